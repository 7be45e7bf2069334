"""Layers that have vectors of the tokens of their own (Gemma 4), in every way of reading a text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope
from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.kinds import AttentionKind, LayerKind, MlpKind, PerLayerEmbedding
from kvjax.reuse.cacheblend import blend
from tests.models import decoder_oracle

V, D = 50, 24
TEXT = np.random.default_rng(0).integers(0, V, 30).astype(np.int32)
PROMPT = 21


@functools.cache
def model() -> Any:
    kinds = tuple(LayerKind(AttentionKind(4, 2, 8, Rope(8), Rule(window)), MlpKind(32)) for window in (None, 6))
    return kvjax.random_model(Config(V, D, kinds, (0, 1, 0), per_layer_embedding=PerLayerEmbedding(6, 3)))


@functools.cache
def exact() -> np.ndarray:
    return decoder_oracle.logits(model().config, model().params, TEXT)


@pytest.mark.parametrize(
    ("method", "chunk"), [("full", None), ("full", 8), ("kvzip:budget=64", 8), ("kvgrad:budget=64", 8)]
)
def test_prompts_in_one_pass_by_layer_and_copied_equal_the_definition(method: str, chunk: int | None) -> None:
    """KVzip and KVgrad read a copy of the prompt behind it, and have all layers read a chunk before the next one."""
    config, tokens = model().config, jnp.asarray(TEXT[None])

    @jax.jit
    def read(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        plan = functional.bind(method, config)
        length = jnp.asarray([PROMPT], jnp.int32)
        last, cache = functional.prefill(params, tokens[:, :PROMPT], length, plan, config, capacity=48, chunk=chunk)
        return last, functional.extend(params, tokens[:, PROMPT:], cache)[0]

    last, later = read(model().params, tokens)
    np.testing.assert_allclose(last[0], exact()[PROMPT - 1], atol=2e-5)
    np.testing.assert_allclose(later[0], exact()[PROMPT:], atol=2e-5)


def test_packed_prompts_have_the_vectors_of_their_own_tokens() -> None:
    prompts = [TEXT[:9].tolist(), TEXT[:14].tolist(), TEXT[:5].tolist()]
    packed = kvjax.reuse.read_packed(model(), prompts, "full", capacity=32)
    np.testing.assert_allclose(packed.last_logits, exact()[[8, 13, 4]], atol=2e-5)


def test_tokens_that_are_run_again_have_their_own_vectors() -> None:
    chunks = kvjax.reuse.read_exactly(model(), [TEXT[:12].tolist(), TEXT[12:25].tolist()])
    blended = blend(chunks, [[0, 1]], [TEXT[25:].tolist()], ratio=1.0)
    np.testing.assert_allclose(blended.last_logits[0], exact()[-1], atol=2e-5)


def test_a_model_with_fewer_layers_leaves_vectors_unread() -> None:
    fewer = model().config.with_layers((0, 1))
    assert fewer.per_layer_embedding == model().config.per_layer_embedding
    logits = functional.logits(model().params, jnp.asarray(TEXT[None]), fewer)[0]
    np.testing.assert_allclose(logits, decoder_oracle.logits(fewer, model().params, TEXT), atol=2e-5)
    with pytest.raises(KvjaxError, match="per_layer_embedding has vectors for 3 layers, and the pattern names 4"):
        model().config.with_layers((0, 1, 0, 1))
