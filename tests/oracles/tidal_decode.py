"""TidalDecode in NumPy, float64, from its paper (arXiv 2410.05076, section 3): one sequence, one token at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def tidal_decode(layers, n: int, topk: int, dense: int, reselect: int, windows=None):
    """Decodes through layers, each (q [K G S H], k [K S H], v [K S H]), after a prompt of n tokens.

    Returns per layer the outputs [K G S-n H] of the rest, and the sets of tokens that its queries read, [K][G][S-n].
    """
    K, G, S, H = layers[0][0].shape
    outs = [np.empty((K, G, S - n, H)) for _ in layers]
    reads = [[[[None] * (S - n) for _ in range(G)] for _ in range(K)] for _ in layers]
    for t in range(n, S):
        for head in range(K):
            for g in range(G):
                chosen = None
                for i, (q, k, v) in enumerate(layers):
                    window = windows[i] if windows else None
                    visible = list(range(0 if window is None else max(0, t - window + 1), t + 1))
                    logits = {s: k[head, s] @ q[head, g, t] / np.sqrt(H) for s in visible}
                    if i in (dense, reselect) and i >= dense:
                        chosen = sorted(visible[:-1], key=lambda s: -logits[s])[: topk - 1]
                    elif i > dense:
                        visible = [s for s in visible if s in chosen or s == t]
                    outs[i][head, g, t - n] = softmax(np.array([logits[s] for s in visible])) @ v[head, visible]
                    reads[i][head][g][t - n] = set(visible)
    return outs, reads
