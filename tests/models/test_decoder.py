"""The decoder with the features of each family, against a plain decoder in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope, RopeScaling, yarn_scaling
from kvjax.engine.forward import exact_logits
from kvjax.models import Config
from kvjax.models.kinds import AttentionKind, Experts, Latent, LayerKind, MlpKind
from tests.models import decoder_oracle

D, V, T = 24, 61, 19
MOST = 3e-5  # of the largest logit
attention = functools.partial(AttentionKind, 4, 2, 8)
ROPE, SCALED = Rope(8), Rope(8, 500.0, RopeScaling("linear", 4.0))
YARN = Rope(8, 1e4, yarn_scaling(8.0, 16))


def gemma() -> Config:
    layer = functools.partial(LayerKind, mlp=MlpKind(40, "gelu_tanh"), norms="both", unit_offset=True)
    kinds = (
        layer(attention(ROPE, Rule(7, 1.0), scale=0.6, qk_norm="head")),
        layer(attention(SCALED, Rule(None, 1.0), scale=0.6, qk_norm="head")),
    )
    return Config(V, D, kinds, (0, 0, 1, 0), tie_embeddings=True, embed_scale=D**0.5, final_cap=1.5)


def olmo() -> Config:
    kind = LayerKind(attention(ROPE, qk_norm="all"), MlpKind(40), norms="after", residual=0.4)
    return Config(V, D, (kind,), (0, 0), embed_scale=3.0, logit_scale=0.25)


def gpt_oss() -> Config:
    mlp = MlpKind(20, "clamped_swiglu", True, Experts(5, 2, router_bias=True))
    kinds = tuple(
        LayerKind(attention(YARN, Rule(window), qkv_bias=True, out_bias=True, sinks=True), mlp) for window in (6, None)
    )
    return Config(V, D, kinds, (0, 1, 0))


def deepseek(query_rank: int | None = 10) -> Config:
    a = AttentionKind(4, 1, 4 + 12, Rope(4, 1e4, yarn_scaling(8.0, 16)), value_dim=12, scale=0.5)
    a = dataclasses.replace(a, latent=Latent(12, 6, 5, query_rank), qkv_bias=True, out_bias=True)
    experts = Experts(8, 3, normalize=False, factor=1.7, shared_width=28, groups=4, top_groups=2)
    return Config(V, D, (LayerKind(a, MlpKind(40)), LayerKind(a, MlpKind(14, experts=experts))), (0, 1, 1))


def narrow_values() -> Config:
    kinds = tuple(LayerKind(attention(rope, value_dim=6), MlpKind(40)) for rope in (Rope(4), None))
    return Config(V, D, kinds, (0, 1, 0))


CONFIGS = {
    "gemma": gemma(),
    "olmo": olmo(),
    "gpt_oss": gpt_oss(),
    "deepseek": deepseek(),
    "deepseek lite": deepseek(None),
    "narrow values": narrow_values(),
}


@functools.cache
def loud_model(name: str) -> kvjax.Model:
    """Makes a model whose every parameter is far from what initialization gives it."""
    model, rng = kvjax.random_model(CONFIGS[name]), np.random.default_rng(5)

    def change(x: Any) -> jax.Array:
        return jnp.asarray(x + rng.normal(size=x.shape) * (0.4 if x.ndim == 1 else 0.2), jnp.float32)

    return dataclasses.replace(model, params=jax.tree.map(change, model.params))


def tokens_of(seed: int = 0, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (batch, T), np.int32)


def reference(name: str, tokens: np.ndarray) -> np.ndarray:
    model = loud_model(name)
    return np.stack([decoder_oracle.logits(model.config, model.params, row) for row in tokens])


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_logits_are_those_of_the_definition(name):
    model, tokens = loud_model(name), tokens_of()
    expected = reference(name, tokens)
    logits = exact_logits(model.params, tokens, model.config)
    np.testing.assert_allclose(logits, expected, atol=MOST * abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_steps_are_those_of_the_definition(name):
    model, tokens = loud_model(name), tokens_of()
    expected, lengths = reference(name, tokens), jnp.array([13, 13])
    plan = functional.bind("full", model.config)
    first, cache = functional.prefill(model.params, tokens[:, :13], lengths, plan, model.config, capacity=32)
    np.testing.assert_allclose(first, expected[:, 12], atol=MOST * abs(expected).max())
    for t in range(13, T):
        step, cache = functional.extend(model.params, tokens[:, t : t + 1], cache)
        np.testing.assert_allclose(step[:, -1], expected[:, t], atol=MOST * abs(expected).max())
