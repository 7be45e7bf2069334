"""PyramidKV's budgets: the published integers, in every branch."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax.cache.eviction.budgets import budgets_by_layer
from kvjax.methods.pyramidkv import Pyramid
from tests.contract import layer
from tests.oracles.eviction import kvpress_pyramid_budget, pyramid_budget


def budget_at_layer(budget, index: int, layers: int):
    """A budget in one of several layers."""
    spec = dataclasses.replace(layer.spec(), index=0, num_layers=layers, method_layers=None)
    return budgets_by_layer(budget, spec)[index]


@pytest.mark.parametrize(("cap", "w"), [(2048, 8), (128, 8), (64, 8), (70, 64), (16, 8), (33, 32)])
@pytest.mark.parametrize("L", [1, 2, 32])
@pytest.mark.parametrize(("rule", "oracle"), [("authors", pyramid_budget), ("peer", kvpress_pyramid_budget)])
def test_pyramids_are_the_published_ones(cap, w, L, rule, oracle):
    budget = Pyramid(cap, w, rule=rule)
    for T in [1, w, cap - 1, cap, cap + 1, 2 * (cap - w) - 1, 2 * (cap - w), 2 * cap, 2 * cap + w, 4 * cap, 10**5]:
        for i in {0, L // 2, L - 1}:
            assert budget_at_layer(budget, i, L).num_kept(T) == oracle(T, i, L, cap, w), (T, i)


def test_the_authors_pyramid_exceeds_its_sum_by_what_rounding_leaves():
    excess = [
        sum(budget_at_layer(Pyramid(cap, 8), i, 32).num_kept(10**5) for i in range(32)) - 32 * cap
        for cap in (2048, 128, 64)
    ]
    assert excess == [16, 176, 240]


def test_the_peers_pyramid_keeps_its_sum_and_is_flat_below_the_window():
    budgets = [budget_at_layer(Pyramid(2048, 64, rule="peer"), i, 32).num_kept(10**5) for i in range(32)]
    assert (
        budgets[0] == round(2 * 2048 - 2048 / 20)
        and budgets[-1] == round(2048 / 20)
        and abs(sum(budgets) - 32 * 2048) < 17
    )
    assert {budget_at_layer(Pyramid(1024, 64, rule="peer"), i, 32).num_kept(4096) for i in range(32)} == {1024}


def test_one_layer_gets_the_mean():
    assert (
        budget_at_layer(Pyramid(64, 8), 0, 1).num_kept(1000)
        == budget_at_layer(Pyramid(640, 8, rule="peer"), 0, 1).num_kept(10**4) // 10
        == 64
    )
