"""RocketKV against its paper, and its scores by hand."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from kvjax.methods.quest import Box
from kvjax.methods.rocketkv import HybridBoxes
from tests.contract import layer
from tests.oracles import rocketkv as oracle

SMALL = "rocketkv:budget=7,topk=4,page=2,window=2,kernel=3"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    arguments = {"budget": 7, "window": 2, "kernel": 3, "page": 2, "num_pages": 1, "num_channels": 8}
    layer.assert_decodes_as(SMALL, functools.partial(oracle.rocketkv, **arguments))


def test_a_page_of_two_keys_by_hand():
    keys, q = np.array([[1.0, 2, 0, 5], [0, -4, 1, 1]]), np.array([3.0, -1, 2, 0])
    expected = 5 / np.sqrt(4 * 5 / 6)  # channels 0 and 2: 3 * 1 + 2 * 1
    np.testing.assert_allclose(oracle.page_scores(q[None], [keys], 2), [[expected]])
    box = Box(*(jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 4) for x in (keys.min(0), keys.max(0))))
    actual = HybridBoxes(2, 0.5).score(box, jnp.asarray(q, jnp.float32).reshape(1, 1, 1, 1, 4))
    np.testing.assert_allclose(actual.item(), expected, rtol=1e-6)


def test_the_heads_of_a_group_share_the_signs_of_their_sum():
    """In channel 0 the second head's sign differs from that of the sum, so the box's greatest key counts against it."""
    box = Box(jnp.full((1, 1, 1, 2), -1.0), jnp.full((1, 1, 1, 2), 2.0))
    q = jnp.array([[3.0, 0], [-1, 0]]).reshape(1, 1, 2, 1, 2)
    actual = HybridBoxes(2, 1.0).score(box, q).ravel() * np.sqrt(2)
    np.testing.assert_allclose(actual, [6, -2], rtol=1e-6)
    assert np.isfinite(HybridBoxes(2, 0.5).score(box, jnp.zeros_like(q))).all()
