"""Scorers by divisions: the script hides the tokens that the methods evict, and a small run from end to end."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvjax
from experiments import divisions, divisions_figure, equal_bytes_table
from kvjax.reuse.full_kv import read_exactly
from kvjax.testing import toy_model

LENGTHS = 60, 47
METHODS = (
    "snapkv:budget=24,window=8",
    "snapkv:budget=24,window=8 + adakv:alpha=0",
    "snapkv:budget=24,window=8 + kvcrush:share=0.25 + adakv:alpha=0.3,scope=model",
    "accumulated:budget=24 + adakv:alpha=0,scope=model,normalise=true",
    "turned_queries:budget=24 + adakv:alpha=0,scope=model",
    "random:budget=24,sinks=4 + adakv:alpha=0,scope=model + int4",
)


@pytest.fixture(scope="module")
def read():
    model = toy_model()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, model.config.vocab_size, n).tolist() for n in LENGTHS]
    return model, rows, read_exactly(model, rows)


def mask_positions(mask):
    """The positions that a mask keeps, by sequence and head."""
    return [[np.flatnonzero(head).tolist() for head in row] for row in np.asarray(mask)]


def sorted_positions(layer):
    """The kept positions of a layer in ascending order, by sequence and head."""
    return [[sorted(head.tolist()) for head in row] for row in layer]


def select_masks(exact, method):
    return divisions.select_tokens(exact, method, divisions.compute_scores(exact, method, None))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_is_what_the_method_keeps(read, method):
    model, rows, exact = read
    kept_positions = kvjax.read(model, rows, method).kept_positions()
    masks = select_masks(exact, method)
    for mask, layer in zip(masks, kept_positions, strict=True):
        assert mask_positions(mask) == sorted_positions(layer)


def test_the_second_pass_is_the_methods_own(read):
    model, rows, exact = read
    method = "kvzip:budget=24,chunk=32"
    scores = divisions.compute_scores(exact, method, divisions.replay_scores(exact, method))
    kept_positions = kvjax.read(model, rows, method).kept_positions()
    masks = divisions.select_tokens(exact, method, scores)
    assert mask_positions(masks[1]) == sorted_positions(kept_positions[1])


@pytest.mark.parametrize("method", METHODS[2:3] + METHODS[-1:])
def test_hidden_tokens_count_as_little_as_evicted_ones(read, method):
    model, rows, exact = read
    codec = "int4" if "int4" in method else ""
    every = exact.compress(divisions.add_component(divisions.EVERY_TOKEN, codec), capacity=96)
    hidden = divisions.hide_tokens(every, select_masks(exact, method))
    gone = exact.compress(method, capacity=96)
    more = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
    for a, b in zip(hidden.score(more), gone.score(more), strict=True):
        np.testing.assert_allclose(a[0], b[0], atol=2e-5)
    full = exact.compress("full", 96).score(more)
    assert np.abs(full[0][0] - gone.score(more)[0][0]).max() > 1e-3


def test_the_error_of_attention_is_that_of_numpy(read):
    """NumPy computes one layer from the definition, for the queries after the prompts."""
    model, rows, _ = read
    batch = divisions.Batch(
        "turns",
        rows,
        [divisions.Questions([[5, 6, 7, 8], [9, 8, 7]], [[True, False, False, True], [True, False, True]], [])],
    )
    later_queries = divisions.read_later_queries(model, batch)
    rng = np.random.default_rng(1)
    masks = [rng.random((2, p.k.shape[1], 64)) < 0.5 for p in later_queries.exact.prompts]
    errors = divisions.attention_errors(later_queries, [np.asarray(m) for m in masks])
    prompt, total, count = later_queries.exact.prompts[1], 0.0, 0
    q, k, v = (np.asarray(x, np.float64) for x in (prompt.q, prompt.k, prompt.v))
    for row, (length, tokens) in enumerate(zip(LENGTHS, (4, 3), strict=True)):
        for t in range(length + 1, length + tokens):
            for head in range(k.shape[1]):
                for query in range(q.shape[2]):
                    s = k[row, head, : t + 1] @ q[row, head, query, t] / np.sqrt(k.shape[-1])
                    is_kept = np.arange(t + 1) >= length
                    is_kept[:length] |= masks[1][row, head, :length]
                    outputs = []
                    for which in (np.ones(t + 1, bool), is_kept):
                        p = np.where(which, np.exp(s - s[which].max()), 0.0)
                        outputs.append(p @ v[row, head, : t + 1] / p.sum())
                    total += np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
                    count += 1
    assert errors[1] == pytest.approx(total / count, abs=2e-4)


SETTINGS = """
[[scorer]]
name = "window"
method = "snapkv:budget=512,window=4"

[[scorer]]
name = "norm"
method = "keynorm:budget=512"
not = ["over the model"]

[[division]]
name = "equal"
component = ""

[[division]]
name = "over the model"
component = "adakv:alpha=0,scope=model,page=4"

[[more]]
name = "bits"
shares = "1/2"
methods = ["int8", "kcache:n=4"]
"""


@pytest.fixture
def run(tmp_path, directory, monkeypatch):
    """Runs the script on a tiny model, with further arguments; returns the results that it sums up."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    monkeypatch.setattr(divisions, "TASKS", {"turns": "turns", "alone": "shared"})

    def run_script(*more: str) -> dict:
        results = tmp_path / "results.json"
        where = ["--model", str(directory), "--settings", str(tmp_path / "settings.toml"), "--results", str(results)]
        sizes = "--length 96 --contexts 2 --questions 2 --seeds 0 --shares 1/2"
        divisions.main([*where, *sizes.split(), "--out", str(tmp_path / "records.jsonl"), *more])
        return json.loads(results.read_text())

    return run_script


def test_a_run_is_summed_up_and_gone_on_with(run, tmp_path):
    document = run("--check")
    methods = {(s["scorer"], s["division"]): s["method"] for s in document["settings"]}
    assert set(methods) >= {("window", "equal"), ("window", "over the model"), ("norm", "equal")}
    assert ("norm", "over the model") not in methods
    model = kvjax.load(document["model"])
    for method in methods.values():
        assert kvjax.planned_bytes(method, model.config, 96, dtype="bfloat16").fraction_of_full <= 0.5
        # Only the later turn of a conversation of two counts; both questions to a context that was read alone do.
        for protocol, questions in (("turns", 1), ("alone", 2)):
            right = document["measured"][method][protocol]["0"]["right"]
            assert np.asarray(right).shape == (2, questions)
    records = tmp_path / "records.jsonl"
    lines = records.read_text().splitlines()
    records.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # the last line is torn by a kill
    resumed = run()
    assert resumed["measured"] == document["measured"]


def test_the_pictures_name_every_line_and_point_of_the_records(tmp_path):
    """README's picture is one of them."""
    curves, where = tmp_path / "curves.svg", tmp_path / "where.svg"
    divisions_figure.main(["--curves", str(curves), "--where", str(where)])
    for name in (*(line.name for line in divisions_figure.EVICTION), *divisions_figure.POINTS.values()):
        assert f"<!-- {name} -->" in curves.read_text()
    assert all(f"<!-- {division} -->" in where.read_text() for division in divisions_figure.DIVISIONS)


def test_the_tables_of_results_are_those_of_the_records():
    page = (divisions_figure.ROOT / "docs" / "results.md").read_text()
    small, qwen = (
        divisions_figure.Results(json.loads((divisions_figure.RESULTS / f"divisions.{name}.json").read_text()))
        for name in ("smollm2", "qwen")
    )
    assert divisions_figure.table(small, "turns", divisions_figure.SHARES) in page
    assert divisions_figure.table(small, "alone", ("1/4", "1/8")) in page
    assert divisions_figure.table(qwen, "turns", ("1/4", "1/8")) in page
    shown_below = json.loads(equal_bytes_table.RESULTS.read_text())["scores"]
    assert divisions_figure.more_table(small, shown_below) in page


def test_a_method_of_both_runs_on_the_real_model_has_one_number():
    """README's text and its picture come from two runs."""
    in_picture = divisions_figure.Results(json.loads((divisions_figure.RESULTS / "divisions.smollm2.json").read_text()))
    points = equal_bytes_table.read_points(json.loads(equal_bytes_table.RESULTS.read_text()))
    shared = {p.method: in_picture.scores(p.method, "turns") for p in points}
    means = {name: round(float(scores.mean()), 2) for name, scores in shared.items() if scores is not None}
    assert set(divisions_figure.POINTS) < set(means)
    assert means == {p.method: round(p.questions[0], 2) for p in points if p.method in means}
