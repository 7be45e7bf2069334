"""RocketKV against its paper, and its scores by hand.

RocketKV in NumPy, float64, from its paper (arXiv 2502.14051) and public code: one sequence, one query at a time.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from kvjax.methods.quest import Box
from kvjax.methods.rocketkv import HybridBoxes
from tests.contract import layer
from tests.oracles.online import softmax


def select_prompt_tokens(q: np.ndarray, k: np.ndarray, budget: int, window: int, kernel: int) -> list[int]:
    """Selects the prompt tokens that a head keeps (stage 1): q [G n H], k [n H]."""
    n, H = k.shape
    if n <= budget:
        return list(range(n))
    total = np.zeros(n - window)
    for t in range(n - window, n):
        total += softmax(q[:, t] @ k[: t + 1].T / np.sqrt(H)).sum(0)[: n - window]
    radius = kernel // 2
    pooled = np.array([total[max(0, i - radius) : i + radius + 1].max() for i in range(n - window)])
    best = np.argsort(-pooled, kind="stable")[: budget - window]
    return [*sorted(best.tolist()), *range(n - window, n)]


def page_scores(q: np.ndarray, pages: list[np.ndarray], num_channels: int) -> np.ndarray:
    """The logits [G pages] of pages of keys [page H] for a head's queries q [G H], from `num_channels` (stage 2)."""
    sign = np.where(q.sum(0) > 0, 1, -1)
    bounds = np.array([(keys * sign).max(0) for keys in pages])
    channels = np.argsort(-np.abs(q).mean(0), kind="stable")[:num_channels]
    raw = (q * sign)[:, channels] @ bounds[:, channels].T
    scale = np.sqrt(q.shape[1] * np.abs(q[:, channels]).sum(1) / np.abs(q).sum(1))
    return raw / scale[:, None]


def rocketkv(
    q, k, v, n: int, budget: int, window: int, kernel: int, page: int, num_pages: int, num_channels: int
) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A head reads the page of the query's own token among its cached tokens, and the best `num_pages` before it.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for h in range(K):
        cached = select_prompt_tokens(q[h, :, :n], k[h, :n], budget, window, kernel)
        for t in range(n, S):
            cached.append(t)
            last_page = (len(cached) - 1) // page * page
            earlier = [cached[s : s + page] for s in range(0, last_page, page)]
            visible = cached[last_page:]
            if earlier:
                weight = softmax(page_scores(q[h, :, t], [k[h, p] for p in earlier], num_channels)).mean(0)
                for i in np.argsort(-weight, kind="stable")[:num_pages]:
                    visible = visible + earlier[i]
            for g in range(G):
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out


SMALL = "rocketkv:budget=7,topk=4,page=2,window=2,kernel=3"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    arguments = {"budget": 7, "window": 2, "kernel": 3, "page": 2, "num_pages": 1, "num_channels": 8}
    layer.assert_decodes_as(SMALL, functools.partial(rocketkv, **arguments))


def test_a_page_of_two_keys_by_hand():
    keys, q = np.array([[1.0, 2, 0, 5], [0, -4, 1, 1]]), np.array([3.0, -1, 2, 0])
    expected = 5 / np.sqrt(4 * 5 / 6)  # channels 0 and 2: 3 * 1 + 2 * 1
    np.testing.assert_allclose(page_scores(q[None], [keys], 2), [[expected]])
    box = Box(*(jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 4) for x in (keys.min(0), keys.max(0))))
    actual = HybridBoxes(2, 0.5).score(box, jnp.asarray(q, jnp.float32).reshape(1, 1, 1, 1, 4))
    np.testing.assert_allclose(actual.item(), expected, rtol=1e-6)


def test_the_heads_of_a_group_share_the_signs_of_their_sum():
    """In channel 0 the second head's sign differs from that of the sum, so the box's greatest key counts against it."""
    box = Box(jnp.full((1, 1, 1, 2), -1.0), jnp.full((1, 1, 1, 2), 2.0))
    q = jnp.array([[3.0, 0], [-1, 0]]).reshape(1, 1, 2, 1, 2)
    actual = HybridBoxes(2, 1.0).score(box, q).ravel() * np.sqrt(2)
    np.testing.assert_allclose(actual, [6, -2], rtol=1e-6)
    assert np.isfinite(HybridBoxes(2, 0.5).score(box, jnp.zeros_like(q))).all()
