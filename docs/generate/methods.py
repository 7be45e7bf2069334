"""A page for each method and each family, from the methods' files and from what was measured."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvjax
from docs.generate.catalogue import by_family, code_list, family_page, pair_verdict, recipes, refusals
from docs.generate.equal_bytes import RESULTS, Result, fractions_row, fractions_table
from docs.generate.parameters import describe
from experiments.methods import measured
from kvjax.cache.calibration.table_kinds import TABLE_KINDS
from kvjax.cache.method import Method
from kvjax.methods.registry import FAMILIES, MethodEntry
from kvjax.methods.strings import parse, parse_parts

Measured = Mapping[str, Mapping[str, Any]]
FULL = "full"
CONTEXT = 2048  # tokens, of the contexts of `experiments.methods`
TRAITS = {
    "exact": "attention is that of the full cache",
    "evicts": "some tokens are lost for good",
    "constant": "the cache stops growing",
    "host": "a part of it lives in host memory",
    "after_prompt": "the tokens to keep are chosen when the prompt ends, before later questions are known",
}
PAPERS = {
    r"(?<![\d.])(?:arXiv )?(\d{4}\.\d{5})(?!\d)": "[arXiv {0}](https://arxiv.org/abs/{0})",
    r"\bopenreview (\w{10})\b": "[OpenReview {0}](https://openreview.net/forum?id={0})",
}
"""How a citation names a paper -> its link."""

ON_TESTBED = f"""The testbed model computed in float32 and read eight contexts of {CONTEXT:,} tokens. Recall is of eight
questions each, asked after the context was compressed; code is 512 tokens of held-out source code after 1,536. Device
and host are fractions of the exact cache's bytes, both in bfloat16, as planned for {CONTEXT:,} tokens; the KiB are
those of one context as it was measured, in float32. `python -m experiments.methods` measures it."""


def page(recipe: MethodEntry) -> str:
    """One method's page."""
    description = describe(recipe)
    parts = [
        f"# {recipe.name}",
        prose(recipe.summary),
        f"Source: {linked(prose(recipe.source))}. Family: [{recipe.family}](../{family_page(recipe.family)}). "
        f"Code: `kvjax/methods/{recipe.make.__module__.rpartition('.')[2]}.py`.",
        "## Use it",
        usage(recipe),
        "## Parameters",
        parameters(recipe),
        prose(description.notes),
        *_section("What it computes", recipe.formula),
        *_section("What differs from the paper or its public code", recipe.differs),
        *real_model(lambda method: recipe.name in names_in(method)),
        "## On the testbed model",
        testbed_table([FULL, recipe.example]),
        ON_TESTBED,
        "## Components",
        components(parse(recipe.example)),
        *explained(recipe),
        "## With other methods",
        pairs(recipe),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", prose(text)] if text else []


def usage(recipe: MethodEntry) -> str:
    """A command and a Python call to copy, with the setting that the page measures."""
    return f"""```sh
kvjax eval --methods "full; {recipe.example}" --out out/{recipe.name}
```

```python
import kvjax

method = {python_call(recipe.example)}
```

The string `{recipe.example}` and the value `method` are the same to every call, such as
[`kvjax.generate`](../generation.md) and [`kvjax.eval.compare`](../evaluation.md)."""


def python_call(text: str) -> str:
    """The call that makes the method of a string."""

    def argument(value: Any) -> str:
        return repr(value if isinstance(value, bool | int | float | str) else str(value))

    calls = [
        f"kvjax.methods.{part.name}({', '.join(f'{key}={argument(value)}' for key, value in part.values.items())})"
        for part in parse_parts(text)
    ]
    return calls[0] if len(calls) == 1 else f"kvjax.compose({', '.join(calls)})"


def parameters(recipe: MethodEntry) -> str:
    """The table of parameters, those that are explained together in one row."""
    if not recipe.parameters:
        return "None."
    rows = []
    for group in describe(recipe).groups:
        given = "<br>".join(map(_default, (recipe.parameters[name] for name in group.names)))
        rows.append(f"| {given} | {prose(group.meaning, in_table=True)} |")
    return "\n".join(["| parameter and default | meaning |", "|---|---|", *rows])


def _default(parameter: inspect.Parameter) -> str:
    """A parameter with its default as a string of a method has it, and its type; an empty text is shown as one."""
    kind = "int or `25%`" if parameter.annotation.__name__ == "TokenBudget" else parameter.annotation.__name__
    default = '""' if parameter.default == "" else parameter.default
    return f"`{parameter.name}={default}` {kind}"


def components(method: Any) -> str:
    """The slots that a method fills, and its traits."""
    default = Method()
    filled = {f.name: getattr(method, f.name) for f in dataclasses.fields(Method) if f.compare}
    rows = [f"| `{name}` | `{value}` |" for name, value in filled.items() if value != getattr(default, name)]
    told = [said for name, said in TRAITS.items() if getattr(method.traits, name)]
    table = "\n".join(["| slot | value |", "|---|---|", *rows]) if rows else "Every slot has its default."
    return table + (f"\n\nIn short: {'; '.join(told)}." if told else "")


def explained(recipe: MethodEntry) -> list[str]:
    """What the classes say to which a docstring refers: `KVCrush`, or that of a kind of table."""
    module = sys.modules[recipe.make.__module__]
    found = {name: getattr(module, name) for name in re.findall(r"`([A-Z]\w+)`", recipe.text)}
    found |= {f"{kind} tables": type(TABLE_KINDS[kind]) for kind in re.findall(r"of kind `(\w+)`", recipe.text)}
    return [f"### {name}\n\n{prose(inspect.getdoc(told) or '')}" for name, told in found.items()]


def pairs(recipe: MethodEntry) -> str:
    """What a method composes with, folded away, and what it does not, by reason."""
    others = [name for name in recipes() if name not in (recipe.name, FULL)]
    works = [name for name in others if pair_verdict(recipe.name, name).works]
    parts = ["Composes with none."]
    if works:
        links = ", ".join(f"[`{name}`]({name}.md)" for name in works)
        parts = [f'??? note "Composes with {len(works)} of {len(others)} methods"\n\n    {links}']
    if refused := refusals(recipe.name):
        rows = [f"| {code_list(names)} | {prose(reason, in_table=True)} |" for reason, names in refused.items()]
        parts.append("\n".join(["| does not compose with | because |", "|---|---|", *rows]))
    return "\n\n".join(parts)


@functools.cache
def real_results() -> tuple[Result, ...]:
    """What was measured at equal bytes on a real model."""
    documents = [json.loads(path.read_text()) for path in sorted(RESULTS.parent.glob("*.smollm2.json"))]
    return tuple(Result(document) for document in documents if {"bfloat16", "scores"} <= document.keys())


def names_in(method: str) -> list[str]:
    """The recipes that a method string names."""
    return [part.name for part in parse_parts(method)]


def real_model(wanted: Callable[[str], bool]) -> list[str]:
    """The section of what real models do under the wanted methods; nothing where none was measured."""
    found, shown = [], set()
    for result in real_results():
        methods = [method for method in result.document["scores"] if method != FULL and wanted(method)]
        # Runs share methods: what another one says, number for number, is said once.
        rows = {method: fractions_row(result, method) for method in methods}
        methods = [method for method, row in rows.items() if row not in shown]
        shown |= set(rows.values())
        if methods:
            found += [fractions_table(result, [FULL, *methods]), _setting(result)]
    return ["## On a real model", *found] if found else []


def _setting(result: Result) -> str:
    document = result.document
    machine, seeds = document["machine"], ", ".join(map(str, document["seeds"]))
    return (
        f"Model `{document['model']}`, computed in {document['computed_in']}; {document['length']:,} tokens, seeds "
        f"{seeds}, contexts: {result.counts()}. Questions are percent right, asked after the context was compressed; "
        "texts are bits per byte above `full`; errors are standard errors over contexts. Device and host are fractions "
        f"of the exact cache's bytes, both in bfloat16. {machine['processor']}, JAX {machine['jax']}."
    )


@functools.cache
def planned(method: str) -> tuple[float, float]:
    """Bytes of a context on the device and on the host, of the exact cache's, both in bfloat16."""
    planned = kvjax.planned_bytes(method, _testbed_config(), CONTEXT, dtype="bfloat16")
    return planned.fraction_of_full, planned.host_fraction_of_full


@functools.cache
def _testbed_config() -> Any:
    return kvjax.load("testbed").config


def testbed_table(methods: Sequence[str]) -> str:
    """What was measured on the testbed model; says how to measure what was not."""
    found = measured()
    names = [name for name in dict.fromkeys(methods) if name in found]
    rows = [_testbed_row(name, found[name]) for name in names]
    heads = ["method", "device, bfloat16", "host, bfloat16", "recall", "code, bits per byte", "predicts as `full`"]
    heads += ["device KiB, float32", "host KiB, float32"]
    table = "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows])
    missing = [name for name in methods if name not in found]
    return table + (f"\n\nNot yet measured: {code_list(missing)}." if missing else "")


def _testbed_row(name: str, row: Mapping[str, Any]) -> str:
    device, host = planned(name)
    numbers = f"{device:.1%} | {host:.1%} | {row['recall']:.1%} | {row['code_bits']:.3f} | {row['agreement']:.1%}"
    return f"| `{name}` | {numbers} | {row['device_bytes'] / 1024:,.0f} | {row['host_bytes'] / 1024:,.0f} |"


def family(name: str) -> str:
    """The page of a family."""
    members = by_family()[name]
    rows = [
        f"| [`{r.name}`](../../methods/{r.name}.md) | {prose(r.summary, in_table=True)}<br>`{r.example}` |"
        for r in members
    ]
    own = {recipe.name for recipe in members} - {FULL}
    parts = [
        f"# {_title(name)}",
        prose(FAMILIES[name]),
        "\n".join(["| method | what it does, and a line to copy |", "|---|---|", *rows]),
        *real_model(lambda method: bool(own & set(names_in(method)))),
        "## On the testbed model",
        testbed_table([FULL, *(recipe.example for recipe in members)]),
        ON_TESTBED,
    ]
    return "\n\n".join(parts) + "\n"


def _title(family: str) -> str:
    return family[0].upper() + family[1:]


def index() -> str:
    """The page of all methods."""
    parts = [
        "# Methods",
        f"{len(recipes())} methods in {len(FAMILIES)} families. A method is a string or a value: `snapkv:budget=25%` "
        'is `kvjax.methods.snapkv(budget="25%")`, and `a + b` [composes two](../composition.md). `kvjax methods` '
        "prints this list.",
    ]
    for name, members in by_family().items():
        lines = [f"- [`{r.name}`]({r.name}.md): {prose(r.summary)}" for r in members]
        parts += [f"## [{_title(name)}](../{family_page(name)})", prose(FAMILIES[name]), "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Path -> text, of all pages."""
    found = {"methods/index.md": index()}
    found |= {family_page(name): family(name) for name in FAMILIES}
    return found | {f"methods/{recipe.name}.md": page(recipe) for recipe in recipes().values()}


def menu() -> list[Any]:
    """The part of the menu with the methods: each family a group that opens with its own page."""
    groups = {
        _title(name): [family_page(name), *({r.name: f"methods/{r.name}.md"} for r in members)]
        for name, members in by_family().items()
    }
    return ["methods/index.md", *({title: group} for title, group in groups.items())]


def linked(text: str) -> str:
    """A citation with links to the papers that it names."""
    for pattern, link in PAPERS.items():
        text = re.sub(pattern, lambda found, link=link: link.format(found[1]), text)
    return text


def prose(text: str, in_table: bool = False) -> str:
    """Text of a docstring as Markdown: methods in quotes as code, and signs of formulas as they are."""
    names = "|".join(recipes())
    text = re.sub(rf"'((?:{names})(?:[: +][^']*)?)'", r"`\1`", text)
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [
        piece if piece.startswith("`") else re.sub(r"([*_])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces
    ]
    return "".join(escaped).replace("|", r"\|") if in_table else "".join(escaped)
