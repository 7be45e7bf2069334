"""A2ATS against its oracle: the codebook weighted by queries, windowed RoPE, and the fetched tokens.

A2ATS in NumPy, float64, from its abstract (arXiv 2502.12665; no public code): one head, one query at a time.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core import memory
from kvjax.methods.a2ats import Codewords, fit_codebook, nearest_codeword
from tests.contract import layer
from tests.oracles.online import rope, softmax


def factorize_moment(moment: np.ndarray) -> np.ndarray:
    """A factor L with L L^T = moment [H H]; keys are multiplied by it before plain k-means."""
    values, vectors = np.linalg.eigh(moment)
    return vectors * np.sqrt(np.maximum(values, 0))


def oracle_nearest_codeword(x: np.ndarray, words: np.ndarray, factor: np.ndarray) -> int:
    """The index of the codeword of a key [H]."""
    return int(np.square((x - words) @ factor).sum(1).argmin())


def oracle_fit_codebook(
    keys: np.ndarray, factor: np.ndarray, num_words: int, iterations: int
) -> tuple[np.ndarray, list[int]]:
    """Fits keys before RoPE [n H] -> (the codewords [C H], the codeword of each key)."""
    n = len(keys)
    if n <= num_words:
        return keys.copy(), list(range(n))
    words = keys[[i * n // num_words for i in range(num_words)]].copy()
    for _ in range(iterations):
        assignment = np.array([oracle_nearest_codeword(k, words, factor) for k in keys])
        words = np.array(
            [keys[assignment == i].mean(0) if (assignment == i).any() else words[i] for i in range(num_words)]
        )
    return words, [oracle_nearest_codeword(k, words, factor) for k in keys]


def a2ats(q, k, v, n: int, topk: int, words: int, sinks: int, recent: int, distance: int, iterations: int = 10):
    """Decodes one head: q [G S H], k, v [S H] after RoPE, a prompt of n tokens -> outputs [G S-n H] of the rest."""
    G, S, H = q.shape
    pos, out = np.arange(S), np.empty((G, S - n, H))
    bare_keys, far_q = rope(k, -pos), rope(rope(q, -pos), np.full(S, distance))
    far_queries = far_q[:, :n].reshape(-1, H)
    factor = factorize_moment(far_queries.T @ far_queries / len(far_queries))
    codewords, codes = oracle_fit_codebook(bare_keys[:n], factor, words, iterations)
    for t in range(n, S):
        if len(codewords) < words:
            codewords = np.concatenate([codewords, bare_keys[t : t + 1]])
            codes.append(len(codewords) - 1)
        else:
            codes.append(oracle_nearest_codeword(bare_keys[t], codewords, factor))
        always = [s for s in range(t + 1) if s < sinks or s > t - max(recent, 1)]
        others = [s for s in range(t + 1) if s not in always]
        for g in range(G):
            products = [far_q[g, t] @ codewords[codes[s]] for s in others]
            best = np.argsort(-np.array(products), kind="stable")[:topk]
            visible = always + [others[i] for i in best]
            out[g, t - n] = softmax(k[visible] @ q[g, t] / np.sqrt(H)) @ v[visible]
    return out


SMALL = "a2ats:topk=3,words=4,sinks=1,recent=2,distance=8"


def test_by_hand_queries_say_which_keys_are_alike():
    """Queries look at the first channel only: keys 1 and 3 share a codeword there, however far apart they are."""
    keys, moment = np.array([[0.0, 0], [5, 9], [1, 0], [6, -9]]), np.diag([4.0, 0])
    words, code = oracle_fit_codebook(keys, factorize_moment(moment), 2, 3)
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
            expected = a2ats(q, k, v, n, topk=3, words=4, distance=8, **settings)
            np.testing.assert_allclose(out[b, h], expected, atol=1e-5)


def test_numbers_of_codewords_take_one_byte_or_two():
    codes = jnp.asarray([[[3, 0]]], jnp.int32)
    stored = [memory.pack(Codewords(words)._narrow(codes)) for words in (256, 257)]
    assert [buffer.data.dtype.itemsize for buffer in stored] == [1, 2]
    for buffer in stored:
        np.testing.assert_array_equal(memory.unpack(buffer)[..., 0], codes)
