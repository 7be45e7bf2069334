"""Every method takes the attention to what is outside of its state: learned sinks, or a prefix that others share."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.protocol import BoundLayer
from kvjax.cache.readers.full import Full
from kvjax.core.attention import attend_dense, merge, sink_partial
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import axes_of_layer_array, named_sharding
from kvjax.core.types import KVBlock, Partial
from kvjax.engine.modes import extend_layer
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.method_case import MethodCase

NOTHING = np.full((layer.K, layer.G), -1e9, np.float32)
SINKS = np.array([[1.0, 3.0], [-0.5, 2.0]], np.float32)  # logits of the battery are about as large as 11


def outside_of(tokens: layer.NewTokens, sinks: jax.Array) -> Partial:
    q, block = tokens
    return sink_partial(sinks[None], q, block.v.shape[3])


@functools.cache
def compile_steps(bound: BoundLayer) -> Any:
    """Compiles all decode steps of the battery under sinks: (state, tokens, sinks) -> (f32[B K G T H], the state)."""

    def step(sinks: jax.Array, state: Any, token: layer.NewTokens) -> tuple[Any, jax.Array]:
        out, state, _ = bound.extend(state, *token, 1, None, outside_of(token, sinks))
        return state, out[:, :, :, 0]

    def run(state: Any, tokens: layer.NewTokens, sinks: jax.Array) -> tuple[jax.Array, Any]:
        state, outs = lax.scan(functools.partial(step, sinks), state, tokens)
        return jnp.moveaxis(outs, 0, 3), state

    return jax.jit(run)


def lossy_readers_and_policies() -> list[MethodCase]:
    """One case for each way of decoding that is dense attention at no size; codecs know of no softmax."""
    found = {}
    for case in FIRST_CASES.values():
        bound = layer.bind(case.small)
        method = bound.method
        is_codec = isinstance(method.read, Full) and method.side_store is None and method.decode is None
        if not case.lossless and not is_codec:
            found.setdefault(bound.after_prompt, case)
    return list(found.values())


@pytest.mark.parametrize("case", lossy_readers_and_policies(), ids=lambda case: case.id)
def test_c11_sinks_of_no_weight_change_nothing(case: MethodCase):
    """`test_toy.py` has methods at their limit, and what codecs decode, under sinks of weight."""
    batch, bound = layer.random_batch(), layer.bind(case.small)
    state, tokens = layer.prefill(bound, batch), layer.stack_steps(batch)
    out, after = compile_steps(bound)(state, tokens, NOTHING)
    expected, without = layer.compile_scan(bound)(state, tokens)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    chex.assert_trees_all_close(after, without, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        "h2o:heavy=2,recent=2",  # token by token
        "kivi:bits=4,group=4,residual=4",  # one call
        "infllm:block=2,sinks=1,local=4,topk=9,representatives=1,chunk=4",  # chunks and a rest
    ],
)
def test_a_call_of_many_tokens_gives_what_single_steps_give(method):
    batch = layer.random_batch()
    bound = layer.bind(method)
    state = layer.prefill(bound, batch)
    expected, _ = compile_steps(bound)(state, layer.stack_steps(batch), SINKS)
    chunk = batch.tokens(0, layer.STEPS)

    @functools.partial(jax.jit, static_argnums=2)
    def extend(state: Any, tokens: layer.NewTokens, commit: int, sinks: jax.Array) -> jax.Array:
        return bound.extend(state, *tokens, commit, None, outside_of(tokens, sinks))[0]

    np.testing.assert_allclose(extend(state, chunk, layer.STEPS, SINKS), expected, atol=2e-6)
    if "infllm" not in method:  # whose drafts recall by the mean of their queries
        np.testing.assert_allclose(extend(state, chunk, 1, SINKS)[:, :, :, :1], expected[:, :, :, :1], atol=2e-6)


def exact_weights(batch: layer.SequenceBatch, b: int, sinks: np.ndarray) -> np.ndarray:
    """The causal weights [K G T S] of all tokens of a sequence, where sinks take their part."""
    q, k, _ = batch.exact(b)
    e = np.exp(np.einsum("kgth,ksh->kgts", q, k) / np.sqrt(layer.H)) * np.tril(np.ones((q.shape[2],) * 2))
    return e / (e.sum(-1) + np.exp(sinks.astype(np.float64))[:, :, None])[..., None]


def test_a_policy_gets_the_weights_of_the_softmax_with_sinks():
    """H2O's scores, of the prompt and of each step, are sums of these weights."""
    batch, bound = layer.random_batch(), layer.bind("h2o:heavy=20,recent=20")
    q, block = layer.prompt(batch)
    observation = Observation(q, block.pos[:, 0], sinks=jnp.asarray(SINKS)[None])
    state = bound.prefill(block, observation, layer.num_slots(bound))
    _, state = compile_steps(bound)(state, layer.stack_steps(batch), SINKS)
    for b, total in enumerate(layer.TOTAL):
        expected = exact_weights(batch, b, SINKS).sum((1, 2))
        for head in range(layer.K):
            place = np.asarray(state.pos[b, head])
            actual = np.asarray(jax.tree.leaves(state.policy_state)[0][b, head])[place >= 0]
            np.testing.assert_allclose(actual, expected[head, place[place >= 0]], rtol=1e-5)
        assert (np.asarray(state.pos[b]) >= 0).sum(1).tolist() == [total] * layer.K


@pytest.mark.parametrize("method", ["h2o:heavy=2,recent=2,granularity=layer", "kivi:bits=4,group=4,residual=4"])
def test_devices_that_divide_the_heads_divide_what_is_outside(method):
    batch, bound = layer.random_batch(), layer.bind(method)
    state, tokens = layer.prefill(bound, batch), batch.token(0)
    outside = outside_of(tokens, jnp.asarray(SINKS))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    # Of a prefix with keys and values of its own, too: all of its arrays differ between heads and sequences.
    prefix = attend_dense(tokens[0], layer.prompt(batch)[1], jnp.full((layer.B, 1), 99))

    def extend(state: Any, tokens: layer.NewTokens, outside: Partial, mesh: Mesh | None) -> Any:
        return extend_layer(bound, state, *tokens, 1, None, outside, mesh=mesh)[:2]

    def place(tree: Any) -> Any:
        def put(x: jax.Array) -> jax.Array:
            return jax.device_put(x, named_sharding(axes_of_layer_array(x.shape, layer.B, layer.K), mesh))

        return jax.tree.map(put, tree)

    for part in (outside, prefix):
        one = jax.jit(functools.partial(extend, mesh=None))(state, tokens, part)
        two = jax.jit(functools.partial(extend, mesh=mesh))(*place((state, tokens, part)))
        assert {x.data.shape[1] for x in two[0].addressable_shards} == {layer.K // 2}
        chex.assert_trees_all_close(two, one, atol=1e-5)


def test_a_query_that_sees_nothing_else_gives_its_weight_to_the_sink():
    q = jnp.ones((1, 1, 1, 2, 4))
    block = KVBlock(jnp.ones((1, 1, 1, 4)), jnp.full((1, 1, 1, 3), 8.0), jnp.zeros((1, 1, 1), jnp.int32))
    part = attend_dense(q, block, jnp.asarray([[-1, 0]], jnp.int32))
    out = merge([part, sink_partial(jnp.full((1, 1, 1), 2.0), q, 3)])  # the other logit is 4 / 2
    np.testing.assert_allclose(out[0, 0, 0], [[0.0] * 3, [4.0] * 3], rtol=1e-6)
