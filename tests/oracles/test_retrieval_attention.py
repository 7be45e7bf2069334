"""RetrievalAttention against its paper, and the search on the host.

RetrievalAttention with exact search in NumPy, float64 (arXiv 2409.10516, section 3): one sequence, by queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.plain import Host
from kvjax.cache.codecs.quantizers import Absmax
from kvjax.core import memory
from tests.contract import layer
from tests.oracles.online import softmax


def retrieval_attention(q, k, v, n: int, topk: int, sinks: int, recent: int, window: int | None = None) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query head reads the first `sinks` tokens, the last `recent` ones, and the `topk` nearest keys of the others.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        tokens = [s for s in range(t + 1) if window is None or s > t - window]
        static = [s for s in tokens if s < sinks or s > t - recent]
        others = np.array([s for s in tokens if s not in static], int)
        for h in range(K):
            for g in range(G):
                logits = k[h] @ q[h, g, t] / np.sqrt(H)
                visible = static + list(others[np.argsort(-logits[others], kind="stable")[:topk]])
                out[h, g, t - n] = softmax(logits[visible]) @ v[h, visible]
    return out


SMALL = "retrieval_attention:topk=2,sinks=1,recent=2"


@pytest.mark.parametrize("window", [None, 7])
def test_it_equals_the_paper_whatever_lies_in_empty_slots(window):
    find = functools.partial(retrieval_attention, topk=2, sinks=1, recent=2, window=window)
    layer.assert_decodes_as(SMALL, find, window)


def test_first_and_last_tokens_lie_on_the_device_and_all_rows_on_the_host():
    batch, bound = layer.random_batch(), layer.bind(SMALL)
    state = layer.prefill(bound, batch)
    for t in range(2):
        _, state = layer.compile_extend(bound)(state, batch.token(t))
    assert state.k.host and state.v.host and not state.reader_state.k.host
    for b, n in enumerate(batch.lengths):
        keys = np.asarray(memory.unpack(state.reader_state.k))[b, 0]
        expected = np.asarray(batch.k[b, 0, [0, n, n + 1]])
        np.testing.assert_array_equal(keys[np.lexsort(keys.T)], expected[np.lexsort(expected.T)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_host_computes_the_products_that_the_device_would(dtype):
    batch = layer.random_batch(dtype=dtype)
    q, sequences = batch.q[:, :, :, :2], memory.pack(batch.k)
    expected = jnp.einsum("bkgth,bksh->bkgts", q, batch.k, preferred_element_type=jnp.float32)
    run = jax.jit(memory.dot_products)
    for keys in (sequences, memory.to_host(sequences)):
        indices = run(keys, q)
        assert memory.memory_kind(indices) == "device" and indices.dtype == jnp.float32
        np.testing.assert_allclose(indices, expected, atol=1e-4)


def test_keys_in_codes_are_searched_on_the_device():
    batch, codec = layer.random_batch(), Host(PerTokenCodec(Absmax()))
    stored = codec.encode(batch.k, jnp.zeros((layer.B, 1, batch.k.shape[2]), jnp.int32))
    indices = jax.jit(lambda q, stored: codec.scores(q, memory.load(stored)))(batch.q[:, :, :, :2], stored)
    expected = jnp.einsum("bkgth,bksh->bkgts", batch.q[:, :, :, :2], codec.decode(stored)) / np.sqrt(layer.H)
    np.testing.assert_allclose(indices, expected, atol=1e-4)
