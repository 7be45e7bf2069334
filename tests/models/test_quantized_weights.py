"""Weights in 8 and 4 bits: codes of an oracle, logits of the dequantized kernels, checkpoints, meshes, errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import kvjax
from kvjax.core.matmul import matmul
from kvjax.core.mesh import make_mesh
from kvjax.core.quantized_kernel import GROUP_ROWS, dequantize, quantize
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.kinds import Experts
from kvjax.models.sharding import param_shardings

KINDS = ("int8", "int4")
CONFIG = kvjax.Config.llama(
    vocab_size=96, width=32, layers=2, heads=8, kv_heads=4, head_dim=8, mlp_width=160, qkv_bias=True
)
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


@functools.cache
def model() -> kvjax.Model:
    return kvjax.random_model(CONFIG)


@functools.cache
def quantized(weights: str) -> kvjax.Model:
    return model().with_weights(weights)


def oracle(kernel: np.ndarray, weights: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a kernel [in out]: codes, and the kernel that they stand for."""
    codes, restored = np.empty_like(kernel), np.empty_like(kernel)
    largest, size = (127, len(kernel)) if weights == "int8" else (7, GROUP_ROWS)
    for start in range(0, len(kernel), size):
        rows = slice(start, start + size)
        for column in range(kernel.shape[1]):
            w = kernel[rows, column]
            scale = np.abs(w).max() * np.float32(1 / largest)
            codes[rows, column] = 0 if scale == 0 else np.round(w / scale)
            restored[rows, column] = codes[rows, column] * scale
    return codes, restored


@pytest.mark.parametrize("weights", KINDS)
def test_codes_and_scales_are_those_of_the_oracle(weights):
    # Two groups and a rest, and a channel of zeros.
    kernel = np.random.default_rng(0).normal(size=(2 * GROUP_ROWS + 40, 5)).astype(np.float32)
    kernel[:, 2] = 0
    ours = quantize(jnp.asarray(kernel), weights=weights)
    codes, restored = oracle(kernel, weights)
    assert ours["codes"].dtype == weights
    assert ours["scale"].shape == ((5,) if weights == "int8" else (3, 5))
    np.testing.assert_array_equal(np.asarray(ours["codes"], np.float32), codes)
    np.testing.assert_allclose(dequantize(ours), restored, rtol=1e-6)
    x = np.random.default_rng(1).normal(size=(3, len(kernel))).astype(np.float32)
    np.testing.assert_allclose(matmul(jnp.asarray(x), ours), x @ restored, rtol=1e-4, atol=1e-4)


def restore_kernels(quantized_model: kvjax.Model) -> kvjax.Model:
    """Returns the model with numbers in place of codes."""
    flat, params = flatten_dict(quantized_model.params), {}
    for path, x in flat.items():
        if path[-1] == "codes":
            scale = flat[*path[:-1], "scale"]
            inputs = 3 if path[-3] == "o" else 1
            is_expert = path[1] == "mlp" and x.ndim == 3
            restore = functools.partial(dequantize, num_inputs=inputs)
            kernel = {"codes": x, "scale": scale}
            params[path[:-1]] = jax.vmap(restore)(kernel) if is_expert else restore(kernel)
        elif path[-2:] != ("kernel", "scale"):
            params[path] = x
    return dataclasses.replace(quantized_model, params=unflatten_dict(params))


def mixture() -> kvjax.Model:
    kind = CONFIG.kinds[0]
    mlp = dataclasses.replace(kind.mlp, width=16, bias=True, experts=Experts(4, 2, shared_width=16))
    return kvjax.random_model(dataclasses.replace(CONFIG, kinds=(dataclasses.replace(kind, mlp=mlp),)))


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("make", [model, mixture])
def test_logits_are_those_of_the_kernels_that_the_codes_stand_for(make, weights):
    exact = make()
    ours = exact.with_weights(weights)
    expected = kvjax.logits(restore_kernels(ours), PROMPT)[0]
    np.testing.assert_allclose(kvjax.logits(ours, PROMPT)[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(expected - kvjax.logits(exact, PROMPT)[0]).max() > 1e-3
    routers = [path for path in flatten_dict(ours.params, sep="/") if "router" in path]
    assert all(path.endswith(("kernel", "bias")) for path in routers) and bool(routers) == (make is mixture)


@pytest.mark.parametrize("weights", KINDS)
def test_a_checkpoint_keeps_codes_and_refuses_another_kind(tmp_path, weights):
    checkpoint.save(tmp_path / "exact", CONFIG, model().params)
    checkpoint.save(tmp_path / "codes", CONFIG, quantized(weights).params)
    loaded = kvjax.load(tmp_path / "codes")
    assert loaded.weights == weights and loaded.dtype == jnp.float32
    assert loaded.fingerprint == quantized(weights).fingerprint != model().fingerprint
    assert kvjax.load(tmp_path / "exact", weights=weights).fingerprint == loaded.fingerprint
    assert kvjax.load(tmp_path / "codes", weights=weights).fingerprint == loaded.fingerprint
    other = next(kind for kind in KINDS if kind != weights)
    with pytest.raises(KvjaxError, match=f"holds {weights} weights.*--weights {other}"):
        kvjax.load(tmp_path / "codes", weights=other)
    narrow = kvjax.load(tmp_path / "codes", dtype="bfloat16")
    assert narrow.dtype == jnp.bfloat16 and narrow.weights == weights


def test_other_kinds_are_refused():
    with pytest.raises(KvjaxError, match="weights='int2' is no kind of weights"):
        model().with_weights("int2")
    with pytest.raises(KvjaxError, match="holds int8 weights, and int4 cannot be made of them"):
        quantized("int8").with_weights("int4")


def test_a_cache_of_other_weights_is_refused():
    cache = kvjax.prefill(model(), PROMPT, "full", capacity=12)[1]
    with pytest.raises(KvjaxError, match="weights"):
        kvjax.generate(quantized("int8"), [[7]], "full", cache=cache, max_new_tokens=1)


@pytest.mark.parametrize("weights", KINDS)
def test_codes_and_scales_are_divided_over_a_mesh(weights):
    mesh = make_mesh(1, 4)
    on_mesh = dataclasses.replace(
        model(), params=jax.device_put(model().params, param_shardings(CONFIG, mesh)), mesh=mesh
    ).with_weights(weights)
    kernel = on_mesh.params["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel["codes"].addressable_shards[0].data.shape == (32, 40)
    assert kernel["scale"].addressable_shards[0].data.shape[-1] == 40
    assert on_mesh.fingerprint == quantized(weights).fingerprint
    expected = kvjax.logits(quantized(weights), PROMPT)[0]
    np.testing.assert_allclose(kvjax.logits(on_mesh, PROMPT)[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_gradient_passes_to_inputs():
    kernel = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32), weights="int8")
    gradient = jax.grad(lambda x: matmul(x, kernel).sum())(jnp.ones((2, 16)))
    np.testing.assert_allclose(gradient, np.tile(dequantize(kernel).sum(1), (2, 1)), rtol=1e-5)
