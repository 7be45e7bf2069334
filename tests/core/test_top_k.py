"""Exact top-k: entries and indices, masks with their counts, ties and padding, and the slots of a mask."""

from __future__ import annotations

import inspect

import jax
import numpy as np
import pytest

from kvjax.core.top_k import mask_to_slots, top_k, top_k_mask


def test_the_highest_entries_come_first_with_their_indices():
    x = np.random.default_rng(0).permutation(60).reshape(3, 20).astype(np.float32)
    best, index = jax.jit(top_k, static_argnums=1)(x, 7)
    np.testing.assert_array_equal(index, np.argsort(-x, -1)[:, :7])
    np.testing.assert_array_equal(best, -np.sort(-x, -1)[:, :7])


@pytest.mark.skipif("is_stable" not in inspect.signature(jax.lax.top_k).parameters, reason="JAX >= 0.11.2 has it")
def test_the_compiler_may_select_without_a_sort():
    assert "is_stable=False" in str(jax.make_jaxpr(lambda x: top_k(x, 7))(np.zeros((3, 20), np.float32)))


def test_exactly_k_entries_are_marked_and_ties_go_to_the_lower_index():
    scores = np.array([[3, 1, 3, 3, 2], [-np.inf, 0, -0.0, 0, 5]], np.float32)
    allowed = np.array([[True, True, False, True, True], [True] * 5])
    select = jax.jit(top_k_mask)
    for n in range(6):
        mask = np.asarray(select(scores, allowed, np.array([n, n], np.int32)))
        assert np.flatnonzero(mask[0]).tolist() == sorted([0, 3, 4, 1][:n])
        assert np.flatnonzero(mask[1]).tolist() == sorted([4, 1, 2, 3, 0][:n])
        np.testing.assert_array_equal(jax.jit(top_k_mask, static_argnums=2)(scores, allowed, n), mask)


def test_a_mask_lists_its_slots_in_order():
    mask = np.array([[[False, True, True, False, True], [False] * 5]])
    assert np.asarray(mask_to_slots(mask, 2)).tolist() == [[[1, 2], [-1, -1]]]
    assert np.asarray(mask_to_slots(mask, 4)).tolist() == [[[1, 2, 4, -1], [-1] * 4]]
