"""LU-KV against its oracle: numbers of tokens by curves, and curves counted on texts.

LU-KV's budgets in plain Python, one layer and prompt length at a time (arXiv 2602.08585; code NVIDIA/kvpress).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.budgets import PromptFraction, Uniform
from kvjax.calibrate import count_arrays
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.methods.lukv import PERCENTS, CurveAllocation
from kvjax.testing import toy_model
from tests.contract import layer

LAYERS = 2
SPEC = dataclasses.replace(layer.spec(), index=None, num_layers=LAYERS, method_layers=None)
LEAN = np.array([[0.9, -0.2], [0.1, -0.8]])
CURVES = np.moveaxis(PERCENTS[:, None, None] / 100 * (1 + LEAN * (1 - PERCENTS[:, None, None] / 100)), 0, 2)


def write_table(path, curves=CURVES, spec=SPEC) -> str:
    layers = [{"keep": x.astype(np.float32)} for x in curves]
    return str(table_file.write(path / "table", "lukv", spec, layers))


def layer_tokens(curves, n: int, percent: int, always: int) -> list[int]:
    """The tokens that the heads of a layer keep of n, by curves [K][99]."""
    ideal = [float(np.float32(curve[percent - 1])) * n for curve in curves]
    tokens = [int(x) for x in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda h: (tokens[h] - ideal[h], h))
    for head in by_remainder[: round(sum(ideal)) - sum(tokens)]:
        tokens[head] += 1
    return [max(x, min(n, always)) for x in tokens]


@pytest.mark.parametrize("percent", [12, 50, 93])
def test_heads_keep_the_tokens_of_their_curves(tmp_path, percent):
    table = TableFile(write_table(tmp_path), "lukv")
    found = CurveAllocation(table, SPEC, PromptFraction(percent / 100), 2, 1, 1, 0.0).tokens(200)
    of_tokens = CurveAllocation(table, SPEC, Uniform(2 * percent), 2, 1, 1, 0.0).tokens(200)
    for n in (100, 200):  # the budget is a whole number of tokens, and so the percentage is exact
        expected = [layer_tokens(curves, n, percent, 3) for curves in CURVES]
        assert found[n].tolist() == expected
    assert of_tokens[200].tolist() == found[200].tolist()
    assert found[4].min() >= 3  # sinks and the recent token, whatever a curve says


def test_a_budget_is_the_mean_of_the_layers_that_divide_it(tmp_path):
    """Layers with windows have curves too, and no part in the budget."""
    table, spec = TableFile(write_table(tmp_path), "lukv"), dataclasses.replace(SPEC, method_layers=(1,))
    assert abs(CURVES[1].mean(0) - PERCENTS / 100).max() > 0.05
    found = CurveAllocation(table, spec, Uniform(40), 0, 0, 1, 0.0).tokens(100)
    assert found[100].shape == (1, 2) and found[100].sum() == 80


def test_counted_curves_are_a_ranking_of_the_tokens_of_all_heads():
    model, texts = toy_model(), [list(range(1, 41)), [7, 3, 9, 1] * 7]
    tables = count_arrays(model, "lukv:method=snapkv:budget=8,window=2", texts)
    curves = np.stack([arrays["keep"] for arrays in tables])
    assert curves.shape == (model.config.layers, 2, 99) and (np.diff(curves) >= 0).all()
    # The window of two tokens stays in every head; 28 and 40 tokens are in the texts.
    kept = [np.mean([max(n * p // 100, 2) / n for n in map(len, texts)]) for p in PERCENTS]
    np.testing.assert_allclose(curves.mean((0, 1)), kept, rtol=1e-5)
    assert np.ptp(curves[..., 49]) > 0.1


def test_curves_that_are_no_fractions_are_refused(tmp_path):
    with pytest.raises(KvjaxError, match=r"are fractions .* lie in \[0, 1\], got 0.*; make the table anew"):
        CurveAllocation.load_table(TableFile(write_table(tmp_path, 2 * CURVES), "lukv"), SPEC)
    spec = specs(kvjax.load("testbed").config)[0]
    np.save(tmp_path / "curves.npy", np.zeros((99, 3, 2)))
    with pytest.raises(KvjaxError, match=r"its array of .* has shape \(99, 3, 2\), and this model needs \(99, 4, 2\)"):
        kvjax.parse(f"snapkv:budget=25% + lukv:table={tmp_path / 'curves.npy'}").bind(spec)
