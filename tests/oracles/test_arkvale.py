"""ArkVale against the paper, its digests while pages grow, and its errors.

ArkVale in NumPy, float64, from its paper (Chen et al., NeurIPS 2024): one sequence, one query at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.types import KVBlock
from kvjax.methods.arkvale import TightBoxes
from tests.contract import layer
from tests.oracles.online import softmax


def page_box(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper corner [H] of the box of a full page of keys [page H]."""
    center = (keys.max(0) + keys.min(0)) / 2
    radius = np.abs(center - keys).mean(0)
    return center - radius, center + radius


def max_product(q: np.ndarray, keys: np.ndarray) -> float:
    """The greatest product of q [H] with a point in the page's box."""
    low, high = page_box(keys)
    return np.maximum(q * low, q * high).sum()


def arkvale(q, k, v, n: int, page: int, num_recalled: int, sinks: int, recent: int) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query reads the first `sinks` tokens, the last `recent` ones, its own page, and `num_recalled` pages between them.
    All heads share these pages; their `max_product` is highest in the mean over query heads.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        start = min(t // page * page, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        pages = [list(range(s, s + page)) for s in range(0, t // page * page, page)]
        pages = [p for p in pages if not set(p) <= always]
        bounds = [np.mean([max_product(q[h, g, t], k[h, p]) for h in range(K) for g in range(G)]) for p in pages]
        best = np.argsort(-np.array(bounds), kind="stable")[:num_recalled]
        visible = sorted(always | {s for i in best for s in pages[i]})
        for h in range(K):
            for g in range(G):
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out


SMALL = "arkvale:budget=6,page=2,sinks=1,window=1,device_layers=0"
unpacked = functools.partial(jax.tree.map, memory.unpack, is_leaf=lambda x: isinstance(x, memory.Buffer))


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    layer.assert_decodes_as(SMALL, lambda *sequence: arkvale(*sequence, 2, 2, 2, 2))


def test_a_page_of_three_keys_by_hand():
    keys = jnp.array([0.0, 2.0, 4.0]).reshape(1, 1, 3, 1)
    index = TightBoxes(3)
    digests = unpacked(index.build(KVBlock(keys, keys, jnp.arange(3, dtype=jnp.int32)[None, None])))
    np.testing.assert_allclose([digests.box.low.item(), digests.box.high.item()], [2 - 4 / 3, 2 + 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(index.score(digests, jnp.ones((1, 1, 1, 1, 1))).item(), 10 / 3, rtol=1e-6)
    assert max_product(np.ones(1), np.array([[0.0], [2.0], [4.0]])) == 2 + 4 / 3 < 4  # no bound


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
