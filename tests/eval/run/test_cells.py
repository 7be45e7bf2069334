"""Cells of a run: the list that every process makes, and that a cell gives its records wherever it runs."""

import dataclasses
import pickle

from kvjax.eval.run import cells, harness
from kvjax.eval.run.cells import CellRunner, make_batches, make_cells
from kvjax.eval.run.context_reader import ContextReader
from kvjax.eval.run.evaluate import evaluate, missing_cells
from tests.eval.run.test_harness import CASES, METHODS, MODEL, TALKS, TEXTS, MemoryStore

ALL_CASES, TWO = [*CASES, *TEXTS[:2], *TALKS[:1]], METHODS[:2]


def test_a_run_is_its_cells_one_after_the_other(monkeypatch):
    monkeypatch.setattr(cells, "GROUP_METHODS", 1)
    runner, batches = CellRunner(MODEL, TWO), make_batches(ALL_CASES, 2)
    evaluate(MODEL, TWO, ALL_CASES, store := MemoryStore(), batch=2)
    # Each method reads each batch for itself.
    order = [(batch, name) for name in TWO for batch in batches]
    expected = [
        record | {"method_hash": runner.hashes[name]}
        for batch, name in order
        for record in cells.run_batch(ContextReader(MODEL), name, runner.methods[name], batch, False)
    ]
    assert len(expected) == 2 * len(ALL_CASES) and store.records == expected
    # Another process has the cells as bytes, and may run them in any order.
    own_cells = [pickle.loads(pickle.dumps(cell)) for cell in make_cells(ALL_CASES, TWO, 2)]
    found = {cell.index: runner.run(cell) for cell in reversed(own_cells)}
    assert [record for i in range(len(found)) for record in found[i]] == expected


def test_speed_has_cells_of_its_own_after_those_of_the_cases(monkeypatch):
    made = make_cells(CASES, [f"m{i}" for i in range(18)], 2, speed=(44, 88))
    assert [c.index for c in made] == list(range(8)) and [c.is_speed for c in made] == 2 * [False, False, True, True]
    assert [c.methods for c in made[3:5]] == [tuple(f"m{i}" for i in range(16)), ("m16", "m17")]
    assert [c.batch.cases[0].key for c in made[-2:]] == ["speed/44", "speed/88"]
    monkeypatch.setattr(harness, "SPEED_TOKENS", 4)
    (record,) = CellRunner(MODEL, "full").run(dataclasses.replace(made[2], methods=("full",)))
    assert record["key"] == "speed/44" and record["tokens_per_second"] > 0 and record["method_hash"]


def test_records_decide_what_is_missing_and_not_how_the_run_is_divided():
    store = MemoryStore()
    store.append([{"method": "full", "task": "toy", "key": key} for key in "ca"])
    store.append([{"method": "int8", "task": "toy", "key": "c"}])
    whole = make_cells(CASES, ["full", "int8"], 2)
    left = missing_cells(whole, store)
    assert [(c.index, c.methods) for c in left] == [(0, ("int8",)), (1, ("full", "int8"))]
    assert all(mine.batch is cell.batch for mine, cell in zip(left, whole, strict=True))
    store.append([{"method": name, "task": "toy", "key": key} for name in ("full", "int8") for key in "abc"])
    assert missing_cells(whole, store) == []
