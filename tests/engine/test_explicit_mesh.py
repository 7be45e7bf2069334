"""`kvjax.functional` with parameters and tokens on a mesh whose axes are `Explicit`, of any names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax import functional
from kvjax.core.mesh import make_mesh as make_auto_mesh
from kvjax.models.sharding import param_shardings
from kvjax.testing import toy_model

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12)).astype(np.int32)
LENGTHS, T = np.array([8, 5], np.int32), 8


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, kv_heads=2, heads=4, vocab_size=96)


def put_on_mesh(names: tuple[str, str]) -> tuple[Any, ...]:
    """The mesh, the parameters by kvjax' rules under other names, tokens and lengths."""
    mesh = jax.make_mesh((2, 2), names, devices=jax.devices()[:4])
    renamed = dict(zip(("data", "model"), names, strict=True))
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, PartitionSpec(*map(renamed.get, s.spec))),
        param_shardings(make_model().config, make_auto_mesh(2, 2)),
    )
    tokens, lengths = (jax.device_put(x, NamedSharding(mesh, PartitionSpec(names[0]))) for x in (TOKENS, LENGTHS))
    return mesh, jax.device_put(make_model().params, shardings), tokens, lengths


def run_all(params: Any, tokens: Any, lengths: Any, method: str) -> tuple[Any, ...]:
    plan = functional.bind(method, make_model().config)
    logits = functional.logits(params, tokens, make_model().config)
    last, cache = functional.prefill(params, tokens[:, :T], lengths, plan, make_model().config, 32)
    new_tokens, cache = functional.decode(params, cache, last.argmax(-1).astype(jnp.int32), 2)

    def step(cache: Any, token: Any) -> Any:
        out, cache = functional.extend(params, token[:, None], cache)
        return cache, out[:, 0]

    cache, steps = lax.scan(step, cache, jnp.moveaxis(tokens[:, T:], 1, 0))
    return logits, last, steps, new_tokens, functional.take(cache, jnp.array([1, 0]))


@pytest.mark.parametrize("names", [("data", "model"), ("x", "y")])
@pytest.mark.parametrize("method", ["full", "kivi:bits=4,group=4,residual=4", "offload"])
def test_the_functional_core_gives_the_same_with_types(names, method):
    want = jax.jit(run_all, static_argnums=3)(make_model().params, TOKENS, LENGTHS, method)
    mesh, *arrays = put_on_mesh(names)
    x, y = names
    with jax.set_mesh(mesh):
        got = jax.jit(run_all, static_argnums=3)(*arrays, method)
    for a, b in zip(got[:4], want[:4], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    types = [(x, None, y), (x, y), (None, x, y), (x, None)]
    assert [a.sharding.spec for a in got[:4]] == [PartitionSpec(*t) for t in types]
    assert {a.sharding.spec for a in jax.tree.leaves(got[4]) if a.ndim == 4} == {PartitionSpec(x, y, None, None)}
    assert kvjax.state_bytes(got[4]) == kvjax.state_bytes(want[4])
    cropped = kvjax.cache_ops.crop(got[4], got[4].length - 1) if method == "full" else got[4]
    assert jax.tree.map(jax.typeof, cropped) == jax.tree.map(jax.typeof, got[4])


def test_outside_of_jit_and_without_a_mesh_that_is_set():
    _, *arrays = put_on_mesh(("x", "y"))
    params, tokens, _ = arrays
    want = functional.logits(make_model().params, TOKENS, make_model().config)
    for run in (functional.logits, jax.jit(functional.logits, static_argnums=2)):
        logits = run(params, tokens, make_model().config)
        np.testing.assert_allclose(logits, want, atol=1e-5)
        assert jax.typeof(logits).sharding.spec == PartitionSpec("x", None, "y")


def test_gradients_have_the_types_of_the_parameters():
    mesh, params, tokens, lengths = put_on_mesh(("x", "y"))
    plan = functional.bind("full", make_model().config)

    def loss(params, tokens, lengths):
        _, cache = functional.prefill(params, tokens[:, :T], lengths, plan, make_model().config, 32)
        return (functional.extend(params, tokens[:, T:], cache)[0] ** 2).mean()

    want = jax.jit(jax.grad(loss))(make_model().params, TOKENS, LENGTHS)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss))(params, tokens, lengths)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, params)
