"""The driver: runs scripts, keeps what they print, goes on after a failure, writes the summary between its marks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys

import pytest

from experiments import all as driver
from kvjax import KvjaxError

MACHINE = {"processor": "P", "cores": 2, "device": "cpu", "jax": "1", "load": 3.5, "load_before": 1.5}


@dataclasses.dataclass(frozen=True)
class Fake(driver.Entry):
    """An entry that runs a line of Python instead."""

    line: str = ""

    def command(self, out):
        return [sys.executable, "-c", self.line]

    def in_brief(self, results):
        return f"ours {results['x']}", "the | paper", "no difference"


def fake(name: str, x: int = 0, line: str | None = None) -> Fake:
    document = json.dumps({"machine": MACHINE, "results": {"x": x}})
    return Fake(name, f"Table {name}", "", f"print('a table'); print({document!r})" if line is None else line)


FAILS = "import sys; sys.exit(3)"


def collection(results, *entries: Fake) -> driver.Collection:
    return driver.Collection("python -m all", entries, results, "mark")


BEGIN, END = "<!-- mark -->", "<!-- /mark -->"


def test_results_are_kept_and_a_failure_stops_nothing(tmp_path, capsys):
    entries = [fake("a", 1), fake("b", line=FAILS), fake("c", line="print('no document')"), fake("d", 4)]
    failures = driver.run_all(entries, tmp_path / "new")
    assert list(failures) == ["b", "c"] and failures["b"] == "exit status 3" and "no document" in failures["c"]
    results = {p.name: json.loads(p.read_text())["results"]["x"] for p in (tmp_path / "new").iterdir()}
    assert results == {"a.json": 1, "d.json": 4}
    progress = capsys.readouterr().err
    assert "2 of 4, 0:" in progress and "b: exit status 3 after" in progress


def test_the_summary_names_every_script(tmp_path):
    ran, old, broken, never = fake("a", 1), fake("old", 2), fake("b", line=FAILS), fake("never")
    driver.run_all([ran, old], tmp_path)
    failures = driver.run_all([dataclasses.replace(old, line=FAILS), broken], tmp_path)
    (tmp_path / "torn.json").write_text('{"results": {}}')
    text = driver.summary_section(collection(tmp_path, ran, old, broken, never, fake("torn")), failures)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows[0] == "| `a`: Table a | the \\| paper | ours 1 | no difference |"
    assert "ours 2" in rows[1] and "an earlier one" in rows[1]
    assert "failed in the last run" in rows[2] and "`python -m all --only b`" in rows[2]
    assert "| not run |" in rows[3] and "cannot be summed up (KeyError" in rows[4]
    assert "P, 2 cores, cpu, JAX 1; load average 1.5 to 3.5" in text
    assert "Nothing was run yet." in driver.summary_section(collection(tmp_path / "none", never), {})


def test_only_what_is_between_the_marks_changes(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        driver.rewrite_section(readme, "new", "mark")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    readme.write_text(f"{END} {BEGIN}")
    with pytest.raises(KvjaxError, match="each once: the summary goes between them"):
        driver.rewrite_section(readme, "new", "mark")


def test_main_runs_those_named_and_tells_of_failures(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}{END}")
    entries = collection(tmp_path / "results", fake("a", 1), fake("b", line=FAILS))
    monkeypatch.setattr(driver, "README", readme)
    monkeypatch.setattr(driver, "SMALL_FORMS", entries)
    monkeypatch.setattr(driver, "summary_section", lambda collection, failures: f"failed: {list(failures)}")
    assert driver.main(["--only", "a"]) == 0 and "failed: []" in readme.read_text()
    assert driver.main([]) == 1 and "failed: ['b']" in readme.read_text()
    assert "failed: b: exit status 3" in capsys.readouterr().err


def test_names_are_checked(capsys):
    assert [e.name for e in driver.select_entries("streaming, kcache_table1")] == ["kcache_table1", "streaming"]
    with pytest.raises(KvjaxError, match="no script .'kcache_table9'.; use kcache_table1, "):
        driver.select_entries("kcache_table9")
    assert driver.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(driver.ENTRIES)
    assert driver.main(["--list", "--real"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(driver.ON_A_REAL_MODEL) and all("smollm2-135m" in line for line in listed)


class Parsed(Exception):
    """Raised in place of running a script."""


@pytest.mark.parametrize(
    "entry",
    [*driver.ENTRIES, *driver.ON_A_REAL_MODEL],
    ids=lambda entry: f"{entry.name}, real" if entry in driver.ON_A_REAL_MODEL else entry.name,
)
def test_every_entry_is_a_script_that_knows_its_arguments(entry, tmp_path, monkeypatch):
    script = importlib.import_module(f"experiments.papers.{entry.module}")
    assert callable(script.in_brief)
    parse = argparse.ArgumentParser.parse_args

    def record_arguments(self, argv):
        raise Parsed(parse(self, argv))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", record_arguments)
    command = entry.command(driver.RESULTS)
    assert command[1:3] == ["-m", f"experiments.papers.{entry.module}"]
    assert not any(w.startswith("/") for w in command[3:])
    with pytest.raises(Parsed):
        script.main(command[3:])


def test_all_scripts_of_the_folder_are_driven():
    shared = {"__init__", "common", "eviction", "eviction_tables", "questions"}
    folder = driver.ROOT / "experiments" / "papers"
    scripts = {p.relative_to(folder) for p in folder.rglob("*.py") if p.stem not in shared}
    assert {".".join(p.with_suffix("").parts) for p in scripts} == {e.module for e in driver.ENTRIES}


def record(method: str, accuracy: float, **more) -> dict:
    """A record of `common.measure`, with one task."""
    return {"method": method, "tasks": {"t": {"accuracy": accuracy, "error": 0.0}}, "agreement": 1.0, **more}


def eviction_document(lines: dict[str, tuple[str | None, float]], **more) -> dict:
    """The document of `eviction_tables.document`: label -> (base, fraction right), later questions at half of it."""
    score = {"first": 1.0, "unseen": 1.0, "later": 0.5}

    def gain(base: str, x: float) -> dict:
        return {w: {"right": (s * (x - lines[base][1]), 0.01)} for w, s in score.items()}

    described = [{"label": m, "method": m, "base": b, "gains": gain(b, x) if b else {}} for m, (b, x) in lines.items()]
    outcomes = [
        {"method": m, "when": w, "right": s * x, "nats": 1.0} for m, (_, x) in lines.items() for w, s in score.items()
    ]
    return {"lines": described, "outcomes": outcomes, **more}


LEVELS = [("full", 0.9)] + [
    (f"{m}:bits=1,one_bit={level}", x)
    for level, pair in (("original", (0.2, 0.3)), ("improved", (0.4, 0.8)))
    for m, x in zip(("kivi", "specache"), pair, strict=True)
]
CRUSHED = {"full": (None, 0.9), "H2O": (None, 0.5), "  kvcrush.mean": ("H2O", 0.6), "  kvcrush.ones": ("H2O", 0.4)}
SHARES = {"snapkv": {"phrases, first": "0.25", "text, text": "0.75"}}
STREAMED = {"tokens": 400, "bytes": {"streaming_llm": [64]}, "excess": {"streaming_llm": 0.1}}
LATENCY = [{"shape": "s", "overhead": {"x + kvcrush": {"added": 0.01}, "x + kmeans": {"added": 0.2}}}]
KINDS = {"snapkv 64": (None, 0.8), "kcache 64": (None, 0.9)}
TIMED = {"seconds_per_step": {"median": 0.002}}


@pytest.mark.parametrize(
    ("name", "results", "sentence"),
    [
        ("specache_table5", [record(m, x) for m, x in LEVELS], "help (+40.0 points): the order of the paper"),
        ("specache_table5", [record(m, 0.9) for m, _ in LEVELS], "do not help (+0.0 points): not the order"),
        ("specache_table4", [record("full", 0.9, **TIMED)], "full 90.0%, 2.0 ms"),
        (
            "specache_figure5",
            [record("full", 0.9), record("a", 0.5, topk=0), record("b", 0.8, topk=64)],
            "+30.0 points",
        ),
        ("specache_table1", {"sizes": [{"share": {"kivi": 0.134, "specache": 0.14}, "paper": 0.13}]}, "1 of 2 sizes"),
        (
            "specache_table2",
            eviction_document({"Full": (None, 0.9), "H2O 4x": ("Full", 0.4), "SpeCache 4x": ("Full", 0.8)}),
            "+40.0",
        ),
        (
            "specache_table3",
            [{"context": 2048, "column": i, "batch": b} for i, b in enumerate((2, 9, 12))],
            "4.5x, 6.0x",
        ),
        (
            "kvcrush_table2",
            eviction_document(CRUSHED),
            "1 of 2 pairs gain, 1 clearly (two standard errors); 1 lose clearly",
        ),
        (
            "kvcrush_table3",
            eviction_document({"FullKV": (None, 0.9), "S": (None, 0.5), "KVCrush* (S)": ("S", 0.6)}),
            "adds +10.0",
        ),
        ("kvcrush_figure5", {"best_share": SHARES}, "1 of 2 of our best fractions"),
        ("kvcrush_figure6", {"latency": LATENCY}, "cheaper of the two here too"),
        ("kvcrush_figure7", eviction_document(CRUSHED), "unseen: 1 of 2 pairs gain"),
        (
            "kvcrush_figure8",
            eviction_document({"full": (None, 0.9), "paged H2O, 8 pages": ("full", 0.5)}),
            "8 pages -40.0",
        ),
        (
            "eviction_curves",
            eviction_document(KINDS, drop={"snapkv 64": (0.5, 0), "kcache 64": (0.1, 0)}),
            "+50.0, offload +10.0",
        ),
        ("streaming", {**STREAMED, "slope": {"streaming_llm": [0.1, 0.2]}}, "within two standard errors of flat"),
        ("streaming", {**STREAMED, "slope": {"streaming_llm": [0.5, 0.2]}}, "beyond two standard errors of flat"),
    ],
)
def test_scripts_sum_up_what_they_found(name, results, sentence):
    (entry,) = (entry for entry in driver.ENTRIES if entry.name == name)
    words = entry.in_brief(results)
    assert len(words) == 3 and all(words) and sentence in " | ".join(words)
