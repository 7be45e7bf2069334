"""Scorers count learned sinks in the sum of every softmax, as NumPy does; sinks that take nothing change nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention import MASKED_LOGIT, softmax
from kvjax.core.attention_mass import Observation, attention_mass, attention_rows, moments
from kvjax.core.types import KVBlock
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.kvzip import ReplayAttention
from kvjax.methods.rkv import RKV
from kvjax.methods.scissorhands import count_below_mean
from kvjax.methods.turned_queries import TurnedQueries
from tests.contract.layer import spec
from tests.oracles import online

B, K, G, S, H = 2, 2, 2, 11, 8
SPEC = dataclasses.replace(spec(head_dim=H), num_kv_heads=K, num_groups=G)
RNG = np.random.default_rng(0)
Q, KEYS, V = (RNG.normal(size=(B, K, *more, S, H)) * 1.5 for more in ((G,), (), ()))
SINKS = np.array([[1.0, -0.5], [0.3, 2.0]])
CAUSAL = np.tril(np.ones((S, S), bool))
POS = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))


def observe(sinks: np.ndarray | float | None, **more) -> tuple[KVBlock, Observation]:
    block = KVBlock(jnp.asarray(KEYS, jnp.float32), jnp.asarray(V, jnp.float32), jnp.asarray(POS[:, None]))
    if sinks is not None:
        sinks = jnp.broadcast_to(jnp.asarray(sinks, jnp.float32), (1, K, G))
    return block, Observation(jnp.asarray(Q, jnp.float32), jnp.asarray(POS), sinks=sinks, **more)


def weigh(logits: np.ndarray, visible: np.ndarray, sinks: np.ndarray = SINKS[None, :, :, None]) -> np.ndarray:
    """The weights of logits [B K G T S], where a sink of each query head takes its part."""
    numerators = np.where(visible, np.exp(logits), 0.0)
    return numerators / (numerators.sum(-1) + np.exp(sinks))[..., None]


CAUSAL_LOGITS = np.einsum("bkgth,bksh->bkgts", Q, KEYS) / np.sqrt(H)


def turned_logits() -> np.ndarray:
    """Of all queries at the position 32 after the prompt's end."""
    turned = online.rope(online.rope(Q, -np.arange(S)), np.full(S, S + 32))
    return np.einsum("bkgth,bksh->bkgts", turned, KEYS) / np.sqrt(H)


def mass_of(block: KVBlock, observation: Observation) -> jax.Array:
    return attention_mass(block, observation, jnp.arange(1.0, 1 + S)[None].repeat(B, 0), block_size=4)[0]


def with_known_sums(observation: Observation) -> Observation:
    """As attention leaves them: the sinks are in the sums already."""
    sums = jnp.asarray(np.log(np.where(CAUSAL, np.exp(CAUSAL_LOGITS), 0.0).sum(-1)), jnp.float32)
    if observation.sinks is not None:
        sums = jnp.logaddexp(sums, observation.sinks[..., None])
    return observation._replace(softmax_lse=sums)


def replay_scores(block: KVBlock, observation: Observation) -> jax.Array:
    """Of a prompt that the same queries repeat, without a lead: the whole prompt is one chunk."""
    new = dataclasses.replace(block, pos=block.pos + S)
    replay, nothing = observation._replace(pos=observation.pos + S), jnp.zeros((B, K, S))
    return ReplayAttention(chunk=S, sinks=0).update_scores(block, jnp.int32(0), replay, new, nothing, SPEC)


def replayed_scores() -> np.ndarray:
    logits = np.concatenate([CAUSAL_LOGITS, CAUSAL_LOGITS], -1)  # the copy's keys are those of the prompt
    visible = np.concatenate([np.ones((S, S), bool), CAUSAL], -1)
    return weigh(logits, visible)[..., :S].max((2, 3))


def rkv_scores(block: KVBlock, observation: Observation) -> jax.Array:
    """Of the tokens before a window of three."""
    return RKV(num_queries=3, kernel=1, mix=1.0).scores(block, observation, SPEC).per_kv_head[..., :-3]


def rkv_weights() -> np.ndarray:
    visible = np.arange(S) < S - 3
    p = weigh(CAUSAL_LOGITS.max(2), visible, SINKS.max(1)[None, :, None])
    return p[:, :, -3:, :-3].mean(2)


def below_mean(block: KVBlock, observation: Observation) -> jax.Array:
    return count_below_mean(block, observation, observation.pos >= 0, SPEC.rule)


def counted_below_mean() -> np.ndarray:
    mean = 1 / np.arange(1, S + 1)[:, None]
    return (CAUSAL & (weigh(CAUSAL_LOGITS, CAUSAL).mean(2) < mean)).sum(2)


def expected_attention(block: KVBlock, observation: Observation) -> jax.Array:
    """With one future position, so that the mean rotation is a rotation."""
    scorer = ExpectedAttention(sinks=0, future=1, covariance=False, value_norms=False)
    return scorer.scores(block, observation, SPEC).per_kv_head


def mean_query_attention() -> np.ndarray:
    mean = online.rope(online.rope(Q, -np.arange(S)).mean(3, keepdims=True), np.array([S]))
    logits = np.einsum("bkgth,bksh->bkgts", mean, KEYS) / np.sqrt(H)
    return weigh(logits, np.ones(S, bool))[:, :, :, 0].mean(2)


CASES = {
    "mass": (mass_of, lambda: np.einsum("bkgts,t->bkgs", weigh(CAUSAL_LOGITS, CAUSAL), np.arange(1.0, 1 + S))),
    "mass, sums known": (
        lambda block, observation: mass_of(block, with_known_sums(observation)),
        lambda: np.einsum("bkgts,t->bkgs", weigh(CAUSAL_LOGITS, CAUSAL), np.arange(1.0, 1 + S)),
    ),
    "rows": (attention_rows, lambda: weigh(CAUSAL_LOGITS, CAUSAL)),
    "rows, sums known": (
        lambda block, observation: attention_rows(block, with_known_sums(observation)),
        lambda: weigh(CAUSAL_LOGITS, CAUSAL),
    ),
    "squares": (
        lambda *observed: moments(*observed, block_size=4).square,
        lambda: (weigh(CAUSAL_LOGITS, CAUSAL) ** 2).sum(3),
    ),
    "turned_queries": (
        lambda *observed: TurnedQueries().scores(*observed, SPEC).per_kv_head,
        lambda: weigh(turned_logits(), np.ones((S, S), bool)).max((2, 3)),
    ),
    "kvzip": (replay_scores, replayed_scores),
    "rkv": (rkv_scores, rkv_weights),
    "scissorhands": (below_mean, counted_below_mean),
    "expected_attention": (expected_attention, mean_query_attention),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_contain_the_sinks(name):
    compute, expected = CASES[name]
    score = jax.jit(lambda sinks: compute(*observe(sinks)))
    np.testing.assert_allclose(score(SINKS), expected(), rtol=1e-6, atol=2e-6)
    without = jax.jit(lambda: compute(*observe(None)))()
    np.testing.assert_allclose(score(-1e9), without, atol=1e-7)
    assert np.abs(np.asarray(without) - expected()).max() > 0.01  # the sinks are not too small to be seen


def test_a_masked_row_has_no_weights_and_a_large_sink_takes_all():
    s = jnp.asarray([[[0.0, 1.0, MASKED_LOGIT]], [[MASKED_LOGIT] * 3]])
    np.testing.assert_array_equal(softmax(s)[1], np.zeros((1, 3)))
    np.testing.assert_array_equal(softmax(s, jnp.full((1, 1), 1e9)), np.zeros((2, 1, 3)))
    e = np.exp([0.0, 1.0])
    np.testing.assert_allclose(softmax(s, jnp.full((2, 1), 2.0))[0, 0, :2], e / (e.sum() + np.exp(2)), rtol=1e-6)
