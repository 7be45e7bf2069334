"""Under `jax_enable_x64` the doors for callers' own programs compute in 32 bits, and give the results without it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kvjax
from kvjax import custom_decoder, functional
from kvjax.core.precision import computes_in_32_bits
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 97, (2, 20))  # i64, as NumPy makes them
LENGTHS = np.array([20, 13])
N, K, H = 4, 2, 32
ROPE = custom_decoder.Rope(H)
METHODS = (
    "full",
    "snapkv:budget=8,window=4 + int8",
    "kivi:bits=4,group=8,residual=8",
    "quest:budget=8,page=4,device_layers=0",
    "h2o:heavy=4,recent=4",
    "kvzip:budget=8",
)
"""A method of each kind of component, and one that repeats the prompt."""


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, head_dim=32)


def dtypes(tree) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


def run_functional(method: str) -> tuple:
    config = make_model().config
    plan = functional.bind(method, config)

    @jax.jit
    def run(params, tokens, lengths):
        last, cache = functional.prefill(params, tokens, lengths, plan, config, 48)
        logits, cache = functional.extend(params, tokens[:, :3], cache)
        answer, cache = functional.decode(params, cache, logits[:, -1].argmax(-1), 3)
        return functional.logits(params, tokens, config), last, logits, answer, functional.take(cache, jnp.arange(2))

    return run(make_model().params, TOKENS, LENGTHS)


def run_attend(method: str, dtype: type = np.float32) -> tuple:
    """A prompt and a scan over steps, whose carry must keep its types."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, 20, heads, H)).astype(dtype) for heads in (N, K, K))
    specs = custom_decoder.specs_of(1, N, K, H, rope=ROPE)
    gives = ("repeat",) if method.startswith("kvzip") else ()
    cache = custom_decoder.attach(method, specs, 48, gives=gives)[0]
    out, cache = custom_decoder.attend(cache, q, k, v, np.broadcast_to(np.arange(20), (2, 20)))

    def repeat(cache, tokens, positions):
        """The decoder's part, in the precision of the caller."""
        vectors = [jnp.asarray(x)[:, jnp.arange(tokens.shape[1]) % 20] * 1.0 for x in (q, k, v)]
        return {0: custom_decoder.attend(cache[0], *vectors, positions + 0)[1]}

    cache = (
        custom_decoder.finish({0: cache}, tokens=TOKENS, repeat=repeat)[0] if gives else custom_decoder.finish(cache)
    )

    def step(cache, t):
        out, cache = custom_decoder.attend(cache, *(jnp.asarray(x[:, :1]) for x in (q, k, v)), jnp.full((2, 1), t))
        return cache, out

    cache, outs = jax.jit(lambda cache: lax.scan(step, cache, jnp.arange(20, 23)))(cache)
    return out, outs, cache


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", [run_functional, run_attend])
def test_results_are_those_of_32_bits(run, method):
    expected = run(method)
    with jax.enable_x64(True):
        got = run(method)
    assert dtypes(got) <= {"float32", "int32", "uint32", "uint8", "int8", "bool"}
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_vectors_and_parameters_of_64_bits_are_narrowed():
    expected = run_attend("full")
    with jax.enable_x64(True):
        got = run_attend("full", np.float64)
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), make_model().params)
        assert dtypes(wide) == {"float64"}
        logits = functional.logits(wide, TOKENS, make_model().config)
        cache = functional.empty(functional.bind("full", make_model().config), make_model().config, 2, 32)
        assert dtypes(cache) == {"float32", "int32"}
    np.testing.assert_array_equal(logits, functional.logits(make_model().params, TOKENS, make_model().config))
    np.testing.assert_allclose(got[0], expected[0], atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("of", ["numpy", "jax"])
@pytest.mark.parametrize(
    "call",
    [
        lambda model: kvjax.generate(model, [[1, 2]], "full", max_new_tokens=2),
        lambda model: kvjax.read(model, [[1, 2]], "kivi"),
        lambda model: kvjax.logits(model, [[1, 2]]),
        lambda model: model.fingerprint,
    ],
)
def test_a_model_with_parameters_of_64_bits_says_how_to_narrow_them(of, call):
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: np.asarray(x, np.float64) if of == "numpy" else x.astype("float64"), make_model().params
        )
    with pytest.raises(KvjaxError, match=r"\['embedding'\] is float64, .*32 bits.*np.asarray\(x, np.float32\)"):
        call(dataclasses.replace(make_model(), params=wide))
    narrowed = jax.tree.map(lambda x: np.asarray(x, np.float32), wide)  # the remedy
    assert dataclasses.replace(make_model(), params=narrowed).fingerprint == make_model().fingerprint


def test_gradients_and_a_vmap_of_the_caller_work():
    def loss(params):
        return (functional.logits(params, TOKENS, make_model().config) ** 2).mean()

    expected = jax.jit(jax.grad(loss))(make_model().params)
    with jax.enable_x64(True):
        got = jax.jit(jax.grad(loss))(make_model().params)
        each = jax.vmap(lambda row: functional.logits(make_model().params, row[None], make_model().config)[0])(
            jnp.asarray(TOKENS)
        )
    assert dtypes((got, each)) == {"float32"}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, expected)
    np.testing.assert_allclose(each, functional.logits(make_model().params, TOKENS, make_model().config), atol=1e-5)


def test_a_decoders_own_rotation_is_compared_as_it_computes():
    seen = []

    def rotate(x, positions):
        seen.append((jnp.arange(2.0).dtype, positions.dtype))
        cos, sin = ROPE.angles(positions[:, :, None])
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    with jax.enable_x64(True):
        custom_decoder.check_rope(custom_decoder.specs_of(1, N, K, H, rope=ROPE)[0], rotate)
    assert seen == [(jnp.float64, jnp.int32)]


@pytest.mark.parametrize("method", ["h2o:heavy=4,recent=4", "int8 + offload"])
def test_bytes_are_counted_and_files_are_recognized_as_without(method, tmp_path):
    """The states have arrays whose dtype is JAX's default: H2O's sums, and the guards of buffers in host memory."""
    model, config = make_model(), make_model().config

    def count() -> tuple[str, str]:
        return str(kvjax.planned_bytes(method, model, 20)), str(kvjax.planned_bytes(method, config, 20, dtype="bf16"))

    expected, context = count(), kvjax.read(make_model(), [[*range(1, 21)]], method)
    path = context.save(tmp_path / "context")
    with jax.enable_x64(True):
        assert count() == expected
        resumed = kvjax.resume(make_model(), path)
        assert dtypes(resumed.cache) == dtypes(context.cache)
    np.testing.assert_array_equal(resumed.feed([[5]]).last_logits, context.feed([[5]]).last_logits)


def test_keys_of_random_numbers_and_static_values_pass():
    def call(key, dtype, number):
        return jax.random.uniform(key), jnp.zeros(2, dtype), number

    with jax.enable_x64(True):
        drawn, zeros, number = computes_in_32_bits(call)(jax.random.key(0), jnp.float32, 2**40)
    assert (drawn.dtype, zeros.dtype, number) == (jnp.float32, jnp.float32, 2**40)
