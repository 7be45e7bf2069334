"""LOOK-M against its oracle: the kept tokens, and the tokens merged into them.

LOOK-M in NumPy, float64, from its paper (arXiv 2406.18139) and KVCache-Factory's `merge_kv`: one head.
"""

from __future__ import annotations

import typing

import jax
import numpy as np
import pytest

from kvjax.methods.lookm import NearestMerge, Rule
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.merge import evicted_tokens, nearest_kept
from tests.oracles.slots import head_slots
from tests.oracles.test_merge import KEPT, LENGTHS, make_prompt, ragged_prompts, run_rule


def select_tokens(received: np.ndarray, budget: int, recent: int, sinks: int, images: list[int]) -> list[int]:
    """Selects the sinks and recent tokens, then text before images, the best by attention received [T] first."""
    T = len(received)
    if budget >= T:
        return list(range(T))
    always = [t for t in range(T) if t < sinks or t >= T - recent]
    others = [t for t in range(T) if t not in always]
    others.sort(key=lambda t: (t in images, -received[t], t))
    return sorted(always + others[: budget - len(always)])


def merge_tokens(k: np.ndarray, v: np.ndarray, tokens: list[int], rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Merges evicted tokens into the nearest kept ones: k, v [T H] -> keys and values of the kept tokens."""
    evicted = [(t, *nearest_kept(k, tokens, t)) for t in evicted_tokens(k, tokens)]
    groups = [(s, [(t, u) for t, to, u in evicted if to == place]) for place, s in enumerate(tokens)]
    keys, values = (np.array([merge_into(x, s, members, rule) for s, members in groups]) for x in (k, v))
    return keys, values


def merge_into(x: np.ndarray, s: int, evicted: list[tuple[int, float]], rule: str) -> np.ndarray:
    """Merges evicted tokens, given with their cosines, into token s of x [T H]."""
    if rule == "normalised":
        weights = {t: max((u + 1) / 2, 1e-6) for t, u in evicted}
        return (x[s] + sum(w * x[t] for t, w in weights.items())) / (1 + sum(weights.values()))
    total = x[s].astype(float)
    for t, u in evicted:
        total += {"average": x[t], "pivot": (x[t] + x[s]) / 2, "weighted": u * x[t]}[rule]
    return total / (1 + len(evicted))


SMALL = "lookm:budget=6,recent=2,sinks=1,images=1-4"


@pytest.mark.parametrize("rule", typing.get_args(Rule))
def test_every_rule_is_its_oracle_whatever_the_padding_holds(rule):
    block, choice = ragged_prompts()
    actual = run_rule(NearestMerge(rule), block, choice)
    for b, (n, kept_tokens) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        for head, slots in enumerate(np.asarray(choice.slots[b])):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (block.k, block.v))
            keys, values = merge_tokens(k, v, slots[:kept_tokens].tolist(), rule)
            np.testing.assert_allclose(actual.k[b, head, :kept_tokens], keys, atol=2e-6)
            np.testing.assert_allclose(actual.v[b, head, :kept_tokens], values, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, run_rule(NearestMerge(rule), *ragged_prompts(padding=np.inf)), actual)


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        ("average", [1, 0.5], [1, 1]),
        ("pivot", [1, 0.25], [1.5, 0.5]),
        ("weighted", [0.8536, 0.3536], [1, 0.7071]),
        ("normalised", [1, 0.4605], [1.0790, 0.9210]),
    ],
)
def test_by_hand_the_lost_token_lies_between_two_and_goes_into_the_first(rule, key, value):
    block, choice = make_prompt([[1, 0], [0, 1], [1, 1]], [[2, 0], [0, 1], [0, 2]], [0, 1])
    actual = run_rule(NearestMerge(rule), block, choice)
    np.testing.assert_allclose(actual.k[0, 0], [key, [0, 1]], atol=5e-5)
    np.testing.assert_allclose(actual.v[0, 0], [value, [0, 1]], atol=5e-5)


def test_text_stays_before_images_and_all_that_leaves_is_merged():
    """Positions 1 to 4 of a sequence are images: two of them stay of nine tokens, all of six tokens."""
    batch = layer.random_batch()
    state = layer.prefill(layer.bind(SMALL), batch)
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
        received = eviction.accumulated_scores(eviction.attention_weights(q, k))[1]
        for head in range(layer.K):
            kept_tokens = select_tokens(received[head], 6, 2, 1, [1, 2, 3, 4])
            assert {t for t in range(n) if not 1 <= t <= 4} <= set(kept_tokens)
            positions, *actual = head_slots(state, b, head)
            assert positions == kept_tokens
            for x, expected in zip(actual, merge_tokens(k[head], v[head], kept_tokens, "pivot"), strict=True):
                np.testing.assert_allclose(x, expected, atol=2e-6)
