"""KCache in NumPy, from section 3.1 of the paper (arXiv 2404.18057): one row, one head at a time."""

from __future__ import annotations

import numpy as np


def kcache(q, k, v, n: int, renormalise: bool = False, shared: bool = False) -> np.ndarray:
    """q [N H], the newest token's queries; k, v [K S H], all tokens so far, the newest included -> [N H].

    S = softmax(q K^T / sqrt(d)); S~, I = TopN(S); A~ = S~ V[I]. shared: one I for the query heads of a
    key/value head, by the sum of their S. Ties go to the lower index.
    """
    groups = q.shape[0] // k.shape[0]
    s = np.stack([k[h // groups].astype(np.float64) @ q[h] / np.sqrt(q.shape[1]) for h in range(q.shape[0])])
    soft = np.exp(s - s.max(1, keepdims=True))
    soft /= soft.sum(1, keepdims=True)
    out = np.empty(q.shape)
    for h in range(q.shape[0]):
        first = h // groups * groups
        by = soft[first : first + groups].sum(0) if shared else soft[h]
        top = np.argsort(-by, kind="stable")[:n]
        kept = soft[h, top]
        out[h] = (kept / kept.sum() if renormalise else kept) @ v[h // groups, top]
    return out
