"""Quest, and the retrieval of units that it is built on: against the paper, at its limit, and slot by slot.

Attention to pages in NumPy, float64, from Quest (arXiv 2406.10774, Algorithm 1): one sequence, query by query.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.group_quant import Kivi
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.method import Method
from kvjax.cache.readers.retrieval import Retrieve
from kvjax.core import memory
from kvjax.core.types import KVBlock
from kvjax.methods.quest import Boxes
from kvjax.registry.strings import method_of
from tests.contract import layer
from tests.oracles.online import softmax


def page_bound(q: np.ndarray, keys: np.ndarray) -> float:
    """The greatest product of q [H] with a point in the box around keys [n H]."""
    return sum(max(x * low, x * high) for x, low, high in zip(q, keys.min(0), keys.max(0), strict=True))


def attend_pages(
    q, k, v, n: int, page: int, num_pages: int, shared=False, sinks=0, recent=0, window=None
) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query reads its own page, the first `sinks` tokens, the last `recent` ones and the best `num_pages` earlier pages.
    With `shared` the queries of a key/value head read the same pages, by the greatest of their bounds.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        start = min(t // page * page, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        first_visible = 0 if window is None else t - window + 1
        earlier = [list(range(s, s + page)) for s in range(0, t // page * page, page)]
        earlier = [weights for weights in earlier if not set(weights) <= always and weights[-1] >= first_visible]
        for head in range(K):
            bounds = np.array([[page_bound(q[head, g, t], k[head, weights]) for weights in earlier] for g in range(G)])
            if shared and earlier:
                bounds[:] = bounds.max(0)
            for g in range(G):
                best = np.argsort(-bounds[g], kind="stable")[:num_pages]
                selected = always | {s for i in best for s in earlier[i]}
                visible = [s for s in sorted(selected) if s >= first_visible]
                weights = softmax(k[head, visible] @ q[head, g, t] / np.sqrt(H))
                out[head, g, t - n] = weights @ v[head, visible]
    return out


unpacked = functools.partial(jax.tree.map, memory.unpack, is_leaf=lambda x: isinstance(x, memory.Buffer))


def oracle_outputs(batch: layer.SequenceBatch, **arguments) -> np.ndarray:
    """The oracle's outputs, f32[B K G STEPS H]."""
    return np.stack([attend_pages(*batch.exact(b), int(n), **arguments) for b, n in enumerate(batch.lengths)])


@pytest.mark.parametrize(
    "reader, arguments",
    [
        (Retrieve(Boxes(2), 2), {"page": 2, "num_pages": 2}),
        (Retrieve(Boxes(3), 1, per="head"), {"page": 3, "num_pages": 1, "shared": True}),
        (Retrieve(Boxes(2), 1, sinks=3, recent=4), {"page": 2, "num_pages": 1, "sinks": 3, "recent": 4}),
        (Retrieve(Boxes(2), 1), {"page": 2, "num_pages": 1, "window": 7}),
        (Retrieve(Boxes(1), 3, sinks=1), {"page": 1, "num_pages": 3, "sinks": 1}),
    ],
    ids=str,
)
def test_it_equals_the_paper(reader, arguments):
    batch = layer.random_batch()
    actual = layer.decode(Method(read=reader), batch, arguments.get("window"))
    np.testing.assert_allclose(actual, oracle_outputs(batch, **arguments), atol=5e-6)


def test_a_page_of_two_keys_by_hand():
    keys = jnp.array([[1.0, -2.0], [3.0, 0.0]])[None, None]
    box = unpacked(Boxes(2).build(KVBlock(keys, keys, jnp.arange(2, dtype=jnp.int32)[None, None])))
    np.testing.assert_array_equal(box.low[0, 0], [[1, -2]])
    np.testing.assert_array_equal(box.high[0, 0], [[3, 0]])
    q = jnp.array([2.0, -1.0]).reshape(1, 1, 1, 1, 2)
    np.testing.assert_allclose(Boxes(2).score(box, q).squeeze() * np.sqrt(2), 8, rtol=1e-6)
    assert page_bound(np.array([2, -1]), np.asarray(keys[0, 0])) == 8


def test_a_page_promises_at_least_the_logit_of_each_of_its_keys():
    batch = layer.random_batch(2)
    k, q = batch.k[:, :, :7], batch.q[:, :, :, :3]
    pos = jnp.where(jnp.arange(7, dtype=jnp.int32) < 6, jnp.arange(7, dtype=jnp.int32), -1)
    block = KVBlock(k, k, jnp.broadcast_to(pos, (layer.B, 1, 7)))
    promised = Boxes(4).score(unpacked(Boxes(4).build(block)), q)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k[:, :, :6]) / np.sqrt(layer.H)
    assert (np.repeat(promised, 4, -1)[..., :6] >= np.asarray(s) - 1e-5).all()


def token_block(batch: layer.SequenceBatch, first, count, width: int, padding: float = np.nan) -> KVBlock:
    """Takes `count` tokens of each sequence from `first` on; after them comes `padding`."""
    at = np.arange(width)[None]
    pos = jnp.asarray(np.where(at < np.asarray(count)[:, None], np.asarray(first)[:, None] + at, -1), jnp.int32)
    take = jnp.maximum(pos, 0)[:, None, :, None]
    k, v = (jnp.where(pos[:, None, :, None] < 0, padding, jnp.take_along_axis(x, take, 2)) for x in (batch.k, batch.v))
    return KVBlock(k, v, pos[:, None])


@pytest.mark.parametrize("size", [1, 3, 4])
def test_what_comes_later_leaves_the_index_that_all_at_once_gives(size):
    batch, index, S = layer.random_batch(), Boxes(size), 17
    n = batch.lengths
    stored = index.build(token_block(batch, 0 * n, n, S))
    for count in ([5, 2, 0], [1, 1, 1], [0, 3, 1]):
        new = token_block(batch, n, count, max(count))
        stored, n = index.append(stored, new, jnp.asarray(n)[:, None]), n + np.array(count, np.int32)
        expected = index.build(token_block(batch, 0 * n, n, S, 1e4))
        jax.tree.map(np.testing.assert_array_equal, stored, expected)


HELD = {
    "plain": (Plain(), Plain()),
    "host": (Host(Plain()), Host(Plain())),
    "low bits": (Kivi(4, 4, "channel", 4), Kivi(4, 4, "token", 4)),
    "low bits on the host": (Host(Kivi(4, 4, "channel", 4)), Host(Kivi(4, 4, "token", 4))),
}


@pytest.mark.parametrize("codecs", HELD.values(), ids=HELD.keys())
def test_all_pages_are_all_slots_whatever_holds_them(codecs):
    batch = layer.random_batch()
    k, v = codecs
    actual = layer.decode(Method(k=k, v=v, read=Retrieve(Boxes(4), 99, sinks=1)), batch)
    np.testing.assert_allclose(actual, layer.decode(Method(k=k, v=v), batch), atol=5e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_all_pages_are_all_slots_behind_a_selection_with_a_bias(window):
    batch = layer.random_batch()
    method = method_of("snapkv:budget=5,window=2,kernel=3")
    full, paged = (layer.bind(m, window) for m in (method, dataclasses.replace(method, read=Retrieve(Boxes(2), 99))))
    outs = []
    for bound_layer in (full, paged):
        state = layer.prefill(bound_layer, batch)
        bias = jnp.where(state.pos >= 0, (state.pos % 3).astype(jnp.float32), 0.0)
        outs.append(layer.compile_scan(bound_layer)(dataclasses.replace(state, bias=bias), layer.stack_steps(batch))[0])
    np.testing.assert_allclose(outs[1], outs[0], atol=5e-6)
