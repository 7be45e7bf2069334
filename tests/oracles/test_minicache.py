"""MiniCache against its oracle, in the pairs of layers of a model.

MiniCache in NumPy, float64, from its paper (arXiv 2405.14366): one head of one sequence at a time.
"""

from __future__ import annotations

import functools
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.cache.protocol import BoundLayer, Cache, LayerSpec
from kvjax.core.attention import sink_partial
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.core.mesh import axes_of_layer_array, named_sharding
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.engine.layer_prompt import LayerCall, LayerPrompt, compress_prompt
from kvjax.engine.modes import extend_layer
from kvjax.errors import KvjaxError
from kvjax.methods.minicache import signed_squared_cosine, slerp, split_length
from kvjax.models.config import Config
from kvjax.reuse.full_kv import FullKV, read_exactly
from kvjax.testing import dense_attention, toy_model


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=4)


def angle(a, b) -> float:
    """The angle between two vectors."""
    return float(np.arccos(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1)))


def interpolate_directions(a, b, t: float) -> np.ndarray:
    """The unit vector at the fraction t of the rotation from the direction of a to that of b."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    orthogonal = b - (a @ b) * a
    rotation = t * angle(a, b)
    return np.cos(rotation) * a + np.sin(rotation) * orthogonal / np.linalg.norm(orthogonal)


def retained_tokens(lower, upper, fraction: float) -> list[int]:
    """The tokens whose keys [T H] differ most in direction, ascending; ties go to the earlier token."""
    order = sorted(range(len(lower)), key=lambda i: (-angle(lower[i], upper[i]), i))
    return sorted(order[: ceil(fraction * len(lower) - 1e-9)])


def merge_tokens(lower, upper, retained, t: float) -> tuple[np.ndarray, np.ndarray]:
    """Merges the directions of one head's keys or values [T H] in both layers, and restores their norms."""
    below, above = lower.astype(float).copy(), upper.astype(float).copy()
    for i in set(range(len(lower))) - set(retained):
        direction = interpolate_directions(below[i], above[i], t)
        below[i], above[i] = (np.linalg.norm(x[i]) * direction for x in (below, above))
    return below, above


def merge_layers(lower, upper, fraction: float, t: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Merges (keys, values) [T H] of a head in the lower and the upper layer -> both, as the cache returns them."""
    retained = retained_tokens(lower[0], upper[0], fraction)
    keys, values = (merge_tokens(a, b, retained, t) for a, b in zip(lower, upper, strict=True))
    return list(zip(keys, values, strict=True))


LOWER, UPPER = 2, 3
PROMPTS = [list(range(1, 22)), [7], [5, 3, 1, 60, 61, 62, 63]]
LENGTHS = np.array([len(row) for row in PROMPTS])
CAPACITY, STEPS = 64, 3


@functools.cache
def full_kv() -> FullKV:
    return read_exactly(make_model(), PROMPTS)


@functools.cache
def read_context(method: str) -> kvjax.Context:
    return full_kv().compress(method, CAPACITY)


def prefill_cache(method: str) -> Cache:
    return read_context(method).cache


@functools.cache
def decoded_tokens() -> list[tuple[jax.Array, KVBlock]]:
    """Queries, keys and values of the decoded tokens, by layer."""
    rng, c = np.random.default_rng(0), make_model().config
    pos = jnp.asarray(LENGTHS[:, None] + np.arange(STEPS)[None], jnp.int32)[:, None]
    tokens = []
    a = c.kind(0).attention
    for _ in range(c.layers):
        q = jnp.asarray(rng.normal(size=(3, a.kv_heads, a.groups, STEPS, a.head_dim)) * 2, jnp.float32)
        k, v = (jnp.asarray(rng.normal(size=(3, a.kv_heads, STEPS, a.head_dim)), jnp.float32) for _ in range(2))
        tokens.append((q, KVBlock(k, v, pos)))
    return tokens


@functools.partial(jax.jit, static_argnames=("plan",))
def run_pair(plan: tuple[BoundLayer, BoundLayer], states, new) -> tuple[list[jax.Array], list]:
    """Extends both layers of a pair with new tokens -> (their outputs, their states)."""
    outs, after, carry = [], [], None
    for bound, state, (q, block) in zip(plan, states, new, strict=True):
        out, state, carry = bound.extend(state, q, block, q.shape[3], carry)
        outs.append(out)
        after.append(state)
    return outs, after


def head_tokens(i: int, b: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact keys and values [T H] of one head of a prompt."""
    prompt = full_kv().prompts[i]
    return tuple(np.asarray(x[b, head, : LENGTHS[b]], np.float64) for x in (prompt.k, prompt.v))


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_both_layers_of_a_pair_read_what_the_oracle_holds(share):
    """With all tokens exact the outputs are those of full attention; a chunk equals single steps."""
    method = f"minicache:share={share}"
    cache, new = prefill_cache(method), decoded_tokens()[LOWER:]
    plan, states = cache.plan[LOWER:], list(cache.layers[LOWER:])
    chunk, _ = run_pair(plan, states, new)
    singles = []
    for t in range(STEPS):
        one = [(q[:, :, :, t : t + 1], jax.tree.map(lambda x, t=t: x[:, :, t : t + 1], block)) for q, block in new]
        types = jax.tree.map(jax.typeof, states)
        out, states = run_pair(plan, states, one)
        assert jax.tree.map(jax.typeof, states) == types
        singles.append(out)
    for i, (q, block) in enumerate(new):
        np.testing.assert_allclose(np.concatenate([out[i] for out in singles], 3), chunk[i], atol=2e-6)
        for b, n in enumerate(LENGTHS):
            for head in range(make_model().config.kind(0).attention.kv_heads):
                merged = merge_layers(head_tokens(LOWER, b, head), head_tokens(UPPER, b, head), share, 0.6)[i]
                k, v = (np.concatenate([x, y[b, head]]) for x, y in zip(merged, (block.k, block.v), strict=True))
                expected = dense_attention(np.asarray(q[b, head]), k[None], v[None], n + np.arange(STEPS))
                np.testing.assert_allclose(chunk[i][b, head], expected, atol=2e-5)


def test_a_pair_keeps_the_same_tokens_exactly_and_every_position_once():
    cache = prefill_cache("minicache:share=0.2")
    lower, upper = cache.layers[LOWER:]
    np.testing.assert_array_equal(lower.pos, upper.pos)
    np.testing.assert_array_equal(lower.side_store.pos, upper.side_store.pos)
    assert upper.side_store.k is None and upper.side_store.v is None
    positions = np.asarray(cache.plan[LOWER].positions(lower))
    for b, n in enumerate(LENGTHS):
        for head in range(make_model().config.kind(0).attention.kv_heads):
            retained = retained_tokens(head_tokens(LOWER, b, head)[0], head_tokens(UPPER, b, head)[0], 0.2)
            assert [p for p in np.asarray(lower.pos[b, head]).tolist() if p >= 0] == retained
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == list(range(n))


def spec(index: int, layers: int) -> LayerSpec:
    return LayerSpec(index, layers, num_kv_heads=2, num_groups=2, head_dim=8, rope=Rope(8))


def test_pairs_begin_in_the_middle_and_a_last_layer_may_be_alone():
    def pairs(layers: int, method: str = "minicache") -> list[int]:
        return [kvjax.parse(method).bind(spec(i, layers)).needs.paired_layer for i in range(layers)]

    assert pairs(4) == [0, 0, 1, -1]
    assert pairs(5) == [0, 0, 1, -1, 0]
    assert pairs(1) == [0] and pairs(2) == [0, 0]
    assert pairs(3, "minicache:start=0") == [1, -1, 0]
    assert kvjax.parse("minicache").bind(spec(1, 4)) == kvjax.parse("full").bind(spec(1, 4))


@pytest.mark.parametrize("index", [LOWER, UPPER])
def test_padding_counts_for_nothing(index):
    """Padding has no effect, in this layer and in the other one."""
    bound = kvjax.parse("minicache:share=0.2").bind(spec(index, 4))
    prompt, other = (full_kv().prompts[i] for i in (index, LOWER + UPPER - index))
    pos = np.arange(prompt.k.shape[2])[None] < LENGTHS[:, None]
    block_pos = jnp.asarray(np.where(pos, np.arange(pos.shape[1])[None], -1), jnp.int32)[:, None]

    def block(of, padding: float) -> KVBlock:
        return KVBlock(*(jnp.where(pos[:, None, :, None], x, padding) for x in (of.k, of.v)), block_pos)

    @jax.jit
    def state(padding: float):
        observation = Observation(prompt.q, jnp.zeros((3, 0), jnp.int32), paired_block=block(other, padding))
        return bound.prefill(block(prompt, padding), observation, 24)

    jax.tree.map(np.testing.assert_array_equal, state(np.inf), state(0.0))


def test_a_quarter_turn_by_hand():
    """Six tenths of it are 54 degrees."""
    actual = slerp(jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 5.0]]), 0.6)
    np.testing.assert_allclose(actual[0], [0.587785, 0.809017], atol=1e-6)
    np.testing.assert_allclose(
        interpolate_directions(np.array([3.0, 0.0]), np.array([0.0, 5.0]), 0.6), actual[0], atol=1e-6
    )


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e3])
def test_where_no_plane_is_given_the_direction_is_one_of_both(scale):
    a = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)) * scale, jnp.float32)
    unit = split_length(a)[1]
    np.testing.assert_allclose(np.linalg.norm(unit, axis=-1), 1.0, atol=1e-6)
    for b, t, expected in ((a, 0.6, unit), (-a, 0.6, -unit), (-a, 0.3, unit), (0 * a, 0.6, unit), (a * 2, 0.0, unit)):
        np.testing.assert_allclose(slerp(a, b, t), expected, atol=1e-5)
    for b in (-a, 0 * a):
        assert np.isfinite(slerp(0 * a, b, 0.6)).all() and np.isfinite(slerp(a, b, 0.5)).all()


def test_the_angle_is_the_same_whichever_layer_asks():
    a, b = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(1).normal(size=(2, 1000, 128)))
    np.testing.assert_array_equal(signed_squared_cosine(a, b), jax.jit(signed_squared_cosine)(b, a))
    cos = np.array([np.cos(angle(x, y)) for x, y in zip(np.float64(a), np.float64(b), strict=True)])
    np.testing.assert_allclose(signed_squared_cosine(a, b), cos * np.abs(cos), atol=1e-3)
    assert not np.asarray(signed_squared_cosine(0 * a, b)).any()


def test_bytes_are_the_planned_ones_and_below_those_of_full():
    cache = prefill_cache("minicache:share=0.2")
    sizes = {"capacity": CAPACITY, "batch": 3, "dtype": make_model().dtype}
    planned = kvjax.planned_bytes("minicache:share=0.2", make_model().config, int(LENGTHS.max()), **sizes)
    assert array_bytes(cache) == planned.total
    config = Config.llama(2, 8, layers=4, heads=2, kv_heads=2, head_dim=128, mlp_width=8)
    full, pairs = (kvjax.planned_bytes(m, config, 4000, dtype="bfloat16").held["device"] for m in ("full", "minicache"))
    # Two of four layers are a pair: they share the directions of 95 % of the tokens, and add lengths and positions.
    assert 0.75 < pairs / full < 0.79


def test_directions_are_held_in_few_bits_and_on_the_host():
    """A pair's outputs with a codec are close to those without one."""
    cache, new = prefill_cache("minicache:share=0.2 + int4 + offload"), decoded_tokens()[LOWER:]
    actual, _ = run_pair(cache.plan[LOWER:], list(cache.layers[LOWER:]), new)
    cache = prefill_cache("minicache:share=0.2")
    expected, _ = run_pair(cache.plan[LOWER:], list(cache.layers[LOWER:]), new)
    for own, other in zip(actual, expected, strict=True):
        assert 0 < np.linalg.norm(own - other) < 0.3 * np.linalg.norm(other)


def test_two_devices_that_divide_the_heads_give_what_one_gives():
    cache, exact = prefill_cache("minicache:share=0.2"), full_kv()
    plan, new, mesh = cache.plan[LOWER:], decoded_tokens()[LOWER:], Mesh(np.array(jax.devices()[:2]), ("model",))

    @jax.jit
    def run(prompts, new):
        outs, states, carry = [], [], None
        for bound, own, other, (q, block) in zip(plan, prompts, prompts[::-1], new, strict=True):
            prompt = LayerPrompt(own.k, own.v, own.q[:, :, :, :0], paired=(other.k, other.v))
            call = LayerCall(bound, None, cache.layers[LOWER].pos.shape[2])
            state = compress_prompt(call, prompt, exact.lengths, CAPACITY, mesh)
            out, state, carry = extend_layer(bound, state, q, block, STEPS, carry, mesh=mesh)
            outs.append(out)
            states.append(state)
        return outs, states

    text = list(exact.prompts[LOWER:]), new
    two = run(
        *jax.tree.map(lambda x: jax.device_put(x, named_sharding(axes_of_layer_array(x.shape, 3, 2), mesh)), text)
    )
    for state in two[1]:
        parts = [shard.data.shape for shard in state.side_store.k_length.addressable_shards]
        assert [shape[:2] for shape in parts] == [(3, 1), (3, 1)]
    one = run_pair(plan, list(cache.layers[LOWER:]), new)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), two, one)


def test_sinks_take_their_part_of_both_layers_of_a_pair():
    """A sink of logit s changes outputs by 1 / (1 + e^s / L), where L is the sum of the softmax without it."""
    cache, new = prefill_cache("minicache:share=0.2"), decoded_tokens()[LOWER:]
    plan, states = cache.plan[LOWER:], list(cache.layers[LOWER:])

    @jax.jit
    def run(logit: jax.Array) -> list[jax.Array]:
        outs, carry = [], None
        for bound, state, (q, block) in zip(plan, states, new, strict=True):
            outside = sink_partial(jnp.broadcast_to(logit, (1, *q.shape[1:3])), q, block.v.shape[3])
            out, _, carry = bound.extend(state, q, block, STEPS, carry, outside)
            outs.append(out)
        return outs

    without, nothing, one, two = run_pair(plan, states, new)[0], run(-1e9), run(1.0), run(2.0)
    for out, same, first, second in zip(without, nothing, one, two, strict=True):
        np.testing.assert_allclose(same, out, atol=1e-6)
        odds = [np.linalg.norm(out, axis=-1) / np.linalg.norm(x, axis=-1) - 1 for x in (first, second)]
        assert odds[0].min() > 0.001
        np.testing.assert_allclose(odds[1], np.e * odds[0], rtol=1e-3)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(KvjaxError, match="component `side_store`, SharedDirections"):
        read_context("minicache:share=0.2").extend_prefix([[1, 2]], "full", of=[0])
