"""A model on a mesh whose axes are `Explicit`, those of `jax.make_mesh`, gives what a model on one device gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import kvjax
from kvjax import cache_ops, functional
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.speculative import speculate
from kvjax.testing import toy_model

PROMPTS, MORE = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 5]], [[1, 2], [3]]


@functools.cache
def make_one() -> kvjax.Model:
    return toy_model(kv_heads=2, heads=4, vocab_size=96, layers=2)


def make_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    assert mesh.explicit_axes == ("data", "model")
    return mesh


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> kvjax.Model:
    folder = tmp_path_factory.mktemp("model") / "toy"
    checkpoint.save(folder, make_one().config, make_one().params)
    return kvjax.load(folder, mesh=make_mesh())


@pytest.fixture(params=[False, True], ids=["no mesh set", "set_mesh"])
def mesh_in_use(request):
    with jax.set_mesh(make_mesh()) if request.param else contextlib.nullcontext():
        yield


def test_the_model_lies_on_the_mesh_that_it_is_given(four, mesh_in_use):
    assert four.mesh == make_mesh() and four.fingerprint == make_one().fingerprint
    assert jax.typeof(four.params["embedding"]).sharding.spec == PartitionSpec("model", None)
    doubled = jax.tree.map(lambda x: x * 2, four.params)  # the caller's own program
    assert jax.tree.map(jax.typeof, doubled) == jax.tree.map(jax.typeof, four.params)


@pytest.mark.parametrize(
    "method", ["full", "snapkv:budget=4,window=2", "offload", "kcache:n=3", "kvzip:budget=4,sinks=1"]
)
def test_generated_tokens_are_those_of_one_device(four, mesh_in_use, method):
    run = functools.partial(kvjax.generate, prompts=PROMPTS, method=method, max_new_tokens=4)
    a, b = run(four), run(make_one())
    assert a.tokens == b.tokens and a.bytes == b.bytes


@pytest.mark.parametrize(
    "options", [{"loop": "scan"}, {"loop": "layers"}, {"temperature": 0.8, "repetition_penalty": 1.1}]
)
def test_loops_and_samplers(four, mesh_in_use, options):
    a, b = (kvjax.generate(m, PROMPTS, "full", max_new_tokens=3, **options).tokens for m in (four, make_one()))
    assert a == b


def test_a_context_is_asked_scored_saved_and_streamed(four, mesh_in_use, tmp_path):
    def use(model: kvjax.Model, path: Any) -> list[Any]:
        context = kvjax.read(model, PROMPTS, "full")
        context = kvjax.resume(model, context.save(path))
        scores = [*context.score(MORE), *kvjax.score(model, PROMPTS, MORE, "full")]
        return [
            context.ask(MORE, max_new_tokens=3).tokens,
            list(context.feed(MORE).stream(max_new_tokens=3)),
            context.take([1, 0]).crop([1, 2]).ask(MORE, max_new_tokens=2).tokens,
            context.edit(1, 2, MORE).ask(MORE, max_new_tokens=2).tokens,
            speculate(model, PROMPTS, "quest:budget=4,page=2", num_draft_tokens=2, max_new_tokens=3).tokens,
        ], np.concatenate([np.ravel(x) for x in scores[2:]])

    (answers, scores), (want, expected) = use(four, tmp_path / "four"), use(make_one(), tmp_path / "one")
    assert answers == want
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_logits_and_caches_have_types_and_go_on(four, mesh_in_use):
    logits = kvjax.logits(four, PROMPTS)
    np.testing.assert_allclose(logits, kvjax.logits(make_one(), PROMPTS), atol=1e-5)
    assert jax.typeof(logits).sharding.spec == PartitionSpec("data", None, "model")
    assert jax.typeof(logits.argmax(-1)).sharding.spec == PartitionSpec("data", None)
    _, cache = kvjax.prefill(four, PROMPTS, "full")
    types = jax.tree.map(jax.typeof, cache.layers)
    assert {x.sharding.spec for x in jax.tree.leaves(types) if x.ndim == 4} == {
        PartitionSpec("data", "model", None, None)
    }
    assert jax.tree.map(jax.typeof, cache_ops.take(cache_ops.crop(cache, [4, 2]), [1, 0]).layers) == types
    assert jax.tree.map(jax.typeof, kvjax.extend(four, MORE, cache)[1].layers) == types
    want = kvjax.generate(make_one(), MORE, cache=kvjax.prefill(make_one(), PROMPTS, "full")[1], max_new_tokens=3)
    assert kvjax.generate(four, MORE, cache=cache, max_new_tokens=3).tokens == want.tokens
    assert kvjax.kept_positions(cache)[0][0][0].tolist() == list(range(9))


def test_parameters_go_into_a_program_of_the_functional_core(four):
    with jax.set_mesh(make_mesh()):
        logits = jax.jit(functional.logits, static_argnums=2)(four.params, np.array([PROMPTS[0]] * 2), four.config)
    np.testing.assert_allclose(logits[0], kvjax.logits(make_one(), PROMPTS)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "names"),
    [((1, 2), ("x", "y")), ((2, 2), ("fsdp", "tp")), ((2,), ("batch",)), ((2, 1, 2), ("data", "model", "sequence"))],
)
def test_a_mesh_of_other_names_is_refused_at_every_door(shape, names):
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: np.prod(shape)])
    for door in (functools.partial(kvjax.load, "testbed"), functools.partial(dataclasses.replace, make_one())):
        with pytest.raises(KvjaxError, match=r"nothing is divided over the mesh axis .*give mesh=Mesh\(mesh.devices"):
            door(mesh=mesh)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_heads_that_the_mesh_does_not_divide_are_named_at_every_door(four, axis_type):
    mesh = jax.make_mesh((1, 4), ("data", "model"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)
    doors = (
        lambda: kvjax.load(four.name, mesh=mesh),
        lambda: dataclasses.replace(make_one(), mesh=mesh),
        lambda: kvjax.Model(make_one().config, make_one().params, mesh=mesh),
    )
    for door in doors:
        with pytest.raises(KvjaxError, match="axis K of size 2 does not divide over the 4 devices .*divides kv_heads"):
            door()
