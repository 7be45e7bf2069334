"""InfLLM in NumPy, float64, from section 3 of the paper (arXiv 2402.04617): one row, one chunk at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import rope, softmax


def infllm(q, k, v, chunks, block: int, sinks: int, local: int, topk: int, representatives: int, per_head=False):
    """q [K G S H], k, v [K S H] before RoPE, in chunks of these lengths -> (outputs [K G S H], blocks at the last).

    Far tokens: key without RoPE, query at position local - 1. A block's key per query head: the mean key of the tokens
    with the most attention received while they were less than `local` tokens behind the query.
    """
    K, G, S, H = q.shape
    init, remainder, blocks = [], [], []
    mass, out, done = np.zeros((K, G, S)), np.empty(q.shape), 0
    for size in chunks:
        times, known = list(range(done, done + size)), len(blocks)
        remainder += times
        far_q = rope(q[:, :, times], np.full(size, local - 1))
        chosen = lookup(far_q.mean(2), blocks, topk, per_head)
        for head in range(K):
            fetched = [s for i in chosen[head] for s in blocks[i][0]]
            for i, t in enumerate(times):
                near = [s for s in range(t + 1) if t - s < local]
                far = [s for s in init + remainder if t - s >= local] + fetched
                assert not set(near) & set(far)
                near_q = rope(q[head, :, t : t + 1], np.array([t]))[:, 0]
                logits = np.concatenate([near_q @ rope(k[head, near], near).T, far_q[head, :, i] @ k[head, far].T], 1)
                p = softmax(logits / np.sqrt(H))
                out[head, :, t] = p @ v[head, near + far]
                mass[head][:, near] += p[:, : len(near)]
        done += size
        while len(init) < sinks and len(remainder) > local:
            init.append(remainder.pop(0))
        while len(remainder) - block >= local:
            members, remainder = remainder[:block], remainder[block:]
            keys = np.empty((K, G, H))
            for head in range(K):
                for g in range(G):
                    best = np.argsort(-mass[head, g, members], kind="stable")[:representatives]
                    keys[head, g] = k[head, np.array(members)[best]].mean(0)
            blocks.append((members, keys))
    return out, known


def lookup(mean, blocks, topk: int, per_head: bool) -> list[list[int]]:
    """mean [K G H] -> the blocks of each head, by the inner product with their keys summed over the heads concerned."""
    K = mean.shape[0]
    score = np.array([(mean * keys).sum((1, 2)) for _, keys in blocks]).reshape(-1, K)
    if not per_head:
        score = np.repeat(score.sum(1, keepdims=True), K, 1)
    return [list(np.argsort(-score[:, h], kind="stable")[:topk]) for h in range(K)]
