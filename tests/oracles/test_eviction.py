"""Selections keep the tokens that the NumPy oracles keep, on ragged prompts (C7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import PromptSelection, Selection
from kvjax.cache.eviction.budgets import Uniform
from kvjax.cache.eviction.granularity import Chunk, Page, Token
from kvjax.cache.eviction.scorers import AccumulatedAttention, WindowAttention
from kvjax.cache.eviction.selection import select_slots
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock, gather_tokens
from kvjax.methods.keynorm import KeyNorm
from tests.contract.layer import spec
from tests.oracles import eviction as oracle

LENGTHS, S, W = (40, 3, 27, 12), 40, 6
STATIC = ("slots", "scorer", "sinks", "recent", "unit", "per", "represent", "window")


@functools.partial(jax.jit, static_argnames=STATIC)
def select_block(block, observation, keep, slots, scorer, sinks, recent, unit, per="head", represent=None, window=None):
    """Returns the block that a selection leaves of another."""
    select = Selection(scorer, Uniform(slots), sinks, recent, unit, per)
    selection = PromptSelection(spec(window), select, representatives=represent)
    chosen = select_slots(selection, block, observation, keep, slots)
    return gather_tokens(block, chosen.slots)


def random_block(seed: int = 0, padding: float = 0.0, queries: int | None = None, lengths=LENGTHS, S: int = S):
    """The block of random prompts, and an observation of all queries, or of each prompt's last `queries`."""
    q, k, v, pos = oracle.random_prompts(lengths, S, seed, padding)
    at = pos
    if queries:
        at = np.array(lengths)[:, None] - queries + np.arange(queries)[None]
        q = np.take_along_axis(q, np.clip(at, 0, S - 1)[:, None, None, :, None], 3)
        at = np.where(at < 0, -1, at).astype(np.int32)
    block = KVBlock(jnp.asarray(k), jnp.asarray(v), jnp.asarray(pos)[:, None])
    return block, Observation(jnp.asarray(q), jnp.asarray(at))


@functools.cache
def oracle_scores(scorer, b: int, n: int, window=None, seed: int = 0):
    """The oracle's scores of sequence b: per query head [K G T] and per key/value head [K T]."""
    q, k, _, _ = oracle.random_prompts(LENGTHS, S, seed)
    attention = oracle.attention_weights(q[b, :, :, :n], k[b, :, :n], window)
    if isinstance(scorer, WindowAttention):
        s = scorer
        return oracle.snapkv_scores(attention, s.num_queries, s.kernel, s.pool, s.reduce, s.reduce_first)
    if isinstance(scorer, AccumulatedAttention):
        return oracle.accumulated_scores(attention, scorer.normalise, scorer.decay, window)
    kv = -np.sqrt((k[b, :, :n].astype(np.float64) ** 2).sum(-1))
    return kv[:, None], kv


def oracle_tokens(scorer, keep, sinks, recent, c=1, reduce="sum", per="head", window=None):
    scores = (oracle_scores(scorer, b, n, window)[1] for b, n in enumerate(LENGTHS))
    return [oracle.select_tokens(s, int(m), sinks, recent, c, reduce, per) for s, m in zip(scores, keep, strict=True)]


def kept_positions(block: KVBlock, b: int) -> list[list[int]]:
    """The positions that each head of sequence b keeps, in slot order; asserts that empty slots come last."""
    pos = np.asarray(block.pos)[b]
    out = [p[p >= 0].tolist() for p in pos]
    assert all((p[len(tokens) :] == -1).all() for p, tokens in zip(pos, out, strict=True))
    return out


CASES = [  # scorer, sliding window; tests/cache/eviction/test_scorers.py compares the scores themselves
    (WindowAttention(W, 5), 9),
    (WindowAttention(W, 3, pool="max", reduce_first=True), None),
    (AccumulatedAttention("visible", decay=0.8), 9),
    (KeyNorm(), None),
]
KEEP = np.array([16, 16, 13, 12], np.int32)


@pytest.mark.parametrize(("scorer", "window"), CASES, ids=str)
def test_each_scorer_keeps_what_the_oracle_keeps(scorer, window):
    block, observation = random_block(queries=scorer.num_queries or None)
    out = select_block(
        block, observation, KEEP, slots=16, scorer=scorer, sinks=2, recent=W, unit=Token(), window=window
    )
    expected = oracle_tokens(scorer, KEEP, 2, W, window=window)
    k, v, old_k, old_v = map(np.asarray, (out.k, out.v, block.k, block.v))
    for b in range(len(LENGTHS)):
        assert kept_positions(out, b) == expected[b]
        for h, tokens in enumerate(expected[b]):  # keys and values moved with their positions
            np.testing.assert_array_equal(k[b, h, : len(tokens)], old_k[b, h, tokens])
            np.testing.assert_array_equal(v[b, h, : len(tokens)], old_v[b, h, tokens])


@pytest.mark.parametrize(
    ("unit", "per"), [(Chunk(4), "head"), (Chunk(5, "max"), "layer"), (Chunk(3, "mean"), "head"), (Page(2), "layer")]
)
def test_whole_chunks_and_pages(unit, per):
    scorer, keep = AccumulatedAttention(), np.array([21, 9, 20, 11], np.int32)
    out = select_block(*random_block(), keep, slots=24, scorer=scorer, sinks=2, recent=3, unit=unit, per=per)
    expected = oracle_tokens(scorer, keep, 2, 3, unit.size, unit.score, per)
    for b in range(len(LENGTHS)):
        assert kept_positions(out, b) == (expected[b] if per == "head" else expected[b][:1])
    if per == "layer":
        assert out.pos.shape == (4, 1, 24) and expected[0][0] == expected[0][1]


def test_a_budget_of_the_whole_row_keeps_the_row():
    all_of_it = np.full(4, 50, np.int32)
    out = select_block(*random_block(), all_of_it, slots=50, scorer=KeyNorm(), sinks=2, recent=W, unit=Chunk(4))
    for b, n in enumerate(LENGTHS):
        assert kept_positions(out, b) == [list(range(n))] * 2
