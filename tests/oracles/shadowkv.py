"""ShadowKV in NumPy, float64, from section 4 of the paper and its authors' constants: one row of a batch at a time."""

from __future__ import annotations

import numpy as np

from kvjax.testing import dense_attention
from tests.oracles.lowrank import by_head, together, turned


def rebuilt(k: np.ndarray, rank: int) -> np.ndarray:
    """A prompt's keys after RoPE [K n H], by the truncated SVD of all heads' keys before it."""
    at = np.arange(k.shape[1])
    u, s, vh = np.linalg.svd(together(turned(k, at, -1)), full_matrices=False)
    return turned(by_head(u[:, :rank] * s[:rank] @ vh[:rank], len(k)), at)


def divided(k: np.ndarray, chunk: int, outliers: int, local: int) -> tuple[list[int], list[int]]:
    """One head's prompt [n H] -> (chunks in low rank, positions of the tokens that stay exact)."""
    whole = max(len(k) // chunk - local, 0)
    worst = []
    for c in range(whole):
        tokens = k[c * chunk : (c + 1) * chunk]
        mean = tokens.mean(0)
        worst.append(min(mean @ x / np.linalg.norm(mean) / np.linalg.norm(x) for x in tokens))
    exact = sorted(range(whole), key=lambda c: worst[c])[:outliers]
    held = [c for c in range(whole) if c not in exact]
    return held, [t for t in range(len(k)) if t // chunk not in held]


def best(q: np.ndarray, landmarks: np.ndarray, count: int) -> list[int]:
    """Queries [G H] of one head -> indices of the landmarks [C H] with the highest softmax weight of any of them."""
    s = q @ landmarks.T / np.sqrt(q.shape[1])
    p = np.exp(s - s.max(1, keepdims=True))
    weight = (p / p.sum(1, keepdims=True)).max(0)
    return np.argsort(-weight, kind="stable")[:count].tolist()


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, budget: int, chunk: int, rank: int, outliers: int, local: int
) -> np.ndarray:
    """The step of the last token: q [K G H], k and v [K S H], of which the first n were the prompt -> [K G H]."""
    low, out = rebuilt(k[:, :n], rank), np.zeros(q.shape)
    for h in range(len(q)):
        held, exact = divided(k[h, :n], chunk, outliers, local)
        rows, values = [k[h, exact], k[h, n:]], [v[h, exact], v[h, n:]]
        if held:
            landmarks = np.stack([k[h, c * chunk : (c + 1) * chunk].mean(0) for c in held])
            for i in best(q[h], landmarks, budget // chunk):
                tokens = slice(held[i] * chunk, (held[i] + 1) * chunk)
                rows, values = [*rows, low[h, tokens]], [*values, v[h, tokens]]
        rows, values = np.concatenate(rows), np.concatenate(values)
        out[h] = dense_attention(q[h][:, None], rows[None], values[None], np.array([len(rows) - 1]))[:, 0]
    return out
