"""TidalDecode over several layers: against the paper, and the selection passed from layer to layer.

TidalDecode in NumPy, float64, from its paper (arXiv 2410.05076, section 3): one sequence, one token at a time.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.registry.strings import method_of
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles.online import softmax


def tidal_decode(layers, n: int, topk: int, dense: int, reselect: int, windows=None):
    """Decodes through layers, each (q [K G S H], k [K S H], v [K S H]), after a prompt of n tokens.

    Returns per layer the outputs [K G S-n H] of the rest, and the sets of tokens that its queries read, [K][G][S-n].
    """
    K, G, S, H = layers[0][0].shape
    outs = [np.empty((K, G, S - n, H)) for _ in layers]
    reads = [[[[None] * (S - n) for _ in range(G)] for _ in range(K)] for _ in layers]
    for t in range(n, S):
        for head in range(K):
            for g in range(G):
                chosen = None
                for i, (q, k, v) in enumerate(layers):
                    window = windows[i] if windows else None
                    visible = list(range(0 if window is None else max(0, t - window + 1), t + 1))
                    logits = {s: k[head, s] @ q[head, g, t] / np.sqrt(H) for s in visible}
                    if i in (dense, reselect) and i >= dense:
                        chosen = sorted(visible[:-1], key=lambda s: -logits[s])[: topk - 1]
                    elif i > dense:
                        visible = [s for s in visible if s in chosen or s == t]
                    outs[i][head, g, t - n] = softmax(np.array([logits[s] for s in visible])) @ v[head, visible]
                    reads[i][head][g][t - n] = set(visible)
    return outs, reads


LAYERS = 5
SMALL = "tidal_decode:topk=4,dense=1,reselect=3"
DATA = [layer.random_batch(seed) for seed in range(LAYERS)]


def bind_layers(method=SMALL, windows=(None,) * LAYERS) -> tuple:
    """Binds a method to each layer of a model with five."""
    method, rope = dataclasses.replace(method_of(method), windowed="method"), Rope(layer.H)
    return tuple(
        method.bind(LayerSpec(i, LAYERS, layer.K, layer.G, layer.H, rope, Rule(windows[i]))) for i in range(LAYERS)
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_layers(plan, states, new, commit):
    """Calls every layer once, bottom to top -> (their outputs, their states, the last cross-layer value)."""
    outs, after, cross_layer = [], [], None
    for bound_layer, state, (q, block) in zip(plan, states, new, strict=True):
        out, state, cross_layer = bound_layer.extend(state, q, block, commit, cross_layer)
        outs.append(out)
        after.append(state)
    return outs, after, cross_layer


def prefill_layers(plan) -> list:
    return [layer.prefill(each, batch) for each, batch in zip(plan, DATA, strict=True)]


def decode(plan) -> tuple[list[np.ndarray], list]:
    """Decodes in single steps -> (per layer f32[B K G STEPS H], the cross-layer values)."""
    states, outs, cross_layer_values = prefill_layers(plan), [], []
    for t in range(layer.STEPS):
        out, states, cross_layer = run_layers(plan, states, [batch.token(t) for batch in DATA], 1)
        outs.append(out)
        cross_layer_values.append(cross_layer)
    return [np.concatenate(x, 3) for x in zip(*outs, strict=True)], cross_layer_values


def oracle_outputs(b: int, windows=None):
    n = int(DATA[0].lengths[b])
    return tidal_decode([batch.exact(b) for batch in DATA], n, 4, 1, 3, windows)


@pytest.mark.parametrize("windows", [(None,) * LAYERS, (None, None, 4, 6, None)], ids=str)
def test_it_equals_the_paper(windows):
    outs, _ = decode(bind_layers(windows=windows))
    for b in range(layer.B):
        for actual, expected in zip(outs, oracle_outputs(b, windows)[0], strict=True):
            np.testing.assert_allclose(actual[b], expected, atol=5e-6)


def test_what_one_layer_chooses_is_what_the_next_one_reads():
    plan = bind_layers()
    for t, cross_layer in enumerate(decode(plan)[1]):
        assert cross_layer.shape == (layer.B, layer.K, 1, layer.G, 3)
        for b in range(layer.B):
            reads = oracle_outputs(b)[1]
            for head in range(layer.K):
                for g in range(layer.G):
                    chosen = {int(s) for s in cross_layer[b, head, 0, g] if s >= 0}
                    assert chosen == reads[4][head][g][t] - {int(DATA[0].lengths[b]) + t}


def test_tokens_0_and_3_by_hand():
    """The keys of tokens 0 and 3 match the query, so the layer above reads these two and the query's own."""
    base, chooser, reader = bind_layers("tidal_decode:topk=3,dense=1")[:3]
    k = jnp.array([[3.0, 0], [0, 1], [-1, 0], [2, 0], [0, 0]])[None, None]
    pos = jnp.arange(5, dtype=jnp.int32)[None, None]
    block = KVBlock(k, jnp.ones_like(k), pos)
    q = jnp.array([1.0, 0]).reshape(1, 1, 1, 1, 2)
    new = block.without_first(4)
    v = jnp.broadcast_to(jnp.array([1.0, 10, 100, 1000, 10000])[None, None, :, None], k.shape)
    values = KVBlock(jnp.zeros_like(k), v, pos)

    def prefill_layer(bound_layer, block):
        spec = dataclasses.replace(bound_layer.spec, num_kv_heads=1, num_groups=1, head_dim=2, rope=Rope(2))
        bound_layer = dataclasses.replace(bound_layer, spec=spec)
        return bound_layer, bound_layer.prefill(block.first(4), None, 5)

    cross_layer = None
    for bound_layer in (base, chooser):
        bound_layer, state = prefill_layer(bound_layer, block)
        _, _, cross_layer = bound_layer.extend(state, q, new, 1, cross_layer)
    np.testing.assert_array_equal(cross_layer[0, 0, 0, 0], [0, 3])
    bound_layer, state = prefill_layer(reader, values)
    out, _, _ = bound_layer.extend(state, q, values.without_first(4), 1, cross_layer)
    np.testing.assert_allclose(out[0, 0, 0, 0], (1 + 1000 + 10000) / 3, rtol=1e-6)


def test_a_chunk_gives_what_single_steps_give_kept_or_not():
    plan = bind_layers()
    steps, cross_layer_values = decode(plan)
    new = [batch.tokens(0, layer.STEPS) for batch in DATA]
    outs, _, cross_layer = run_layers(plan, prefill_layers(plan), new, layer.STEPS)
    for actual, expected in zip(outs, steps, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    np.testing.assert_array_equal(cross_layer, jnp.concatenate(cross_layer_values, 2))
    outs, _, _ = run_layers(plan, prefill_layers(plan), [batch.tokens(0, 2) for batch in DATA], 1)
    for actual, expected in zip(outs, steps, strict=True):
        np.testing.assert_allclose(actual, expected[:, :, :, :2], atol=2e-6)


def test_layers_that_hold_different_tokens_understand_each_other():
    """Under a selection per head, the chosen tokens are read from their slots, at their own positions."""
    selection = "snapkv:budget=5,window=2,kernel=3"
    plan, full = bind_layers(f"{selection} + tidal_decode:topk=99,dense=1,reselect=3"), bind_layers(selection)
    states = prefill_layers(full)
    common = [dataclasses.replace(states[0], k=s.k, v=s.v) for s in states]  # every layer holds the same tokens
    new = [batch.token(0) for batch in DATA]
    for actual, expected in zip(run_layers(plan, common, new, 1)[0], run_layers(full, common, new, 1)[0], strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    outs, _ = decode(plan)
    assert all(np.isfinite(out).all() for out in outs)


@dataclasses.dataclass(frozen=True)
class GatherOnly(Plain):
    """A codec that gathers single tokens and cannot decode all of them."""

    def decode(self, stored):
        raise AssertionError("all rows were asked for")


def test_the_layers_above_fetch_single_rows():
    plan = bind_layers()
    chooser, reader = (
        plan[1],
        dataclasses.replace(plan[2], method=dataclasses.replace(plan[2].method, k=GatherOnly(), v=GatherOnly())),
    )
    state, new = layer.prefill(chooser, DATA[0]), DATA[0].token(0)
    carry = jax.eval_shape(lambda state, new: chooser.extend(state, *new, 1, None), state, new)[2]
    step = functools.partial(jax.eval_shape, lambda state, new, cross_layer: reader.extend(state, *new, 1, cross_layer))
    assert step(state, new, carry)[2] == carry
    with pytest.raises(AssertionError, match="all rows"):
        step(state, new, None)  # without a value from below it must read everything


def test_on_the_host_and_in_a_whole_model():
    on_host = bind_layers(f"{SMALL} + offload")
    assert on_host[2].k == Host(Plain())
    for actual, expected in zip(decode(on_host)[0], decode(bind_layers())[0], strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    model, prompt = toy_model(layers=4), [[5, 6, 7, 8, 9, 3, 2], [4, 1, 2]]
    expected = kvjax.generate(model, prompt, "full", max_new_tokens=6).tokens
    assert kvjax.generate(model, prompt, "tidal_decode:topk=99,dense=1", max_new_tokens=6).tokens == expected
    assert kvjax.generate(model, prompt, "tidal_decode:topk=2,dense=1", max_new_tokens=6).tokens != expected
