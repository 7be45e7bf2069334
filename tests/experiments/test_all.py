"""The driver: runs scripts, keeps what they print, goes on after a failure, sums up."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys

import pytest

from experiments import all as driver

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


class Parsed(Exception):
    """Raised in place of running a script."""


@pytest.mark.parametrize(
    "entry",
    [*driver.ENTRIES, *driver.ON_A_REAL_MODEL],
    ids=lambda entry: f"{entry.name}, real" if entry in driver.ON_A_REAL_MODEL else entry.name,
)
def test_every_entry_is_a_script_that_knows_its_arguments(entry, tmp_path, monkeypatch):
    module = f"experiments.papers.{entry.module}".split()[0]
    script = importlib.import_module(module)
    assert callable(script.in_brief)
    parse = argparse.ArgumentParser.parse_args

    def record_arguments(self, argv):
        raise Parsed(parse(self, argv))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", record_arguments)
    command = entry.command(driver.RESULTS)
    assert command[1:3] == ["-m", module]
    assert not any(w.startswith("/") for w in command[3:])
    with pytest.raises(Parsed):
        script.main(command[3:])


def test_all_scripts_of_the_folder_are_driven():
    shared = {"__init__", "common", "eviction", "eviction_tables", "questions"}
    folder = driver.ROOT / "experiments" / "papers"
    scripts = {p.relative_to(folder) for p in folder.rglob("*.py") if p.stem not in shared}
    assert {".".join(p.with_suffix("").parts) for p in scripts} == {e.module.split()[0] for e in driver.ENTRIES}
