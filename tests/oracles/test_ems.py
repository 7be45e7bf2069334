"""EMS against its oracle: global and local scores, the band that may merge, and the zero class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import Scores
from kvjax.methods.ems import CenterMerge
from tests.contract import layer
from tests.oracles import ems as oracle
from tests.oracles import eviction
from tests.oracles.slots import head_slots
from tests.oracles.test_merge import KEPT, LENGTHS, make_prompt, ragged_prompts, run_rule

SMALL = "ems:budget=6,window=2,threshold=0"


@pytest.mark.parametrize("rule", [CenterMerge(1.0, 0.0), CenterMerge(0.5, 0.2)], ids=str)
def test_merging_is_its_oracle_whatever_the_padding_holds(rule):
    block, choice = ragged_prompts()
    actual = run_rule(rule, block, choice)
    for b, (n, kept_tokens) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        for head, slots in enumerate(np.asarray(choice.slots[b])):
            k, v = (np.asarray(x[b, head, :n], np.float64) for x in (block.k, block.v))
            score = np.asarray(choice.scores.per_kv_head[b, head, :n], np.float64)
            keys, values = oracle.merge_tokens(k, v, score, slots[:kept_tokens].tolist(), rule.band, rule.threshold)
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
            score = oracle.scores(a[head], 2)
            kept_tokens = oracle.select_tokens(score, 6, 2)
            positions, *actual = head_slots(state, b, head)
            assert positions == kept_tokens
            for x, expected in zip(
                actual, oracle.merge_tokens(k[head], v[head], score, kept_tokens, 1.0, 0.0), strict=True
            ):
                np.testing.assert_allclose(x, expected, atol=5e-6)
