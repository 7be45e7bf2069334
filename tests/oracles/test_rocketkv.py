"""RocketKV against its paper, and its scores by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.methods.quest import Box
from kvjax.methods.rocketkv import HybridBoxes, rocketkv
from tests.contract import layer
from tests.oracles import rocketkv as oracle

SMALL = "rocketkv:budget=7,topk=4,page=2,window=2,kernel=3"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    batch, bound = layer.random_batch(), layer.bind(SMALL)
    arguments = {"budget": 7, "window": 2, "kernel": 3, "page": 2, "num_pages": 1, "num_channels": 8}
    sequences = zip(batch.q, batch.k, batch.v, batch.lengths, strict=True)
    expected = [
        oracle.rocketkv(*(np.asarray(x[..., : n + layer.STEPS, :], np.float64) for x in (q, k, v)), int(n), **arguments)
        for q, k, v, n in sequences
    ]
    actual = layer.decode(SMALL, batch)
    np.testing.assert_allclose(actual, np.stack(expected), atol=5e-6)
    np.testing.assert_array_equal(layer.decode(SMALL, batch, state=layer.prefill(bound, batch, np.inf)), actual)


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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rocketkv(topk=7), "topk of RocketKV must be at least 2 pages of 4 tokens, got 7; use 8"),
        (lambda: rocketkv(channels=0.0), r"channels must be a fraction of the head size in \(0, 1\], got 0.0"),
        (lambda: rocketkv(page=0), "page of RocketKV must be at least 1, got 0"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make, text):
    with pytest.raises(KvjaxError, match=text):
        make()
