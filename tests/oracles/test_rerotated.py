"""Positions without gaps, after FINCH and after other methods that evict once, against an oracle in NumPy.

tests/methods/test_public_eviction.py compares both with kvpress, chunks included.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.contract import layer
from tests.oracles.eviction import attention_weights, snapkv_scores
from tests.oracles.online import rope, softmax


def decode_after(scores: np.ndarray, q, k, v, n: int, budget: int, window: int, chunk: int = 0) -> np.ndarray:
    """Decodes over the tokens of the best scores [K n] and the last `window` ones: outputs [K G steps H].

    With chunks, each keeps of its tokens the part that the budget is of all: a rank is divided by the length.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for h in range(K):
        places = []
        for start in range(0, n, chunk or n):
            tokens = range(start, min(start + (chunk or n), n))
            best = sorted(tokens, key=lambda s: (s < n - window, -scores[h, s], s))
            places += [(s < n - window, rank / len(tokens), s) for rank, s in enumerate(best)]
        kept = sorted(s for *_, s in sorted(places)[: max(min(budget, n), 0)])
        plain = rope(k[h], -np.arange(S))
        for t in range(n, S):
            held = [*kept, *range(n, t + 1)]
            keys = rope(plain[held], np.arange(len(held)))
            for g in range(G):
                query = rope(rope(q[h, g, t : t + 1], np.array([-t])), np.array([len(held) - 1]))[0]
                out[h, g, t - n] = softmax(keys @ query / np.sqrt(H)) @ v[h, held]
    return out


def finch(q, k, v, n: int, budget: int, window: int, chunk: int) -> np.ndarray:
    weights = attention_weights(q[:, :, :n], k[:, :n])[:, :, -window:]
    before = np.arange(n)[-window:, None]
    return decode_after((weights * before).sum(2).mean(1), q, k, v, n, budget, window, chunk)


def snapkv(q, k, v, n: int, budget: int, window: int) -> np.ndarray:
    scores = snapkv_scores(attention_weights(q[:, :, :n], k[:, :n]), window, 3, "max")[1]
    return decode_after(scores, q, k, v, n, budget, window)


@pytest.mark.parametrize("chunk", [0, 4])
def test_finch_equals_its_oracle_whatever_lies_in_empty_slots(chunk):
    method = f"finch:budget=6,window=2,chunk={chunk}"
    layer.assert_decodes_as(method, functools.partial(finch, budget=6, window=2, chunk=chunk))


@pytest.mark.parametrize("codec", ["", " + kivi:bits=8,group=4,residual=4"])
def test_tokens_of_another_method_get_positions_without_gaps(codec):
    method, oracle = "snapkv:budget=6,window=2,kernel=3 + rerotated", functools.partial(snapkv, budget=6, window=2)
    if not codec:
        layer.assert_decodes_as(method, oracle)
        return
    batch = layer.random_batch()
    expected = np.stack([oracle(*batch.exact(b), int(n)) for b, n in enumerate(batch.lengths)])
    np.testing.assert_allclose(layer.decode(method + codec, batch), expected, atol=0.1)  # keys in 8 bits
    gaps = layer.decode(method.replace(" + rerotated", ""), batch)
    assert np.abs(gaps - expected).max() > 0.1
