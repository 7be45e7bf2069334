"""A budget over the whole model against its oracle: kept tokens, their bytes, and scores that cannot be ranked."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.cache.eviction.budget_allocation import most_shared_slots, round_up_shared
from kvjax.cache.eviction.ranking import ModelRanking
from kvjax.cache.eviction.selection import Candidates, score_candidates
from kvjax.errors import KvjaxError
from kvjax.methods.keydiff import KeyDiff
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import keydiff
from tests.oracles import model_ranking as oracle

OVER_THE_MODEL = "adakv:scope=model,alpha=0,page=4"
PROMPTS = [list(range(60)), [5, 9, 5, 5, 1, 7, 3], list(range(30, 70))]


def count_tokens(rule: ModelRanking, scores: np.ndarray, lengths: list[int], quotas: list[list[int]]) -> np.ndarray:
    """The tokens of each head by scores [L B K U] of sequences of these lengths and quotas [L][B]; 2 more are sinks."""
    bound = kvjax.parse(f"keydiff:budget=9,sinks=2 + {OVER_THE_MODEL}").bind(layer.spec())
    inside = np.arange(scores.shape[3]) < np.array(lengths)[None, :, None, None]
    batch_heads = Candidates(
        jnp.asarray(np.where(inside, scores, -np.inf), jnp.float32),
        jnp.asarray(quotas, jnp.int32),
        jnp.full(scores.shape[:2], 2, jnp.int32),
    )
    allocate = jax.jit(lambda x: rule.allocate_tokens(bound.selection, x, jnp.asarray(lengths, jnp.int32)))
    return np.asarray(allocate(batch_heads))


def test_the_example_by_hand():
    """Two layers of two heads keep two of four tokens in the mean: 9 8 7 6 5 4 | 3 3 are the best eight."""
    scores = np.array([[[[9, 8, 7, 1], [3, 2, 1, 0]]], [[[6, 5, 4, 0], [3, 0, 0, 0]]]])
    assert count_tokens(ModelRanking(), scores, [4], [[2], [2]]).tolist() == [[[5, 3]], [[5, 3]]]
    # Half of the budget is safe: each head keeps its best token.
    low = np.array([[[[9, 8, 7, 6], [9, 8, 7, 6]]], [[[1, 0, 0, 0], [1, 0, 0, 0]]]])
    assert count_tokens(ModelRanking(), low, [4], [[2], [2]]).tolist() == [[[6, 6]], [[2, 2]]]
    assert count_tokens(ModelRanking(safe=0.5), low, [4], [[2], [2]]).tolist() == [[[5, 5]], [[3, 3]]]


def test_normalised_scores_of_a_layer_sum_to_one():
    """The layer's two heads together, of each sequence; the recent token takes no part."""
    bound = layer.bind(f"random:budget=4,recent=1 + {OVER_THE_MODEL}")
    block = layer.prompt(layer.random_batch())[1]
    plain = bound.measure(block, None).scores
    scaled = ModelRanking(normalise=True).measure(bound.selection, block, None).scores
    inside = np.isfinite(plain)
    total = np.where(inside, plain, 0).sum((1, 2), keepdims=True)
    np.testing.assert_array_equal(np.isfinite(scaled), inside)
    np.testing.assert_allclose(np.where(inside, scaled, 0), np.where(inside, plain, 0) / np.maximum(total, 1e-30), 1e-6)


@pytest.mark.parametrize(("method", "negative"), [("keynorm", True), ("keydiff", True), ("random", False)])
def test_normalised_scores_keep_their_order_whatever_their_sign(method, negative):
    bound = layer.bind(f"{method}:budget=4 + {OVER_THE_MODEL},normalise=true")
    block = layer.prompt(layer.random_batch())[1]
    plain = np.asarray(score_candidates(bound.selection, block, None).scores)
    scaled = np.asarray(bound.measure(block, None).scores)
    assert (plain[np.isfinite(plain)] < 0).any() == negative
    np.testing.assert_array_equal(np.argsort(scaled, -1, kind="stable"), np.argsort(plain, -1, kind="stable"))
    np.testing.assert_allclose(np.where(np.isfinite(scaled), np.abs(scaled), 0).sum((1, 2)), 1, 1e-5)


def test_norms_of_keys_are_ranked_beside_the_mean_norm_of_their_layer():
    """Keys are read off the exact cache. Without the division they would be refused."""
    model, prompt = toy_model(kv_heads=2), PROMPTS[0]
    context = kvjax.read(model, [prompt], f"keynorm:budget=12 + {OVER_THE_MODEL},normalise=true")
    exact = kvjax.read(model, [prompt], "full").cache.layers
    norms = [np.linalg.norm(np.asarray(state.k.data, np.float64)[0, :, : len(prompt)], axis=-1) for state in exact]
    expected = oracle.select_units([(-norm / norm.sum()).tolist() for norm in norms], [12] * len(norms))
    for layer_kept, layer_want in zip(context.kept_positions(), expected, strict=True):
        assert [head.tolist() for head in layer_kept[0]] == layer_want


@pytest.mark.parametrize(
    "method",
    [
        "kvzip:budget=4",
        "turned_queries:budget=6,sinks=2,recent=4",
        f"snapkv:budget=8,window=6,unit=chunk4 + {OVER_THE_MODEL}",
        f"pyramidkv:budget=9,window=8,unit=page4 + {OVER_THE_MODEL}",
    ],
)
def test_a_budget_that_leaves_nothing_to_rank_names_the_least_that_does(method):
    with pytest.raises(KvjaxError, match="nothing is left to rank over the model; give budget>=") as e:
        layer.bind(method)
    least = re.search(r"budget>=(\d+)", str(e.value))[1]
    layer.bind(re.sub(r"budget=\d+", f"budget={least}", method))


@pytest.mark.parametrize("levels", [3, 10**6])
@pytest.mark.parametrize("safe", [0.0, 0.5])
def test_counts_are_the_oracles_in_ragged_batches_with_many_ties(levels, safe):
    rng = np.random.default_rng(levels)
    lengths, quotas = [20, 1, 13, 20], [[6, 1, 4, 20], [2, 0, 8, 20], [4, 1, 0, 20]]
    scores = rng.integers(0, levels, (3, 4, 2, 20)) * rng.integers(1, 4, (3, 4, 2, 1))
    counts = count_tokens(ModelRanking(safe=safe), scores, lengths, quotas)
    for b, n in enumerate(lengths):
        sequence_quotas = [quota[b] for quota in quotas]
        expected = oracle.select_units(scores[:, b, :, :n].tolist(), sequence_quotas, safe)
        assert (counts[:, b] - 2).tolist() == [[len(units) for units in heads] for heads in expected]
        assert (counts[:, b] - 2).sum() == 2 * sum(sequence_quotas)


@pytest.mark.parametrize("chunk", [None, 8])
def test_all_heads_keep_what_the_oracle_keeps_of_their_keys(chunk):
    """Keys are read off the exact cache; 3 recent tokens stay in every head."""
    model, budget, recent = toy_model(kv_heads=2), 12, 3
    context = kvjax.read(model, PROMPTS, f"keydiff:budget={budget},recent={recent} + {OVER_THE_MODEL}", chunk=chunk)
    exact = kvjax.read(model, PROMPTS, "full").cache.layers
    unequal = 0
    for b, prompt in enumerate(PROMPTS):
        n = len(prompt)
        keys = [np.asarray(state.k.data, np.float64)[b, :, :n] for state in exact]
        scores = [[keydiff.scores(head)[: n - min(recent, n)].tolist() for head in heads] for heads in keys]
        expected = oracle.select_units(scores, [min(budget, n) - min(recent, n)] * len(scores))
        newest = list(range(n - min(recent, n), n))
        for layer_kept, layer_want in zip(context.kept_positions(), expected, strict=True):
            for head, units in zip(layer_kept[b], layer_want, strict=True):
                assert head.tolist() == units + newest
                unequal += len(head) != budget
    assert unequal > 3


def test_a_sequence_does_not_depend_on_its_neighbours():
    model = toy_model(kv_heads=2)
    text = f"snapkv:budget=12,window=4,kernel=3 + {OVER_THE_MODEL} + kvcrush + int8"
    together = kvjax.read(model, PROMPTS, text, headroom=8)
    for b, prompt in enumerate(PROMPTS):
        single = kvjax.read(model, [prompt], text, headroom=8)
        for batch_heads, single_heads in zip(together.kept_positions(), single.kept_positions(), strict=True):
            assert [head.tolist() for head in batch_heads[b]] == [head.tolist() for head in single_heads[0]]
        assert together.generate(max_new_tokens=5).tokens[b] == single.generate(max_new_tokens=5).tokens[0]


def test_representatives_leave_no_head_without_tokens_of_its_own():
    """KVCrush's slots are the same in all heads, a quarter of the mean budget; ranked heads have at least as many."""
    text = f"keydiff:budget=12,recent=2 + {OVER_THE_MODEL} + kvcrush:share=0.5"
    context = kvjax.read(toy_model(kv_heads=2), PROMPTS[:1], text)
    lengths = [len(head) for heads in context.kept_positions() for head in heads[0]]
    assert sum(lengths) == 12 * len(lengths) and min(lengths) >= 2 + 5


@pytest.mark.parametrize(
    "method", ["keydiff:budget=12,recent=2", "kvzip:budget=25%,level=head", "snapkv:budget=12,window=4"]
)
@pytest.mark.parametrize("length", [60, 130, 333])
def test_a_plan_is_never_below_what_is_held_and_allocated(method, length):
    model, prompt = toy_model(kv_heads=2), np.random.default_rng(length).integers(0, 60, length).tolist()
    text = f"{method} + {OVER_THE_MODEL} + int8"
    context = kvjax.read(model, [prompt], text, headroom=16)
    planned = kvjax.planned_bytes(text, model, length, capacity=context.cache.capacity)
    assert context.bytes.held["device"] <= planned.held["device"] <= 1.5 * context.bytes.held["device"]
    assert context.bytes.total["device"] <= planned.total["device"]


def test_slots_are_rounded_up_to_two_sizes_for_each_doubling():
    sizes = [round_up_shared(n, mean_slots=0, most_slots=10**6) for n in range(1, 2000)]
    assert sorted(set(sizes)) == [16 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    assert all(n <= size < 1.5 * n + 16 for n, size in enumerate(sizes, 1))
    assert [round_up_shared(n, mean_slots=256, most_slots=10**6) for n in (1, 64, 65)] == [64, 64, 96]
    assert round_up_shared(200, mean_slots=100, most_slots=203) == 208, "no layer needs more than the whole prompt"
    assert round_up_shared(640, mean_slots=100, most_slots=600) == 640, "but for its pages, which may be large"


@pytest.mark.parametrize("seed", range(3))
def test_sizes_together_stay_below_what_is_planned_for_them(seed):
    rng = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 2.0):
        needed = np.ceil(rng.lognormal(5, spread, 32)).astype(int).clip(1, 4000)
        mean = int(needed.mean()) + 1
        sizes = [round_up_shared(int(n), int(needed.mean()), most_slots=4000) for n in needed]
        assert sum(sizes) <= len(sizes) * most_shared_slots(mean, most_slots=4000)


def test_layers_and_texts_share_sizes():
    """Two texts of one length, whose divisions differ, have pools of the same few sizes."""
    model = toy_model(kv_heads=2, layers=6)
    texts = [np.random.default_rng(seed).integers(0, 60, 400).tolist() for seed in (1, 2)]
    contexts = [kvjax.read(model, [text], f"keydiff:budget=100 + {OVER_THE_MODEL}", headroom=16) for text in texts]
    lengths = [[len(head) for heads in context.kept_positions() for head in heads[0]] for context in contexts]
    assert lengths[0] != lengths[1]
    for context in contexts:
        pools = [state.side_store.pos.shape[2] for state in context.cache.layers]
        assert set(pools) <= {32, 48, 64, 96, 128, 192, 256, 384}


@dataclasses.dataclass(frozen=True)
class CountedScorer(KeyDiff):
    """KeyDiff that counts how often it is traced."""

    calls: ClassVar[list[int]] = []

    def scores(self, block, observation, spec):
        self.calls.append(block.k.shape[2])
        return super().scores(block, observation, spec)


def test_a_prompt_is_scored_once_for_the_ranking_and_the_choice():
    ranked = kvjax.parse(f"keydiff:budget=12,recent=2 + {OVER_THE_MODEL}")
    counted = dataclasses.replace(ranked, select=dataclasses.replace(ranked.select, scorer=CountedScorer()))
    model, tokens = toy_model(kv_heads=2), jnp.asarray([PROMPTS[0]])
    lengths = jnp.asarray([len(PROMPTS[0])])
    caches = [
        functional.prefill(model.params, tokens, lengths, functional.bind(method, model.config), model.config, 72)[1]
        for method in (counted, ranked)
    ]
    assert CountedScorer.calls == [60], "equal layers share the program that scores them"
    chex.assert_trees_all_equal(caches[0].layers, caches[1].layers)


@pytest.mark.parametrize("method", ["kvzip", "turned_queries"])
def test_levels_are_the_divisions_of_adakv_without_a_safe_share(method):
    equal = kvjax.parse(f"{method}:budget=12,level=head")
    assert equal.side_store is None and equal.layer_budgets is None
    over_the_model = f"{method}:budget=12,level=head + adakv:alpha=0,scope=model"
    assert kvjax.parse(f"{method}:budget=12") == kvjax.parse(f"{method}:budget=12,level=model")
    assert kvjax.parse(f"{method}:budget=12") == kvjax.parse(over_the_model)
    ranked, adakv = (
        kvjax.read(toy_model(kv_heads=2), PROMPTS, f"{method}:budget=12,{how}")
        for how in ("level=layer,page=4", "level=head + adakv:alpha=0,page=4")
    )
    for ranked_heads, plain_heads in zip(ranked.kept_positions(), adakv.kept_positions(), strict=True):
        assert [[x.tolist() for x in heads] for heads in ranked_heads] == [
            [x.tolist() for x in heads] for heads in plain_heads
        ]
    assert ranked.bytes == adakv.bytes


@pytest.mark.parametrize("more", ["kvcrush", "criticalkv", "int8", "int4", "merging"])
def test_the_model_level_composes_with_what_works_on_single_tokens(more):
    model, text = toy_model(kv_heads=2), f"kvzip:budget=12,page=4 + {more}"
    context = kvjax.read(model, PROMPTS[:1], text, headroom=8)
    lengths = [[len(head) for head in heads[0]] for heads in context.kept_positions()]
    assert sum(map(sum, lengths)) == 12 * 2 * len(lengths) and len(set(map(tuple, lengths))) > 1
    assert np.isfinite(context.last_logits).all() and len(context.generate(max_new_tokens=3).tokens[0]) == 3
