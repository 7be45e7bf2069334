"""Budgets: the published integers, in every branch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache.eviction.budgets import (
    PerLayer,
    PromptFraction,
    Pyramid,
    TokenBudget,
    Uniform,
    budgets_by_layer,
    num_kept_by_length,
)
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles.eviction import pyramid, pyramid_peer


def at(budget, index: int, layers: int):
    """A budget in one layer of so many."""
    spec = dataclasses.replace(layer.spec(), index=0, num_layers=layers)
    return budgets_by_layer(budget, spec)[index]


def test_uniform_and_ratio():
    assert [Uniform(8).num_kept(n) for n in (1, 8, 9)] == [1, 8, 8]
    assert [PromptFraction(0.25).num_kept(n) for n in (0, 1, 3, 7, 8)] == [0, 1, 1, 1, 2]
    assert PromptFraction(1 - 0.9).num_kept(10) == 1  # int() of 0.9999999999999998 would be 0
    assert PromptFraction(1 - 0.9).num_kept(30) == int(30 * (1 - 0.9)) == 2  # rounded down like kvpress
    assert PromptFraction(1.0).num_kept(7) == 7


def test_a_table_has_one_number_per_layer():
    assert [at(PerLayer((3, 1)), i, 2).num_kept(2) for i in range(2)] == [2, 1]
    with pytest.raises(KvjaxError, match="the table has 2 layers, the model has 3: give 3 numbers"):
        at(PerLayer((3, 1)), 0, 3)


@pytest.mark.parametrize(("cap", "w"), [(2048, 8), (128, 8), (64, 8), (70, 64), (16, 8), (33, 32)])
@pytest.mark.parametrize("L", [1, 2, 32])
@pytest.mark.parametrize(("rule", "oracle"), [("authors", pyramid), ("peer", pyramid_peer)])
def test_pyramids_are_the_published_ones(cap, w, L, rule, oracle):
    budget = Pyramid(cap, w, rule=rule)
    for T in [1, w, cap - 1, cap, cap + 1, 2 * (cap - w) - 1, 2 * (cap - w), 2 * cap, 2 * cap + w, 4 * cap, 10**5]:
        for i in {0, L // 2, L - 1}:
            assert at(budget, i, L).num_kept(T) == oracle(T, i, L, cap, w), (T, i)


def test_the_authors_pyramid_exceeds_its_sum_by_what_rounding_leaves():
    excess = [sum(at(Pyramid(cap, 8), i, 32).num_kept(10**5) for i in range(32)) - 32 * cap for cap in (2048, 128, 64)]
    assert excess == [16, 176, 240]


def test_the_peers_pyramid_keeps_its_sum_and_is_flat_below_the_window():
    kept = [at(Pyramid(2048, 64, rule="peer"), i, 32).num_kept(10**5) for i in range(32)]
    assert kept[0] == round(2 * 2048 - 2048 / 20) and kept[-1] == round(2048 / 20) and abs(sum(kept) - 32 * 2048) < 17
    assert {at(Pyramid(1024, 64, rule="peer"), i, 32).num_kept(4096) for i in range(32)} == {1024}


def test_one_layer_gets_the_mean():
    assert at(Pyramid(64, 8), 0, 1).num_kept(1000) == at(Pyramid(640, 8, rule="peer"), 0, 1).num_kept(10**4) // 10 == 64


def test_a_table_of_all_lengths_never_undercuts_what_is_protected():
    table = num_kept_by_length(PromptFraction(0.5), 20, protected=6)
    assert table.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 8, 8, 9, 9, 10]
    assert table.dtype == np.int32 and num_kept_by_length(PromptFraction(0.5), 20, protected=6) is table
    with pytest.raises(KvjaxError, match="keeps 5 of 20 tokens in a layer, fewer than the 6 sinks and recents"):
        num_kept_by_length(Uniform(5), 20, protected=6)
    assert num_kept_by_length(Uniform(5), 5, protected=6).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Uniform(0), "at least 1 token per layer, got 0"),
        (lambda: PerLayer((4, 0)), "at least 1 token per layer, got 0"),
        (lambda: PromptFraction(0.0), r"fraction must lie in \(0, 1\], got 0.0"),
        (lambda: Pyramid(8, 8), "needs more than these, got tokens=8; use at least 9"),
        (lambda: Pyramid(9, 8, beta=0), "beta must be at least 1, got 0"),
        (lambda: Pyramid(9, 8, rule="paper"), "rule must be 'authors' or 'peer', got 'paper'"),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()


def test_budgets_are_values():
    assert (
        dataclasses.replace(Uniform(3), tokens=4) == Uniform(4) and len({PromptFraction(0.5), PromptFraction(0.5)}) == 1
    )


@pytest.mark.parametrize("more", ["", " + kvcrush", " + adakv", " + kivi:bits=2,group=8,residual=8", " + d2o"])
def test_a_fraction_of_each_prompt_in_a_string(more):
    model = toy_model()
    prompts = [[1 + i % 50 for i in range(n)] for n in (80, 40)]
    _, cache = kvjax.prefill(model, prompts, "snapkv:budget=25%,window=4" + more)
    held = kvjax.kept_positions(cache)
    for row, tokens in enumerate((20, 10)):
        heads = [len(head) for layer in held for head in layer[row]]
        assert np.mean(heads) == pytest.approx(tokens, abs=0.5)  # AdaKV's heads share the places


def test_a_fraction_is_written_as_it_was_given():
    method = kvjax.methods.snapkv(budget="12.5%", window=4)
    assert kvjax.name_of(method) == "snapkv:budget=12.5%,window=4" and kvjax.parse(kvjax.name_of(method)) == method
    assert method.select.budget == PromptFraction(0.125) and TokenBudget("64") == TokenBudget(64) == 64


@pytest.mark.parametrize("budget", ["0%", "150%", "-5%", "x%", "nan%", "many", "1e400%"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(KvjaxError, match=r"a fraction of each prompt from above 0% to 100%, got"):
        kvjax.parse(f"snapkv:budget={budget}")
