"""ShadowKV in NumPy, float64, from its paper (arXiv 2410.21465, section 4) and the authors' constants: one sequence."""

from __future__ import annotations

import numpy as np

from kvjax.testing import dense_attention
from tests.oracles.lowrank import concat_heads, rotate, split_heads


def reconstruct_keys(k: np.ndarray, rank: int) -> np.ndarray:
    """Reconstructs a prompt's keys after RoPE [K n H] from the truncated SVD of all heads' keys before RoPE."""
    pos = np.arange(k.shape[1])
    u, s, vh = np.linalg.svd(concat_heads(rotate(k, pos, -1)), full_matrices=False)
    return rotate(split_heads(u[:, :rank] * s[:rank] @ vh[:rank], len(k)), pos)


def split_prompt(k: np.ndarray, chunk: int, outliers: int, local: int) -> tuple[list[int], list[int]]:
    """Splits one head's prompt [n H] -> (chunks in low rank, positions of the tokens that stay exact)."""
    num_chunks = max(len(k) // chunk - local, 0)
    similarities = []
    for c in range(num_chunks):
        tokens = k[c * chunk : (c + 1) * chunk]
        mean = tokens.mean(0)
        similarities.append(min(mean @ x / np.linalg.norm(mean) / np.linalg.norm(x) for x in tokens))
    exact = sorted(range(num_chunks), key=lambda c: similarities[c])[:outliers]
    low_rank = [c for c in range(num_chunks) if c not in exact]
    return low_rank, [t for t in range(len(k)) if t // chunk not in low_rank]


def best_landmarks(q: np.ndarray, landmarks: np.ndarray, num_best: int) -> list[int]:
    """The landmarks [C H] with the highest softmax weight of any of one head's queries [G H]."""
    logits = q @ landmarks.T / np.sqrt(q.shape[1])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weight = (weights / weights.sum(1, keepdims=True)).max(0)
    return np.argsort(-weight, kind="stable")[:num_best].tolist()


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, budget: int, chunk: int, rank: int, outliers: int, local: int
) -> np.ndarray:
    """Runs the step of the last token: q [K G H], k and v [K S H], a prompt of n tokens -> [K G H]."""
    low_rank_keys, out = reconstruct_keys(k[:, :n], rank), np.zeros(q.shape)
    for h in range(len(q)):
        low_rank, exact = split_prompt(k[h, :n], chunk, outliers, local)
        keys, values = [k[h, exact], k[h, n:]], [v[h, exact], v[h, n:]]
        if low_rank:
            landmarks = np.stack([k[h, c * chunk : (c + 1) * chunk].mean(0) for c in low_rank])
            for i in best_landmarks(q[h], landmarks, budget // chunk):
                tokens = slice(low_rank[i] * chunk, (low_rank[i] + 1) * chunk)
                keys, values = [*keys, low_rank_keys[h, tokens]], [*values, v[h, tokens]]
        keys, values = np.concatenate(keys), np.concatenate(values)
        out[h] = dense_attention(q[h][:, None], keys[None], values[None], np.array([len(keys) - 1]))[:, 0]
    return out
