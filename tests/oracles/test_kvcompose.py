"""KVCompose in NumPy, one sequence at a time, from arXiv 2509.05165 and kvpress: composites and budgets of layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.protocol import Replay
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.kvcompose import CompositeRanking, Composites, kvcompose
from tests.contract import layer


def repeated_scores(q: np.ndarray, keys: np.ndarray, new_keys: np.ndarray) -> np.ndarray:
    """The scores [K T] of prompts of T tokens by the queries [K G T H] of their repetition."""
    K, G, T, H = q.shape
    heads = np.zeros((K, G, T))
    for head in range(K):
        for g in range(G):
            for t in range(T):
                logits = np.concatenate([keys[head], new_keys[head, : t + 1]]) @ q[head, g, t] / np.sqrt(H)
                weights = np.exp(logits - logits.max())
                heads[head, g] = np.maximum(heads[head, g], (weights / weights.sum())[:T])
    scores = heads.mean(1)
    return scores + scores.mean(0)


def layer_counts(scores: np.ndarray, quota: int) -> list[int]:
    """Tokens of each layer, by scores [L K T] and the tokens that each layer would keep by itself."""
    composites = np.sort(scores, -1)[..., ::-1].mean(1)
    composites[0] = composites.max(0)
    L, T = composites.shape
    best = np.argsort(-composites.reshape(-1), kind="stable")[: L * quota] // T
    return [max(int((best == i).sum()), 1) for i in range(L)]


@pytest.mark.parametrize("value_norms", [False, True])
def test_scores_are_those_of_the_repetition(value_norms):
    bound = layer.bind(kvcompose(5, value_norms=value_norms))
    batch, scorer = layer.random_batch(1), bound.method.select.scorer
    assert bound.needs.replay == Replay(
        chunk_tokens=2**30, lead_tokens=0, first="", later=""
    )  # no words come before the repetition
    q, block = layer.prompt(batch)
    lengths = jnp.asarray(batch.lengths)[:, None, None]
    new = KVBlock(block.k[..., ::-1], block.v, jnp.where(block.pos >= 0, block.pos + lengths, -1))

    @jax.jit
    def score(block: KVBlock) -> jax.Array:
        observation = Observation(q, new.pos[:, 0])
        received = scorer.update_scores(
            block, jnp.int32(0), observation, new, jnp.zeros(block.k.shape[:3]), layer.spec()
        )
        observation = observation._replace(replay_scores=received)
        return scorer.scores(block, observation, layer.spec()).per_kv_head

    actual = np.asarray(score(block))
    for b, n in enumerate(batch.lengths):
        q_row, k_row, v_row = (x[..., :n, :] for x in batch.exact(b))
        expected = repeated_scores(q_row, k_row, k_row[..., ::-1])
        if value_norms:
            received = expected - expected.mean(0) / 2  # the mean was added, so that this takes it off again
            received = received * np.linalg.norm(v_row, axis=-1)
            expected = received + received.mean(0)
        np.testing.assert_allclose(actual[b, :, :n], expected, rtol=1e-4, atol=1e-7)
        assert (actual[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize("quota", [1, 5, 12])
def test_layers_get_what_their_composites_win(quota):
    L, K, T, lengths = 3, 2, 12, (12, 5)
    rng = np.random.default_rng(quota)
    scores = (
        rng.exponential(size=(len(lengths), L, K, T)).astype(np.float32) * np.array([1, 3, 0.1])[None, :, None, None]
    )
    composites = np.full((L, len(lengths), T), -np.inf, np.float32)
    for b, n in enumerate(lengths):
        composites[:, b, :n] = np.sort(scores[b, ..., :n], -1)[..., ::-1].mean(1)
    quotas = np.array([[min(quota, n) for n in lengths]] * L, np.int32)
    allocate = functools.partial(CompositeRanking().allocate_tokens, layer.bind("kvcompose:budget=5").selection)
    measures = jax.tree.map(jnp.asarray, Composites(composites, quotas, np.zeros_like(quotas)))
    actual = np.asarray(jax.jit(allocate)(measures, jnp.asarray(lengths, jnp.int32)))
    for b, n in enumerate(lengths):
        assert actual[:, b].tolist() == layer_counts(scores[b, ..., :n].astype(float), min(quota, n))
