"""The catalogue: a small run, in parts and gone on with, gives the scores of `kvjax.eval.compare`."""

from __future__ import annotations

import json
import shutil
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from docs import hooks
from docs.generate import catalogue as page
from docs.generate.equal_bytes import Result
from experiments import catalogue, catalogue_tables
from kvjax.eval import Spec, compare

FAMILIES = """
[[family]]
name = "tokens"
methods = ["sinks_and_recent:budget=32"]

[[family]]
name = "bits and tables"
methods = ["int8", "qfilters:budget=32"]
"""
DECLARED = """
[[run]]
name = "tiny"
model = "{model}"
length = 96
shares = ["3/4"]
methods = "families.toml"
batch = 2

[[run.task]]
name = "turns"
contexts = 2
questions = 2
seeds = 2

[[run.task]]
name = "ppl"
contexts = 2
seeds = 1
"""


@pytest.fixture
def results(tmp_path, directory, monkeypatch):
    """Declares a run on a tiny model; returns the folder of its results."""
    (tmp_path / "families.toml").write_text(FAMILIES)
    (tmp_path / "catalogue.toml").write_text(DECLARED.format(model=directory))
    monkeypatch.setattr(catalogue, "DECLARED", tmp_path / "catalogue.toml")
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVJAX_TABLES", "")  # a run names its own, and the variable is restored
    return tmp_path / "results"


def test_a_run_goes_on_in_parts_and_has_the_scores_of_compare(results, directory, capsys):
    catalogue.main(["--minutes", "0"])  # fits, and has no time for more
    points = json.loads((results / "tiny.fitted.json").read_text())["points"]
    assert [(p["settings"], bool(p["method"])) for p in points] == [
        ("sinks_and_recent:budget=32", True),
        ("int8", True),
        ("qfilters:budget=32", False),  # this model has no table of its heads
    ]
    assert "table" in points[2]["why"] and not catalogue.read_lines("tiny")
    (results / "tiny.1-of-2.jsonl").touch()  # as records that were copied without their machine
    for part in ("1/2", "2/2", "1/2"):  # a part that is complete adds nothing
        catalogue.main(["--part", part])
    for part in (1, 2):
        written = (results / f"tiny.{part}-of-2.jsonl").read_text().splitlines()
        assert ["machine" in json.loads(line) for line in written].count(True) == 1
    lines = catalogue.read_lines("tiny")
    assert sorted((x["task"], x["seed"]) for x in lines) == [("ppl", 0)] * 3 + [("turns", 0)] * 3 + [("turns", 1)] * 3
    model, tokens = kvjax.load(directory), points[0]["method"]
    rows = compare(model, ["full", tokens, "int8"], "ppl", Spec((96,), contexts=2), batch=2)
    mean = {x["method"]: np.mean(x["scores"]) for x in lines if x["task"] == "ppl"}
    assert mean == pytest.approx({row.method: row.bits for row in rows}, abs=1e-4)
    capsys.readouterr()
    catalogue.main(["--repeat", "100"])
    assert capsys.readouterr().out.count(", 0 of 2 contexts differ\n") == len(lines)
    catalogue_tables.main(["--out", str(results)])
    printed = capsys.readouterr().out
    best = min((tokens, "int8"), key=mean.__getitem__)
    assert f"| **a long text goes on**; exact cache {mean['full']:.3f} bits |" in printed
    assert f"| 1 | `{best}` {mean[best] - mean['full']:+.3f} |" in printed
    assert (results / "catalogue.tiny.png").read_bytes().startswith(b"\x89PNG")
    catalogue_tables.main(["--front", "tiny"])
    front = tomllib.loads(capsys.readouterr().out)["family"]
    assert {f["name"]: f["methods"] for f in front} == {
        "tokens": ["sinks_and_recent:budget=32"],
        "bits and tables": ["int8"],
    }
    with pytest.raises(kvjax.KvjaxError, match="'fiddly' is no run at equal bytes with records; there are: tiny"):
        catalogue_tables.main(["--front", "fiddly"])


def test_tables_are_calibrated_once_and_what_lacked_one_is_fitted_again(results, capsys):
    declared = results.parent / "catalogue.toml"
    catalogue.main(["--minutes", "0"])
    capsys.readouterr()
    asked = '\n[run.tables]\ncontexts = 2\ntokens = 32\nkinds = ["qfilters", "heads", "merged_bases:heads=3"]\n'
    declared.write_text(declared.read_text() + asked)
    (results.parent / "families.toml").write_text(FAMILIES.replace('"int8",', '"int8", "int4; merged_heads",'))
    catalogue.main(["--minutes", "0", "--lines", "^sinks"])
    assert "tiny: a table of" not in (said := capsys.readouterr().err) and "fitted" not in said
    catalogue.main(["--minutes", "0"])
    said = capsys.readouterr().err
    assert "tiny: a table of qfilters, " in said and "tiny: no table of merged_bases:heads=3: 3 heads toget" in said
    assert "fitted qfilters" in said and "fitted int8" not in said
    document = json.loads((results / "tiny.fitted.json").read_text())
    assert document["tables"] == {"contexts": 2, "tokens": 32}
    assert [p["method"].partition(":")[0] for p in document["points"]] == [
        "sinks_and_recent",
        "int8",
        "int4",
        "qfilters",
    ]
    catalogue.main(["--minutes", "0"])
    assert "a table of qfilters" not in capsys.readouterr().err
    cache = results.parent / "cache" / "tables"
    (made,) = cache.rglob("*.safetensors")
    (kept,) = (results / "tables").rglob("*.safetensors")
    assert made.name == kept.name == "qfilters.safetensors"
    # Another machine has the records alone, and their tables.
    shutil.rmtree(cache)
    catalogue.main(["--minutes", "0"])
    assert "a table of qfilters" not in capsys.readouterr().err and made.read_bytes() == kept.read_bytes()
    declared.write_text(declared.read_text().replace("tokens = 32", "tokens = 16"))
    with pytest.raises(kvjax.KvjaxError, match="give the run another name"):
        catalogue.main(["--minutes", "0"])


def test_a_run_has_lines_of_its_own_beside_those_of_its_file(results):
    declared = results.parent / "catalogue.toml"
    declared.write_text(declared.read_text().replace("batch = 2", 'batch = 2\nadded = ["int4"]'))
    run = catalogue.read_declared("tiny")["tiny"]
    assert [line for _, line in catalogue.read_methods(run)] == [
        "sinks_and_recent:budget=32",
        "int8",
        "qfilters:budget=32",
        "int4",
    ]
    catalogue.main(["--minutes", "0", "--lines", "^int4"])
    assert {p["settings"] for p in catalogue.read_fitted(run)["points"]} == {"int4"}


def test_tables_are_calibrated_on_documentation_and_code():
    model = kvjax.load("testbed")
    prose, code = catalogue.calibration_documents(model, 2, 64)
    assert len(prose) == len(code) == 64
    assert model.text_tokenizer().decode(prose).startswith('The "assert" statement')
    assert code == model.text_tokenizer().encode_prompt(catalogue.source_code(1, 64)[0])[:64]


def test_lines_that_are_no_longer_declared_leave_the_sizes(results):
    catalogue.main(["--minutes", "0"])
    families = results.parent / "families.toml"
    families.write_text(families.read_text().replace('"int8", ', '"int4; merged_heads:heads=3", '))
    catalogue.main(["--minutes", "0"])
    points = json.loads((results / "tiny.fitted.json").read_text())["points"]
    assert [(p["settings"], p["method"]) for p in points[1:]] == [
        ("int4; merged_heads:heads=3", "int4"),  # this model's heads cannot be merged by threes
        ("qfilters:budget=32", ""),
    ]


def test_a_seed_counts_once_every_method_has_it(results):
    catalogue.main(["--minutes", "0"])
    (run,) = catalogue.read_declared(None).values()
    methods = ["full", *(p["method"] for p in catalogue.read_fitted(run)["points"] if p["method"])]
    lines = [{"method": m, "task": "turns", "seed": seed, "scores": [1.0, 0.5]} for seed in (0, 1) for m in methods]
    written = [{"machine": catalogue.machine()}, *lines[:-1]]
    (results / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    document = catalogue.sum_up(run)
    assert document["tasks"] == ["turns"] and document["seeds"] == [0]
    assert document["scores"] == {m: {"turns": {"0": [1.0, 0.5]}} for m in methods}
    assert f", JAX {catalogue.machine()['jax']}." in page.page("tiny", Result(document))
    text = page.page("tiny", Result(document | {"machines": []}))
    assert "2 settings; contexts: 2 of later questions." in text
    assert "- `qfilters:budget=32` failed: " in text and "- 3/4" not in text  # nothing is too large
    failed = {"method": methods[-1], "task": "turns", "seed": 1, "failed": "no memory"}
    (results / "tiny.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*written, failed]))
    document = catalogue.sum_up(run)
    assert document["seeds"] == [0, 1] and methods[-1] not in document["scores"]
    assert document["failed"][methods[-1]] == "no memory"


def test_the_menu_of_the_site_has_the_pages_that_are_made(monkeypatch):
    document = {"model": "testbed", "length": 2048}
    names = {None: "tiny", "front": "front", "forms": "forms"}
    monkeypatch.setattr(page, "read_results", lambda kind: {names[kind]: Result(document)})
    config = hooks.on_config(
        SimpleNamespace(nav=[{"Methods": "methods/index.md"}, {"Results": ["results.md", "a.md"]}])
    )
    entry = {"The catalogue, the testbed model, 2,048 tokens": "catalogue.tiny.md"}
    front = {"The front, the testbed model, 2,048 tokens": "catalogue.front.md"}
    forms = {"Forms of one method, the testbed model, 2,048 tokens": "catalogue.forms.md"}
    assert config.nav[1]["Results"] == ["results.md", entry, front, forms, "a.md"]


def test_the_front_takes_the_best_of_each_use_in_turn():
    def result(right, bits):
        scores = {"turns.essays": right, "ppl": bits}
        points = [
            {"method": m, "settings": m.upper(), "family": "f", "share": "1/4", "device_bytes": 1} for m in "abcd"
        ]
        measured = {m: {task: {"0": [by_method[m]] * 2} for task, by_method in scores.items()} for m in "abcd"}
        held = {m: [0.2, 1.0 if m == "d" else 0.0] for m in "abcd"}  # d has the rest on the host
        return Result({"points": points, "scores": measured, "tasks": list(scores), "bfloat16": held})

    first = result({"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.1}, {"a": 1.5, "b": 1.4, "c": 1.3, "d": 1.2})
    assert page.choose_front([first], most=(2, 1)) == ["A", "C", "D"]
    assert page.choose_front([first], most=(3, 0)) == ["A", "C", "B"]
    second = result({"a": 0.1, "b": 0.2, "c": 0.8, "d": 0.1}, {"a": 1.2, "b": 1.3, "c": 1.4, "d": 1.5})
    assert page.choose_front([first, second], most=(9, 9)) == ["A", "C", "B", "D"]


def test_a_front_is_measured_on_other_contexts_than_those_that_chose_it(results):
    declared = results.parent / "catalogue.toml"
    declared.write_text(declared.read_text() + '\n[[run]]\nname = "tiny.front"\nlike = "tiny"\nfirst_seed = 1\n')
    run = catalogue.read_declared("tiny.front")["tiny.front"]
    pieces = catalogue.make_pieces(run, ["full"])
    assert [(p.task, p.seed) for p in pieces] == [("turns", 1), ("ppl", 1), ("turns", 2)]
    results.mkdir()
    path = results / "tiny.front.jsonl"
    path.write_text(json.dumps({"method": "full", "task": "turns", "seed": 1, "scores": [1.0]}) + "\n")
    (results / "tiny.front.fitted.json").write_text(json.dumps({"points": [], "full_bytes": 1}))
    assert catalogue.sum_up(run)["seeds"] == [1]


def test_a_method_that_fails_is_recorded_and_not_tried_again(results, directory, monkeypatch):
    run = catalogue.CellRunner.run_method

    def fail(self, cell, method):
        if method == "int8":
            raise kvjax.KvjaxError("no memory")
        return run(self, cell, method)

    monkeypatch.setattr(catalogue.CellRunner, "run_method", fail)
    catalogue.main([])
    monkeypatch.setattr(catalogue.CellRunner, "run_method", run)
    catalogue.main([])
    failed = [x for x in catalogue.read_lines("tiny") if x["method"] == "int8"]
    assert [x.get("failed") for x in failed] == ["no memory"]


def test_the_best_on_the_device_and_with_the_host_have_rows_of_their_own():
    settings = {"family": "f", "share": "1/4", "device_bytes": 1}
    right = {"full": 1.0, "a": 1.0, "b": 0.75, "c": 0.0}
    document = {
        "points": [settings | {"method": m, "settings": m} for m in "abc"],
        "scores": {m: {"turns": {"0": [x] * 8}} for m, x in right.items()},
        "bfloat16": {"full": [1.0, 0.0], "a": [0.1, 0.9], "b": [0.25, 0.0], "c": [0.25, 0.001]},
        "tasks": ["turns"],
    }
    rows = page.winners_table(Result(document)).splitlines()
    assert [row.split(" (")[0] for row in rows[3:5]] == ["| 1 | `b` 75", "| 2 | `c` 0"]
    assert rows[5] == "| 3 |  |" and rows[6].startswith("| with the host | `a` 100")
    assert "not told apart from the first: 0 more" in rows[2]  # c is worse than b, and a is no rival on the device


def test_the_tables_of_fronts_have_each_fraction_of_each_model():
    def result(model, right):
        points = [{"family": "f", "settings": m, "device_bytes": 1} for m in ("int8", "int4", "offload")]
        points = [p | {"method": p["settings"] + x[-1], "share": x} for p in points for x in ("1/2", "1/4")]
        methods = {"full": 1.0} | right
        held = {m: [0.2, 0.9 if m.startswith("offload") else 0.0] for m in methods}
        scores = {m: {"turns.essays": {"1": [x] * 12}} for m, x in methods.items()}
        document = {"model": model, "points": points, "scores": scores, "tasks": ["turns.essays"], "bfloat16": held}
        return Result(document)

    first = result("testbed", {"int82": 1.0, "int84": 0.0, "int42": 1.0, "int44": 1.0, "offload4": 1.0})
    second = result("smollm2-135m", {"int82": 0.25, "int42": 0.5})
    best = page.best_tables([first, second]).splitlines()
    assert best[2:] == [
        "| the testbed model 1/2 | 100 (76–100) | int8 100 (76–100) | int4 100 | +0 (-24 to +24) |  |",
        "| the testbed model 1/4 | 100 (76–100) | int4 100 (76–100) | int8 0 | +100 (+66 to +100) "
        "| offload 100 (76–100) |",
        "| SmolLM2-135M 1/2 | 100 (76–100) | int4 50 (40–60) | int8 25 | +25 (+9 to +39) |  |",
    ]
    rows = page.front_tables(first).splitlines()
    assert rows[0] == "| the testbed model, later questions on essays | 1/2 | 1/4 |"
    assert rows[2:] == [
        "| `full` | 100 (76–100) | 100 (76–100) |",
        "| int4 | **100 (76–100)** | **100 (76–100)** |",
        "| int8 | **100 (76–100)** | 0 (0–24) |",
        "| offload, host |  | **100 (76–100)** |",
    ]


def test_a_run_like_another_has_its_fields_and_records_of_its_own(results):
    declared = results.parent / "catalogue.toml"
    declared.write_text(declared.read_text() + '\n[[run]]\nname = "tiny.1"\nlike = "tiny"\nlength = 64\n')
    tiny, like = catalogue.read_declared(None).values()
    assert like == tiny | {"name": "tiny.1", "like": "tiny", "length": 64}
    results.mkdir()
    line = json.dumps({"method": "full", "task": "ppl", "seed": 0, "scores": [1.0]})
    for name in ("tiny", "tiny.2-of-3", "tiny.1.1-of-2"):
        (results / f"{name}.jsonl").write_text(line + "\n")
    assert [len(catalogue.read_lines(name)) for name in ("tiny", "tiny.1")] == [2, 1]


def test_forms_have_the_sizes_that_are_written_and_are_compared_with_the_first(results, capsys):
    declared, folder = results.parent / "catalogue.toml", results.parent
    (folder / "forms.toml").write_text(
        '[[family]]\nname = "A"\nmethods = ["streaming_llm:recent=28", "sinks_and_recent:budget=32"]\n'
    )
    declared.write_text(
        declared.read_text()
        + '\n[[run]]\nname = "forms"\nkind = "forms"\nlike = "tiny"\nmethods = "forms.toml"\n'
        + '[[run.task]]\nname = "long_answer"\ncontexts = 2\nseeds = 1\n'
    )
    catalogue.main(["--only", "forms"])
    run = catalogue.read_declared("forms")["forms"]
    constant, growing = catalogue.read_fitted(run)["points"]
    assert (constant["method"], growing["method"]) == ("streaming_llm:recent=28", "sinks_and_recent:budget=32")
    assert constant["answer_bytes"] < growing["answer_bytes"]  # which holds its 32 tokens and all 48 of the answer
    full = catalogue.read_fitted(run)["full_bytes"]
    assert growing["answer_bytes"] / full == pytest.approx(80 / 96, rel=0.01)
    (result,) = page.read_results("forms").values()
    assert not page.read_results()  # neither the tables at equal bytes nor the front are made of forms
    first, other = (result.contexts(p["method"], "long_answer") for p in (constant, growing))
    capsys.readouterr()
    catalogue_tables.main([])
    row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("| `sinks_and_recent:budget=32`"))
    assert f" 83.3% | {(other - result.contexts('full', 'long_answer')).mean():+.3f}; " in row
    assert f"; {(other - first).mean():+.3f} (" in row and first.mean() != other.mean()
    path = results / "forms.jsonl"
    path.write_text("".join(x + "\n" for x in path.read_text().splitlines() if "sinks_and_recent" not in x))
    catalogue_tables.main([])  # the bytes of a form stand there before its scores
    assert "| 83.3% |  |" in capsys.readouterr().out
    path.unlink()
    catalogue_tables.main([])
    assert "| 83.3% |\n" in capsys.readouterr().out


def test_sizes_that_were_fitted_to_another_length_are_refused(results):
    catalogue.main(["--minutes", "0"])
    declared = results.parent / "catalogue.toml"
    declared.write_text(declared.read_text().replace("length = 96", "length = 64"))
    with pytest.raises(kvjax.KvjaxError, match="give the run another name"):
        catalogue.main([])


def test_an_unknown_run_is_named(results):
    with pytest.raises(kvjax.KvjaxError, match="no run 'large'; there are tiny"):
        catalogue.main(["--only", "large"])


def test_the_declared_runs_are_of_tasks_and_methods_that_there_are():
    for run in catalogue.read_declared(None).values():
        catalogue.suite.expand([task["name"] for task in run["task"]])
        assert tomllib.loads((catalogue.Path(catalogue.__file__).parent / run["methods"]).read_text())["family"]
        assert not run["shares"] or catalogue.parse_shares(",".join(run["shares"]))
