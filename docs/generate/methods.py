"""The pages of methods and of families, from the methods' docstrings and from what was measured."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import kvjax
from docs.generate.entries import builtin_entries, code_list, entries_by_family, family_path
from docs.generate.equal_bytes import RESULTS, Result, method_table
from docs.generate.pairs import defined_components, judge_pair, refusals
from experiments.methods import read_results
from kvjax.cache.calibration.table_kinds import TABLE_KINDS
from kvjax.registry.registration import FAMILIES, MethodEntry
from kvjax.registry.strings import parse, parse_parts

FULL = "full"
CONTEXT_TOKENS = 2048  # the length of the contexts of `experiments.methods`
TRAITS = {
    "exact": "attention is that of the full cache",
    "evicts": "some tokens are lost for good",
    "constant": "the cache stops growing",
    "host": "a part of it lives in host memory",
    "after_prompt": "the tokens to keep are selected when the prompt ends, before later questions are known",
}
PAPERS = {
    r"(?<![\d.])(?:arXiv )?(\d{4}\.\d{5})(?!\d)": r"[arXiv \1](https://arxiv.org/abs/\1)",
    r"\bopenreview (\w{10})\b": r"[OpenReview \1](https://openreview.net/forum?id=\1)",
}
"""A pattern of how references name a paper -> the link that replaces it."""

ON_TESTBED = f"""The testbed model computed in float32 and read eight contexts of {CONTEXT_TOKENS:,} tokens. Recall is
of eight questions each, asked after the context was compressed; code is 512 tokens of held-out source code after 1,536.
Device and host are KiB of a context, and fractions of the exact cache's, all in bfloat16, as planned for
{CONTEXT_TOKENS:,} tokens. `python -m experiments.methods` measures it."""


def page(entry: MethodEntry) -> str:
    """The page of one method."""
    docs = entry.docs
    parts = [
        f"# {entry.name}",
        prose(docs.summary),
        f"Source: {link_papers(prose(docs.reference))}. Family: [{entry.family}](../{family_path(entry.family)}). "
        f"Code: `kvjax/methods/{entry.make.__module__.rpartition('.')[2]}.py`.",
        prose(docs.description),
        "## Use it",
        usage(entry),
        "## Parameters",
        parameter_table(entry),
        "## What it computes",
        prose(docs.formula),
        "## What differs from the paper or its public code",
        prose(docs.differs),
        *real_model_section(lambda method: entry.name in method_names(method)),
        "## On the testbed model",
        testbed_table([FULL, entry.example]),
        ON_TESTBED,
        "## Components",
        component_table(parse(entry.example)),
        *class_sections(entry),
        "## With other methods",
        pair_lists(entry),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def usage(entry: MethodEntry) -> str:
    """A command and a Python call to copy, with the setting that the page measures."""
    calls = []
    for name, values in parse_parts(entry.example):
        # A value that is no Python literal, such as the fraction 25%, is given as its string.
        literals = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()}
        calls.append(f"kvjax.methods.{name}({', '.join(f'{key}={value!r}' for key, value in literals.items())})")
    call = calls[0] if len(calls) == 1 else f"kvjax.compose({', '.join(calls)})"
    return f"""```sh
kvjax eval --methods "full; {entry.example}" --out out/{entry.name}
```

```python
import kvjax

method = {call}
```

The string `{entry.example}` and the value `method` are the same to every call, such as
[`kvjax.generate`](../generation.md) and [`kvjax.eval.compare`](../evaluation.md)."""


def parameter_table(entry: MethodEntry) -> str:
    """The parameters with types, defaults and meanings; an empty default is shown as "" ."""
    if not entry.parameters:
        return "None."
    rows = []
    for name, meaning in entry.meanings.items():
        parameter = entry.parameters[name]
        type_name = parameter.annotation.__name__
        type_name = "int or `25%`" if type_name == "TokenBudget" else type_name
        default = '""' if parameter.default == "" else parameter.default
        rows.append(f"| `{name}={default}` {type_name} | {prose(meaning, in_table=True)} |")
    return "\n".join(["| parameter and default | meaning |", "|---|---|", *rows])


def component_table(method: Any) -> str:
    """The components that a method defines, and its traits."""
    rows = [f"| `{name}` | `{value}` |" for name, value in defined_components(method).items()]
    traits = [text for name, text in TRAITS.items() if getattr(method.traits, name)]
    table = "\n".join(["| component | value |", "|---|---|", *rows]) if rows else "Every component has its default."
    return table + (f"\n\nIn short: {'; '.join(traits)}." if traits else "")


def class_sections(entry: MethodEntry) -> list[str]:
    """The docstrings of classes that a method's docstring names, such as `KVCrush`, and of its kind of table."""
    module, text = sys.modules[entry.make.__module__], " ".join([entry.docs.description, *entry.docs.args.values()])
    named = {name: getattr(module, name) for name in re.findall(r"`([A-Z]\w+)`", text)}
    named |= {f"{kind} tables": type(TABLE_KINDS[kind]) for kind in re.findall(r"of kind `(\w+)`", text)}
    return [f"### {name}\n\n{prose(inspect.getdoc(cls) or '')}" for name, cls in named.items()]


def pair_lists(entry: MethodEntry) -> str:
    """The methods that a method composes with, folded away, and the others with the reasons."""
    others = [name for name in builtin_entries() if name not in (entry.name, FULL)]
    composing = [name for name in others if judge_pair(entry.name, name).composes]
    parts = ["Composes with none."]
    if composing:
        links = ", ".join(f"[`{name}`]({name}.md)" for name in composing)
        parts = [f'??? note "Composes with {len(composing)} of {len(others)} methods"\n\n    {links}']
    if refused := refusals(entry.name):
        rows = [f"| {code_list(names)} | {prose(reason, in_table=True)} |" for reason, names in refused.items()]
        parts.append("\n".join(["| does not compose with | because |", "|---|---|", *rows]))
    return "\n\n".join(parts)


@functools.cache
def real_results() -> tuple[Result, ...]:
    """The results at equal bytes on a real model, those of README first."""
    paths = sorted(RESULTS.parent.glob("*.smollm2.json"), reverse=True)
    documents = [json.loads(path.read_text()) for path in paths]
    return tuple(Result(document) for document in documents if {"bfloat16", "scores"} <= document.keys())


@functools.cache
def method_names(method: str) -> tuple[str, ...]:
    """The names of the methods that a string composes."""
    return tuple(part.name for part in parse_parts(method))


def real_model_section(is_wanted: Callable[[str], bool]) -> list[str]:
    """The results of real models under the wanted methods; empty where none was measured."""
    found, shown = [], set()
    for result in real_results():
        # Runs share methods, under strings of their own: each method has the numbers of one run.
        methods = {parse(m): m for m in result.document["scores"] if m != FULL and is_wanted(m)}
        methods = [name for value, name in methods.items() if value not in shown]
        shown |= set(map(parse, methods))
        if methods:
            found += [method_table(result, [FULL, *methods]), _describe_run(result)]
    return ["## On a real model", *found] if found else []


def _describe_run(result: Result) -> str:
    document = result.document
    machine, seeds = document["machine"], ", ".join(map(str, document["seeds"]))
    return (
        f"Model `{document['model']}`, computed in {document['computed_in']}; {document['length']:,} tokens, seeds "
        f"{seeds}, contexts: {result.counts()}. Questions are percent right, asked after the context was compressed; "
        "texts are bits per byte above `full`; in brackets are 95% intervals over contexts. Device and host are "
        f"fractions of the exact cache's bytes, both in bfloat16. {machine['processor']}, JAX {machine['jax']}."
    )


@functools.cache
def plan_context(method: str) -> kvjax.CacheBytes:
    """Planned bytes of a context, in bfloat16."""
    return kvjax.planned_bytes(method, _testbed_config(), CONTEXT_TOKENS, dtype="bfloat16")


@functools.cache
def _testbed_config() -> Any:
    return kvjax.load("testbed").config


def testbed_table(methods: Sequence[str]) -> str:
    """The results on the testbed model, and the methods without any."""
    results = read_results()
    names = [name for name in dict.fromkeys(methods) if name in results]
    rows = []
    for name in names:
        row, planned = results[name], plan_context(name)
        fractions = planned.fraction_of_full, planned.host_fraction_of_full, row["recall"]
        numbers = " | ".join([*(f"{x:.1%}" for x in fractions), f"{row['code_bits']:.3f}", f"{row['agreement']:.1%}"])
        kib = " | ".join(f"{planned.held[kind] / 1024:,.0f}" for kind in ("device", "pinned_host"))
        rows.append(f"| `{name}` | {numbers} | {kib} |")
    heads = ["method", "device, bfloat16", "host, bfloat16", "recall", "code, bits per byte", "predicts as `full`"]
    heads += ["device KiB, bfloat16", "host KiB, bfloat16"]
    table = "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows])
    missing = [name for name in methods if name not in results]
    return table + (f"\n\nNot yet measured: {code_list(missing)}." if missing else "")


def family_page(name: str) -> str:
    """The page of a family."""
    members = entries_by_family()[name]
    rows = [
        f"| [`{e.name}`](../../methods/{e.name}.md) | {prose(e.docs.summary, in_table=True)}<br>`{e.example}` |"
        for e in members
    ]
    own = {entry.name for entry in members} - {FULL}
    parts = [
        f"# {_capitalize(name)}",
        prose(FAMILIES[name]),
        "\n".join(["| method | what it does, and a line to copy |", "|---|---|", *rows]),
        *real_model_section(lambda method: bool(own & set(method_names(method)))),
        "## On the testbed model",
        testbed_table([FULL, *(entry.example for entry in members)]),
        ON_TESTBED,
    ]
    return "\n\n".join(parts) + "\n"


def _capitalize(family: str) -> str:
    return family[0].upper() + family[1:]


def index_page() -> str:
    """The page of all methods."""
    parts = [
        "# Methods",
        f"{len(builtin_entries())} methods in {len(FAMILIES)} families. A method is a string or a value: "
        '`snapkv:budget=25%` is `kvjax.methods.snapkv(budget="25%")`, and `a + b` [composes two](../composition.md). '
        "`kvjax methods` prints this list.",
    ]
    for name, members in entries_by_family().items():
        lines = [f"- [`{e.name}`]({e.name}.md): {prose(e.docs.summary)}" for e in members]
        parts += [f"## [{_capitalize(name)}](../{family_path(name)})", prose(FAMILIES[name]), "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Path -> text, of all pages."""
    texts = {"methods/index.md": index_page()}
    texts |= {family_path(name): family_page(name) for name in FAMILIES}
    return texts | {f"methods/{entry.name}.md": page(entry) for entry in builtin_entries().values()}


def menu() -> list[Any]:
    """The part of the site's menu with the methods: a group per family, which opens with the family's page."""
    groups = {
        _capitalize(name): [family_path(name), *({e.name: f"methods/{e.name}.md"} for e in members)]
        for name, members in entries_by_family().items()
    }
    return ["methods/index.md", *({title: group} for title, group in groups.items())]


def link_papers(text: str) -> str:
    """A reference with links to the papers that it names."""
    for pattern, link in PAPERS.items():
        text = re.sub(pattern, link, text)
    return text


def prose(text: str, in_table: bool = False) -> str:
    """Text of a docstring as Markdown: methods in quotes as code, and the signs of formulas escaped."""
    names = "|".join(builtin_entries())
    text = re.sub(rf"'((?:{names})(?:[: +][^']*)?)'", r"`\1`", text)
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [
        piece if piece.startswith("`") else re.sub(r"([*_])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces
    ]
    return "".join(escaped).replace("|", r"\|") if in_table else "".join(escaped)
