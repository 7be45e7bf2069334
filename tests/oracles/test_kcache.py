"""KCache equals its NumPy oracle, step by step, on ragged sequences (C7).

KCache in NumPy, from its paper (arXiv 2404.18057, section 3.1): one sequence, one head at a time.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import methods
from tests.contract import layer


def kcache(q, k, v, n: int, renormalise: bool = False, shared: bool = False) -> np.ndarray:
    """Attends with the newest token's queries [N H] to k, v [K S H] of all tokens, the newest included -> [N H].

    S = softmax(q K^T / sqrt(d)); S~, I = TopN(S); A~ = S~ V[I]. With `shared` the query heads of a key/value head have
    one I, by the sum of their S. Ties go to the lower index.
    """
    num_groups = q.shape[0] // k.shape[0]
    logits = np.stack([k[h // num_groups].astype(np.float64) @ q[h] / np.sqrt(q.shape[1]) for h in range(q.shape[0])])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    out = np.empty(q.shape)
    for h in range(q.shape[0]):
        first = h // num_groups * num_groups
        ranking = weights[first : first + num_groups].sum(0) if shared else weights[h]
        top = np.argsort(-ranking, kind="stable")[:n]
        selected = weights[h, top]
        out[h] = (selected / selected.sum() if renormalise else selected) @ v[h // num_groups, top]
    return out


@pytest.mark.parametrize("n", [1, 3, 8, 50])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_kcache_equals_the_paper(n, renormalise, granularity):
    batch = layer.random_batch(seed=n)
    out = layer.decode(methods.kcache(n, device_layers=0, renormalise=renormalise, granularity=granularity), batch)
    for b, length in enumerate(batch.lengths):
        for t in range(layer.STEPS):
            at = length + t
            q = np.asarray(batch.q[b])[:, :, at].reshape(-1, layer.H)
            k, v = (np.asarray(x[b])[:, : at + 1] for x in (batch.k, batch.v))
            expected = kcache(q, k, v, n, renormalise, granularity == "kv")
            np.testing.assert_allclose(out[b, :, :, t].reshape(-1, layer.H), expected, atol=2e-6)


def test_a_small_n_without_renormalising_shrinks_the_output():
    batch = layer.random_batch()
    plain, scaled = (layer.decode(methods.kcache(1, 0, r), batch) for r in (False, True))
    assert np.linalg.norm(plain) < 0.9 * np.linalg.norm(scaled)
