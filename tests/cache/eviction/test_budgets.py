"""Budgets give the published integers, in every branch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache.components import Scorer, Selection
from kvjax.cache.eviction.budgets import (
    PerLayer,
    PromptFraction,
    TokenBudget,
    Uniform,
    budgets_by_layer,
)
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model
from tests.contract import layer


def layer_budget(budget, index: int, layers: int):
    """The budget of one of `layers` layers."""
    spec = dataclasses.replace(layer.spec(), index=0, num_layers=layers, method_layers=None)
    return budgets_by_layer(budget, spec)[index]


def test_uniform_and_fraction():
    assert [Uniform(8).num_kept(n) for n in (1, 8, 9)] == [1, 8, 8]
    assert [PromptFraction(0.25).num_kept(n) for n in (0, 1, 3, 7, 8)] == [0, 1, 1, 1, 2]
    assert PromptFraction(1 - 0.9).num_kept(10) == 1  # int() of 0.9999999999999998 would be 0
    assert PromptFraction(1 - 0.9).num_kept(30) == int(30 * (1 - 0.9)) == 2  # rounded down like kvpress
    assert PromptFraction(1.0).num_kept(7) == 7


def test_a_table_has_one_number_per_layer():
    assert [layer_budget(PerLayer((3, 1)), i, 2).num_kept(2) for i in range(2)] == [2, 1]
    with pytest.raises(KvjaxError, match="the table has 2 layers, the model has 3: give 3 numbers"):
        layer_budget(PerLayer((3, 1)), 0, 3)


def test_a_table_of_all_lengths_never_undercuts_what_is_protected():
    half, five = (Selection(Scorer(), budget, sinks=2, recent=4) for budget in (PromptFraction(0.5), Uniform(5)))
    table = half.num_kept_by_length(20)
    assert table.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 8, 8, 9, 9, 10]
    assert table.dtype == np.int32 and half.num_kept_by_length(20) is table
    with pytest.raises(
        KvjaxError,
        match="budget=5 of a layer is less than the 6 tokens that always stay, sinks=2, recent=4; give budget>=6",
    ):
        five.num_kept_by_length(20)
    assert five.num_kept_by_length(5).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Uniform(0), "at least 1 token per layer, got 0"),
        (lambda: PerLayer((4, 0)), "at least 1 token per layer, got 0"),
        (lambda: PromptFraction(0.0), r"fraction must lie in \(0, 1\], got 0.0"),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()


def test_budgets_are_values():
    assert dataclasses.replace(Uniform(3), tokens=4) == Uniform(4)
    assert len({PromptFraction(0.5), PromptFraction(0.5)}) == 1


@pytest.mark.parametrize("more", ["", " + kvcrush", " + adakv", " + kivi:bits=2,group=8,residual=8", " + d2o"])
def test_a_fraction_of_each_prompt_in_a_string(more):
    model = toy_model()
    prompts = [[1 + i % 50 for i in range(n)] for n in (80, 40)]
    _, cache = kvjax.prefill(model, prompts, "snapkv:budget=25%,window=4" + more)
    positions = kvjax.kept_positions(cache)
    for sequence, tokens in enumerate((20, 10)):
        counts = [len(head) for layer in positions for head in layer[sequence]]
        assert np.mean(counts) == pytest.approx(tokens, abs=0.5)  # AdaKV's heads share the slots of a layer


def test_a_fraction_is_written_as_it_was_given():
    method = kvjax.methods.snapkv(budget="12.5%", window=4)
    assert kvjax.name_of(method) == "snapkv:budget=12.5%,window=4" and kvjax.parse(kvjax.name_of(method)) == method
    assert method.select.budget == PromptFraction(0.125) and TokenBudget("64") == TokenBudget(64) == 64


@pytest.mark.parametrize("budget", ["0%", "150%", "-5%", "x%", "nan%", "many", "1e400%"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(KvjaxError, match=r"a fraction of each prompt from above 0% to 100%, got"):
        kvjax.parse(f"snapkv:budget={budget}")
