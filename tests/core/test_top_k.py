"""Exact top-k as a mask: counts, ties and padding, and the slots of a mask."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.core.top_k import mask_to_slots, top_k_mask


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
