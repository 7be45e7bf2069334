"""Runs the small form of every table and figure, one after the other, and writes the summary into README.md.

python -m experiments.all [--only kcache_table1,kcache_table2] [--part 1/4] [--list] [--summary] [--real]

--real runs the scripts that measure quality on SmolLM2-135M instead, with essays and questions about needles in them,
into results/smollm2 and a summary of its own; on two busy cores ten of them took 51 minutes, eviction_curves alone 56.

Each script runs in a process of its own. The last line that it prints becomes results/NAME.json, its plots go there
too, and its other output stays visible. A script that fails does not stop the others; the exit status is then 1.
--summary only rewrites the summary from the existing results. --part 1/4 runs every fourth script and leaves the
summary as it is, so that machines which share this folder can divide the scripts; --summary follows when all are done.
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

from experiments.bench.measuring import log_progress
from experiments.papers.questions import MULTIKEYS, SINGLES
from kvjax import KvjaxError
from kvjax.eval.run.parts import parse_part
from kvjax.eval.tasks.suite import split_words
from kvjax.utils.files import make_folder

ROOT = Path(__file__).resolve().parents[1]  # scripts run here, so that no document names a path of this machine
RESULTS, README = ROOT / "experiments" / "results", ROOT / "experiments" / "README.md"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One script of experiments/papers."""

    module: str  # within experiments.papers, and the table where the module has several
    reproduces: str
    arguments: str  # of the small form; {out} stands for the folder of its plots

    @property
    def name(self) -> str:
        """Name of the script in --only, in the summary and in results/."""
        return self.module.replace(".tables ", ".").replace(".", "_")

    def command(self, out: Path) -> list[str]:
        """The command line that runs the script."""
        text = f"experiments.papers.{self.module} {self.arguments}".replace("{out}", os.path.relpath(out, ROOT))
        return [sys.executable, "-m", *text.split()]

    def in_brief(self, results: Any) -> tuple[str, str, str]:
        """(ours, the paper's, the difference), as the script summarizes its results."""
        # Imported only when a document is summed up: --list and a failing script do not load the others.
        return importlib.import_module(f"experiments.papers.{self.module.split()[0]}").in_brief(results)


# Options of the scripts on quantized and offloaded caches (ASKED) and on eviction (EVICTED).
# Smaller than the scripts' own defaults: these runs show that everything works, and the direction of a result.
ASKED = "--length 1024 --contexts 8 --windows 4 --out {out}"
EVICTED = "--length 1024 --contexts 8 --batch 8 --windows 4 --out {out}"
ENTRIES = (
    Entry("kcache.table1", "KCache, Table 1", ""),
    Entry("kcache.equations", "KCache, equations 1-4", ""),
    Entry("kcache.table2", "KCache, Table 2", f"{ASKED} --n 8,32,128 --layers 0,1"),
    Entry("kcache.table3", "KCache, Table 3", "--models testbed,small --steps 4 --repeats 5"),
    Entry("kcache.table4", "KCache, Table 4", ASKED),
    Entry("specache.figure2", "SpeCache, Figure 2", "--length 1024 --windows 2 --contexts 2 --out {out}"),
    Entry("specache.table1", "SpeCache, Table 1", ASKED),
    Entry("specache.table2", "SpeCache, Table 2", EVICTED),
    Entry("specache.table3", "SpeCache, Table 3", "--measure small --batch 2 --steps 4 --repeats 3"),
    Entry("specache.table4", "SpeCache, Table 4", f"{ASKED} --rows 4 --repeats 5"),
    Entry("specache.table5", "SpeCache, Table 5", "--length 2048 --contexts 16 --windows 4 --out {out}"),
    Entry("specache.figure4", "SpeCache, Figure 4", "--contexts 2 --depths 5 --batch 10 --out {out}"),
    Entry("specache.figure5", "SpeCache, Figure 5", f"{ASKED} --topk 0,8,32,128 --tasks variables"),
    Entry("specache.appendix", "SpeCache, appendix C", "--length 1024 --contexts 8 --ratios 8"),
    Entry("kvcrush.tables table2", "KVCrush, Table II", f"{EVICTED} --anchors random,mean,alternate"),
    Entry("kvcrush.tables table3", "KVCrush, Table III", EVICTED),
    Entry("kvcrush.tables figure5", "KVCrush, Figure 5", f"{EVICTED} --shares 0.25,0.5,0.75"),
    Entry("kvcrush.figure6", "KVCrush, Figure 6", "--no-accuracy --shapes small --repeats 3"),
    Entry("kvcrush.tables figure7", "KVCrush, Figure 7", f"{EVICTED} --units token"),
    Entry("kvcrush.tables figure8", "KVCrush, Figure 8", f"{EVICTED} --pages 8,16"),
    Entry("eviction_curves", "recall against budget", f"{EVICTED} --budgets 64,128,256 --tasks phrases,variables"),
    Entry("streaming", "StreamingLLM, Figure 5", "--out {out}"),
)
# Scripts that count bytes and operations or time random caches are absent: trained weights change none of it.
REAL = "--model smollm2-135m --text essays --length 1024 --out {out}"
REAL_SIZES = f"{REAL} --contexts 8 --batch 8 --windows 4"
REAL_ASKED = f"{REAL_SIZES} --tasks shared"
ON_A_REAL_MODEL = (
    Entry("kcache.table2", "KCache, Table 2", f"{REAL_ASKED} --n 32,64,128 --layers 0,1"),
    Entry("kcache.table4", "KCache, Table 4", f"{REAL_SIZES} --tasks shared,{','.join((*SINGLES, *MULTIKEYS))}"),
    Entry("specache.table1", "SpeCache, Table 1", REAL_ASKED),
    Entry("specache.table2", "SpeCache, Table 2", REAL_ASKED),
    Entry("specache.table4", "SpeCache, Table 4", f"{REAL_ASKED} --rows 4 --repeats 5"),
    Entry("specache.table5", "SpeCache, Table 5", REAL_ASKED),
    Entry("specache.figure2", "SpeCache, Figure 2", REAL),
    Entry("specache.figure4", "SpeCache, Figure 4", f"{REAL} --lengths 512,1024 --depths 4 --contexts 2"),
    Entry("specache.figure5", "SpeCache, Figure 5", f"{REAL_ASKED} --topk 0,16,64,128"),
    Entry("kvcrush.tables table2", "KVCrush, Table II", f"{REAL_ASKED} --anchors random,mean,alternate"),
    # The window is longer than the usual 8 tokens: a question ends with the template and the answer's first words, and
    # its own key would lie outside.
    Entry("kvcrush.tables table3", "KVCrush, Table III", f"{REAL_ASKED} --window 32"),
    Entry("kvcrush.tables figure5", "KVCrush, Figure 5", f"{REAL_ASKED} --shares 0.25,0.5,0.75"),
    Entry("kvcrush.tables figure7", "KVCrush, Figure 7", f"{REAL_ASKED} --window 32"),
    Entry("kvcrush.tables figure8", "KVCrush, Figure 8", f"{REAL_ASKED} --pages 8,16"),
    Entry("eviction_curves", "recall against budget", f"{REAL_ASKED} --budgets 64,128,256,512"),
)
SWEEPS = ("specache_figure4", "specache_appendix")
"""The scripts whose work is an evaluation, which takes `--ray`."""


@dataclasses.dataclass(frozen=True)
class Collection:
    """Scripts that run together and share a summary."""

    command: str
    entries: tuple[Entry, ...]
    results: Path
    mark: str  # README.md holds the summary between <!-- mark --> and <!-- /mark -->


SMALL_FORMS = Collection("python -m experiments.all", ENTRIES, RESULTS, "results")
REAL_MODEL = Collection("python -m experiments.all --real", ON_A_REAL_MODEL, RESULTS / "smollm2", "smollm2")


def select_entries(only: str | None, entries: Sequence[Entry] = ENTRIES) -> list[Entry]:
    """All entries, or the ones that `only` names, in their own order."""
    if only is None:
        return list(entries)
    names = split_words(only)
    unknown = [n for n in names if n not in {e.name for e in entries}]
    if unknown or not names:
        raise KvjaxError(f"--only names no script {unknown or only!r}; use {', '.join(e.name for e in entries)}")
    return [e for e in entries if e.name in names]


def last_document(text: str) -> str:
    """The last line that a script printed; raises KvjaxError if it is no JSON document of results."""
    lines = text.strip().splitlines()
    try:
        if "results" in json.loads(lines[-1]):
            return lines[-1]
    except (IndexError, ValueError, TypeError):
        pass
    raise KvjaxError(f"its last line is no JSON document with results: {(lines or ['nothing was printed'])[-1]:.100}")


def run_one(entry: Entry, results: Path) -> str | None:
    """Runs a script and writes its document; returns the problem, or None."""
    # Each script gets a process: their compiled programs together run out of memory mappings, and an abort in the
    # compiler would end the whole run.
    finished = subprocess.run(entry.command(results), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    try:
        if finished.returncode:
            return f"exit status {finished.returncode}"
        # A failed run leaves the earlier document in place, and the summary shows it.
        (results / f"{entry.name}.json").write_text(last_document(finished.stdout) + "\n")
    except KvjaxError as e:
        return str(e)
    return None


def run_all(entries: Sequence[Entry], results: Path) -> dict[str, str]:
    """Runs all scripts; returns the problems by name."""
    make_folder(results)
    start, problems = time.monotonic(), {}

    def format_minutes(seconds: float) -> str:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02}"

    for i, entry in enumerate(entries, 1):
        so_far = format_minutes(time.monotonic() - start)
        log_progress(f"{i} of {len(entries)}, {so_far} so far: {entry.name} {entry.arguments}")
        began = time.monotonic()
        problem = run_one(entry, results)
        if problem:
            problems[entry.name] = problem
        log_progress(f"{entry.name}: {problem or 'done'} after {format_minutes(time.monotonic() - began)}")
    return problems


def summary_row(entry: Entry, collection: Collection, failed: bool) -> tuple[str, dict[str, Any] | None]:
    """(the entry's line of the summary, the machine of its results)."""
    path, head = collection.results / f"{entry.name}.json", f"`{entry.name}`: {entry.reproduces}"
    if not path.is_file():
        words = "failed in the last run" if failed else "not run"
        return f"| {head} | | {words} | `{collection.command} --only {entry.name}` |", None
    document = json.loads(path.read_text())
    try:
        ours, paper, difference = entry.in_brief(document["results"])
    except Exception as e:  # a document of an older version of the script can lack anything
        ours, paper = f"results/{path.name} cannot be summed up ({type(e).__name__}: {e})", ""
        difference = "run it again"
    difference += " The last run failed: this is an earlier one." if failed else ""
    cells = (text.replace("|", "\\|").replace("\n", " ") for text in (paper, ours, difference))
    return f"| {head} | {' | '.join(cells)} |", document.get("machine")


def summary_section(collection: Collection, problems: Mapping[str, str]) -> str:
    """The summary of all scripts as Markdown, with one sentence on the machines."""
    rows = [summary_row(e, collection, e.name in problems) for e in collection.entries]
    where = "Nothing was run yet."
    if found := [m for _, m in rows if m]:
        names = dict.fromkeys(f"{m['processor']}, {m['cores']} cores, {m['device']}, JAX {m['jax']}" for m in found)
        # Readers need the load: above the number of cores, only ratios of the summary's seconds can be trusted.
        loads = [x for m in found for x in (m["load_before"], m["load"])]
        where = f"Taken on {'; '.join(names)}; load average {min(loads):g} to {max(loads):g}."
    head = ["| script | the paper | ours | the difference |", "|---|---|---|---|"]
    return "\n".join([f"`{collection.command}` wrote this. {where}", "", *head, *(line for line, _ in rows)])


def rewrite_section(readme: Path, text: str, mark: str) -> None:
    """Replaces the text between the two comments of a mark."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    old = readme.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise KvjaxError(f"{readme} must hold {begin} and then {end}, each once: the summary goes between them")
    before, after = old.partition(begin)[0], old.partition(end)[2]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the scripts, writes the summary and returns the exit status; see the module's docstring."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", metavar="NAME,...", help="these scripts only")
    p.add_argument("--part", metavar="I/N", help="the I-th of N parts of the scripts, no summary")
    p.add_argument("--ray", metavar="ADDRESS", help=f"a Ray cluster for the scripts that sweep: {', '.join(SWEEPS)}")
    p.add_argument("--list", action="store_true", help="print the scripts and their arguments, and run nothing")
    p.add_argument("--summary", action="store_true", help="run nothing, rewrite the summary")
    p.add_argument("--real", action="store_true", help="on SmolLM2-135M, which the extra smollm2 installs")
    args = p.parse_args(argv)
    collection = REAL_MODEL if args.real else SMALL_FORMS
    entries = select_entries(args.only, collection.entries)
    part = None if args.part is None else parse_part(args.part)
    if part and args.summary:
        raise KvjaxError("--summary is of all scripts; give it without --part, when all parts are done")
    if args.ray is not None:
        swept = [dataclasses.replace(e, arguments=f"{e.arguments} --ray {args.ray}") for e in entries]
        entries = [on_ray if e.name in SWEEPS else e for e, on_ray in zip(entries, swept, strict=True)]
    if part:
        # Every N-th, since the long scripts of a paper stand side by side.
        entries = entries[part.number - 1 :: part.count]
    if args.list:
        print("\n".join(f"{e.name:18} {e.reproduces:22} {e.arguments}" for e in entries))
        return 0
    problems = {} if args.summary else run_all(entries, collection.results)
    if part is None:
        # The summary has all scripts after --only as well: each from the run that wrote its document.
        rewrite_section(README, summary_section(collection, problems), collection.mark)
        log_progress(f"wrote {collection.results} and the summary in {README}")
    else:
        log_progress(f"{part} is done; when all are: {collection.command} --summary")
    for name, problem in problems.items():
        print(f"failed: {name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvjaxError as e:
        sys.exit(f"error: {e}")
