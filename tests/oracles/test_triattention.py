"""TriAttention against its oracle, on ragged sequences, after the prompt and while decoding.

TriAttention in NumPy, float64, from its paper (arXiv 2604.04921): one key/value head of one sequence.

Queries q [G Q H] at positions q_pos [Q] and keys k [S H] at positions pos [S], after rotation by RoPE; `frequencies`
[H / 2] in radians per position.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.future_queries import mean_over_pre_rope, sum_queries
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope, RopeScaling
from kvjax.core.types import KVBlock
from kvjax.methods.triattention import CalibratedTriAttention, QueryModuli, TriAttention
from tests.contract import layer


def unrotate_pairs(x: np.ndarray, pos: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The channel pairs of x [n H] as complex numbers [n H/2], without the rotation to their positions."""
    half = len(frequencies)
    return (x[:, :half] + 1j * x[:, half:]) * np.exp(-1j * np.outer(pos, frequencies))


def scores(q, q_pos, k, pos, frequencies, furthest, normalise=True) -> np.ndarray:
    """The scores [S] for a query after the newest key, at distances that double."""
    keys, now, head_scores = unrotate_pairs(k, pos, frequencies), max(pos) + 1, []
    for queries in q:
        pairs = unrotate_pairs(queries, q_pos, frequencies)
        mean, modulus = pairs.mean(0), np.abs(pairs).mean(0)
        key_scores = []
        for key, p in zip(keys, pos, strict=True):
            phase, total, ahead = np.angle(mean * key.conj()), [], 1
            while ahead <= furthest:
                trig = np.abs(mean) * np.abs(key) * np.cos((now - p + ahead) * frequencies + phase)
                total.append(np.sum(trig + (modulus - np.abs(mean)) * np.abs(key)))
                ahead *= 2
            key_scores.append(np.mean(total))
        key_scores = np.array(key_scores)
        head_scores.append((key_scores - key_scores.mean()) / max(key_scores.std(), 1e-6) if normalise else key_scores)
    return np.max(head_scores, 0)


def select_tokens(q, q_pos, k, tokens, frequencies, furthest, budget, recent) -> list[int]:
    """Selects the last `recent` tokens of k [S H] and the best of the others, ascending."""
    token_scores = scores(q, q_pos, k[tokens], np.array(tokens), frequencies, furthest)
    best = sorted(range(len(tokens) - recent), key=lambda i: -token_scores[i])[: max(budget - recent, 0)]
    return sorted([tokens[i] for i in best] + tokens[len(tokens) - recent :])


def decode(q, k, v, n: int, frequencies, furthest, budget, recent, every) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]; evicts when `every` are too many.

    The last `every` queries give the statistics, that of the token that comes in among them.
    """
    G, S, H = q.shape
    out = np.empty((G, S - n, H))
    cached = list(range(n))
    if n > budget:
        cached = select_tokens(q[:, :n], np.arange(n), k, cached, frequencies, furthest, budget, recent)
    for t in range(n, S):
        if len(cached) >= budget + every:
            latest = np.arange(max(t + 1 - every, 0), t + 1)
            cached = select_tokens(q[:, latest], latest, k, cached, frequencies, furthest, budget, recent)
        cached = [*cached, t]
        logits = q[:, t] @ k[cached].T / np.sqrt(H)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, t - n] = weights / weights.sum(-1, keepdims=True) @ v[cached]
    return out


FREQUENCIES = 1 / 10_000 ** (np.arange(layer.H // 2) / (layer.H // 2))


@functools.cache
def compile_scores(scorer: TriAttention, spec: LayerSpec):
    return jax.jit(lambda block, observation: scorer.scores(block, observation, spec).per_kv_head)


@pytest.mark.parametrize("scorer", [TriAttention(100), TriAttention(1, normalise=False)], ids=str)
def test_scores_are_those_of_its_oracle_whatever_padding_holds(scorer):
    batch = layer.random_batch(3)
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = np.asarray(compile_scores(scorer, layer.spec())(block, Observation(q, block.pos[:, 0])))
        for b, n in enumerate(batch.lengths.tolist()):
            for head in range(layer.K):
                queries, keys = (np.asarray(x[b, head, ..., :n, :], np.float64) for x in (batch.q, batch.k))
                at = np.arange(n)
                expected = scores(queries, at, keys, at, FREQUENCIES, scorer.furthest, scorer.normalise)
                np.testing.assert_allclose(actual[b, head, :n], expected, atol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()


def test_the_mean_is_that_of_the_counted_queries_a_block_at_a_time():
    batch = layer.random_batch(2)
    q, block = layer.prompt(batch, np.inf)
    observation = Observation(q, block.pos[:, 0])
    of_row = jax.jit(
        lambda observation: mean_over_pre_rope(
            observation, observation.pos >= 1, Rope(layer.H), sum_queries, queries_at_once=4
        ),
    )
    actual = np.asarray(of_row(observation))
    for b, n in enumerate(batch.lengths.tolist()):
        for head in np.ndindex(layer.K, layer.G):
            queries = np.asarray(batch.q[b][head][1:n], np.float64)
            pairs = unrotate_pairs(queries, np.arange(1, n), FREQUENCIES).sum(0) / max(n - 1, 1)
            np.testing.assert_allclose(actual[b][head], np.concatenate([pairs.real, pairs.imag]), atol=1e-5)


@pytest.mark.parametrize(("tokens", "score"), [(1, 1.0), (2, -1.0)])
def test_half_a_turn_per_position_by_hand(tokens, score):
    """The key at position 0, read one step ahead of position 1 and 2: a whole turn away, and one and a half."""
    rope = Rope(2, scaling=RopeScaling("linear", 1 / np.pi))
    pos = np.array([[0, 1 if tokens == 2 else -1]], np.int32)
    x = np.array([[1, 0], [-1, 0]], np.float32)[None, None]  # (1, 0) at both positions, after rotation
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=1, head_dim=2, rope=rope)
    scorer = TriAttention(furthest=1, normalise=False)
    actual = compile_scores(scorer, spec)(KVBlock(x, x, pos[:, None]), Observation(x[:, :, None], pos))
    np.testing.assert_allclose(actual[0, 0, 0], score, atol=1e-5)


def test_statistics_of_the_prompt_itself_in_a_table_give_its_own_scores(tmp_path):
    batch, spec, kind = (
        dataclasses.replace(layer.random_batch(3), lengths=np.array([9, 9, 9])),
        layer.spec(),
        QueryModuli(),
    )
    q, block = layer.prompt(batch, np.inf)
    counts = jax.jit(lambda block, observation: kind.count(block, observation, spec))(
        block, Observation(q, block.pos[:, 0])
    )
    arrays = kind.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counts), spec)
    table = TableFile(str(table_file.write(tmp_path / "t", "query_moduli", spec, [arrays])), "query_moduli")
    actual = np.asarray(compile_scores(CalibratedTriAttention(100, given=table), spec)(block, None))
    for head in range(layer.K):
        queries, keys = (np.asarray(x[0, head, ..., :9, :], np.float64) for x in (batch.q, batch.k))
        expected = scores(queries, np.arange(9), keys, np.arange(9), FREQUENCIES, 100)
        np.testing.assert_allclose(actual[0, head], expected, atol=1e-4)


def test_what_left_the_sliding_window_scores_below_all_others():
    q, block = layer.prompt(layer.random_batch())
    actual = np.asarray(compile_scores(TriAttention(100), layer.spec(window=5))(block, Observation(q, block.pos[:, 0])))
    assert (actual[0] < -1e29).tolist() == [[True] * 5 + [False] * 4] * layer.K  # the next query is at 9


def test_each_head_keeps_the_tokens_that_suit_the_prompts_mean_query():
    batch = layer.random_batch(1)
    positions = layer.prefill(layer.bind("triattention:budget=5,recent=2,furthest=8,every=0"), batch).pos
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k = (np.asarray(x[b, head, ..., :n, :], np.float64) for x in (batch.q, batch.k))
            expected = (
                select_tokens(q, np.arange(n), k, list(range(n)), FREQUENCIES, 8, 5, 2) if n > 5 else list(range(n))
            )
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == expected


def test_it_returns_to_its_budget_by_the_latest_queries():
    batch = layer.random_batch(4)
    out = layer.decode("triattention:budget=5,recent=1,furthest=8,every=2", batch)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k, v = batch.exact(b, head)
            expected = decode(q, k, v, n, FREQUENCIES, 8, 5, 1, 2)
            np.testing.assert_allclose(out[b, head], expected, atol=2e-5)
