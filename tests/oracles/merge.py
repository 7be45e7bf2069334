"""Merging of evicted tokens in NumPy, float64, one sequence and head at a time, from the papers and code named below.

A head has keys k [T H] and values v [T H], and keeps the tokens `kept`, ascending; all others are evicted.
"""

from __future__ import annotations

import numpy as np


def evicted_tokens(k, kept) -> list[int]:
    """The tokens that are not kept."""
    return [t for t in range(len(k)) if t not in set(kept)]


def nearest_kept(k, kept, t: int) -> tuple[int, float]:
    """The kept token whose key is nearest to that of t -> (its index in `kept`, cosine); ties go to the lower index."""
    best, cosine = 0, -np.inf
    for slot, s in enumerate(kept):
        similarity = k[t] @ k[s] / max(np.linalg.norm(k[t]), 1e-6) / max(np.linalg.norm(k[s]), 1e-6)
        if similarity > cosine + 1e-9:
            best, cosine = slot, similarity
    return best, cosine


def d2o(k, v, kept, rule="authors"):
    """D2O (arXiv 2406.13035): k, v [K T H], kept [K][n] -> (keys, values [K n H], tokens in each slot [K n]).

    The rule "authors" is the class D2O_LayerKVCache of its public code, at its first call.
    """
    heads = [[(t, *nearest_kept(k[h], kept[h], t)) for t in evicted_tokens(k[h], kept[h])] for h in range(len(k))]
    similarities = [u for head in heads for _, _, u in head]
    out_k, out_v, counts = [], [], []
    for h, head in enumerate(heads):
        keys, values, count = [], [], []
        for slot, s in enumerate(kept[h]):
            merged = []
            for rank, (t, to, u) in enumerate(head):
                same_rank = [other[rank][2] for other in heads if rank < len(other)]
                head_similarities = [x for _, _, x in head]
                similarity, threshold = (
                    (np.mean(same_rank), np.mean(similarities))
                    if rule == "authors"
                    else (u, np.mean(head_similarities))
                )
                if to == slot and similarity >= threshold - 1e-6:
                    merged.append((t, u))
            if rule == "authors":
                weights, total_weight = [u for _, u in merged], 1 + len(merged)
                own_weight = 1.0
            else:
                weights, own_weight = [np.exp(u) for _, u in merged], np.e
                total_weight = own_weight + sum(weights)
            for x, out in ((k[h], keys), (v[h], values)):
                total = own_weight * x[s] + sum(w * x[t] for w, (t, _) in zip(weights, merged, strict=True))
                out.append(total / total_weight)
            count.append(1 + len(merged))
        out_k.append(keys)
        out_v.append(values)
        counts.append(count)
    return np.array(out_k), np.array(out_v), np.array(counts)


def merging(k, v, kept, threshold=0.0, fraction=1.0) -> np.ndarray:
    """The merged values [n H] of one head (kvpress' MergingPress)."""
    evicted = [(t, *nearest_kept(k, kept, t)) for t in evicted_tokens(k, kept)]
    least = np.quantile([u for _, _, u in evicted], 1 - fraction) if evicted else 0.0
    out = []
    for slot, s in enumerate(kept):
        total, total_weight = v[s].astype(float), 1.0
        for t, to, u in evicted:
            if to == slot and u >= threshold and u >= least - 1e-9:
                a, b = np.linalg.norm(v[t]), np.linalg.norm(v[s])
                w = max(u, 0) * a / (a + b + 1e-6)
                total, total_weight = total + w * v[t], total_weight + w
        out.append(total / total_weight)
    return np.array(out)


def cam(v, kept, attention, window: int, uniform) -> np.ndarray:
    """The merged values [n H] of one head, by attention received [T] and random numbers [T] (CaM, LCTmppB165)."""
    out = v[kept].astype(float)
    for t in evicted_tokens(v, kept):
        following = [slot for slot, s in enumerate(kept) if s > t][:window]
        if not following:
            continue
        mean = np.mean([attention[kept[slot]] for slot in following])
        if uniform[t] < min(attention[t] / mean, 1.0):
            for slot in following:
                out[slot] += v[t] / len(following)
    return out
