"""Weights in 8 and 4 bits: codes of an oracle, logits of the dequantized kernels, checkpoints, meshes, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType

import kvjax
from kvjax.core.matmul import matmul
from kvjax.core.quantized_kernel import GROUP_INPUTS, dequantize, quantize
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.quantized_params import UNQUANTIZED
from tests.fixtures import LOUD, load_family

KINDS = ("int8", "int4")
CONFIG = kvjax.Config.llama(
    vocab_size=96, width=40, layers=2, heads=8, kv_heads=4, head_dim=8, mlp_width=160, qkv_bias=True
)
PROMPTS, MORE = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9]], [[3, 2, 3], [8, 4]]
CLOSE = 2e-5  # of the largest logit: the order of sums moves float32 by up to 1.4e-5, by processor and version


@functools.cache
def model() -> kvjax.Model:
    return kvjax.random_model(CONFIG)


@functools.cache
def quantized(weights: str) -> kvjax.Model:
    return model().with_weights(weights)


@functools.cache
def family_model(name: str, weights: str) -> kvjax.Model:
    config, params, _ = load_family(name)
    return kvjax.Model(config, params).with_weights(weights)


def restore_kernels(quantized_model: kvjax.Model) -> kvjax.Model:
    """Returns the model with float32 kernels in place of codes, restored in NumPy."""
    flat, params = flatten_dict(quantized_model.params), {}
    for path, x in flat.items():
        if path[-2:] == ("kernel", "codes"):
            codes, scale = np.asarray(x, np.float32), np.asarray(flat[*path[:-1], "scale"])
            maps = int(path[1] == "mlp" and path[2] != "shared" and codes.ndim == 3)  # experts
            inputs = 3 if path[-3] == "o" else 1
            by_input = codes.reshape(*codes.shape[:maps], -1, *codes.shape[maps + inputs :])
            if x.dtype == jnp.int4:
                each = np.repeat(scale, GROUP_INPUTS, maps).take(range(by_input.shape[maps]), maps)
            else:
                each = np.expand_dims(scale, maps)
            params[path[:-1]] = jnp.asarray((by_input * each).reshape(codes.shape))
        elif path[-2:] != ("kernel", "scale"):
            params[path] = x
    return dataclasses.replace(quantized_model, params=unflatten_dict(params))


def assert_same_logits(ours: Any, expected: Any) -> None:
    np.testing.assert_allclose(ours, expected, rtol=0, atol=CLOSE * np.abs(np.asarray(expected)).max())


def quantize_in_numpy(kernel: np.ndarray, weights: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a kernel [in out]: codes, and the kernel that they stand for."""
    codes, restored = np.zeros_like(kernel), np.zeros_like(kernel)
    size = len(kernel) if weights == "int8" else GROUP_INPUTS
    for column, start in np.ndindex(kernel.shape[1], -(-len(kernel) // size)):
        group = slice(start * size, (start + 1) * size), column
        largest = kernel[group][np.abs(kernel[group]).argmax()]
        scale = abs(largest) * np.float32(1 / 127) if weights == "int8" else largest / -8
        codes[group] = np.clip(np.round(kernel[group] / (scale or 1)), *((-127, 127) if weights == "int8" else (-8, 7)))
        restored[group] = codes[group] * scale
    return codes, restored


@pytest.mark.parametrize("weights", KINDS)
def test_codes_and_scales_are_those_of_the_oracle(weights):
    # Two groups and a rest, a channel of zeros, and an outlier.
    kernel = np.random.default_rng(0).normal(size=(2 * GROUP_INPUTS + 9, 5)).astype(np.float32)
    kernel[:, 2], kernel[3, 1] = 0, -9
    ours = quantize(jnp.asarray(kernel), weights=weights)
    codes, restored = quantize_in_numpy(kernel, weights)
    assert ours["codes"].dtype == weights
    assert ours["scale"].shape == ((5,) if weights == "int8" else (3, 5))
    np.testing.assert_array_equal(np.asarray(ours["codes"], np.float32), codes)
    np.testing.assert_allclose(dequantize(ours), restored, rtol=1e-6)
    x = np.random.default_rng(1).normal(size=(3, len(kernel))).astype(np.float32)
    np.testing.assert_allclose(matmul(jnp.asarray(x), ours), x @ restored, rtol=1e-4, atol=1e-4)


def test_sums_of_codes_do_not_overflow_float16():
    kernel = jnp.full((64, 3), 0.01, jnp.float16)
    for num_tokens in (1, 100):
        y = matmul(jnp.full((num_tokens, 64), 30, jnp.float16), quantize(kernel, weights="int8"))
        np.testing.assert_allclose(y, 64 * 30 * 0.01, rtol=2e-3)


# The other checkpoints of FAMILIES have the parameters of llama3.
EVERY_FAMILY = ("llama3", "llama3_tied", "qwen2", "qwen3", *LOUD)


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "int8") for name in EVERY_FAMILY), ("deepseek_v2", "int4"), ("gpt_oss", "int4")]
)
def test_a_family_has_codes_of_its_kernels_and_of_nothing_else(name, weights):
    ours, (_, params, _) = family_model(name, weights), load_family(name)
    exact, changed = flatten_dict(params, sep="/"), flatten_dict(restore_kernels(ours).params, sep="/")
    assert changed.keys() == exact.keys()
    kept = {path for path, x in changed.items() if x is exact[path]}
    assert kept == {path for path in exact if not path.endswith("/kernel") or path.split("/")[-2] in UNQUANTIZED}
    for path in changed.keys() - kept:  # half a step, and a whole one where a 4-bit code is clipped
        x, y = np.asarray(exact[path], np.float32), changed[path]
        assert np.abs(x - y).max() < np.abs(x).max() * (0.51 / 127 if weights == "int8" else 0.126), path


EVERY_KERNEL = ("qwen3_next", "deepseek_v2", "gemma4_shared", "gpt_oss", "llama3_tied")
"""Families that together have a kernel at each place where any family has one."""


def kernel_places(name: str) -> set[tuple[str, int]]:
    """The paths of a family's kernels within a layer, with their ranks."""
    flat = flatten_dict(load_family(name)[1])
    return {("/".join(path[1:-1]), x.ndim) for path, x in flat.items() if path[-1] == "kernel"}


def test_these_families_have_all_kernels():
    assert set().union(*map(kernel_places, EVERY_KERNEL)) == set().union(*map(kernel_places, EVERY_FAMILY))


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "int8") for name in EVERY_KERNEL), ("deepseek_v2", "int4"), ("gpt_oss", "int4")]
)
def test_logits_are_those_of_the_kernels_that_the_codes_stand_for(name, weights):
    ours = family_model(name, weights)
    assert_same_logits(kvjax.logits(ours, PROMPTS), kvjax.logits(restore_kernels(ours), PROMPTS))


def use(model: kvjax.Model, method: str = "full") -> tuple[list[list[int]], np.ndarray]:
    """Reads, generates, extends and scores: (tokens, log-probabilities and logits)."""
    logits, cache = kvjax.prefill(model, PROMPTS, method, capacity=24)
    more, _ = kvjax.extend(model, MORE, cache)
    scores = kvjax.score(model, PROMPTS, MORE, method)
    tokens = kvjax.generate(model, PROMPTS, method, max_new_tokens=3).tokens
    return tokens, np.concatenate([np.ravel(x) for x in (*scores, np.asarray(logits), np.asarray(more))])


def assert_same_use(ours: tuple[Any, np.ndarray], expected: tuple[Any, np.ndarray]) -> None:
    assert ours[0] == expected[0]
    np.testing.assert_allclose(ours[1], expected[1], rtol=0, atol=10 * CLOSE * np.abs(expected[1]).max())


@pytest.mark.whole
@pytest.mark.parametrize(("name", "weights"), [("deepseek_v2", "int8"), ("gpt_oss", "int4")])
def test_every_use_of_a_model_is_that_of_the_kernels(name, weights):
    ours = family_model(name, weights)
    assert_same_use(use(ours), use(restore_kernels(ours)))


METHODS = (
    "snapkv:budget=6,window=2",
    "kivi:bits=4,group=8,residual=8",
    "kcache:n=4",
    "quest:budget=8,page=4",
    "minicache",
)


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_each_class_run_on_codes(method):
    run = functools.partial(kvjax.generate, prompts=PROMPTS, method=method, max_new_tokens=3)
    assert run(quantized("int8")).tokens == run(restored_int8()).tokens


@functools.cache
def restored_int8() -> kvjax.Model:
    return restore_kernels(quantized("int8"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Directories of one model: its exact kernels, and each kind of codes."""
    folder = tmp_path_factory.mktemp("stored")
    checkpoint.save(folder / "exact", CONFIG, model().params)
    for weights in KINDS:
        checkpoint.save(folder / weights, CONFIG, quantized(weights).params)
    return folder


@pytest.mark.parametrize("weights", KINDS)
def test_a_checkpoint_keeps_codes_and_refuses_another_kind(stored, weights):
    loaded = kvjax.load(stored / weights)
    assert loaded.weights == weights and loaded.dtype == jnp.float32 and weights in repr(loaded)
    assert loaded.fingerprint == quantized(weights).fingerprint != model().fingerprint
    assert kvjax.load(stored / "exact", weights=weights).fingerprint == loaded.fingerprint
    assert kvjax.load(stored / weights, weights=weights).fingerprint == loaded.fingerprint
    other = next(kind for kind in KINDS if kind != weights)
    with pytest.raises(KvjaxError, match=f"holds {weights} weights.*--weights {other}"):
        kvjax.load(stored / weights, weights=other)
    narrow = kvjax.load(stored / weights, dtype="bfloat16")
    assert narrow.dtype == jnp.bfloat16 and narrow.weights == weights
    kernels = narrow.params["layer_0"]["mlp"]["up"]["kernel"]
    assert kernels["scale"].dtype == jnp.bfloat16 and kernels["codes"].dtype == weights
    assert_same_logits(kvjax.logits(loaded, PROMPTS), kvjax.logits(restore_kernels(loaded), PROMPTS))


@pytest.mark.parametrize(("weights", "axis_type"), [("int8", AxisType.Explicit), ("int4", AxisType.Auto)])
def test_codes_and_scales_are_divided_over_a_mesh(stored, weights, axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)
    exact = kvjax.load(stored / "exact", mesh=mesh)
    for set_mesh in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with set_mesh:
            ways = {
                "loaded": kvjax.load(stored / "exact", mesh=mesh, weights=weights),
                "stored": kvjax.load(stored / weights, mesh=mesh),
                "quantized": exact.with_weights(weights),
            }
            types = {name: jax.tree.map(jax.typeof, each.params) for name, each in ways.items()}
            assert types["loaded"] == types["stored"] == types["quantized"]
            assert {each.fingerprint for each in ways.values()} == {quantized(weights).fingerprint}
    params = ways["loaded"].params["layer_0"]
    kernel = params["mlp"]["up"]["kernel"]
    assert kernel["codes"].addressable_shards[0].data.shape == (40, 80)
    assert kernel["scale"].addressable_shards[0].data.shape[-1] == 80
    assert params["attention"]["o"]["kernel"]["codes"].addressable_shards[0].data.shape == (2, 2, 8, 40)
    assert_same_use(use(ways["loaded"]), use(quantized(weights)))


def test_what_cannot_be_is_refused(stored):
    for refused in (lambda w: model().with_weights(w), lambda w: kvjax.load(stored / "exact", weights=w)):
        for weights in ("int3", 8, jnp.int8):
            with pytest.raises(KvjaxError, match="is no kind of weights; take 'int8', 'int4', or None"):
                refused(weights)
    with pytest.raises(KvjaxError, match="weights=None names no kind of codes"):
        model().with_weights(None)  # type: ignore[arg-type]
    with pytest.raises(KvjaxError, match="holds int8 weights, and int4 cannot be made of them; load it anew"):
        quantized("int8").with_weights("int4")
    assert quantized("int8").with_weights("int8") is quantized("int8")


def test_a_cache_of_other_weights_is_refused():
    cache = kvjax.prefill(model(), PROMPTS, "full", capacity=16)[1]
    with pytest.raises(KvjaxError, match="weights"):
        kvjax.generate(quantized("int8"), MORE, "full", cache=cache, max_new_tokens=1)


@pytest.mark.parametrize("weights", KINDS)
def test_a_kernel_that_is_not_finite_is_named(weights):
    params = flatten_dict(model().params, sep="/")
    params["layer_1/mlp/up/kernel"] = params["layer_1/mlp/up/kernel"].at[3, 4].set(jnp.nan)
    broken = dataclasses.replace(model(), params=unflatten_dict(params, sep="/")).with_weights(weights)
    with pytest.raises(KvjaxError, match="the parameter layer_1/mlp/up/kernel/scale of the model is not"):
        kvjax.generate(broken, PROMPTS, "full", max_new_tokens=1)


def test_a_gradient_passes_to_inputs_and_not_to_codes():
    kernel = quantize(jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32), weights="int8")
    gradient = jax.grad(lambda x: matmul(x, kernel).sum())(jnp.ones((2, 16)))
    np.testing.assert_allclose(gradient, np.tile(dequantize(kernel).sum(1), (2, 1)), rtol=1e-5)
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda kernel: matmul(jnp.ones((2, 16)), kernel).sum())(kernel)
