"""CriticalKV against its oracle, alone and over AdaKV's budgets of heads.

CriticalKV in NumPy, one head at a time, from the two stages of the paper (arXiv 2502.03805) and kvpress' class.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.eviction.rescoring import TwoStage
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.methods.criticalkv import OutputScores, output_norms
from tests.contract import layer
from tests.oracles import adakv, eviction


def projected_norms(v, output) -> np.ndarray:
    """The mean over G of |v W|_1, [T], for values [T H] and the output projections of their query heads [G H D]."""
    return np.mean([np.abs(v @ w).sum(-1) for w in output], 0)


def select_tokens(scores, norms, budget: int, always=(), fraction: float = 0.5) -> list[int]:
    """Selects `budget` tokens of a head.

    The tokens of `always` come first, then the best by score up to `fraction` of the budget, then the best by
    (score + 1e-4) times their norm.
    """
    candidates = [t for t in range(len(scores)) if t not in always]
    num_by_score = max(int(fraction * budget) - len(always), 0)
    chosen = sorted(candidates, key=lambda t: (-scores[t], t))[:num_by_score]
    others = sorted((t for t in candidates if t not in chosen), key=lambda t: (-(scores[t] + 1e-4) * norms[t], t))
    return sorted([*always, *chosen, *others[: budget - len(always) - num_by_score]])


SNAPKV = "snapkv:budget=7,window=2,kernel=3"


def test_the_example_by_hand():
    score, c = [0.4, 0.3, 0.2, 0.1], [1, 1, 1, 4]
    assert select_tokens(score, c, 2) == [0, 3] and select_tokens(score, [1] * 4, 2) == [0, 1]
    scores, new = (jnp.asarray(x, jnp.float32)[None, None] for x in (score, (np.array(score) + 1e-4) * c))
    count, num_always = jnp.array([2], jnp.int32), jnp.array([0], jnp.int32)
    ranking = TwoStage(0.5, new).rank(scores, jnp.ones((1, 1, 4), bool), count, num_always)
    assert sorted(np.argsort(-ranking[0, 0])[:2].tolist()) == [0, 3]


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_what_values_add_is_counted_some_tokens_at_a_time(tokens):
    rng = np.random.default_rng(tokens)
    v, output = rng.normal(size=(2, 3, 9, 4)), rng.normal(size=(1, 3, 2, 4, 5))
    actual = output_norms(jnp.asarray(v, jnp.float32), jnp.asarray(output, jnp.float32), tokens)
    expected = [[projected_norms(v[b, h], output[0, h]) for h in range(3)] for b in range(2)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def oracle_tokens(batch: layer.SequenceBatch, output: np.ndarray, b: int, n: int, over_adakv: bool) -> list[list[int]]:
    """The tokens that each head of sequence b keeps."""
    q, k, v = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
    scores = eviction.snapkv_scores(eviction.attention_weights(q, k, None), 2, 3, "max")[1]
    always, units, quota = eviction.split_units(n, 7, 0, 2, 1)
    budgets = [len(always) + quota] * layer.K
    if over_adakv and quota:
        worth = [eviction.unit_scores(head_scores, units) for head_scores in scores]
        budgets = [len(always) + count for count in adakv.budgets(worth, quota)]
    reach = [projected_norms(v[h], output[0, h]) for h in range(layer.K)]
    return [select_tokens(scores[h], reach[h], budgets[h], always) for h in range(layer.K)]


@pytest.mark.parametrize("over_adakv", [False, True])
def test_heads_keep_what_the_oracle_keeps_in_a_ragged_batch(over_adakv):
    changed = 0
    text = SNAPKV + (" + adakv:page=4" if over_adakv else "")
    bound, plain = layer.bind(text + " + criticalkv"), layer.bind(text)
    for seed in range(3):
        batch = layer.random_batch(seed)
        output = np.asarray(layer.model_arrays(bound, *layer.prompt(batch))[1], np.float64)
        positions, plain_positions = (
            np.asarray(m.positions(layer.prefill(m, batch, padding=np.inf))) for m in (bound, plain)
        )
        changed += (positions != plain_positions).any()
        for b, n in enumerate(batch.lengths.tolist()):
            for head, tokens in enumerate(oracle_tokens(batch, output, b, n, over_adakv)):
                assert sorted(p for p in positions[b, head].tolist() if p >= 0) == tokens
    assert changed


def test_with_all_of_the_budget_by_the_scorer_it_is_the_scorers_choice():
    batch = layer.random_batch(1)
    single, whole = (layer.bind(SNAPKV + more) for more in ("", " + criticalkv:share=1"))
    np.testing.assert_array_equal(*(m.positions(layer.prefill(m, batch)) for m in (single, whole)))


def test_where_it_cannot_stand_it_says_why():
    for method, says in (
        ("criticalkv", "component `second_stage`.* works on an eviction method's selection .* compose it with one"),
        (SNAPKV + " + criticalkv + recompress", "component `second_stage`.*component `decode`.*leave one of them out"),
    ):
        with pytest.raises(IncompatibleMethod, match=says):
            layer.bind(method)
    with pytest.raises(KvjaxError, match="share must lie in"):
        kvjax.methods.criticalkv(share=1.5)
    assert OutputScores().needs_output
