"""EMS against its oracle: global and local scores, the band that may merge, and the zero class.

EMS in NumPy, float64, from its paper (arXiv 2412.08521): one sequence, one key/value head of G query heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import Scores
from kvjax.methods.ems import CenterMerge
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.merge import evicted_tokens, nearest_kept
from tests.oracles.slots import head_slots
from tests.oracles.test_merge import KEPT, LENGTHS, make_prompt, ragged_prompts, run_rule


def scores(attention: np.ndarray, window: int) -> np.ndarray:
    """The sum of two scores [T] of causal attention [G T T]: its mean over queries, and the last queries'."""
    T = attention.shape[1]
    total = np.zeros(T)
    for weights in attention:
        mean_attention = np.array([weights[s:, s].mean() for s in range(T)])
        recent_attention = weights[-window:].sum(0)
        total += mean_attention / mean_attention.sum() + recent_attention / recent_attention.sum()
    return total / len(attention)


def select_tokens(scores: np.ndarray, budget: int, window: int) -> list[int]:
    """Selects the last tokens and the best of the others."""
    T = len(scores)
    if budget >= T:
        return list(range(T))
    old = sorted(range(T - window), key=lambda t: -scores[t])
    return sorted([*old[: budget - window], *range(T - window, T)])


def merge_tokens(k, v, scores, tokens, band: float, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Merges evicted tokens into the kept ones: k, v [T H] -> keys and values of the kept tokens."""
    k, v = np.asarray(k, float), np.asarray(v, float)
    merged = sorted(evicted_tokens(k, tokens), key=lambda t: -scores[t])[: int(band * len(tokens))]
    nearest = {t: nearest_kept(k, tokens, t) for t in merged}
    norm = np.linalg.norm(k, axis=1)
    keys, values = [], []
    for place, s in enumerate(tokens):
        group = [s] + [t for t, (to, u) in nearest.items() if to == place and u >= threshold]
        w = np.array([scores[t] for t in group]) / sum(scores[t] for t in group)
        direction = w @ (k[group] / norm[group][:, None])
        keys.append(direction / np.linalg.norm(direction) * (w @ norm[group]))
        values.append(w @ v[group])
    return np.array(keys), np.array(values)


SMALL = "ems:budget=6,window=2,threshold=0"


@pytest.mark.parametrize("rule", [CenterMerge(1.0, 0.0), CenterMerge(0.5, 0.2)], ids=str)
def test_merging_is_its_oracle_whatever_the_padding_holds(rule):
    block, choice = ragged_prompts()
    actual = run_rule(rule, block, choice)
    for b, (n, kept_tokens) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        for head, slots in enumerate(np.asarray(choice.slots[b])):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (block.k, block.v))
            score = np.asarray(choice.scores.per_kv_head[b, head, :n], np.float64)
            keys, values = merge_tokens(k, v, score, slots[:kept_tokens].tolist(), rule.band, rule.threshold)
            np.testing.assert_allclose(actual.k[b, head, :kept_tokens], keys, atol=5e-6)
            np.testing.assert_allclose(actual.v[b, head, :kept_tokens], values, atol=5e-6)
    jax.tree.map(np.testing.assert_array_equal, run_rule(rule, *ragged_prompts(padding=np.inf)), actual)


@pytest.mark.parametrize(
    ("threshold", "key", "value"),
    [(0.75, [2.7163, 0.4289], 2), (0.85, [2, 0], 1)],
    ids=["nearer to the centre", "nearer to the zero class"],
)
def test_by_hand_a_token_is_merged_or_evicted(threshold, key, value):
    """The cosine is 0.8, scores are 3 and 1: direction (3 + 0.8, 0.6) / 4, norm (3 * 2 + 5) / 4."""
    block, choice = make_prompt([[2, 0], [4, 3]], [[1], [5]], [0])
    kv = jnp.asarray([[[3.0, 1.0]]])
    actual = run_rule(CenterMerge(1.0, threshold), block, choice._replace(scores=Scores(kv[:, :, None], kv)))
    np.testing.assert_allclose(actual.k[0, 0, 0], key, atol=5e-5)
    np.testing.assert_allclose(actual.v[0, 0, 0], [value], atol=1e-6)


def test_each_head_keeps_its_best_and_merges_the_next_best():
    batch = layer.random_batch()
    state = layer.prefill(layer.bind(SMALL), batch)
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
        a = eviction.attention_weights(q, k)
        for head in range(layer.K):
            score = scores(a[head], 2)
            kept_tokens = select_tokens(score, 6, 2)
            positions, *actual = head_slots(state, b, head)
            assert positions == kept_tokens
            for x, expected in zip(actual, merge_tokens(k[head], v[head], score, kept_tokens, 1.0, 0.0), strict=True):
                np.testing.assert_allclose(x, expected, atol=5e-6)
