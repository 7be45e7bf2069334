"""A page for each method, from its file and from what it measures on the shipped model.

python -m experiments.method_pages --measure    measures every method that experiments/results/methods.json lacks
python -m experiments.method_pages --speed      measures the speed of all methods; on a machine without other work
python -m experiments.method_pages              writes docs/methods/
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from rich.progress import track

from kvjax import demo, load
from kvjax.cache.method import Method
from kvjax.cli import use_compilation_cache
from kvjax.eval.exam import exam
from kvjax.eval.run.harness import SPEED_RUNS
from kvjax.methods.catalogue import Recipe, load_all
from kvjax.methods.pairs import Verdict, verdict
from kvjax.methods.strings import parse
from kvjax.run.generate import generate

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
MEASURED = ROOT / "experiments" / "results" / "methods.json"
TRAITS = {
    "exact": "attention is that of the full cache",
    "evicts": "some tokens are lost for good",
    "constant": "the cache stops growing",
    "host": "a part of it lives in host memory",
    "after_prompt": "what stays is decided when the prompt ends, before later questions are known",
}


def measured() -> dict[str, dict[str, Any]]:
    """What was measured, by method string."""
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def measure(again: bool = False) -> None:
    """Adds what is missing to what was measured; every method on the same contexts, beside `full`."""
    found = {} if again else measured()
    missing = [r.example for r in load_all().values() if r.example not in found]
    asked = exam(load("testbed"), demo.SEED)
    for row in demo.measure(asked, tuple(dict.fromkeys(["full", *missing]))):
        kept = dataclasses.asdict(row)
        del kept["tokens_per_second"]  # what else the machine does changes it: see `measure_speed`
        found.setdefault(row.method, kept)  # `full`, beside which all are measured, stays
        _write(found)  # what is done stays if the run is stopped


def measure_speed() -> None:
    """Adds to each method how many times as fast as `full` it decodes, both in turns."""
    found, asked = measured(), exam(load("testbed"), demo.SEED)

    def rate(method: str) -> float:
        how = {"max_new_tokens": 64, "eos_ids": (), "loop": "while"}
        return generate(asked.model, asked.contexts, method, **how).tokens_per_second

    for method, row in track(found.items(), "methods", transient=True):
        row["speed"] = statistics.median(rate(method) / rate("full") for _ in range(SPEED_RUNS))
        _write(found)


def _write(found: dict[str, dict[str, Any]]) -> None:
    MEASURED.write_text(json.dumps(found, indent=2) + "\n")


def page(recipe: Recipe, found: dict[str, dict[str, Any]]) -> str:
    """One method's page."""
    text = inspect.getdoc(recipe.make)
    parts = [
        f"# {recipe.name}",
        text.splitlines()[0],
        f"Source: {recipe.source}.",
        *_section("What it computes", recipe.formula),
        *_section("What differs from the paper or its public code", recipe.differs),
        "## Parameters",
        _parameters(recipe),
        textwrap.dedent("\n".join(text.splitlines()[1:])).strip(),
        "## What it is made of",
        _slots(parse(recipe.example)),
        "## Measured",
        _measured(recipe, found),
        "## With other methods",
        _pairs(recipe),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _parameters(recipe: Recipe) -> str:
    if not recipe.parameters:
        return "None."
    rows = [f"| `{n}` | {p.annotation.__name__} | `{p.default}` |" for n, p in recipe.parameters.items()]
    return "\n".join(["| parameter | type | default |", "|---|---|---|", *rows])


def _slots(method: Any) -> str:
    default = Method()
    filled = {f.name: getattr(method, f.name) for f in dataclasses.fields(Method) if f.compare}
    rows = [f"| `{name}` | `{value}` |" for name, value in filled.items() if value != getattr(default, name)]
    told = [said for name, said in TRAITS.items() if getattr(method.traits, name)]
    table = "\n".join(["| slot | value |", "|---|---|", *rows]) if rows else "Every slot has its default."
    return table + (f"\n\nIn short: {'; '.join(told)}." if told else "")


def _measured(recipe: Recipe, found: dict[str, dict[str, Any]]) -> str:
    names = [n for n in dict.fromkeys(("full", recipe.example)) if n in found]
    if recipe.example not in names:
        return "Not yet: `python -m experiments.method_pages --measure`."
    head = ["| method | recall | code, bits per byte | predicts as `full` | device KiB | host KiB |", "|---" * 6 + "|"]
    rows = [_row(name, found[name]) for name in names]
    return "\n".join(head + rows) + (
        "\n\nOn the shipped model: eight contexts of 2,048 tokens, eight questions each, asked after the context was\n"
        "compressed; 512 tokens of held-out source code after 1,536; bytes of one context, float32."
    )


def _row(name: str, r: dict[str, Any]) -> str:
    numbers = f"{r['recall']:.1%} | {r['code_bits']:.3f} | {r['agreement']:.1%}"
    return f"| `{name}` | {numbers} | {r['device_bytes'] / 1024:,.0f} | {r['host_bytes'] / 1024:,.0f} |"


def _pairs(recipe: Recipe) -> str:
    verdicts: dict[str, Verdict] = {n: verdict(recipe.name, n) for n in load_all() if n not in (recipe.name, "full")}
    yes = ", ".join(f"`{n}`" for n, v in verdicts.items() if v.works)
    no = [f"- `{n}`: {v.reason}" for n, v in verdicts.items() if not v.works]
    first = f"Composes with {yes}." if yes else "Composes with none."
    return "\n".join([first, "", "Not with:", "", *no]) if no else first


def index(found: dict[str, dict[str, Any]]) -> str:
    """The list of all pages."""
    rows = [
        f"| [`{r.name}`]({r.name}.md) | {r.summary} | {_recall(r, found)} |"
        for r in sorted(load_all().values(), key=lambda r: r.name)
    ]
    return "\n".join(
        [
            "# The methods",
            "",
            "Written by `python -m experiments.method_pages` from the methods' own files; recall and device bytes are",
            "those of the setting on the method's page, on the shipped model and contexts of 2,048 tokens.",
            "",
            "| method | | recall, device KiB |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _recall(recipe: Recipe, found: dict[str, dict[str, Any]]) -> str:
    r = found.get(recipe.example)
    return f"{r['recall']:.1%}, {r['device_bytes'] / 1024:,.0f}" if r else ""


def pages() -> dict[str, str]:
    """File name -> text, of all pages."""
    found = measured()
    return {"README.md": index(found)} | {f"{r.name}.md": page(r, found) for r in load_all().values()}


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--measure", action="store_true", help="measure the methods that are missing first")
    p.add_argument("--again", action="store_true", help="with --measure: all of them")
    p.add_argument("--speed", action="store_true", help="measure how fast they decode")
    args = p.parse_args()
    use_compilation_cache()
    if args.measure:
        measure(args.again)
    if args.speed:
        measure_speed()
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    main()
