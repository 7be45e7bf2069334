"""Elastic Cache against its oracle: anchors, the tokens averaged into them, and evictions while decoding.

Elastic Cache in NumPy, float64, from its paper (arXiv 2407.18121) and public code, with true ranks: one sequence.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kvjax import parse
from kvjax.errors import IncompatibleMethod
from kvjax.methods.elastic_cache import AnchorMerge
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.merge import evicted_tokens
from tests.oracles.slots import head_slots
from tests.oracles.test_merge import KEPT, LENGTHS, make_prompt, ragged_prompts, run_rule


def select_tokens(received: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks, the last token and the best others by attention received [T], the mean over all heads."""
    T = len(received)
    if budget >= T:
        return list(range(T))
    others = sorted(range(sinks, T - 1), key=lambda t: -received[t])
    return sorted([*range(sinks), *others[: budget - sinks - 1], T - 1])


def merge_tokens(x: np.ndarray, tokens: list[int], sinks: int) -> np.ndarray:
    """Averages keys or values [T H]: each kept token with the evicted tokens that are nearest to it."""
    anchors = tokens[sinks:-1]
    groups = {s: [s] for s in tokens}
    for t in evicted_tokens(x, tokens):
        if anchors:
            groups[min(anchors, key=lambda s: (abs(s - t), s))].append(t)
    return np.array([x[groups[s]].astype(float).mean(0) for s in tokens])


def positions_after_decode(prompt_tokens: list[int], n: int, num_steps: int, budget: int, distance: int) -> list[int]:
    """The cached positions after `num_steps` steps that follow a prompt of n tokens."""
    positions = list(prompt_tokens)
    for t in range(n, n + num_steps):
        positions.append(t)
        if len(positions) > budget:
            del positions[-1 - distance]
    return positions


SMALL = "elastic_cache:budget=6,sinks=1,distance=3"


def test_merging_is_its_oracle_whatever_the_padding_holds():
    block, choice = ragged_prompts()
    actual = run_rule(AnchorMerge(1), block, choice)
    for b, (n, kept_tokens) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        for head, slots in enumerate(np.asarray(choice.slots[b])):
            for merged, x in ((actual.k, block.k), (actual.v, block.v)):
                expected = merge_tokens(np.asarray(x[b, head, :n], np.float64), slots[:kept_tokens].tolist(), 1)
                np.testing.assert_allclose(merged[b, head, :kept_tokens], expected, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, run_rule(AnchorMerge(1), *ragged_prompts(padding=np.inf)), actual)


@pytest.mark.parametrize(
    ("kept_tokens", "expected"),
    [
        ([0, 2, 5, 6], [0, (1 + 2 + 3) / 3, (4 + 5) / 2, 6]),
        ([0, 2, 4, 6], [0, (1 + 2 + 3) / 3, (4 + 5) / 2, 6]),  # token 3 is as near to 4 as to 2
        ([0, 6], [0, 6]),  # no anchor between the first and the last
    ],
)
def test_by_hand_tokens_go_into_the_nearest_of_two_anchors(kept_tokens, expected):
    block, choice = make_prompt([[1, 0]] * 7, [[t] for t in range(7)], kept_tokens)
    np.testing.assert_allclose(run_rule(AnchorMerge(1), block, choice).v[0, 0, :, 0], expected, atol=1e-6)


def test_heads_share_their_tokens_and_one_at_a_fixed_distance_leaves():
    batch = layer.random_batch()
    bound = layer.bind(SMALL)
    state = layer.prefill(bound, batch)
    after = state
    for step in range(layer.STEPS):
        _, after = layer.compile_extend(bound)(after, batch.token(step))
    assert state.pos.shape == (layer.B, 1, 7)
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
        kept_tokens = select_tokens(eviction.accumulated_scores(eviction.attention_weights(q, k))[1].mean(0), 6, 1)
        positions_left = positions_after_decode(kept_tokens, n, layer.STEPS, 6, 3)
        for head in range(layer.K):
            positions, keys, values = head_slots(state, b, head)
            assert positions == kept_tokens
            np.testing.assert_allclose(keys, merge_tokens(k[head], kept_tokens, 1), atol=2e-6)
            np.testing.assert_allclose(values, merge_tokens(v[head], kept_tokens, 1), atol=2e-6)
            assert head_slots(after, b, head)[0] == positions_left
        assert positions_left[-3:] == [n + layer.STEPS - 3, n + layer.STEPS - 2, n + layer.STEPS - 1]


def test_its_policy_wants_a_selection_with_a_budget_in_tokens():
    single = dataclasses.replace(parse(SMALL), select=None, merge=None)
    with pytest.raises(
        IncompatibleMethod, match="component `decode`.*component `select`.*use a selection with a budget"
    ):
        layer.bind(single)
