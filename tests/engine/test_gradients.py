"""Gradients through every method equal finite differences or the straight-through formula, or are refused.

A method is smooth if its output is a smooth function of queries, keys and values as long as the choice of tokens stays
the same. Such methods store vectors unchanged in any memory, evict or merge them, read a part of them, or store fewer
numbers of each (low rank, fewer channels). Their gradients equal central finite differences. A choice has no gradient,
and no difference here is taken across one.

If vectors become codes (`STEPPED`), the output is a staircase, and its differences say nothing. Its gradient is the
straight-through estimator: the gradient of the exact vectors, at the values which the codes stand for, or
x' = x + stop_gradient(coded - x). It is tested against this formula, written out over attention to all tokens.

Most tests run one layer on random queries, keys and values; the last ones differentiate a model's parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvjax import functional
from kvjax.cache.bound_layer import MethodLayer
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.engine.plan import specs
from kvjax.engine.straight_through import StraightThrough, make_differentiable
from kvjax.errors import GradientThroughBits, KvjaxError
from kvjax.methods.specache import LowBitCopy
from kvjax.models.config import Config
from kvjax.models.model import random_model
from kvjax.registry.strings import parse
from tests.contract import layer as one_layer
from tests.contract.cases import FIRST_CASES
from tests.contract.table import methods_of_distinct_parts

STEPPED = set(
    "bfp e8 fp8 gear ggml int4 int8 kivi kvarn kvquant kvtc mikv mxfp4 nvfp4 oscar rotatekv saq specache turboquant "
    "zipcache zipvl".split()
)
SMALL = {name: case.small for name, case in FIRST_CASES.items()} | {
    "codes that only select": "double_sparsity:heavy=3,factor=4,bits=4,device_layers=0",
    "codes in pages": "snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4",
    "codes of what stays": "snapkv:budget=6,window=2,kernel=3 + int4",
}
STEPPED |= {"codes in pages", "codes of what stays"}
DISTINCT = [name for name in SMALL if name not in FIRST_CASES or name in methods_of_distinct_parts()]
"""All but methods that differ from others in their scorer alone, whose choice has no gradient."""
CONFIG = Config.llama(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=32, mlp_width=64)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)
QKV = tuple[jax.Array, jax.Array, jax.Array]
"""Queries, keys and values of prompts and of the tokens that follow them."""


@functools.cache
def bind_layer(text: str, differentiable: bool = True) -> Any:
    method = parse(text)
    return (make_differentiable(method) if differentiable else method).bind(one_layer.spec())


def random_qkv(dtype: Any = jnp.float32) -> QKV:
    batch = one_layer.random_batch(3)
    return batch.q.astype(dtype), batch.k.astype(dtype), batch.v.astype(dtype)


def run_steps(layer: MethodLayer, qkv: QKV, steps: int = 1) -> tuple[jax.Array, Any]:
    """Reads the prompts, then single tokens -> (f32[B K G steps H], the state)."""
    batch = one_layer.SequenceBatch(*qkv, one_layer.LENGTHS)
    state = one_layer.make_state(layer, *one_layer.prompt(batch), one_layer.num_slots(layer))
    if steps == 1:
        return layer.extend(state, *batch.token(0), 1, None)[:2]
    return one_layer.scan_steps(layer, state, one_layer.stack_steps(batch, steps))


def loss(out: jax.Array) -> jax.Array:
    return jnp.square(out).mean() + out.mean()


@functools.cache
def compile_gradient(layer: MethodLayer, steps: int = 1) -> Any:
    """Compiles the function of a QKV -> ((loss, (positions in the cache, output, state)), gradient)."""

    def run(qkv: QKV) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Any]]:
        out, state = run_steps(layer, qkv, steps)
        return loss(out), (layer.positions(state), out, state)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


@functools.cache
def compile_forward(layer: MethodLayer) -> Any:
    return jax.jit(lambda qkv: run_steps(layer, qkv))


def check_finite_differences(run: Any, inputs: Any, eps: float, seed: int = 5) -> None:
    """Asserts that the gradient of `run` equals central differences in one direction, across no choice of tokens."""
    rng = np.random.default_rng(seed)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), inputs)

    def run_at(step: float) -> Any:
        return run(jax.tree.map(lambda x, y: x + step * y, inputs, direction))

    (_, (positions, *_)), gradient = run_at(0.0)
    (loss_up, (positions_up, *_)), _ = run_at(eps)
    (loss_down, (positions_down, *_)), _ = run_at(-eps)
    assert jax.tree.all(jax.tree.map(np.array_equal, positions_up, positions))
    assert jax.tree.all(jax.tree.map(np.array_equal, positions_down, positions))
    slopes = jax.tree.map(lambda x, y: float(jnp.vdot(x, y)), gradient, direction)
    difference = float(loss_up - loss_down) / (2 * eps)
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), difference, rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("name", [name for name in DISTINCT if name not in STEPPED])
def test_a_smooth_method_has_the_gradient_of_finite_differences(name):
    layer = bind_layer(SMALL[name])
    # A policy acts at each step, and its second step starts from the cache that the first one changed.
    check_finite_differences(compile_gradient(layer, 2 if layer.method.decode else 1), random_qkv(), 1e-3)


@pytest.mark.parametrize("name", sorted(STEPPED))
def test_codes_have_the_gradient_of_the_exact_vectors_at_their_values(name):
    qkv = random_qkv()
    (_, (_, out, _)), gradients = compile_gradient(bind_layer(SMALL[name]))(qkv)
    expected_out, expected_gradients = straight_through(bind_layer(SMALL[name], False), qkv)
    np.testing.assert_allclose(out[:, :, :, 0], expected_out, atol=2e-5)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-6, rtol=1e-4)


def straight_through(layer: MethodLayer, qkv: QKV) -> tuple[jax.Array, QKV]:
    """Output and gradients of attention to the tokens of a layer that carries no exact vectors, by the formula."""
    _, state = compile_forward(layer)(qkv)
    return attend_at_codes(qkv, *decode_by_token(layer, state, qkv[1].shape))


@jax.jit  # one program for all methods
def attend_at_codes(qkv: QKV, coded_k: np.ndarray, coded_v: np.ndarray, is_cached: np.ndarray) -> tuple[jax.Array, QKV]:
    """Output and gradients of attention to coded vectors, where a gradient passes as if they were the exact ones."""
    query_pos = jnp.asarray(one_layer.LENGTHS)

    def replace_values(x: jax.Array, coded: np.ndarray) -> jax.Array:
        return x + lax.stop_gradient(jnp.where(is_cached[..., None], coded - x, 0.0))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = jnp.take_along_axis(q, query_pos[:, None, None, None, None], 3)[:, :, :, 0]
        k, v = replace_values(k, coded_k), replace_values(v, coded_v)
        s = jnp.einsum("bkgh,bksh->bkgs", q, k) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(is_cached[:, :, None], s, -jnp.inf), -1)
        return jnp.einsum("bkgs,bksh->bkgh", p, v)

    return attend(*qkv), jax.grad(lambda qkv: loss(attend(*qkv)))(qkv)


def decode_blocks(layer: MethodLayer, state: Any) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Keys, values and positions that queries read, a block for each place that holds some."""
    blocks = [(layer.storage.decode_keys(state.k, state.pos), layer.v.decode(state.v), state.pos)]
    if isinstance(state.reader_state, LowBitCopy):  # nothing has been fetched yet, so that all is read from the copy
        read = layer.method.read
        blocks = [(read.k.decode(state.reader_state.k), read.v.decode(state.reader_state.v), state.pos)]
    if state.side_store is not None:
        block = layer.method.side_store.visible_block(layer.storage, state.side_store)
        blocks.append((block.k, block.v, layer.method.side_store.positions(state.side_store)))
    return blocks


def decode_by_token(
    layer: MethodLayer, state: Any, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys and values [B K T H] that queries read, by token, and which tokens are in the cache, bool[B K T]."""
    k, v, is_cached = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape[:3], bool)
    # Uncompiled, each operation of a codec would be a program of its own.
    blocks = jax.jit(functools.partial(decode_blocks, layer))(state)
    for keys, values, pos in jax.tree.map(np.asarray, blocks):
        pos = np.broadcast_to(pos, (*shape[:2], pos.shape[2]))
        keys, values = (np.broadcast_to(x, (*pos.shape, shape[3])) for x in (keys, values))
        for b, head, slot in zip(*np.nonzero(pos >= 0), strict=True):
            t = pos[b, head, slot]
            k[b, head, t], v[b, head, t], is_cached[b, head, t] = keys[b, head, slot], values[b, head, slot], True
    return k, v, is_cached


def has_straight_through(value: Any) -> bool:
    """Whether a layer, or a component at any depth, was wrapped."""
    if isinstance(value, StraightThrough):
        return True
    if not dataclasses.is_dataclass(value):
        return False
    return any(has_straight_through(getattr(value, field.name)) for field in dataclasses.fields(value))


@pytest.mark.parametrize("name", SMALL)
def test_bits_refuse_a_gradient_and_what_holds_none_is_the_same_program_without_carriers(name):
    plain, carrying, qkv = bind_layer(SMALL[name], False), bind_layer(SMALL[name]), random_qkv()
    assert has_straight_through(carrying) == (name in STEPPED)

    def run(layer: MethodLayer, qkv: QKV) -> jax.Array:
        return loss(run_steps(layer, qkv)[0])

    if name in STEPPED or parse(SMALL[name]).traits.host:
        with pytest.raises(GradientThroughBits, match=r"(codes of|words in host memory).*differentiable=True"):
            jax.eval_shape(jax.grad(functools.partial(run, plain)), qkv)
    else:
        programs = [jax.make_jaxpr(functools.partial(run, layer))(qkv) for layer in (plain, carrying)]
        assert list_primitives(programs[0]) == list_primitives(programs[1])


def list_primitives(program: Any) -> list[Any]:
    """All operations of a traced program and of its inner programs, in their order."""
    inner = getattr(program, "jaxpr", program)
    if not hasattr(inner, "eqns"):
        return []
    names = []
    for operation in inner.eqns:
        names.append(operation.primitive.name)
        for part in jax.tree.leaves(list(operation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            names += list_primitives(part)
    return names


@pytest.mark.parametrize("name", [*sorted(STEPPED), "kcache", "infllm", "shadowkv"])
def test_the_forward_pass_gives_the_same_bits(name):
    layers = (bind_layer(SMALL[name], differentiable) for differentiable in (True, False))
    np.testing.assert_array_equal(*(compile_forward(layer)(random_qkv())[0] for layer in layers))


@pytest.mark.parametrize(
    "name", ["full", "snapkv", "h2o", "kcache", "think", "shadowkv", "cskv", "retrieval_attention"]
)
def test_gradients_pass_through_caches_of_16_bits(name):
    run = compile_gradient(bind_layer(SMALL[name]))
    narrow = random_qkv(jnp.bfloat16)
    (_, (positions, *_)), gradients = run(narrow)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    (_, (wide_positions, *_)), wide_gradients = run(wide)
    assert np.array_equal(positions, wide_positions)
    for gradient, expected in zip(gradients, wide_gradients, strict=True):
        assert jnp.linalg.norm(gradient.astype(jnp.float32) - expected) < 0.05 * jnp.linalg.norm(expected)
    with pytest.raises(GradientThroughBits, match="raw bits of 16-bit floats|words in host memory"):
        jax.eval_shape(jax.grad(lambda qkv: loss(run_steps(bind_layer(SMALL[name], False), qkv)[0])), narrow)


@functools.cache
def compile_state_gradient(layer: MethodLayer) -> Any:
    """Compiles the function of a state and a new token -> (loss of the token's output, gradient to the state)."""
    return jax.jit(jax.value_and_grad(lambda *args: loss_of_token(layer, *args), allow_int=True))


def loss_of_token(layer: MethodLayer, state: Any, token: one_layer.NewTokens) -> jax.Array:
    return loss(layer.extend(state, *token, 1, None)[0])


def map_floats(fun: Any, state: Any, *others: Any) -> Any:
    """Applies `fun` to the floats of a state; its integers stay."""
    return jax.tree.map(lambda x, *y: fun(x, *y) if jnp.issubdtype(x.dtype, jnp.floating) else x, state, *others)


@pytest.mark.parametrize("name", DISTINCT)
def test_the_gradient_to_a_cache_is_that_of_finite_differences_or_refused(name):
    # Methods that only select are one layer after the prompt, and share a program.
    layer, token = bind_layer(SMALL[name], False).after_prompt, one_layer.random_batch(3).token(2)
    if name in STEPPED or parse(SMALL[name]).traits.host:
        state = jax.eval_shape(functools.partial(run_steps, bind_layer(SMALL[name], False)), random_qkv())[1]
        with pytest.raises(GradientThroughBits, match=r"(codes of|words in host memory).*differentiable=True"):
            jax.eval_shape(jax.grad(functools.partial(loss_of_token, layer), allow_int=True), state, token)
        return
    state = compile_gradient(bind_layer(SMALL[name]), 2 if layer.method.decode else 1)(random_qkv())[0][1][2]
    rng = np.random.default_rng(5)
    direction = map_floats(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    run = compile_state_gradient(layer)
    up, down = (map_floats(lambda x, d, step=step: x + step * d, state, direction) for step in (1e-3, -1e-3))
    difference = float(run(up, token)[0] - run(down, token)[0]) / 2e-3
    slopes = map_floats(jnp.vdot, direction, run(state, token)[1])
    slope = sum(float(x) for x in jax.tree.leaves(slopes) if jnp.issubdtype(x.dtype, jnp.floating))
    np.testing.assert_allclose(slope, difference, rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("name", ["kivi", "int8", "turboquant", "specache", "codes in pages", "full"])
def test_a_differentiable_cache_passes_the_whole_gradient_of_a_prompt(name):
    """The gradient to the cache, taken further to the prompt, is the one through both at once."""
    layer, qkv = bind_layer(SMALL[name]), random_qkv()
    token = one_layer.SequenceBatch(*qkv, one_layer.LENGTHS).token(0)

    def read_prompt(qkv: QKV) -> tuple[Any, one_layer.NewTokens]:
        batch = one_layer.SequenceBatch(*qkv, one_layer.LENGTHS)
        state = one_layer.make_state(layer, *one_layer.prompt(batch), one_layer.num_slots(layer))
        return state, batch.token(0)

    (state, token), pull_back = jax.vjp(jax.jit(read_prompt), qkv)
    gradient = jax.jit(jax.grad(functools.partial(loss_of_token, layer), (0, 1), allow_int=True))(state, token)
    (found,) = pull_back(gradient)
    for x, expected in zip(found, compile_gradient(layer)(qkv)[1], strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-6, rtol=1e-4)


PARTS_OF_CACHE = {
    "the cache": (lambda cache: cache, lambda cache, part: part),
    "its layers": (lambda cache: cache.layers, lambda cache, part: dataclasses.replace(cache, layers=part)),
    "its last keys": (
        lambda cache: cache.layers[-1].k,
        lambda cache, part: dataclasses.replace(
            cache, layers=(cache.layers[0], dataclasses.replace(cache.layers[1], k=part))
        ),
    ),
}
DERIVATIVES = {
    "grad": lambda run, part: jax.grad(run, allow_int=True)(part),
    "vjp": lambda run, part: jax.vjp(run, part),
    "jacrev": lambda run, part: jax.jacrev(run, allow_int=True)(part),
    "linearize": lambda run, part: jax.linearize(run, part),
    "of jit": lambda run, part: jax.grad(jax.jit(run), allow_int=True)(part),
    "of checkpoint": lambda run, part: jax.grad(jax.checkpoint(run), allow_int=True)(part),
    "vmap": lambda run, part: jax.vmap(jax.grad(run, allow_int=True))(jax.tree.map(lambda x: x[None], part)),
}


def abstract_cache(text: str, differentiable: bool = False) -> tuple[Any, Any]:
    """Parameters and a cache of two sequences of a small model, as types."""
    plan, params = functional.bind(text, CONFIG, differentiable), random_model(CONFIG, 1).params

    def read(params: Any) -> Any:
        lengths = jnp.array([9, 6], jnp.int32)
        return functional.prefill(params, jnp.asarray(TOKENS[:, :9]), lengths, plan, CONFIG, 24)[1]

    return params, jax.eval_shape(read, params)


@pytest.mark.parametrize("part", PARTS_OF_CACHE)
@pytest.mark.parametrize("how", DERIVATIVES)
def test_codes_in_a_cache_refuse_every_kind_of_derivative(how, part):
    params, cache = abstract_cache("int8")
    take, put = PARTS_OF_CACHE[part]

    def derive(cache: Any) -> Any:
        def run(part: Any) -> jax.Array:
            return functional.extend(params, TOKENS[:, 9:], put(cache, part))[0][:, -1].var()

        return jax.tree.leaves(DERIVATIVES[how](run, take(cache)))[0]

    with pytest.raises(GradientThroughBits, match=r"codes of keys and values in a cache.*differentiable=True"):
        jax.eval_shape(derive, cache)


@pytest.mark.parametrize(
    "text", ["int8", "int4", "turboquant:ends=0", "offload", "fp8", "kivi:bits=2,group=8,residual=8"]
)
def test_codes_refuse_the_gradient_of_steps_in_a_scan_and_of_a_score_of_what_is_in_the_cache(text):
    params, cache = abstract_cache(text)

    def scan_steps(cache: Any) -> jax.Array:
        def step(cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            logits, cache = functional.extend(params, tokens[:, None], cache)
            return cache, logits

        return lax.scan(step, cache, jnp.asarray(TOKENS[:, 9:].T))[1].var()

    def draft(cache: Any) -> jax.Array:  # nothing is written, so that nothing is encoded either
        return functional.extend(params, TOKENS[:, 9:], cache, commit=0)[0].var()

    for run in (scan_steps, draft):
        with pytest.raises(GradientThroughBits, match="differentiable=True"):
            jax.eval_shape(jax.grad(run, allow_int=True), cache)
    exact = abstract_cache(text, True)[1]
    assert jax.eval_shape(jax.grad(draft, allow_int=True), exact).length.shape == (2,)


def test_16_bits_on_the_device_refuse_a_gradient_to_the_cache():
    layer = bind_layer("full", False)
    state = jax.eval_shape(functools.partial(run_steps, layer), random_qkv(jnp.bfloat16))[1]
    token = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 3 else x, one_layer.random_batch(3).token(2))
    with pytest.raises(GradientThroughBits, match="raw bits of 16-bit floats"):
        jax.eval_shape(jax.grad(functools.partial(loss_of_token, layer), allow_int=True), state, token)


def sum_coded(x: jax.Array) -> jax.Array:
    """Sums vectors [.. H] after they were stored in eight bits."""
    codec = parse("int8").k
    codes = codec.encode(x.reshape(1, 1, -1, x.shape[-1]), jnp.zeros((1, 1, x.size // x.shape[-1]), jnp.int32))
    return codec.decode(codes).sum()


def scan_coded(x: jax.Array) -> jax.Array:
    return lax.scan(lambda total, vector: (total + sum_coded(vector[None]), None), 0.0, x)[0]


TRANSFORMED = {
    "grad": jax.grad(sum_coded),
    "jit": jax.jit(jax.grad(sum_coded)),
    "grad of jit": jax.grad(jax.jit(sum_coded)),
    "vmap": lambda x: jax.vmap(jax.grad(sum_coded))(x[None]),
    "jvp": lambda x: jax.jvp(sum_coded, (x,), (x,)),
    "linearize": lambda x: jax.linearize(sum_coded, x),
    "checkpoint": jax.grad(jax.checkpoint(sum_coded)),
    "scan": jax.grad(scan_coded),
    "cond": jax.grad(lambda x: lax.cond(x.sum() > 0, sum_coded, jnp.sum, x)),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_gradient_through_codes_is_an_error_under_every_transformation(how):
    with pytest.raises(GradientThroughBits, match=r"codes of Absmax.*differentiable=True in kvjax\.functional\.bind"):
        jax.eval_shape(TRANSFORMED[how], jax.ShapeDtypeStruct((2, 32), jnp.float32))
    assert issubclass(GradientThroughBits, KvjaxError)


def test_what_is_constant_passes():
    x = jnp.ones((2, 32))
    assert jax.grad(lambda y: y * sum_coded(x))(2.0) == sum_coded(x)
    assert jax.grad(lambda y: y * sum_coded(lax.stop_gradient(x * y)))(2.0) == sum_coded(2 * x)
    assert jax.grad(lambda y: lax.scan(lambda a, vector: (a * sum_coded(vector[None]), None), y, x)[0])(1.0) == 32.0**2
    index = jax.grad(lambda x: x[0, refuse_gradient(x[0].argmax(), "an index")])(x)
    np.testing.assert_array_equal(index, jnp.zeros_like(x).at[0, 0].set(1.0))


@pytest.mark.parametrize("text", ["kivi:bits=2,group=8,residual=8", "int4", "offload", "kcache:n=3,device_layers=0"])
def test_queries_of_a_constant_cache_have_a_gradient(text):
    """Nothing is written, so that no gradient enters bits: the queries' gradient needs no `StraightThrough`."""
    layer = bind_layer(text, False)
    _, state = compile_forward(layer)(random_qkv())
    q, new = one_layer.random_batch(3).token(1)

    @jax.jit
    def run(state: Any, q: jax.Array) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda q: loss(layer.extend(state, q, new, 0, None)[0]))(q)

    eps, direction = 1e-2, jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.float32)
    (loss_up, _), (loss_down, _) = run(state, q + eps * direction), run(state, q - eps * direction)
    difference = (loss_up - loss_down) / (2 * eps)
    np.testing.assert_allclose(jnp.vdot(run(state, q)[1], direction), difference, rtol=1e-2, atol=1e-4)


def test_floats_stay_floats_of_as_many_bytes():
    x = jnp.ones((1, 1, 4, 8), jnp.bfloat16)
    with memory.as_floats(True):
        floats = memory.append(memory.pack(x, host=True), 2 * x[:, :, :1], jnp.ones((1, 1), jnp.int32))
    bits = memory.append(memory.pack(x), 2 * x[:, :, :1], jnp.ones((1, 1), jnp.int32))
    assert floats.data.dtype == jnp.bfloat16 and not floats.host and floats.data.nbytes == bits.data.nbytes
    np.testing.assert_array_equal(memory.unpack(floats), memory.unpack(bits))


def test_a_method_without_components_is_refused_with_a_reason():
    class Own:
        """A KVMethod that is no `Method`."""

    with pytest.raises(KvjaxError, match="Own has none.*differentiable=False"):
        make_differentiable(Own())
    method = make_differentiable(parse("kivi"))
    assert make_differentiable(method) is method and not make_differentiable(parse("offload")).traits.host


@functools.cache
def compile_parameter_gradient(text: str) -> Any:
    """Compiles the gradient in a model's parameters; the loss is the variance of logits after prefill and extend."""
    plan = tuple(make_differentiable(parse(text)).bind(spec) for spec in specs(CONFIG))

    def run(params: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        lengths = jnp.array([9, 6], jnp.int32)
        _, cache = functional.prefill(params, jnp.asarray(TOKENS[:, :9]), lengths, plan, CONFIG, 24)
        logits, cache = functional.extend(params, jnp.asarray(TOKENS[:, 9:]), cache)
        positions = [layer.positions(state) for layer, state in zip(plan, cache.layers, strict=True)]
        return logits[:, -1].var(-1).sum(), (positions, logits)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "minicache:start=0",
        "tidal_decode:topk=3,dense=0,reselect=1",
        "kvzip:budget=5",
        "specache:bits=2,group=4,residual=4,topk=100",
    ],
)
def test_parameters_have_the_gradient_of_finite_differences(text):
    params = random_model(CONFIG, 1).params
    check_finite_differences(compile_parameter_gradient(text), params, 3e-4)


def test_parameters_of_16_bits_have_nearly_the_gradient_of_those_of_32():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_model(CONFIG, 1).params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)

    def flat_gradient(params: Any) -> jax.Array:
        _, gradients = compile_parameter_gradient("full")(params)
        return jnp.concatenate([x.ravel().astype(jnp.float32) for x in jax.tree.leaves(gradients)])

    gradient, expected = flat_gradient(narrow), flat_gradient(wide)
    assert jnp.linalg.norm(gradient - expected) < 0.1 * jnp.linalg.norm(expected)
