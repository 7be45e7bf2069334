"""KCache in NumPy, from its paper (arXiv 2404.18057, section 3.1): one sequence, one head at a time."""

from __future__ import annotations

import numpy as np


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
