"""InfLLM in NumPy, float64, from its paper (arXiv 2402.04617, section 3): one sequence, one chunk at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import rope, softmax


def infllm(q, k, v, chunks, block: int, sinks: int, local: int, topk: int, representatives: int, per_head=False):
    """Runs q [K G S H], k, v [K S H] before RoPE in chunks -> (outputs [K G S H], blocks before the last chunk).

    A far token has a key without RoPE and a query at position local - 1. A block key per query head is the mean key of
    the tokens that received the most attention while they were less than `local` tokens before the query.
    """
    K, G, S, H = q.shape
    sink_tokens, remainder, blocks = [], [], []
    mass, out, start = np.zeros((K, G, S)), np.empty(q.shape), 0
    for size in chunks:
        tokens, num_blocks = list(range(start, start + size)), len(blocks)
        remainder += tokens
        far_q = rope(q[:, :, tokens], np.full(size, local - 1))
        chosen = select_blocks(far_q.mean(2), blocks, topk, per_head)
        for head in range(K):
            fetched = [s for i in chosen[head] for s in blocks[i][0]]
            for i, t in enumerate(tokens):
                near = [s for s in range(t + 1) if t - s < local]
                far = [s for s in sink_tokens + remainder if t - s >= local] + fetched
                assert not set(near) & set(far)
                near_q = rope(q[head, :, t : t + 1], np.array([t]))[:, 0]
                logits = np.concatenate([near_q @ rope(k[head, near], near).T, far_q[head, :, i] @ k[head, far].T], 1)
                weights = softmax(logits / np.sqrt(H))
                out[head, :, t] = weights @ v[head, near + far]
                mass[head][:, near] += weights[:, : len(near)]
        start += size
        while len(sink_tokens) < sinks and len(remainder) > local:
            sink_tokens.append(remainder.pop(0))
        while len(remainder) - block >= local:
            block_tokens, remainder = remainder[:block], remainder[block:]
            keys = np.empty((K, G, H))
            for head in range(K):
                for g in range(G):
                    best = np.argsort(-mass[head, g, block_tokens], kind="stable")[:representatives]
                    keys[head, g] = k[head, np.array(block_tokens)[best]].mean(0)
            blocks.append((block_tokens, keys))
    return out, num_blocks


def select_blocks(queries, blocks, topk: int, per_head: bool) -> list[list[int]]:
    """Selects the blocks of each head by the product of queries [K G H] and block keys, summed over the query heads."""
    K = queries.shape[0]
    scores = np.array([(queries * keys).sum((1, 2)) for _, keys in blocks]).reshape(-1, K)
    if not per_head:
        scores = np.repeat(scores.sum(1, keepdims=True), K, 1)
    return [list(np.argsort(-scores[:, h], kind="stable")[:topk]) for h in range(K)]
