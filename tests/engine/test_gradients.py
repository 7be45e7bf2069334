"""Gradients through every method are those of finite differences, or of the exact vectors, or refused.

A method is smooth where its output, between two choices of tokens, is a smooth function of queries, keys and values.
That holds for all that keep vectors as they are, wherever these lie, that evict or merge, that read a part, or that
hold fewer numbers of a vector (low rank, fewer channels). Their gradients equal central finite differences. A choice
has no gradient, and no difference here is taken across one.

If vectors become codes (`STEPPED`), the output is a staircase, and its differences say nothing. Its gradient is the
straight-through estimator: that of the exact vectors, at the values which the codes stand for, or
x' = x + stop_gradient(coded - x). It is tested against this formula, written out over attention to all tokens.

Most tests drive one layer by given queries, keys and values; the last ones differentiate a model's parameters.
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
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.engine.plan import specs
from kvjax.engine.straight_through import StraightThrough, make_differentiable
from kvjax.errors import GradientThroughBits, KvjaxError
from kvjax.methods.specache import LowBitCopy
from kvjax.methods.strings import parse
from kvjax.models.config import Config
from kvjax.models.model import random_model
from tests.contract import layer as one_layer
from tests.contract.cases import FIRST_CASES

STEPPED = set("bfp fp8 gear int4 int8 kivi kvquant mikv rotatekv saq specache turboquant zipcache zipvl".split())
SMALL = {name: case.small for name, case in FIRST_CASES.items()} | {
    "codes that only select": "double_sparsity:heavy=3,factor=4,bits=4,device_layers=0",
    "codes in pages": "snapkv:budget=6,window=2,kernel=3 + adakv:page=4 + kivi:bits=4,group=4,residual=4",
    "codes of what stays": "snapkv:budget=6,window=2,kernel=3 + int4",
}
STEPPED |= {"codes in pages", "codes of what stays"}
Rows = tuple[jax.Array, jax.Array, jax.Array]
"""q, k and v of prompts and of what follows them."""


@functools.cache
def bound(text: str, differentiable: bool = True) -> Any:
    method = parse(text)
    return (make_differentiable(method) if differentiable else method).bind(one_layer.spec())


def rows(dtype: Any = jnp.float32) -> Rows:
    d = one_layer.random_batch(3)
    return d.q.astype(dtype), d.k.astype(dtype), d.v.astype(dtype)


def answers(layer: Any, given: Rows, steps: int = 1) -> tuple[jax.Array, Any]:
    """Prompts, then single tokens: (f32[B K G steps H], the state)."""
    d = one_layer.SequenceBatch(*given, one_layer.LENGTHS)
    state = one_layer.make_state(layer, *one_layer.prompt(d), one_layer.num_slots(layer))
    if steps == 1:
        return layer.extend(state, *d.token(0), 1, None)[:2]
    return one_layer.scan_steps(layer, state, one_layer.stack_steps(d, steps))


def loss(out: jax.Array) -> jax.Array:
    return jnp.square(out).mean() + out.mean()


@functools.cache
def gradient(layer: Any, steps: int = 1) -> Any:
    """The compiled function of rows: ((loss, (which tokens are held, output)), its gradient)."""

    def run(given: Rows) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, state = answers(layer, given, steps)
        return loss(out), (layer.positions(state), out)

    return jax.jit(jax.value_and_grad(run, has_aux=True))


@functools.cache
def forward(layer: Any) -> Any:
    return jax.jit(lambda given: answers(layer, given))


def check_differences(run: Any, given: Any, eps: float, seed: int = 5) -> None:
    """Asserts that the gradient of `run` is that of central differences in one direction, without another choice."""
    rng = np.random.default_rng(seed)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), given)

    def at(step: float) -> Any:
        return run(jax.tree.map(lambda x, y: x + step * y, given, direction))

    ((_, (held, _)), grad), ((up, (above, _)), _), ((down, (below, _)), _) = at(0.0), at(eps), at(-eps)
    assert jax.tree.all(
        jax.tree.map(lambda *x: np.array_equal(x[0], x[1]) and np.array_equal(x[0], x[2]), held, above, below)
    )
    along = jax.tree.map(lambda x, y: float(jnp.vdot(x, y)), grad, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(along)), float(up - down) / (2 * eps), rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in STEPPED])
def test_a_smooth_method_has_the_gradient_of_finite_differences(name):
    layer = bound(SMALL[name])
    # A policy acts at each step, and its second one finds what the first has left.
    check_differences(gradient(layer, 2 if layer.method.decode else 1), rows(), 1e-3)


@pytest.mark.parametrize("name", sorted(STEPPED))
def test_codes_have_the_gradient_of_the_exact_vectors_at_their_values(name):
    given = rows()
    (_, (_, out)), found = gradient(bound(SMALL[name]))(given)
    expected_out, expected = straight_through(bound(SMALL[name], False), given)
    np.testing.assert_allclose(out[:, :, :, 0], expected_out, atol=2e-5)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6, rtol=1e-4)


def straight_through(layer: Any, given: Rows) -> tuple[jax.Array, Rows]:
    """Output and gradients of attention to what a layer without carriers holds, by the formula."""
    _, state = forward(layer)(given)
    coded_k, coded_v, held = held_by_token(layer, state, given[1].shape)
    at = jnp.asarray(one_layer.LENGTHS)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = jnp.take_along_axis(q, at[:, None, None, None, None], 3)[:, :, :, 0]
        k, v = (
            x + lax.stop_gradient(jnp.where(held[..., None], coded - x, 0.0))
            for x, coded in ((k, coded_k), (v, coded_v))
        )
        s = jnp.einsum("bkgh,bksh->bkgs", q, k) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(held[:, :, None], s, -jnp.inf), -1)
        return jnp.einsum("bkgs,bksh->bkgh", p, v)

    return attend(*given), jax.grad(lambda rows: loss(attend(*rows)))(given)


def held_by_token(layer: Any, state: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys and values [B K T H] that queries read, by token, and which tokens are held, bool[B K T]."""
    k, v, held = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape[:3], bool)
    blocks = [(layer.decode_keys(state.k, state.pos), layer.v.decode(state.v), state.pos)]
    if isinstance(state.reader_state, LowBitCopy):  # nothing has been fetched yet, so that all is read from the copy
        read = layer.method.read
        blocks = [(read.k.decode(state.reader_state.k), read.v.decode(state.reader_state.v), state.pos)]
    if state.side_store is not None:
        shown = layer.method.side_store.visible_block(layer, state.side_store)
        blocks.append((shown.k, shown.v, layer.method.side_store.positions(state.side_store)))
    for keys, values, pos in blocks:
        pos = np.broadcast_to(pos, (*shape[:2], pos.shape[2]))
        keys, values = (np.broadcast_to(x, (*pos.shape, shape[3])) for x in (keys, values))
        for b, head, slot in zip(*np.nonzero(pos >= 0), strict=True):
            t = pos[b, head, slot]
            k[b, head, t], v[b, head, t], held[b, head, t] = keys[b, head, slot], values[b, head, slot], True
    return k, v, held


def is_stepped(layer: Any) -> bool:
    """Whether anything in a layer was wrapped."""
    if isinstance(layer, StraightThrough):
        return True
    if not dataclasses.is_dataclass(layer):
        return False
    return any(is_stepped(getattr(layer, field.name)) for field in dataclasses.fields(layer))


@pytest.mark.parametrize("name", SMALL)
def test_bits_refuse_a_gradient_and_what_holds_none_is_the_same_program_without_carriers(name):
    plain, carrying, given = bound(SMALL[name], False), bound(SMALL[name]), rows()
    assert is_stepped(carrying) == (name in STEPPED)

    def run(layer: Any, given: Rows) -> jax.Array:
        return loss(answers(layer, given)[0])

    if name in STEPPED or parse(SMALL[name]).traits.host:
        with pytest.raises(GradientThroughBits, match=r"(codes of|words in host memory).*differentiable=True"):
            jax.eval_shape(jax.grad(functools.partial(run, plain)), given)
    else:
        programs = [jax.make_jaxpr(functools.partial(run, layer))(given) for layer in (plain, carrying)]
        assert primitives(programs[0]) == primitives(programs[1])


def primitives(program: Any) -> list[Any]:
    """All operations of a traced program in their order, those of its inner programs included."""
    inner = getattr(program, "jaxpr", program)
    if not hasattr(inner, "eqns"):
        return []
    found = []
    for operation in inner.eqns:
        found.append(operation.primitive.name)
        for part in jax.tree.leaves(list(operation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            found += primitives(part)
    return found


@pytest.mark.parametrize("name", [*sorted(STEPPED), "kcache", "infllm", "shadowkv"])
def test_the_forward_pass_gives_the_same_bits(name):
    np.testing.assert_array_equal(*(forward(bound(SMALL[name], carried))(rows())[0] for carried in (True, False)))


@pytest.mark.parametrize(
    "name", ["full", "snapkv", "h2o", "kcache", "think", "shadowkv", "cskv", "retrieval_attention"]
)
def test_gradients_pass_through_caches_of_16_bits(name):
    given = rows(jnp.bfloat16)
    (_, (held, _)), found = gradient(bound(SMALL[name]))(given)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    (_, (same, _)), expected = gradient(bound(SMALL[name]))(wide)
    assert np.array_equal(held, same)
    for mine, other in zip(found, expected, strict=True):
        assert jnp.linalg.norm(mine.astype(jnp.float32) - other) < 0.05 * jnp.linalg.norm(other)
    with pytest.raises(GradientThroughBits, match="raw bits of 16-bit floats|words in host memory"):
        jax.eval_shape(jax.grad(lambda rows: loss(answers(bound(SMALL[name], False), rows)[0])), given)


def coded(x: jax.Array) -> jax.Array:
    """The sum of rows [.. H] that were held in eight bits."""
    codec = parse("int8").k
    held = codec.encode(x.reshape(1, 1, -1, x.shape[-1]), jnp.zeros((1, 1, x.size // x.shape[-1]), jnp.int32))
    return codec.decode(held).sum()


def in_a_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (total + coded(row[None]), None), 0.0, x)[0]


TRANSFORMED = {
    "grad": jax.grad(coded),
    "jit": jax.jit(jax.grad(coded)),
    "grad of jit": jax.grad(jax.jit(coded)),
    "vmap": lambda x: jax.vmap(jax.grad(coded))(x[None]),
    "jvp": lambda x: jax.jvp(coded, (x,), (x,)),
    "linearize": lambda x: jax.linearize(coded, x),
    "checkpoint": jax.grad(jax.checkpoint(coded)),
    "scan": jax.grad(in_a_scan),
    "cond": jax.grad(lambda x: lax.cond(x.sum() > 0, coded, jnp.sum, x)),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_gradient_through_codes_is_an_error_under_every_transformation(how):
    with pytest.raises(GradientThroughBits, match=r"codes of Absmax.*differentiable=True in kvjax\.functional\.bind"):
        jax.eval_shape(TRANSFORMED[how], jax.ShapeDtypeStruct((2, 32), jnp.float32))
    assert issubclass(GradientThroughBits, KvjaxError)


def test_what_is_constant_passes():
    x = jnp.ones((2, 32))
    assert jax.grad(lambda y: y * coded(x))(2.0) == coded(x)
    assert jax.grad(lambda y: y * coded(lax.stop_gradient(x * y)))(2.0) == coded(2 * x)
    assert jax.grad(lambda y: lax.scan(lambda a, row: (a * coded(row[None]), None), y, x)[0])(1.0) == 32.0**2
    index = jax.grad(lambda x: x[0, refuse_gradient(x[0].argmax(), "an index")])(x)
    np.testing.assert_array_equal(index, jnp.zeros_like(x).at[0, 0].set(1.0))


@pytest.mark.parametrize("text", ["kivi:bits=2,group=8,residual=8", "int4", "offload", "kcache:n=3,device_layers=0"])
def test_queries_of_a_constant_cache_have_a_gradient(text):
    """Nothing is written, so that no gradient goes into bits, and that of the queries is right without carriers."""
    layer, given, d = bound(text, False), rows(), one_layer.random_batch(3)
    _, state = forward(layer)(given)
    q, fresh = d.token(1)

    @jax.jit
    def run(state: Any, q: jax.Array) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda q: loss(layer.extend(state, q, fresh, 0, None)[0]))(q)

    eps, direction = 1e-2, jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.float32)
    (up, _), (down, _) = run(state, q + eps * direction), run(state, q - eps * direction)
    np.testing.assert_allclose(jnp.vdot(run(state, q)[1], direction), (up - down) / (2 * eps), rtol=1e-2, atol=1e-4)


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


CONFIG = Config(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=32, mlp_width=64)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)


@functools.cache
def of_parameters(text: str) -> Any:
    """As `gradient`, of a model's parameters: the variance of the next logits after prefill and extend."""
    plan = tuple(make_differentiable(parse(text)).bind(spec) for spec in specs(CONFIG))

    def run(params: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        lengths = jnp.array([9, 6], jnp.int32)
        _, cache = functional.prefill(params, jnp.asarray(TOKENS[:, :9]), lengths, plan, CONFIG, 24)
        logits, cache = functional.extend(params, jnp.asarray(TOKENS[:, 9:]), cache)
        held = [layer.positions(state) for layer, state in zip(plan, cache.layers, strict=True)]
        return logits[:, -1].var(-1).sum(), (held, logits)

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
    check_differences(of_parameters(text), params, 3e-4)


def test_parameters_of_16_bits_have_nearly_the_gradient_of_those_of_32():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_model(CONFIG, 1).params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    found, expected = (of_parameters("full")(params)[1] for params in (narrow, wide))
    found, expected = (
        jnp.concatenate([x.ravel().astype(jnp.float32) for x in jax.tree.leaves(g)]) for g in (found, expected)
    )
    assert jnp.linalg.norm(found - expected) < 0.1 * jnp.linalg.norm(expected)
