"""A2ATS in NumPy, float64, from its abstract (arXiv 2502.12665): one head, one query at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import rope, softmax


def root(moment: np.ndarray) -> np.ndarray:
    """A factor L with L L^T = moment [H H]: what keys are multiplied by before plain k-means."""
    values, vectors = np.linalg.eigh(moment)
    return vectors * np.sqrt(np.maximum(values, 0))


def nearest(x: np.ndarray, words: np.ndarray, factor: np.ndarray) -> int:
    """The codeword of a key [H]."""
    return int(np.square((x - words) @ factor).sum(1).argmin())


def codebook(keys: np.ndarray, factor: np.ndarray, count: int, rounds: int) -> tuple[np.ndarray, list[int]]:
    """Bare keys [n H] -> (the codewords [C H], that of each key)."""
    n = len(keys)
    if n <= count:
        return keys.copy(), list(range(n))
    words = keys[[i * n // count for i in range(count)]].copy()
    for _ in range(rounds):
        mine = np.array([nearest(k, words, factor) for k in keys])
        words = np.array([keys[mine == i].mean(0) if (mine == i).any() else words[i] for i in range(count)])
    return words, [nearest(k, words, factor) for k in keys]


def a2ats(q, k, v, n: int, topk: int, words: int, sinks: int, recent: int, distance: int, rounds: int = 10):
    """One head, q [G S H], k, v [S H] after RoPE, a prompt of n tokens -> outputs [G S-n H] of the rest."""
    G, S, H = q.shape
    at, out = np.arange(S), np.empty((G, S - n, H))
    bare, far = rope(k, -at), rope(rope(q, -at), np.full(S, distance))
    asked = far[:, :n].reshape(-1, H)
    factor = root(asked.T @ asked / len(asked))
    book, code = codebook(bare[:n], factor, words, rounds)
    for t in range(n, S):
        if len(book) < words:
            book = np.concatenate([book, bare[t : t + 1]])
            code.append(len(book) - 1)
        else:
            code.append(nearest(bare[t], book, factor))
        always = [s for s in range(t + 1) if s < sinks or s > t - max(recent, 1)]
        others = [s for s in range(t + 1) if s not in always]
        for g in range(G):
            score = [far[g, t] @ book[code[s]] for s in others]
            best = np.argsort(-np.array(score), kind="stable")[:topk]
            seen = always + [others[i] for i in best]
            out[g, t - n] = softmax(k[seen] @ q[g, t] / np.sqrt(H)) @ v[seen]
    return out
