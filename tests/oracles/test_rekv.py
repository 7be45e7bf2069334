"""ReKV against its paper, its lookup by hand, and the state of a question.

ReKV in NumPy, float64, from its paper (arXiv 2503.00540): one sequence, one query at a time.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import IncompatibleMethod
from kvjax.methods.rekv import MeanKeys
from tests.contract import layer
from tests.oracles.online import rope, softmax


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two arrays as vectors."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def rekv(q, k, v, n: int, topk: int, block: int, sinks: int, recent: int) -> np.ndarray:
    """Answers over a context of n tokens: q [K G S H], k, v [K S H] of one sequence after RoPE -> outputs [K G S-n H].

    A token of the question reads the first `sinks` tokens, the last `recent` ones, its own block, and `topk` earlier
    blocks whose mean key has the greatest cosine to the mean query so far; all heads form one vector without RoPE.
    """
    K, G, S, H = q.shape
    inverse_pos = -np.arange(S)
    unrotated_q, unrotated_k = rope(q, inverse_pos), rope(k, inverse_pos)
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        mean_query = unrotated_q[:, :, n : t + 1].mean(2)
        start = min(t // block * block, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        blocks = [list(range(s, s + block)) for s in range(0, t // block * block, block)]
        blocks = [x for x in blocks if not set(x) <= always]
        keys = [np.repeat(unrotated_k[:, x].mean(1)[:, None], G, 1) for x in blocks]
        best = np.argsort([-cosine(mean_query, key) for key in keys], kind="stable")[:topk]
        visible = sorted(always | {s for i in best for s in blocks[i]})
        for h in range(K):
            for g in range(G):
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out


SMALL = "rekv:topk=1,block=2,sinks=1,recent=2"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    layer.assert_decodes_as(SMALL, lambda *sequence: rekv(*sequence, 1, 2, 1, 2))


def test_the_cosine_is_over_all_heads_as_one_vector():
    """By hand: both heads' keys (3, 4) and (0, 0) against (1, 0) and (0, 1): 3 / 5, whatever the length of a block."""
    sums = jnp.array([[[3.0, 4.0], [30.0, 40.0]], [[0.0, 0.0], [0.0, 0.0]]])[None]
    q = jnp.array([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 1, 2)
    np.testing.assert_allclose(MeanKeys(2).score(sums, q).ravel() * np.sqrt(2), [0.6, 0.6], rtol=1e-6)
    assert np.isfinite(MeanKeys(2).score(0 * sums, q)).all()


def test_only_kept_tokens_go_on_asking():
    batch, bound = layer.random_batch(), layer.bind(SMALL)
    state = layer.prefill(bound, batch)
    chunk, new = batch.tokens(0, 2), None
    for commit, count in ((0, 0), (1, 1)):
        out, next_state = layer.compile_extend(bound, commit)(state, chunk)
        for b, n in enumerate(batch.lengths):
            question = rope(np.asarray(batch.q[b, :, :, n : n + 2], np.float64), -np.arange(n, n + 2))[
                :, :, :count
            ].sum(2)
            np.testing.assert_allclose(next_state.reader_state.question[b], question, atol=1e-5)
        new = out if new is None else new
        np.testing.assert_allclose(out, new, atol=2e-6)  # the question's outputs do not depend on the stored tokens


def test_tokens_that_asked_cannot_be_taken_back():
    bound = layer.bind(SMALL)
    with pytest.raises(IncompatibleMethod, match="component `read`, QuestionRetrieval, keeps something of all tokens"):
        bound.method.read.crop(bound.storage, layer.prefill(bound, layer.random_batch()))
