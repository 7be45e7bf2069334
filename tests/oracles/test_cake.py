"""CAKE against its oracle: the measures of layers, their division of the budget, and the kept tokens of heads.

CAKE in NumPy, one sequence and layer at a time, from its paper (arXiv 2503.12491) and its public code's rounding.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.eviction.budgets import PromptFraction
from kvjax.core.attention import Rule
from kvjax.core.attention_mass import Observation, moments
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.cake import Preference, ShiftingAttention
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.eviction import pool_scores


def preference(attention, tau1: float = 1.6, tau2: float = 0.6) -> float:
    """Combines dispersion and shift of the window's attention to the tokens before it, [heads W past]."""
    dispersion = -(attention * np.log(attention + 1e-10)).sum()
    shift = attention.var(1, ddof=1).sum()
    return float(dispersion ** (1 / tau1) * shift ** (1 / tau2))


def scores(attention, kernel: int = 5, gamma: float = 200.0) -> np.ndarray:
    """The scores of the tokens before the window, from the attention [G W past] of one key/value head."""
    head_scores = attention.mean(1) + gamma * attention.var(1, ddof=1)
    return np.mean([pool_scores(values, kernel, "avg") for values in head_scores], 0)


def spread_equally(parts: list[int], amount: int, least: int, most: int) -> list[int]:
    """Adds `amount` to the parts that are not at their limit, in equal steps; the remainder goes to the first ones."""
    parts = list(parts)
    while amount:
        free = [i for i, x in enumerate(parts) if (x < most if amount > 0 else x > least)]
        step, remainder = divmod(abs(amount), len(free))
        for rank, i in enumerate(free):
            change = step + (rank < remainder)
            change = min(change, most - parts[i]) if amount > 0 else -min(change, parts[i] - least)
            parts[i], amount = parts[i] + change, amount - change
            if not amount:
                break
    return parts


def budgets(preferences: list[float], total: int, most: int) -> list[int]:
    """Budgets of the layers without the window: at least one token and at most `most` each, `total` in all."""
    total_preference = sum(preferences)
    fractions = [x / total_preference if total_preference else 1 / len(preferences) for x in preferences]
    parts = [int(x * total) for x in fractions]
    excess = sum(max(x - most, 0) for x in parts)
    parts = spread_equally([min(x, most) for x in parts], excess, 0, most)
    parts = [max(x, 1) for x in parts]
    return spread_equally(parts, total - sum(parts), 1, most)


LENGTHS, S, W, L = (40, 3, 27, 12), 40, 6, 3


@functools.cache
def bind_layer(text: str, index: int = 0, layers: int = L):
    """Binds a method to one of several layers."""
    return kvjax.parse(text).bind(
        dataclasses.replace(layer.spec(head_dim=8), index=index, num_layers=layers, method_layers=None)
    )


def prompt_batch(seed: int, padding: float = 0.0) -> tuple[KVBlock, Observation]:
    """A layer's ragged prompts, and their last W queries."""
    q, k, v, pos = eviction.random_prompts(LENGTHS, S, seed, padding)
    at = np.array(LENGTHS)[:, None] - W + np.arange(W)[None]
    q = np.take_along_axis(q, np.clip(at, 0, S - 1)[:, None, None, :, None], 3)
    return KVBlock(*map(jnp.asarray, (k, v, pos[:, None]))), Observation(
        jnp.asarray(q), jnp.maximum(jnp.asarray(at), -1)
    )


@functools.cache
def window_attention(seed: int, b: int) -> np.ndarray:
    """The attention [K G W past] of sequence b's window to the tokens before it."""
    q, k, _, _ = eviction.random_prompts(LENGTHS, S, seed)
    n = LENGTHS[b]
    return eviction.attention_weights(q[b, :, :, :n], k[b, :, :n])[:, :, -W:, : n - W]


def test_the_example_by_hand():
    attention = np.array([[[0.8, 0.2], [0.2, 0.8]]])
    assert -(attention * np.log(attention)).sum() == pytest.approx(1.0008, abs=1e-4)
    assert attention.var(1, ddof=1).sum() == pytest.approx(0.36)
    assert preference(attention) == pytest.approx(0.1823, abs=1e-4)
    # The same attention from queries and keys: two tokens, and a window of two that no query attends to.
    odds = 2 * np.log(4)
    q = jnp.array([[odds, 0, 1, 0], [0, odds, 1, 0]], jnp.float32)[None, None, None]
    k = jnp.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -999, 0], [0, 0, -999, 0]], jnp.float32)[None, None]
    block, observation = KVBlock(k, k, jnp.arange(4)[None, None]), Observation(q, jnp.array([[2, 3]]))
    assert bind_layer("cake:budget=3,window=2").measure(block, observation)[0] == pytest.approx(0.1823, abs=1e-4)


def test_the_example_of_budgets():
    assert budgets([1, 3], 8, 100) == [2, 6]
    assert budgets([1, 3], 8, 5) == [3, 5]
    num_kept = bind_layer("cake:budget=6,window=2", layers=2).divide_budget(
        jnp.array([[1.0] * 3, [3.0] * 3]), jnp.array([100, 7, 4])
    )
    assert np.asarray(num_kept).T.tolist() == [[2 + 2, 6 + 2], [3 + 2, 5 + 2], [4, 4]]


@pytest.mark.parametrize("layers", [1, 7])
def test_budgets_are_the_oracles_row_by_row(layers):
    rng = np.random.default_rng(layers)
    measures = rng.gamma(0.3, size=(layers, 40)).astype(np.float32)
    measures[:, :2] = 0
    lengths = rng.integers(1, 60, 40)
    num_kept = np.asarray(
        bind_layer("cake:budget=20,window=4", layers=layers).divide_budget(measures, jnp.asarray(lengths, jnp.int32))
    )
    for b, n in enumerate(lengths.tolist()):
        assert num_kept[:, b].sum() == layers * min(n, 20)
        assert num_kept[:, b].max() <= n and num_kept[:, b].min() >= min(n, 4 + 1)
        if n > 4:
            expected = budgets(measures[:, b].tolist(), layers * (min(n, 20) - 4), n - 4)
            assert (num_kept[:, b] - 4).tolist() == expected
    even = np.minimum(lengths[:2], 20)
    np.testing.assert_array_equal(num_kept[:, :2], np.broadcast_to(even, (layers, 2)))


@pytest.mark.parametrize("padding", [0.0, 1e4, np.inf])
def test_measures_and_scores_are_the_oracles_whatever_the_padding_holds(padding):
    method = bind_layer(f"cake:budget=16,window={W}")
    block, observation = prompt_batch(0, padding)
    measures = np.asarray(jax.jit(method.measure)(block, observation))
    scored = np.asarray(
        jax.jit(ShiftingAttention(W, 5, "avg").scores, static_argnums=2)(block, observation, method.spec).per_kv_head
    )
    for b, n in enumerate(LENGTHS):
        if n <= W:
            assert measures[b] == 0
            continue
        a = window_attention(0, b)
        assert measures[b] == pytest.approx(preference(a.reshape(-1, *a.shape[2:])), rel=1e-4)
        for head in range(2):
            np.testing.assert_allclose(scored[b, head, : n - W], scores(a[head]), rtol=1e-4, atol=1e-5)
            assert (scored[b, head, n - W : n] >= 1).all() and (scored[b, head, n:] == -np.inf).all()


def test_more_queries_than_the_window_change_nothing():
    block, observation = prompt_batch(1)
    longer = Observation(
        jnp.pad(observation.q, [(0, 0)] * 3 + [(3, 0), (0, 0)], constant_values=9.0),
        jnp.pad(observation.pos, [(0, 0), (3, 0)]),
    )
    method = bind_layer(f"cake:budget=16,window={W}")
    np.testing.assert_allclose(method.measure(block, longer), method.measure(block, observation), rtol=1e-6)
    for few, all_at_once in zip(moments(block, longer, Rule(9), 4), moments(block, longer, Rule(9)), strict=True):
        np.testing.assert_allclose(few, all_at_once, atol=1e-6)


def test_layers_keep_what_the_oracle_keeps():
    text, per_layer = f"cake:budget=12,window={W}", []
    blocks = [prompt_batch(seed) for seed in range(L)]
    measures = jnp.stack([bind_layer(text, i).measure(*blocks[i]) for i in range(L)])
    num_kept = bind_layer(text).divide_budget(measures, jnp.array(LENGTHS))
    for i, (block, observation) in enumerate(blocks):
        state = jax.jit(bind_layer(text, i).prefill, static_argnums=2)(
            block, observation._replace(num_kept=num_kept[i]), S
        )
        per_layer.append(np.asarray(state.pos))
    for b, n in enumerate(LENGTHS):
        if n <= 12:
            assert all((pos[b, :, :n] == np.arange(n)).all() for pos in per_layer)
            continue
        windows = [window_attention(seed, b) for seed in range(L)]
        preferences = [preference(a.reshape(-1, *a.shape[2:])) for a in windows]
        counts = budgets(preferences, L * (12 - W), n - W)
        assert len(set(counts)) > 1
        for pos, a, count in zip(per_layer, windows, counts, strict=True):
            for head in range(2):
                expected = eviction.top_indices(scores(a[head]), count) + list(range(n - W, n))
                assert pos[b, head][pos[b, head] >= 0].tolist() == expected


def test_a_model_divides_the_budget_of_each_row_whole_and_in_chunks():
    model, prompts, text = toy_model(), [list(range(60)), [5], list(range(30, 70))], "cake:budget=12,window=4"
    full = kvjax.read(model, prompts, text, headroom=32)
    chunks = kvjax.read(model, prompts, text, headroom=32, chunk=8)
    single = kvjax.read(model, prompts[2:], text, headroom=32)
    counts = np.array([[len(heads[0]) for heads in layer_heads] for layer_heads in full.kept_positions()])
    assert counts.sum(0).tolist() == [3 * 12, 3 * 1, 3 * 12]
    assert counts[:, [0, 2]].min() >= 5 and len(set(counts[:, 0])) > 1 and not (counts[:, 0] == counts[:, 2]).all()
    for a, b, c in zip(full.kept_positions(), chunks.kept_positions(), single.kept_positions(), strict=True):
        for heads, other in [*zip(a, b, strict=True), (a[2], c[0])]:
            assert [head.tolist() for head in heads] == [head.tolist() for head in other]
    room = full.cache.capacity - 60
    for layer_heads, state in zip(counts, full.cache.layers, strict=True):  # slots follow the sequence that keeps most
        assert 0 <= state.pos.shape[2] - layer_heads.max() - room < 16 + 16
    tokens = full.generate(max_new_tokens=5).tokens
    assert (
        tokens == chunks.generate(max_new_tokens=5).tokens and tokens[2] == single.generate(max_new_tokens=5).tokens[0]
    )


def test_wrong_values_say_so():
    method = kvjax.Method(select=kvjax.methods.cake().select, layer_budgets=Preference())
    ratio = dataclasses.replace(method.select, budget=PromptFraction(0.5))
    with pytest.raises(KvjaxError, match="grows with the text"):
        dataclasses.replace(method, select=ratio).bind(layer.spec()).divide_budget(jnp.ones((1, 1)), jnp.array([90]))
