"""A2ATS against its oracle: the codebook weighted by queries, windowed RoPE, and the fetched tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core import memory
from kvjax.methods.a2ats import Codewords, fit_codebook, nearest_codeword
from tests.contract import layer
from tests.oracles import a2ats as oracle

SMALL = "a2ats:topk=3,words=4,sinks=1,recent=2,distance=8"


def test_by_hand_queries_say_which_keys_are_alike():
    """Queries look at the first channel only: keys 1 and 3 share a codeword there, however far apart they are."""
    keys, moment = np.array([[0.0, 0], [5, 9], [1, 0], [6, -9]]), np.diag([4.0, 0])
    words, code = oracle.fit_codebook(keys, oracle.factorize_moment(moment), 2, 3)
    assert code == [0, 1, 0, 1]
    np.testing.assert_allclose(words, [[0.5, 0], [5.5, 0]])
    x, is_token = jnp.asarray(keys, jnp.float32)[None, None], jnp.ones((1, 1, 4), bool)
    weights = jnp.asarray(moment, jnp.float32)[None, None]
    codewords = fit_codebook(x, is_token, weights, 2, 3)
    np.testing.assert_allclose(codewords[0, 0], words, atol=1e-6)
    for vectors_at_once in (4, 3):
        assert nearest_codeword(x, codewords, weights, vectors_at_once=vectors_at_once).ravel().tolist() == code


@pytest.mark.parametrize("changes", ["", ",recent=0,sinks=0,rounds=1"])
def test_it_equals_its_oracle_whatever_lies_in_empty_slots(changes):
    batch, method = (
        layer.random_batch(),
        kvjax.parse("a2ats:topk=3,words=4,distance=8" + (changes or ",recent=2,sinks=1")),
    )
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))
    settings = {"recent": 0, "sinks": 0, "iterations": 1} if changes else {"recent": 2, "sinks": 1}
    for b, n in enumerate(map(int, batch.lengths)):
        for h in range(layer.K):
            q, k, v = batch.exact(b, h)
            expected = oracle.a2ats(q, k, v, n, topk=3, words=4, distance=8, **settings)
            np.testing.assert_allclose(out[b, h], expected, atol=1e-5)


def test_numbers_of_codewords_take_one_byte_or_two():
    codes = jnp.asarray([[[3, 0]]], jnp.int32)
    stored = [memory.pack(Codewords(words)._narrow(codes)) for words in (256, 257)]
    assert [buffer.data.dtype.itemsize for buffer in stored] == [1, 2]
    for buffer in stored:
        np.testing.assert_array_equal(memory.unpack(buffer)[..., 0], codes)
