"""RetrievalAttention against its paper, and the search on the host."""

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
from kvjax.errors import KvjaxError
from kvjax.methods.retrieval_attention import retrieval_attention
from tests.contract import layer
from tests.oracles import retrieval_attention as oracle

SMALL = "retrieval_attention:topk=2,sinks=1,recent=2"


@pytest.mark.parametrize("window", [None, 7])
def test_it_equals_the_paper_whatever_lies_in_empty_slots(window):
    batch, bound = layer.random_batch(), layer.bind(SMALL, window)
    find = functools.partial(oracle.retrieval_attention, topk=2, sinks=1, recent=2, window=window)
    sequences = zip(batch.q, batch.k, batch.v, batch.lengths, strict=True)
    expected = [
        find(*(np.asarray(x[..., : n + layer.STEPS, :], np.float64) for x in (q, k, v)), int(n))
        for q, k, v, n in sequences
    ]
    actual = layer.decode(SMALL, batch, window)
    np.testing.assert_allclose(actual, np.stack(expected), atol=5e-6)
    np.testing.assert_array_equal(layer.decode(SMALL, batch, window, layer.prefill(bound, batch, np.inf)), actual)


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
    indices = jax.jit(codec.score_in_place)(batch.q[:, :, :, :2], stored)
    expected = jnp.einsum("bkgth,bksh->bkgts", batch.q[:, :, :, :2], codec.decode(stored)) / np.sqrt(layer.H)
    np.testing.assert_allclose(indices, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: retrieval_attention(topk=0), "topk of RetrievalAttention must be at least 1, got 0"),
        (lambda: retrieval_attention(sinks=-1), "sinks of RetrievalAttention must be at least 0, got -1"),
        (lambda: retrieval_attention(recent=0), "recent of RetrievalAttention must be at least 1, got 0"),
    ],
)
def test_errors_name_the_value_and_the_remedy(make, text):
    with pytest.raises(KvjaxError, match=text):
        make()
