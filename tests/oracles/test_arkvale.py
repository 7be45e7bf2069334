"""ArkVale against the paper, its digests while pages grow, and its errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.types import KVBlock
from kvjax.methods.arkvale import TightBoxes
from tests.contract import layer
from tests.oracles import arkvale as oracle

SMALL = "arkvale:budget=6,page=2,sinks=1,window=1,device_layers=0"
unpacked = functools.partial(jax.tree.map, memory.unpack, is_leaf=lambda x: isinstance(x, memory.Buffer))


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    layer.assert_decodes_as(SMALL, lambda *sequence: oracle.arkvale(*sequence, 2, 2, 2, 2))


def test_a_page_of_three_keys_by_hand():
    keys = jnp.array([0.0, 2.0, 4.0]).reshape(1, 1, 3, 1)
    index = TightBoxes(3)
    digests = unpacked(index.build(KVBlock(keys, keys, jnp.arange(3, dtype=jnp.int32)[None, None])))
    np.testing.assert_allclose([digests.box.low.item(), digests.box.high.item()], [2 - 4 / 3, 2 + 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(index.score(digests, jnp.ones((1, 1, 1, 1, 1))).item(), 10 / 3, rtol=1e-6)
    assert oracle.max_product(np.ones(1), np.array([[0.0], [2.0], [4.0]])) == 2 + 4 / 3 < 4  # no bound


def token_block(batch: layer.SequenceBatch, first, counts, width: int, padding: float) -> KVBlock:
    """A block of counts[b] tokens of each sequence from `first` on, followed by `padding`."""
    offsets = np.arange(width)[None]
    pos = jnp.asarray(
        np.where(offsets < np.asarray(counts)[:, None], np.asarray(first)[:, None] + offsets, -1), jnp.int32
    )
    idx = jnp.maximum(pos, 0)[:, None, :, None]
    k, v = (jnp.where(pos[:, None, :, None] < 0, padding, jnp.take_along_axis(x, idx, 2)) for x in (batch.k, batch.v))
    return KVBlock(k, v, pos[:, None])


def test_pages_that_grow_have_the_digests_of_pages_at_once():
    batch, size, S = layer.random_batch(), 4, 17
    n = batch.lengths
    build, write = (jax.jit(method) for method in (TightBoxes(size).build, TightBoxes(size).append))
    reader_state = build(token_block(batch, 0 * n, n, S, np.inf))
    for counts in ([5, 2, 0], [0, 1, 1], [1, 3, 5]):
        new = token_block(batch, n, counts, 5, np.nan)
        reader_state, n = write(reader_state, new, jnp.asarray(n)[:, None]), n + np.array(counts, np.int32)
        actual, expected = unpacked(reader_state), unpacked(build(token_block(batch, 0 * n, n, S, 1e4)))
        for b, pages in enumerate(n // size):  # an unfinished page is never scored
            for x, y in zip(actual.box, expected.box, strict=True):
                np.testing.assert_allclose(x[b, :, :pages], y[b, :, :pages], atol=1e-6)
            growing = int(n[b]) % size
            np.testing.assert_array_equal(actual.growing[b, :, :growing], expected.growing[b, :, :growing])
