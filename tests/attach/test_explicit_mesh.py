"""`custom_decoder.attend` in decoders on a mesh whose axes are `Explicit`, those of `jax.make_mesh`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax import custom_decoder
from kvjax.custom_decoder.layer_cache import GIVES
from kvjax.errors import KvjaxError
from tests.attach import explicit_decoder as decoder
from tests.attach.plain_decoder import rotate
from tests.attach.test_every_method import NEEDS_OUR_DECODER, SEVERAL_LAYERS, STRINGS

B, T, NEW, CAPACITY = 2, 12, 3, 32
TOKENS = np.random.default_rng(0).integers(0, decoder.VOCAB, (B, T + NEW)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(T + NEW, dtype=np.int32), TOKENS.shape)
ROPE = custom_decoder.Rope(decoder.H)
METHODS = ("full", "snapkv:budget=6,window=2,kernel=3", "kivi:bits=4,group=4,residual=4", "offload")


def num_layers(name: str) -> int:
    return SEVERAL_LAYERS.get(name, 2 if "scope=model" in STRINGS[name] else 1)


def run_decoder(name: str, weights: Any, tokens: jax.Array, positions: jax.Array) -> Any:
    """Logits of a prompt, of the steps after it in a scan, and the cache; the scan asks for one type of cache."""
    specs = custom_decoder.specs_of(num_layers(name), decoder.N, decoder.K, decoder.H, rope=ROPE)
    attached = custom_decoder.attach(STRINGS[name], specs, CAPACITY, gives=GIVES)
    num_drafts = attached[0].layer.bound.needs.draft_tokens
    given = {"commit": 1} if num_drafts else {}
    prompt = tokens[:, :T], positions[:, :T]
    logits, cache = decoder.forward(weights, *prompt, attached)
    cache = custom_decoder.finish(
        cache, tokens=prompt[0], repeat=lambda cache, *call: decoder.forward(weights, *call, cache)[1]
    )
    if num_drafts:
        _, cache = decoder.forward(weights, tokens[:, T : T + 1], positions[:, T : T + 1], cache, commit=0)

    def step(cache: Any, i: jax.Array) -> Any:
        fed = (lax.dynamic_slice_in_dim(x, T + i, 1 + num_drafts, 1) for x in (tokens, positions))
        out, cache = decoder.forward(weights, *fed, cache, **given)
        return cache, out[:, 0]

    cache, steps = lax.scan(step, cache, jnp.arange(NEW - num_drafts, dtype=jnp.int32))
    return logits, steps, cache


@functools.cache
def make_inputs(layers: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The weights, tokens and positions on a mesh."""
    mesh = decoder.make_mesh(*shape)
    sharding = NamedSharding(mesh, decoder.by_rules("batch", None))
    return decoder.make_weights(layers, mesh), *(jax.device_put(x, sharding) for x in (TOKENS, POSITIONS))


def run_on(name: str, shape: tuple[int, ...]) -> Any:
    with jax.set_mesh(decoder.make_mesh(*shape)):
        return jax.jit(functools.partial(run_decoder, name))(*make_inputs(num_layers(name), shape))


def test_a_decoder_equals_itself_with_plain_attention():
    prompt, steps, cache = run_on("full", (2, 2, 1))
    with jax.set_mesh(decoder.make_mesh(2, 2, 1)):
        want, _ = jax.jit(functools.partial(decoder.forward, cache=None))(*make_inputs(1, (2, 2, 1)))
    np.testing.assert_allclose(prompt, np.asarray(want)[:, :T], atol=1e-5)
    np.testing.assert_allclose(np.moveaxis(np.asarray(steps), 0, 1), np.asarray(want)[:, T:], atol=1e-5)
    assert jax.typeof(cache[0].state.k.data).sharding.spec == PartitionSpec("x", "y", None, None)


@pytest.mark.parametrize("name", ["snapkv", "kcache", "kvzip"])
def test_four_devices_give_what_one_gives(name):
    one, four = run_on(name, (1, 1, 1)), run_on(name, (2, 2, 1))
    for got, want in zip(four[:2], one[:2], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    for got, want in zip(*(jax.tree.leaves(x[2]) for x in (four, one)), strict=True):
        assert got.sharding.memory_kind == want.sharding.memory_kind
        num_parts = 4 if got.ndim > 2 and got.shape[1] == decoder.K else 2
        assert got.addressable_shards[0].data.size * num_parts == got.size


@pytest.mark.parametrize("name", [name for name in STRINGS if name not in NEEDS_OUR_DECODER])
def test_every_method_is_traced_with_types(name):
    with jax.set_mesh(decoder.make_mesh(2, 2, 1)):
        _, _, cache = jax.eval_shape(functools.partial(run_decoder, name), *make_inputs(num_layers(name), (2, 2, 1)))
    specs = [x.sharding.spec for x in jax.tree.leaves(cache) if x.ndim == 4 and x.shape[:2] == (B, decoder.K)]
    assert set(specs) <= {PartitionSpec("x", "y", None, None)}
    assert {x.length.sharding.spec for x in cache.values()} == {PartitionSpec("x")}


def random_layer() -> tuple[np.ndarray, ...]:
    """q [B T N H], k [B T K H] and v [B T K H] of four sequences, and their positions."""
    rng = np.random.default_rng(1)
    shape = 4, T + 1
    q, k, v = (rng.normal(size=(*shape, n, 8)).astype(np.float32) for n in (4, 2, 2))
    return q, k, v, np.broadcast_to(np.arange(T + 1, dtype=np.int32), shape)


def attach(method: str, **given: Any) -> custom_decoder.LayerCache:
    return custom_decoder.attach(
        method, custom_decoder.specs_of(1, 4, 2, 8, rope=custom_decoder.Rope(8)), CAPACITY, **given
    )[0]


def attend_twice(cache: custom_decoder.LayerCache, q: Any, k: Any, v: Any, positions: Any) -> tuple[Any, Any, Any]:
    prompt, cache = custom_decoder.attend(cache, q[:, :T], k[:, :T], v[:, :T], positions[:, :T])
    step, cache = custom_decoder.attend(cache, q[:, T:], k[:, T:], v[:, T:], positions[:, T:])
    return prompt, step, cache


@functools.cache
def outputs_without_mesh(method: str) -> tuple[Any, Any, Any]:
    return jax.jit(attend_twice)(attach(method), *map(jnp.asarray, random_layer()))


def put(mesh: Mesh, *names: Any) -> list[Any]:
    """The layer's tensors on a mesh, and its positions as they are."""
    q, k, v, positions = random_layer()
    return [*(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names))) for x in (q, k, v)), positions]


def make_mesh(*names: str, types: tuple[AxisType, ...] = (AxisType.Explicit,) * 2) -> Mesh:
    return jax.make_mesh((2, 2), names, devices=jax.devices()[:4], axis_types=types)


def assert_alike(method: str, got: tuple[Any, Any, Any], *names: Any) -> None:
    """Asserts the outputs of `attend_twice`, and where they lie; the cache lies as they do."""
    want = outputs_without_mesh(method)
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
        assert jax.typeof(x).sharding.spec == PartitionSpec(*names, *[None] * (4 - len(names)))
    buffers = [x for x in jax.tree.leaves(got[2]) if x.ndim == 4]
    sequences, _, heads = (*names, None, None, None)[:3]
    assert {jax.typeof(x).sharding.spec for x in buffers} == {PartitionSpec(sequences, heads, None, None)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_set", [False, True], ids=["mesh of the arrays", "set_mesh"])
@pytest.mark.parametrize("run", [attend_twice, jax.jit(attend_twice)], ids=["eager", "jit"])
def test_outputs_and_caches_have_types(method, is_set, run):
    mesh = make_mesh("a", "b")
    with jax.set_mesh(mesh if is_set else None):
        out = run(attach(method), *put(mesh, "a", None, "b"))
        assert_alike(method, out, "a", None, "b")
        assert jax.typeof(out[2].positions).sharding.spec[0] == "a"
        with jax.set_mesh(mesh):
            assert jax.typeof(out[0] * 2) == jax.typeof(out[0])  # the caller's program goes on


@pytest.mark.parametrize("names", [("a",), (("a", "b"),), (None, None, "b"), ("a", None, None, "b"), ()])
def test_any_division_of_the_queries_is_that_of_the_outputs(names):
    mesh = make_mesh("a", "b")
    with jax.set_mesh(mesh):
        assert_alike("full", jax.jit(attend_twice)(attach("full"), *put(mesh, *names)), *names)


def test_a_step_that_lies_otherwise_leaves_the_cache_where_it_is():
    mesh = make_mesh("a", "b")

    @jax.jit
    def run(q, k, v):
        _, before = custom_decoder.attend(attach("full"), q[:, :T], k[:, :T], v[:, :T], random_layer()[3][:, :T])
        step = (jax.sharding.reshard(x[:, T:], PartitionSpec()) for x in (q, k, v))
        return before, custom_decoder.attend(before, *step, random_layer()[3][:, T:])

    with jax.set_mesh(mesh):
        before, (out, after) = run(*put(mesh, "a", None, "b")[:3])
    np.testing.assert_allclose(out, outputs_without_mesh("full")[1], atol=1e-5)
    assert jax.tree.map(jax.typeof, before) == jax.tree.map(jax.typeof, after)


@pytest.mark.parametrize("run", [attend_twice, jax.jit(attend_twice)], ids=["eager", "jit"])
def test_axes_of_both_types_in_one_mesh(run):
    mesh = make_mesh("a", "b", types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        assert_alike("full", run(attach("full"), *put(mesh, "a", None, "b")), "a")


def test_a_callers_own_shard_map_over_some_axes_or_all():
    mesh, want = make_mesh("a", "b"), outputs_without_mesh("full")
    along_a = PartitionSpec("a")

    def run(*tensors: Any) -> Any:
        return attend_twice(attach("full"), *tensors)[:2]

    with jax.set_mesh(mesh):
        q, k, v, positions = put(mesh, "a")
        positions = jax.device_put(positions, NamedSharding(mesh, along_a))
        for axes in ({"a"}, {"a", "b"}):
            mapped = jax.shard_map(run, in_specs=along_a, out_specs=along_a, axis_names=axes, check_vma=axes == {"a"})
            for got, expected in zip(jax.jit(mapped)(q, k, v, positions), want[:2], strict=True):
                np.testing.assert_allclose(got, expected, atol=1e-5)


def test_gradients_have_the_types_of_what_they_are_of():
    mesh, cache = make_mesh("a", "b"), attach("full", differentiable=True)
    *tensors, positions = random_layer()

    def loss(q, k, v):
        prompt, step, _ = attend_twice(cache, q, k, v, positions)
        return (prompt**2).sum() + (step**2).sum()

    grad = jax.grad(loss, (0, 1, 2))
    want = jax.jit(grad)(*map(jnp.asarray, tensors))
    with jax.set_mesh(mesh):
        on_mesh = put(mesh, "a", None, "b")[:3]
        for run, given in ((jax.jit(grad), on_mesh), (jax.jit(grad), tensors), (grad, on_mesh)):
            for got, x, y in zip(run(*given), given, want, strict=True):
                np.testing.assert_allclose(got, y, atol=1e-5)
                assert jax.typeof(got).sharding.spec == jax.typeof(x).sharding.spec


def test_layers_are_scanned_over():
    mesh = make_mesh("a", "b")
    q, k, v, positions = put(mesh, "a", None, "b")
    # An empty cache has no arrays, so that its stack has none either.
    caches = jax.tree.map(lambda *x: jnp.stack(x), *[attach("full")] * 2)

    def layer(q, cache):
        return custom_decoder.attend(cache, q, k, v, positions)

    with jax.set_mesh(mesh):
        out, caches = jax.jit(lambda q, caches: lax.scan(layer, q, caches, length=2))(q, caches)
    assert jax.typeof(out) == jax.typeof(q)
    assert jax.typeof(caches.state.k.data).sharding.spec == PartitionSpec(None, "a", "b", None, None)


@pytest.mark.parametrize("method", METHODS[1:3])
@pytest.mark.parametrize("is_set", [False, True], ids=["no mesh set", "set_mesh"])
@pytest.mark.parametrize("run", [attend_twice, jax.jit(attend_twice)], ids=["eager", "jit"])
def test_a_mesh_that_attach_is_given_divides_the_cache(method, is_set, run):
    mesh, plain = make_mesh("data", "model"), [jnp.asarray(x) for x in random_layer()]
    for tensors in (put(mesh, "data", None, "model"), plain):
        with jax.set_mesh(mesh if is_set else None):
            out = run(attach(method, mesh=mesh), *tensors)
        for x, y in zip(out[:2], outputs_without_mesh(method)[:2], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        assert {x.sharding.spec[:2] for x in jax.tree.leaves(out[2]) if x.ndim == 4} == {("data", "model")}


def test_another_mesh_than_the_programs_is_an_error():
    mesh, cache = make_mesh("a", "b"), attach("full", mesh=make_mesh("data", "model"))
    with jax.set_mesh(mesh), pytest.raises(KvjaxError, match=r"'data': 2.*runs on .*'a': 2.*leave mesh out"):
        jax.jit(attend_twice)(cache, *put(mesh, "a", None, "b"))


@pytest.mark.parametrize("names", [("x", "y"), ("fsdp", "tp"), ("batch", "embed"), ("data", "tp")])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_of_other_names_is_refused(names, axis_type):
    remedy = r'Mesh\(mesh.devices, \("data", "model"\)\), or leave mesh out'
    with pytest.raises(KvjaxError, match=f"{names[1] if names[0] == 'data' else names[0]}.*2 devices.*{remedy}"):
        attach("full", mesh=make_mesh(*names, types=(axis_type,) * 2))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("run", [attend_twice, jax.jit(attend_twice)], ids=["eager", "jit"])
def test_sizes_that_the_mesh_of_attach_does_not_divide_are_named(axis_type, run):
    mesh, remedy = make_mesh("data", "model", types=(axis_type,) * 2), "leave mesh out of attach"
    with pytest.raises(KvjaxError, match=f"axis B of size 3 does not divide .* 2 devices.*{remedy}"):
        run(attach("full", mesh=mesh), *(x[:3] for x in random_layer()))
    with pytest.raises(KvjaxError, match=f"axis K of size 1 does not divide .* 2 devices.*{remedy}"):
        custom_decoder.attach(
            "full", custom_decoder.specs_of(1, 4, 1, 8, rope=custom_decoder.Rope(8)), CAPACITY, mesh=mesh
        )


def test_values_are_still_checked_where_they_are_known():
    mesh = make_mesh("a", "b")
    q, k, v, positions = put(mesh, "a", None, "b")
    with jax.set_mesh(mesh), pytest.raises(KvjaxError, match=r"sequence 0 has \[1, 2, 3, 4\]"):
        custom_decoder.attend(attach("full"), q, k, v, positions + 1)


def test_check_rope_runs_the_callers_function_within_the_callers_mesh():
    def rotate_on_mesh(x, positions):
        assert jax.sharding.get_abstract_mesh().axis_names == ("a", "b")
        return rotate(x, positions)

    with jax.set_mesh(make_mesh("a", "b")):
        custom_decoder.check_rope(custom_decoder.Rope(8), rotate_on_mesh)


@pytest.mark.parametrize("name", ["kvzip", "cake"])
def test_finish_outside_of_jit_repeats_the_prompt_within_the_callers_mesh(name):
    specs = custom_decoder.specs_of(num_layers(name), decoder.N, decoder.K, decoder.H, rope=ROPE)
    attached = custom_decoder.attach(STRINGS[name], specs, CAPACITY, gives=GIVES)
    logits = []
    for shape in ((1, 1, 1), (2, 2, 1)):
        weights, tokens, positions = make_inputs(num_layers(name), shape)
        with jax.set_mesh(decoder.make_mesh(*shape)):
            run = jax.jit(decoder.forward)
            _, cache = run(weights, tokens[:, :T], positions[:, :T], attached)
            repeat = lambda cache, *call, run=run, weights=weights: run(weights, *call, cache)[1]  # noqa: E731
            cache = custom_decoder.finish(cache, tokens=tokens[:, :T], repeat=repeat)
            logits.append(run(weights, tokens[:, T : T + 1], positions[:, T : T + 1], cache)[0])
    np.testing.assert_allclose(*logits, atol=1e-5)
