"""Merging against its oracle, its hand-made examples, and the properties of every rule."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.components import Scores, SelectedSlots
from kvjax.cache.eviction.merging import match_evicted
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import attend_dense, merge
from kvjax.core.random import draw
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock, gather_tokens
from kvjax.methods.cam import ValueSpread
from kvjax.methods.d2o import D2O
from kvjax.methods.merging import ValueMerge
from tests.contract import layer
from tests.oracles import merge as oracle

B, K, G, T, H = 3, 2, 2, 12, 8
LENGTHS = (12, 1, 9)
KEPT = (5, 1, 4)
RULES = [D2O(), D2O("paper", count=True), ValueMerge(), ValueMerge(0.1, 0.4), ValueSpread(2, seed=3)]
SPEC = LayerSpec(index=0, num_layers=1, num_kv_heads=K, num_groups=G, head_dim=H, rope=Rope(H))


def ragged_prompts(seed=0, padding=0.0) -> tuple[KVBlock, SelectedSlots]:
    """Prompts of 12, 1 and 9 tokens with positive scores; each head keeps a random choice of 5, 1 and 4."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, B, K, T, H))
    received = rng.uniform(0.1, 1.0, size=(B, K, T))
    slots = np.full((B, K, max(KEPT)), -1)
    pos = np.full((B, 1, T), -1)
    for b, n in enumerate(LENGTHS):
        pos[b, 0, :n] = np.arange(n)
        k[b, :, n:], v[b, :, n:], received[b, :, n:] = padding, padding, -np.inf
        for h in range(K):
            slots[b, h, : KEPT[b]] = np.sort(rng.permutation(n)[: KEPT[b]])
    block = KVBlock(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), jnp.asarray(pos, jnp.int32))
    kv = jnp.asarray(received, jnp.float32)
    return block, SelectedSlots(jnp.asarray(slots, jnp.int32), Scores(kv[:, :, None], kv))


def apply_rule(rule, block: KVBlock, choice: SelectedSlots) -> KVBlock:
    """Merges evicted tokens into the selected slots by a rule."""
    return rule(block, gather_tokens(block, choice.slots), choice, SPEC)


@functools.cache
def compile_rule(rule):
    """Compiles `apply_rule` for a rule."""
    return jax.jit(functools.partial(apply_rule, rule))


def run_rule(rule, block: KVBlock, choice: SelectedSlots) -> KVBlock:
    """Runs `apply_rule`, compiled once for all tests."""
    return compile_rule(rule)(block, choice)


def oracle_merge(rule, k, v, selected, received):
    """The oracle's keys and values [K n H] of a sequence, and the tokens in each slot [K n] if the rule counts them."""
    if isinstance(rule, D2O):
        keys, values, counts = oracle.d2o(k, v, selected, rule.rule)
        return keys, values, counts if rule.count else None
    keys = np.stack([k[h][selected[h]] for h in range(K)])
    if isinstance(rule, ValueMerge):
        values = [oracle.merging(k[h], v[h], selected[h], rule.threshold, rule.fraction) for h in range(K)]
        return keys, np.stack(values), None
    index = np.broadcast_arrays(0, np.arange(K)[:, None], np.arange(k.shape[1])[None])
    uniform = (np.asarray(draw(rule.seed, *(jnp.asarray(i, jnp.int32) for i in index))) >> 8) / 2**24
    values = [oracle.cam(v[h], selected[h], received[h], rule.window, uniform[h]) for h in range(K)]
    return keys, np.stack(values), None


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_is_its_oracle(rule):
    block, choice = ragged_prompts(padding=1e4)
    actual = run_rule(rule, block, choice)
    for b, (n, num_kept) in enumerate(zip(LENGTHS, KEPT, strict=True)):
        k, v, received = (np.asarray(x[b, :, :n], np.float64) for x in (block.k, block.v, choice.scores.per_kv_head))
        slots = [list(map(int, head[:num_kept])) for head in np.asarray(choice.slots[b])]
        keys, values, counts = oracle_merge(rule, k, v, slots, received)
        np.testing.assert_allclose(actual.k[b, :, :num_kept], keys, atol=2e-6)
        np.testing.assert_allclose(actual.v[b, :, :num_kept], values, atol=2e-6)
        assert (actual.bias is None) == (counts is None)
        if counts is not None:
            np.testing.assert_allclose(actual.bias[b, :, :num_kept], np.log(counts), atol=1e-6)
    selected = gather_tokens(block, choice.slots).clean()
    assert (np.abs(actual.v - selected.v).max((1, 2, 3)) > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_where_nothing_is_lost_all_stays_bit_for_bit(rule):
    block, choice = ragged_prompts()
    per_head = dataclasses.replace(block, pos=jnp.broadcast_to(block.pos, (B, K, T)))
    actual = run_rule(rule, block, choice._replace(slots=per_head.pos))
    np.testing.assert_array_equal(actual.pos, per_head.pos)
    np.testing.assert_array_equal(actual.k, per_head.k)
    np.testing.assert_array_equal(actual.v, per_head.v)
    assert actual.bias is None or not np.any(actual.bias)


@pytest.mark.parametrize("rule", [D2O("paper", count=True), ValueMerge(), ValueMerge(0.1, 0.4)], ids=str)
def test_the_order_of_lost_tokens_does_not_matter(rule):
    block, choice = ragged_prompts()
    block, choice = jax.tree.map(lambda x: x[:1], (block, choice))
    selected = gather_tokens(block, choice.slots)
    order = np.arange(T)
    lost = sorted(set(range(T)) - set(np.asarray(choice.slots[0]).ravel().tolist()))
    order[lost] = lost[::-1]
    assert len(lost) > 1
    reversed_block = dataclasses.replace(block, k=block.k[:, :, order], v=block.v[:, :, order])
    actual = rule(reversed_block, selected, choice, SPEC)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), actual, rule(block, selected, choice, SPEC))


def test_many_tokens_are_compared_a_block_at_a_time():
    block, choice = ragged_prompts(padding=np.nan)
    selected = gather_tokens(block, choice.slots)
    at_once, by_five = (match_evicted(block, selected, choice, n) for n in (256, 5))
    np.testing.assert_array_equal(by_five.mask, at_once.mask)
    np.testing.assert_array_equal(by_five.slot, at_once.slot)
    np.testing.assert_allclose(by_five.cosine, at_once.cosine, atol=1e-6)


def make_prompt(k, v, slots) -> tuple[KVBlock, SelectedSlots]:
    """Makes a prompt of one sequence with one head."""
    k, v = (jnp.asarray(x, jnp.float32)[None, None] for x in (k, v))
    pos = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    same = jnp.ones(pos.shape)
    return KVBlock(k, v, pos), SelectedSlots(jnp.asarray(slots, jnp.int32)[None, None], Scores(same[:, :, None], same))


def test_merging_by_hand():
    block, choice = make_prompt([[1, 0], [0, 1], [1, 1]], [[2, 0], [0, 1], [0, 2]], [0, 1])
    actual = run_rule(ValueMerge(), block, choice)
    np.testing.assert_allclose(actual.v[0, 0], [[1.4776, 0.5224], [0, 1]], atol=5e-5)
    np.testing.assert_array_equal(actual.k, block.k[:, :, :2])


@pytest.mark.parametrize("rule", ["authors", "paper"])
def test_two_equal_keys_by_hand(rule):
    block, choice = make_prompt([[1, 2], [1, 2]], [[2], [4]], [0])
    actual = run_rule(D2O(rule, count=True), block, choice)
    np.testing.assert_allclose(actual.v[0, 0], [[3]], atol=1e-6)
    np.testing.assert_allclose(actual.bias[0, 0], [np.log(2)], atol=1e-6)


def test_cam_by_hand():
    """All scores are equal, so the evicted token's value is always merged, half into each of the next two."""
    block, choice = make_prompt([[1]] * 5, [[1], [10], [2], [3], [4]], [0, 2, 3, 4])
    np.testing.assert_allclose(run_rule(ValueSpread(2), block, choice).v[0, 0, :, 0], [1, 7, 8, 4])
    np.testing.assert_allclose(
        run_rule(ValueSpread(9), block, choice).v[0, 0, :, 0], [1, 2 + 10 / 3, 3 + 10 / 3, 4 + 10 / 3]
    )


READERS = {
    "full": kvjax.methods.full(),
    "kcache": kvjax.methods.kcache(n=100, device_layers=0),
    "specache, fetched at once": kvjax.methods.specache(8, group=1, residual=1, topk=3, speculative=False),
    "specache": kvjax.methods.specache(8, group=1, residual=1, topk=3),
    "kivi": kvjax.methods.kivi(8, group=8, residual=64),
    "quest": kvjax.methods.quest(budget=100, page=2, device_layers=0),
    "pages of unequal heads": kvjax.Method(side_store=kvjax.methods.adakv(page=4).side_store),
}


@pytest.mark.parametrize("name", READERS)
def test_equal_tokens_merged_and_counted_give_exact_attention_in_every_reader(name):
    """Ten tokens have one or two twins each; five are kept and weigh as many times as they represent tokens."""
    rng = np.random.default_rng(0)
    twins = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 0])
    k, v = (jnp.asarray(x[:, :, twins], jnp.float32) for x in rng.normal(size=(2, B, K, 5, H)))
    block = KVBlock(k, v, jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32), (B, 1, 10)))
    first_five = dataclasses.replace(kvjax.methods.sinks_and_recent(budget=5, sinks=5).select, scope="head")
    bound = dataclasses.replace(READERS[name], merge=D2O(count=True), select=first_five).bind(SPEC)
    q = jnp.asarray(rng.normal(size=(B, K, G, 3, H)), jnp.float32)
    fresh = jnp.asarray(rng.normal(size=(2, B, K, 3, H)), jnp.float32)
    state = jax.jit(lambda block: bound.prefill(block, None, bound.num_slots(10, 16)))(block)
    assert bound.positions(state).max() == 4
    for t in range(3):
        pos = jnp.full((B, 1, 1), 10 + t, jnp.int32)
        new = KVBlock(fresh[0, :, :, t : t + 1], fresh[1, :, :, t : t + 1], pos)
        block = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 2), block, new)
        out, state = layer.compile_extend(bound)(state, (q[:, :, :, t : t + 1], new))
        expected = merge([attend_dense(q[:, :, :, t : t + 1], block, pos[:, 0])])
        np.testing.assert_allclose(out, expected, atol=2e-2 if "specache" in name else 1e-5)
