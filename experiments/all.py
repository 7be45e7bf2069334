"""The small form of every table and figure, one after the other, and the summary in README.md.

python -m experiments.all [--only kcache_table1,kcache_table2] [--list] [--summary] [--real]

--real runs those that measure quality on SmolLM2-135M instead, with essays and questions about needles in them, into
results/smollm2 and a summary of its own; on two busy cores ten of them took 51 minutes, eviction_curves alone 56.

Each script runs in a process of its own; what it prints last becomes results/NAME.json, its plots go there too, what it
says on the way stays visible. A script that fails does not stop the others; the exit status is then 1. --summary only
rewrites the summary from the results that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.common import progress
from experiments.papers.questions import MULTIKEYS, SINGLES
from kvjax import KvjaxError
from kvjax.eval.tasks.suite import split_words

ROOT = Path(__file__).resolve().parents[1]  # scripts run here, so that no document names a path of this machine
RESULTS, README = ROOT / "experiments" / "results", ROOT / "experiments" / "README.md"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A script of experiments/papers, what it reproduces, and the arguments of its small form; {out}: for plots."""

    name: str
    what: str
    arguments: str

    def command(self, out: Path) -> list[str]:
        """What runs it."""
        words = (w.replace("{out}", os.path.relpath(out, ROOT)) for w in self.arguments.split())
        return [sys.executable, "-m", f"experiments.papers.{self.name}", *words]

    def in_brief(self, results: Any) -> tuple[str, str, str]:
        """(ours, the paper's, the difference), by the script's own account."""
        return importlib.import_module(f"experiments.papers.{self.name}").in_brief(results)


ASKED = "--length 1024 --contexts 8 --windows 4 --out {out}"
EVICTED = "--length 1024 --contexts 8 --batch 8 --windows 4 --out {out}"
ENTRIES = (
    Entry("kcache_table1", "KCache, Table 1", ""),
    Entry("kcache_equations", "KCache, equations 1-4", ""),
    Entry("kcache_table2", "KCache, Table 2", f"{ASKED} --n 8,32,128 --layers 0,1"),
    Entry("kcache_table3", "KCache, Table 3", "--models testbed,small --steps 4 --repeats 5"),
    Entry("kcache_table4", "KCache, Table 4", ASKED),
    Entry("specache_figure2", "SpeCache, Figure 2", "--length 1024 --windows 2 --contexts 2 --out {out}"),
    Entry("specache_table1", "SpeCache, Table 1", ASKED),
    Entry("specache_table2", "SpeCache, Table 2", EVICTED),
    Entry("specache_table3", "SpeCache, Table 3", "--measure small --batch 2 --steps 4 --repeats 3"),
    Entry("specache_table4", "SpeCache, Table 4", f"{ASKED} --rows 4 --repeats 5"),
    Entry("specache_table5", "SpeCache, Table 5", "--length 2048 --contexts 16 --windows 4 --out {out}"),
    Entry("specache_figure4", "SpeCache, Figure 4", "--contexts 2 --depths 5 --batch 10 --out {out}"),
    Entry("specache_figure5", "SpeCache, Figure 5", f"{ASKED} --topk 0,8,32,128 --tasks variables"),
    Entry("specache_appendix", "SpeCache, appendix C", "--length 1024 --contexts 8 --ratios 8"),
    Entry("kvcrush_table2", "KVCrush, Table II", f"{EVICTED} --anchors random,mean,alternate"),
    Entry("kvcrush_table3", "KVCrush, Table III", EVICTED),
    Entry("kvcrush_figure5", "KVCrush, Figure 5", f"{EVICTED} --shares 0.25,0.5,0.75"),
    Entry("kvcrush_figure6", "KVCrush, Figure 6", "--no-accuracy --shapes small --repeats 3"),
    Entry("kvcrush_figure7", "KVCrush, Figure 7", f"{EVICTED} --units token"),
    Entry("kvcrush_figure8", "KVCrush, Figure 8", f"{EVICTED} --pages 8,16"),
    Entry("eviction_curves", "recall against budget", f"{EVICTED} --budgets 64,128,256 --tasks phrases,variables"),
    Entry("streaming", "StreamingLLM, Figure 5", "--out {out}"),
)
REAL = "--model smollm2-135m --text essays --length 1024 --out {out}"
REAL_SIZES = f"{REAL} --contexts 8 --batch 8 --windows 4"
REAL_ASKED = f"{REAL_SIZES} --tasks shared"
ON_A_REAL_MODEL = (
    Entry("kcache_table2", "KCache, Table 2", f"{REAL_ASKED} --n 32,64,128 --layers 0,1"),
    Entry("kcache_table4", "KCache, Table 4", f"{REAL_SIZES} --tasks shared,{','.join((*SINGLES, *MULTIKEYS))}"),
    Entry("specache_table1", "SpeCache, Table 1", REAL_ASKED),
    Entry("specache_table2", "SpeCache, Table 2", REAL_ASKED),
    Entry("specache_table4", "SpeCache, Table 4", f"{REAL_ASKED} --rows 4 --repeats 5"),
    Entry("specache_table5", "SpeCache, Table 5", REAL_ASKED),
    Entry("specache_figure2", "SpeCache, Figure 2", REAL),
    Entry("specache_figure4", "SpeCache, Figure 4", f"{REAL} --lengths 512,1024 --depths 4 --contexts 2"),
    Entry("specache_figure5", "SpeCache, Figure 5", f"{REAL_ASKED} --topk 0,16,64,128"),
    Entry("kvcrush_table2", "KVCrush, Table II", f"{REAL_ASKED} --anchors random,mean,alternate"),
    Entry("kvcrush_table3", "KVCrush, Table III", f"{REAL_ASKED} --window 32"),
    Entry("kvcrush_figure5", "KVCrush, Figure 5", f"{REAL_ASKED} --shares 0.25,0.5,0.75"),
    Entry("kvcrush_figure7", "KVCrush, Figure 7", f"{REAL_ASKED} --window 32"),
    Entry("kvcrush_figure8", "KVCrush, Figure 8", f"{REAL_ASKED} --pages 8,16"),
    Entry("eviction_curves", "recall against budget", f"{REAL_ASKED} --budgets 64,128,256,512"),
)


@dataclasses.dataclass(frozen=True)
class Collection:
    """Scripts that are run and summed up together."""

    command: str
    entries: tuple[Entry, ...]
    results: Path
    mark: str  # of the summary's place in README.md

    @property
    def begin(self) -> str:
        """What stands before the summary."""
        return f"<!-- {self.mark} -->"

    @property
    def end(self) -> str:
        """What stands behind it."""
        return f"<!-- /{self.mark} -->"


SMALL_FORMS = Collection("python -m experiments.all", ENTRIES, RESULTS, "results")
REAL_MODEL = Collection("python -m experiments.all --real", ON_A_REAL_MODEL, RESULTS / "smollm2", "smollm2")


def chosen(only: str | None, entries: Sequence[Entry] = ENTRIES) -> list[Entry]:
    """All entries, or those named, in their own order."""
    if only is None:
        return list(entries)
    names = split_words(only)
    unknown = [n for n in names if n not in {e.name for e in entries}]
    if unknown or not names:
        raise KvjaxError(f"--only names no script {unknown or only!r}; use {', '.join(e.name for e in entries)}")
    return [e for e in entries if e.name in names]


def document(text: str) -> str:
    """The last line of what a script printed; raises KvjaxError if it is no JSON document of results."""
    lines = text.strip().splitlines()
    try:
        if "results" in json.loads(lines[-1]):
            return lines[-1]
    except (IndexError, ValueError, TypeError):
        pass
    raise KvjaxError(f"its last line is no JSON document with results: {(lines or ['nothing was printed'])[-1]:.100}")


def run_one(entry: Entry, results: Path) -> str | None:
    """Runs a script and keeps its document; returns what went wrong, or None."""
    done = subprocess.run(entry.command(results), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    try:
        if done.returncode:
            return f"exit status {done.returncode}"
        (results / f"{entry.name}.json").write_text(document(done.stdout) + "\n")
    except KvjaxError as e:
        return str(e)
    return None


def run_all(entries: Sequence[Entry], results: Path) -> dict[str, str]:
    """Runs all of them; returns what went wrong, by name."""
    results.mkdir(parents=True, exist_ok=True)
    start, wrong = time.monotonic(), {}

    def clock(s):
        return f"{int(s) // 60}:{int(s) % 60:02}"

    for i, entry in enumerate(entries, 1):
        progress(f"{i} of {len(entries)}, {clock(time.monotonic() - start)} so far: {entry.name} {entry.arguments}")
        began = time.monotonic()
        problem = run_one(entry, results)
        if problem:
            wrong[entry.name] = problem
        progress(f"{entry.name}: {problem or 'done'} after {clock(time.monotonic() - began)}")
    return wrong


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def row(entry: Entry, collection: Collection, failed: bool) -> tuple[str, dict[str, Any] | None]:
    """(the entry's line of the summary, its machine)."""
    path, head = collection.results / f"{entry.name}.json", f"`{entry.name}`: {entry.what}"
    if not path.is_file():
        words = "failed in the last run" if failed else "not run"
        return f"| {head} | | {words} | `{collection.command} --only {entry.name}` |", None
    kept = json.loads(path.read_text())
    try:
        ours, paper, difference = entry.in_brief(kept["results"])
    except Exception as e:  # a document of an older version of the script can lack anything
        ours, paper, difference = (
            f"results/{path.name} cannot be summed up ({type(e).__name__}: {e})",
            "",
            "run it again",
        )
    difference += " The last run failed: this is an earlier one." if failed else ""
    return f"| {head} | {cell(paper)} | {cell(ours)} | {cell(difference)} |", kept.get("machine")


def machines(found: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on where the results were taken."""
    if not found:
        return "Nothing was run yet."
    names = dict.fromkeys(f"{m['processor']}, {m['cores']} cores, {m['device']}, JAX {m['jax']}" for m in found)
    loads = [x for m in found for x in (m["load_before"], m["load"])]
    return f"Taken on {'; '.join(names)}; load average {min(loads):g} to {max(loads):g}."


def section(collection: Collection, wrong: Mapping[str, str]) -> str:
    """The summary of all scripts as Markdown."""
    rows = [row(e, collection, e.name in wrong) for e in collection.entries]
    head = ["| script | the paper | ours | the difference |", "|---|---|---|---|"]
    said = machines([m for _, m in rows if m])
    return "\n".join([f"`{collection.command}` wrote this. {said}", "", *head, *(line for line, _ in rows)])


def rewrite(readme: Path, text: str, begin: str, end: str) -> None:
    """Puts the text between two marks of a file."""
    old = readme.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise KvjaxError(f"{readme} must hold {begin} and then {end}, each once: the summary goes between them")
    before, after = old.partition(begin)[0], old.partition(end)[2]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, sums up and returns the exit status; see the module's text."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", metavar="NAME,...", help="these scripts only")
    p.add_argument("--list", action="store_true", help="print the scripts and their arguments, and run nothing")
    p.add_argument("--summary", action="store_true", help="run nothing, rewrite the summary")
    p.add_argument("--real", action="store_true", help="on SmolLM2-135M, which the extra smollm2 brings")
    args = p.parse_args(argv)
    collection = REAL_MODEL if args.real else SMALL_FORMS
    entries = chosen(args.only, collection.entries)
    if args.list:
        print("\n".join(f"{e.name:18} {e.what:22} {e.arguments}" for e in entries))
        return 0
    wrong = {} if args.summary else run_all(entries, collection.results)
    rewrite(README, section(collection, wrong), collection.begin, collection.end)
    progress(f"wrote {collection.results} and the summary in {README}")
    for name, problem in wrong.items():
        print(f"failed: {name}: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvjaxError as e:
        sys.exit(f"error: {e}")
