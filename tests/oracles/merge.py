"""Merging of lost tokens in NumPy, float64, one row and one head at a time, from the papers and code named below.

A head has keys k [T H] and values v [T H], and keeps the tokens `kept`, ascending; all others are lost.
"""

from __future__ import annotations

import numpy as np


def lost_of(k, kept) -> list[int]:
    """The tokens that are not kept."""
    return [t for t in range(len(k)) if t not in set(kept)]


def near(k, kept, t: int) -> tuple[int, float]:
    """(place among the kept, cosine) of the kept token whose key is nearest to that of t; the lower of equals."""
    best, cosine = 0, -np.inf
    for place, s in enumerate(kept):
        c = k[t] @ k[s] / max(np.linalg.norm(k[t]), 1e-6) / max(np.linalg.norm(k[s]), 1e-6)
        if c > cosine + 1e-9:
            best, cosine = place, c
    return best, cosine


def d2o(k, v, kept, rule="authors"):
    """All heads k, v [K T H], kept [K][n] -> (keys and values [K n H], tokens that each slot stands for [K n]).

    D2O (arXiv 2406.13035); "authors": the class D2O_LayerKVCache of its public code, at its first call.
    """
    heads = [[(t, *near(k[h], kept[h], t)) for t in lost_of(k[h], kept[h])] for h in range(len(k))]
    every = [u for head in heads for _, _, u in head]
    out_k, out_v, number = [], [], []
    for h, head in enumerate(heads):
        keys, values, count = [], [], []
        for place, s in enumerate(kept[h]):
            joining = []
            for rank, (t, to, u) in enumerate(head):
                same_rank = [other[rank][2] for other in heads if rank < len(other)]
                own = [x for _, _, x in head]
                mine, least = (np.mean(same_rank), np.mean(every)) if rule == "authors" else (u, np.mean(own))
                if to == place and mine >= least - 1e-6:
                    joining.append((t, u))
            if rule == "authors":
                weights, whole = [u for _, u in joining], 1 + len(joining)
                own_weight = 1.0
            else:
                weights, own_weight = [np.exp(u) for _, u in joining], np.e
                whole = own_weight + sum(weights)
            for x, out in ((k[h], keys), (v[h], values)):
                total = own_weight * x[s] + sum(w * x[t] for w, (t, _) in zip(weights, joining, strict=True))
                out.append(total / whole)
            count.append(1 + len(joining))
        out_k.append(keys)
        out_v.append(values)
        number.append(count)
    return np.array(out_k), np.array(out_v), np.array(number)


def merging(k, v, kept, threshold=0.0, fraction=1.0) -> np.ndarray:
    """One head -> its values [n H] (kvpress' MergingPress)."""
    lost = [(t, *near(k, kept, t)) for t in lost_of(k, kept)]
    least = np.quantile([u for _, _, u in lost], 1 - fraction) if lost else 0.0
    out = []
    for place, s in enumerate(kept):
        total, whole = v[s].astype(float), 1.0
        for t, to, u in lost:
            if to == place and u >= threshold and u >= least - 1e-9:
                a, b = np.linalg.norm(v[t]), np.linalg.norm(v[s])
                w = max(u, 0) * a / (a + b + 1e-6)
                total, whole = total + w * v[t], whole + w
        out.append(total / whole)
    return np.array(out)


def cam(v, kept, received, window: int, chance) -> np.ndarray:
    """One head: attention received [T], a number in [0, 1) for each token -> its values [n H] (CaM, LCTmppB165)."""
    out = v[kept].astype(float)
    for t in lost_of(v, kept):
        following = [place for place, s in enumerate(kept) if s > t][:window]
        if not following:
            continue
        mean = np.mean([received[kept[place]] for place in following])
        if chance[t] < min(received[t] / mean, 1.0):
            for place in following:
                out[place] += v[t] / len(following)
    return out
