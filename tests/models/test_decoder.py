"""The decoder with the features of each family, against a plain decoder in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import functional
from kvjax.cache.accounting import full_bytes
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope, RopeScaling, yarn_scaling
from kvjax.engine.forward import exact_logits, layer_calls
from kvjax.errors import KvjaxError
from kvjax.models import Config, checkpoint, decoder
from kvjax.models.decoder import MixtureOfExperts, output_projection_of
from kvjax.models.kinds import (
    AttentionKind,
    Experts,
    GatedDelta,
    Latent,
    LayerKind,
    MlpKind,
    PerLayerEmbedding,
    QueryTemperature,
    Scoring,
)
from kvjax.models.sharding import param_shardings
from tests.models import decoder_oracle

D, V, T = 24, 62, 19
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
    return Config(V, D, kinds, (0, 1, 0), tie_embeddings=True, embed_scale=D**0.5, final_cap=1.5)


def olmo() -> Config:
    kind = LayerKind(attention(ROPE, qk_norm="all"), MlpKind(40), norms="after", residual=0.4)
    return Config(V, D, (kind,), (0, 0), embed_scale=3.0, logit_scale=0.25)


def gpt_oss() -> Config:
    mlp = MlpKind(20, "clamped_swiglu", True, Experts(5, 2, router_bias=True))
    kinds = tuple(
        LayerKind(attention(YARN, Rule(window), qkv_bias=True, out_bias=True, sinks=True), mlp) for window in (6, None)
    )
    return Config(V, D, kinds, (0, 1))


def deepseek(query_rank: int | None = 10, scoring: Scoring = "softmax") -> Config:
    a = AttentionKind(4, 1, 4 + 12, Rope(4, 1e4, yarn_scaling(8.0, 16)), value_dim=12, scale=0.5)
    a = dataclasses.replace(a, latent=Latent(12, 6, 5, query_rank), qkv_bias=True, out_bias=True)
    experts = Experts(8, 3, scoring == "sigmoid", 1.7, shared_width=28, groups=4, top_groups=2, scoring=scoring)
    return Config(V, D, (LayerKind(a, MlpKind(40)), LayerKind(a, MlpKind(14, experts=experts))), (0, 1))


def narrow_values() -> Config:
    layers = ((Rope(4), None), (None, QueryTemperature(0.7, 5)))
    kinds = tuple(
        LayerKind(attention(rope, value_dim=6, query_temperature=temperature), MlpKind(40))
        for rope, temperature in layers
    )
    return Config(V, D, kinds, (0, 1, 0))


def gated_delta() -> Config:
    recurrence = AttentionKind(6, 2, 6, None, value_dim=10, recurrence=GatedDelta(3))
    attend = attention(Rope(4), qk_norm="head", qkv_bias=True, output_gate=True)
    experts = Experts(6, 3, shared_width=10, shared_gate=True)
    kinds = (
        LayerKind(recurrence, MlpKind(40), unit_offset=True),
        LayerKind(attend, MlpKind(14, experts=experts), unit_offset=True),
    )
    return Config(V, D, kinds, (0, 1, 0))


def gemma4() -> Config:
    proportional = RopeScaling("proportional", 2.0, rotated_fraction=0.5)
    attend = functools.partial(attention, scale=1.0, qk_norm="head", qkv_bias=True)
    full = AttentionKind(4, 2, 12, Rope(12, 500.0, proportional), scale=1.0, qk_norm="head", qkv_bias=True)
    experts = Experts(5, 2, shared_width=20, own_norms=True)
    layer = functools.partial(LayerKind, norms="both", output_scale=True)
    kinds = (
        layer(attend(ROPE, Rule(7), value_norm=True), MlpKind(40, "gelu_tanh")),
        layer(
            dataclasses.replace(full, value_norm=True, keys_as_values=True),
            MlpKind(14, "gelu_tanh", experts=experts),
        ),
        layer(attend(ROPE, Rule(7), reads_layer=0), MlpKind(40, "gelu_tanh")),
        layer(dataclasses.replace(full, reads_layer=1), MlpKind(24, "gelu_tanh")),
    )
    own = PerLayerEmbedding(6, 4)
    return Config(V, D, kinds, (0, 1, 2, 3), tie_embeddings=True, embed_scale=D**0.5, per_layer_embedding=own)


CONFIGS = {
    "gemma": gemma(),
    "olmo": olmo(),
    "gpt_oss": gpt_oss(),
    "deepseek": deepseek(),
    "deepseek lite": deepseek(None, "sigmoid"),
    "narrow values": narrow_values(),
    "gated delta": gated_delta(),
    "gemma 4": gemma4(),
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


@functools.cache
def reference(name: str) -> np.ndarray:
    model = loud_model(name)
    return np.stack([decoder_oracle.logits(model.config, model.params, row) for row in tokens_of()])


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_logits_are_those_of_the_definition(name):
    model, tokens = loud_model(name), tokens_of()
    expected = reference(name)
    logits = exact_logits(model.params, tokens, model.config)
    np.testing.assert_allclose(logits, expected, atol=MOST * abs(expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_of_tokens_compute_the_definition(name, monkeypatch):
    monkeypatch.setattr(decoder, "BLOCK_TOKENS", 4)  # 19 tokens: four blocks, and three tokens that are left
    model, expected = loud_model(name), reference(name)
    compute = jax.jit(
        functools.partial(exact_logits.__wrapped__, config=model.config)
    )  # a new program, without a cache
    assert "while" in compute.lower(model.params, tokens_of()).as_text()
    logits = compute(model.params, tokens_of())
    np.testing.assert_allclose(logits, expected, atol=MOST * abs(expected).max())


def test_blocks_of_tokens_take_the_memory_of_one_block(monkeypatch):
    monkeypatch.setattr(decoder, "BLOCK_TOKENS", 64)
    mlp = decoder.MLP(D, jnp.float32, MlpKind(50 * D))
    x = jax.ShapeDtypeStruct((1, 16 * 64, D), jnp.float32)
    params = jax.eval_shape(mlp.init, jax.random.key(0), x)

    def workspace(f: Any) -> int:
        return jax.jit(f).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    whole = workspace(mlp.apply)

    def in_blocks(params: Any, x: Any) -> Any:
        return decoder.map_token_blocks(lambda block: mlp.apply(params, block), lambda block, y: y, x)

    assert workspace(in_blocks) < whole / 8


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_steps_are_those_of_the_definition(name):
    model, tokens = loud_model(name), tokens_of()
    expected, lengths = reference(name), jnp.array([13, 13])
    plan = functional.bind("full", model.config)
    first, cache = functional.prefill(model.params, tokens[:, :13], lengths, plan, model.config, capacity=32)
    np.testing.assert_allclose(first, expected[:, 12], atol=MOST * abs(expected).max())
    for t in range(13, T):
        step, cache = functional.extend(model.params, tokens[:, t : t + 1], cache)
        np.testing.assert_allclose(step[:, -1], expected[:, t], atol=MOST * abs(expected).max())


def test_bfloat16_rounds_and_nothing_more():
    """Logits of bfloat16 parameters are those of the definition, by which a rule left out in this dtype would show.

    A factor or an offset that is folded into the parameters would not: it moves logits by less than rounding does.
    """
    for name in ("gemma", "deepseek", "gated delta"):
        model, tokens = loud_model(name), tokens_of()
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
        exact = [decoder_oracle.logits(model.config, params, row) for row in tokens]
        logits = np.asarray(exact_logits(params, tokens, model.config), np.float64)
        error = np.sqrt(np.mean((logits - exact) ** 2, -1) / np.mean(np.square(exact)))
        # Not the mean: where two experts are about as good, rounding chooses the other one for a token, by chance.
        assert np.median(error) < 0.02, (name, error)


def test_layers_of_one_kind_share_a_program():
    config = gemma()
    calls = layer_calls(functional.bind("full", config), config, (32,) * 3)
    assert len(set(calls)) == 2 and calls[0] == calls[2]


@pytest.mark.parametrize(
    ("name", "shape"), [("gemma", (2, 2)), ("gpt_oss", (1, 2)), ("deepseek", (2, 1)), ("gemma 4", (1, 2))]
)
def test_a_mesh_changes_nothing(name, shape):
    model, tokens = loud_model(name), tokens_of()
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))
    on_mesh = jax.device_put(model.params, param_shardings(model.config, mesh))
    on_devices = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    expected = exact_logits(model.params, tokens, model.config)
    logits = exact_logits(on_mesh, on_devices, model.config)
    np.testing.assert_allclose(logits, expected, atol=MOST * abs(expected).max())


def test_latent_attention_has_one_head_and_is_not_divided():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    with pytest.raises(KvjaxError, match="axis K of size 1 does not divide over the 2 devices"):
        param_shardings(deepseek(), mesh)


def test_experts_have_the_gradients_of_a_dense_sum():
    """Each token's experts are found again by a sum over all of them, weighted by 0 where a token does not go."""
    kind = MlpKind(6, experts=Experts(5, 2, factor=1.3))
    part = MixtureOfExperts(4, jnp.dtype("float32"), kind)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 7, 4)), jnp.float32)
    params = nn.unbox(part.init(jax.random.key(0), x)["params"])

    def dense(params: Any, x: jax.Array) -> jax.Array:
        s = x @ params["router"]["kernel"]
        best, index = jax.lax.top_k(s, 2)
        weight = (jax.nn.one_hot(index, 5) * jax.nn.softmax(best, -1)[..., None]).sum(-2) * 1.3
        gate, up = (jnp.einsum("btd,edf->btef", x, params[name]["kernel"]) for name in ("gate", "up"))
        y = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, params["down"]["kernel"])
        return (y * weight[..., None]).sum(2)

    def sparse(params: Any, x: jax.Array) -> jax.Array:
        return part.apply({"params": params}, x)

    def loss(run: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda params, x: jnp.sin(run(params, x)).sum(), argnums=(0, 1)))

    found, expected = (loss(run)(params, x) for run in (sparse, dense))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), found, expected)
    mapped = jax.vmap(lambda row: sparse(params, row[None])[0])(x)
    np.testing.assert_allclose(mapped, sparse(params, x), atol=1e-5)


def test_the_output_projection_of_latent_attention_contains_the_values_up_projection():
    params, kind = loud_model("deepseek").params["layer_1"], deepseek().kind(1)
    out = np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32)  # of each query head, in latent channels
    values = np.einsum("gr,gvr->gv", out, params["attention"]["value_up"])
    expected = np.einsum("gv,gvd->d", values, params["attention"]["o"]["kernel"][0])
    found = np.einsum("gr,grd->d", out, output_projection_of(params, kind)[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek", "narrow values", "gemma 4"])
def test_a_checkpoint_of_kinds_is_read_back(name, tmp_path):
    model = loud_model(name)
    checkpoint.save(tmp_path / "model", model.config, model.params)
    config, params = checkpoint.restore(tmp_path / "model")
    assert config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_bytes_of_an_exact_cache_are_those_of_each_layer():
    config = deepseek()
    assert full_bytes(config, [10], "float32") == 2 * (10 * (16 * 4 + 4) + 4) + 4
    kinds = (
        dataclasses.replace(config.kind(0), attention=attention(ROPE, value_dim=6)),
        dataclasses.replace(config.kind(0), attention=AttentionKind(4, 1, 8, None)),
    )
    mixed = Config(V, D, kinds, (0, 1, 1))
    numbers = 2 * (8 + 6) + 2 * (8 + 8)
    assert full_bytes(mixed, [10, 3], "bfloat16") == 13 * (numbers * 2 + 3 * 4) + 2 * (3 * 4 + 4)
