"""Adaptive R-KV against its oracle, and the oracle against the numbers that OpenVINO's own tests expect.

Adaptive R-KV in NumPy, float64, from OpenVINO's adaptive_rkv_diversity.hpp and openvino.genai's cache_eviction.cpp
(Apache-2.0): one sequence, all key/value heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.adaptive_rkv import BlockDiversity, mean_similarity
from tests.contract import layer
from tests.oracles.online import softmax

GOLDEN_KEYS = np.array(
    """
    4.949 -7.294 -6.330 3.757 -3.561 1.029 5.030 -9.483 5.350 -2.745 -1.404 -7.788 -1.086 4.576 -8.726 -8.815
    3.144 8.512 8.518 -8.386 7.889 -5.721 5.507 4.295 -6.624 -8.463 7.474 9.879 4.534 -5.908 -9.388 2.356
    7.497 8.186 -8.658 -4.796 -8.248 -9.797 -7.907 -4.513
    3.469 7.633 7.244 -6.844 -7.173 4.450 6.705 -7.035 8.773 -7.571 -9.878 -9.584 0.807 8.059 -7.172 4.303
    -3.323 -8.852 1.167 -1.126 -4.428 9.678 -6.547 0.037 -8.152 -9.865 3.694 -7.650 0.359 8.018 -7.152 -6.242
    -9.120 -7.228 -9.186 3.202 -9.304 -0.401 -5.287 6.834
    """.split(),
    float,
).reshape(2, 10, 4)
"""The keys of two heads in the "golden" test of OpenVINO's adaptive_rkv_diversity.cpp: tokens 2 to 7 are evictable."""

GOLDEN_DIVERSITY = [
    [-0.237145, -0.237145, -0.352696, -0.487902, -0.072365, -0.707192],
    [-0.334657, -0.505941, 0, 0.036135, -0.634881, -0.490221],
    [-0.380811, -0.398746801, -0.432080003, -0.693021748, 0, 0.067216441],
]
"""What it expects: minus the similarities of blocks of two tokens to each token, mean over the heads."""


def similarities(keys: np.ndarray) -> np.ndarray:
    """Cosines of evictable keys [K n H], those below their row's mean set to zero, mean over the heads: [n n]."""
    unit = keys / np.sqrt((keys**2).sum(-1, keepdims=True) + np.finfo(np.float32).eps)
    cosine = unit @ unit.swapaxes(1, 2)
    for head in cosine:
        np.fill_diagonal(head, 0)
    return np.where(cosine >= cosine.mean(-1, keepdims=True), cosine, 0).mean(0)


def test_the_oracle_and_the_method_have_openvinos_numbers():
    found = -similarities(GOLDEN_KEYS[:, 2:8]).reshape(3, 2, 6).sum(1)
    np.testing.assert_allclose(found, GOLDEN_DIVERSITY, atol=1e-5)
    rows = (np.arange(10) >= 2) & (np.arange(10) < 8)
    columns = jnp.asarray(rows[None] & (np.arange(10)[:, None] == np.arange(10)))  # one token after the other
    keys = jnp.broadcast_to(jnp.asarray(GOLDEN_KEYS, jnp.float32)[None], (10, 2, 10, 4))
    compare = jax.jit(lambda k, c: mean_similarity(k, jnp.broadcast_to(jnp.asarray(rows), (10, 10)), c, 4).mean(1))
    by_token = np.asarray(compare(keys, columns))[2:8, 2:8]  # [column, row]
    np.testing.assert_allclose(-by_token.T.reshape(3, 2, 6).sum(1), GOLDEN_DIVERSITY, atol=1e-5)


def select_tokens(q, k, cached: list[int], t: int, budget: int, *, window, kernel, mass, block, sinks, recent):
    """Selects of the cached tokens by the queries up to t: q [K G S H], k [K S H]."""
    n = len(cached)
    queries = range(max(t - window + 1, 0), t + 1)
    attention = np.zeros(n)
    for i in queries:
        seen = [j for j in range(n) if cached[j] <= i]
        for h in range(len(k)):
            for g in range(q.shape[1]):
                weights = softmax(k[h, [cached[j] for j in seen]] @ q[h, g, i] / np.sqrt(k.shape[-1]))
                attention[seen] += weights / (len(queries) * len(k) * q.shape[1])
    pooled = np.array([attention[i : i + kernel].max() for i in range(n)])
    num_blocks = max(n - sinks - recent, 0) // block
    end = sinks + num_blocks * block
    by_block = pooled[sinks:end].reshape(num_blocks, block).sum(1)
    left = max((budget - sinks - recent - (n - recent - end)) // block, 0)
    order = sorted(range(num_blocks), key=lambda b: (-by_block[b], b))
    kept, total = [], 0.0
    while total < mass * by_block.sum() and len(kept) < min(left, num_blocks):
        total += by_block[order[0]]
        kept.append(order.pop(0))
    if order and len(kept) < left:
        table = -similarities(k[:, cached[sinks:end]]).reshape(num_blocks, block, -1).sum(1)
        columns = [b * block + i for b in order for i in range(block)]
        diversity = table[:, columns].mean(1)
        kept += sorted(order, key=lambda b: (-diversity[b], b))[: left - len(kept)]
    middle = [sinks + b * block + i for b in sorted(kept) for i in range(block)]
    return [cached[i] for i in (*range(sinks), *middle, *range(end, n))]


def decode(q, k, v, n: int, budget: int, every: int, **options) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H], a prompt of n tokens -> outputs [K G S-n H]."""
    K, G, S, H = q.shape
    cached, out = list(range(n)), np.empty((K, G, S - n, H))
    if n > budget:
        cached = select_tokens(q, k, cached, n - 1, budget, **options)
    for t in range(n, S):
        if len(cached) == budget + every:
            cached = select_tokens(q, k, cached, t, budget, **options)
        cached.append(t)
        for h in range(K):
            out[h, :, t - n] = softmax(q[h, :, t] @ k[h, cached].T / np.sqrt(H)) @ v[h, cached]
    return out


SETTINGS = {"window": 2, "kernel": 2, "block": 2, "sinks": 1, "recent": 1}


@pytest.mark.parametrize("mass", [0.0, 0.5, 1.0])
def test_it_equals_the_oracle_whatever_lies_in_empty_slots(mass):
    """By diversity alone, by both, and by attention alone; a budget of 6 leaves whole blocks at every compression."""
    text = ",".join(f"{name}={value}" for name, value in SETTINGS.items())

    def oracle(q, k, v, n: int) -> np.ndarray:
        return decode(q, k, v, n, 6, 2, mass=mass, **SETTINGS)

    layer.assert_decodes_as(f"adaptive_rkv:budget=6,every=2,mass={mass},{text}", oracle)


def test_blocks_are_chosen_as_in_the_oracle_over_long_prompts():
    """Forty tokens: several blocks are heavy, and several of the others stay for their keys."""
    rng = np.random.default_rng(0)
    lengths, S, K, G, H = (40, 33, 26), 40, 2, 2, 8
    q, k = rng.normal(size=(3, K, G, S, H)), rng.normal(size=(3, K, S, H)) * 0.3
    k[..., 0] += np.repeat(rng.normal(size=(3, K, S // 4)), 4, -1) * 3  # neighbors are alike
    scorer = BlockDiversity(num_queries=4, kernel=3, mass=0.4, block=4, sinks=2, recent=3)
    pos = jnp.asarray(np.where(np.arange(S) < np.array(lengths)[:, None], np.arange(S), -1), jnp.int32)
    block = KVBlock(jnp.asarray(k, jnp.float32), jnp.asarray(k, jnp.float32), pos[:, None])
    spec = dataclasses.replace(layer.spec(), head_dim=H)
    observation = Observation(jnp.asarray(q, jnp.float32), pos)
    found = np.asarray(jax.jit(lambda *x: scorer.scores(*x, spec).per_kv_head)(block, observation))
    options = {"window": 4, "kernel": 3, "mass": 0.4, "block": 4, "sinks": 2, "recent": 3}
    for b, n in enumerate(lengths):
        num_blocks = (n - 5) // 4
        by_block = found[b, 0, 2 : 2 + num_blocks * 4].reshape(num_blocks, 4)
        assert (by_block == by_block[:, :1]).all()
        order = np.argsort(-by_block[:, 0], kind="stable")
        for left in range(1, num_blocks):
            budget = 5 + (n - 5) % 4 + left * 4
            kept = select_tokens(q[b], k[b], list(range(n)), n - 1, budget, **options)
            middle = {(i - 2) // 4 for i in kept if 2 <= i < 2 + num_blocks * 4}
            assert middle == set(order[:left].tolist())
