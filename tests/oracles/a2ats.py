"""A2ATS in NumPy, float64, from its abstract (arXiv 2502.12665; no public code): one head, one query at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import rope, softmax


def factorize_moment(moment: np.ndarray) -> np.ndarray:
    """A factor L with L L^T = moment [H H]; keys are multiplied by it before plain k-means."""
    values, vectors = np.linalg.eigh(moment)
    return vectors * np.sqrt(np.maximum(values, 0))


def nearest_codeword(x: np.ndarray, words: np.ndarray, factor: np.ndarray) -> int:
    """The index of the codeword of a key [H]."""
    return int(np.square((x - words) @ factor).sum(1).argmin())


def fit_codebook(keys: np.ndarray, factor: np.ndarray, num_words: int, iterations: int) -> tuple[np.ndarray, list[int]]:
    """Fits keys before RoPE [n H] -> (the codewords [C H], the codeword of each key)."""
    n = len(keys)
    if n <= num_words:
        return keys.copy(), list(range(n))
    words = keys[[i * n // num_words for i in range(num_words)]].copy()
    for _ in range(iterations):
        assignment = np.array([nearest_codeword(k, words, factor) for k in keys])
        words = np.array(
            [keys[assignment == i].mean(0) if (assignment == i).any() else words[i] for i in range(num_words)]
        )
    return words, [nearest_codeword(k, words, factor) for k in keys]


def a2ats(q, k, v, n: int, topk: int, words: int, sinks: int, recent: int, distance: int, iterations: int = 10):
    """Decodes one head: q [G S H], k, v [S H] after RoPE, a prompt of n tokens -> outputs [G S-n H] of the rest."""
    G, S, H = q.shape
    pos, out = np.arange(S), np.empty((G, S - n, H))
    bare_keys, far_q = rope(k, -pos), rope(rope(q, -pos), np.full(S, distance))
    far_queries = far_q[:, :n].reshape(-1, H)
    factor = factorize_moment(far_queries.T @ far_queries / len(far_queries))
    codewords, codes = fit_codebook(bare_keys[:n], factor, words, iterations)
    for t in range(n, S):
        if len(codewords) < words:
            codewords = np.concatenate([codewords, bare_keys[t : t + 1]])
            codes.append(len(codewords) - 1)
        else:
            codes.append(nearest_codeword(bare_keys[t], codewords, factor))
        always = [s for s in range(t + 1) if s < sinks or s > t - max(recent, 1)]
        others = [s for s in range(t + 1) if s not in always]
        for g in range(G):
            products = [far_q[g, t] @ codewords[codes[s]] for s in others]
            best = np.argsort(-np.array(products), kind="stable")[:topk]
            visible = always + [others[i] for i in best]
            out[g, t - n] = softmax(k[visible] @ q[g, t] / np.sqrt(H)) @ v[visible]
    return out
