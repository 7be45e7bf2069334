"""A layer that no shipped model has: loud logits under a soft cap of 1, learned sinks, values narrower than keys.

A tiny checkpoint cannot tell whether a cap of 50 is applied, or whether a shape was taken from queries where it is that
of values. Every method runs on this layer, with tables made for it.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_kinds import TABLE_KINDS
from kvjax.cache.protocol import BoundLayer, LayerSpec
from kvjax.core.attention import Rule, sink_partial
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.registry.loading import load_all
from kvjax.registry.strings import parse
from kvjax.testing import dense_attention
from tests.contract import layer

VALUE_DIM = 16
SOFT_CAP = 1.0
SINKS = np.array([[1.0, 1.5], [0.5, 2.0]], np.float32)  # of each query head
LOUDNESS = 3.0
"""By which queries are multiplied, as a model does whose scale is not the root of the heads' width."""


def spec(soft_cap: float | None = SOFT_CAP) -> LayerSpec:
    """The only layer of a model."""
    K, G, H = layer.K, layer.G, layer.H
    return LayerSpec(0, 1, K, G, H, Rope(H), Rule(soft_cap=soft_cap), VALUE_DIM)


@functools.cache
def batch() -> layer.SequenceBatch:
    """The battery's prompts in such a layer."""
    return layer.random_batch(value_dim=VALUE_DIM, loudness=LOUDNESS)


@functools.cache
def tables() -> Path:
    """A folder of tables for the layer, one of each kind, to be taken for those that ship with kvjax."""
    load_all()
    folder = Path(tempfile.mkdtemp(prefix="kvjax-toy-tables"))
    for name, kind in TABLE_KINDS.items():
        (folder / name).mkdir()
        arrays = kind.example(spec(), np.random.default_rng(0))
        table_file.write(folder / name / "toy.safetensors", name, spec(), [arrays])
    return folder


def dense_outputs(
    tokens: layer.SequenceBatch, soft_cap: float | None = SOFT_CAP, sinks: np.ndarray | None = SINKS
) -> np.ndarray:
    """The outputs of exact attention in all steps, f64[B K G STEPS Hv]."""
    out = np.zeros((layer.B, layer.K, layer.G, layer.STEPS, VALUE_DIM))
    flat = None if sinks is None else sinks.reshape(-1)
    for b, length in enumerate(map(int, tokens.lengths)):
        q, k, v = tokens.exact(b)
        pos = length + np.arange(layer.STEPS)
        q = q[:, :, pos].reshape(-1, *q[:, :, pos].shape[2:])
        out[b] = dense_attention(q, k, v, pos, soft_cap=soft_cap, sinks=flat).reshape(out[b].shape)
    return out


def bind(method: str) -> BoundLayer:
    """Binds a method to the layer."""
    return parse(method).bind(spec())


def decode(bound: Any, tokens: layer.SequenceBatch) -> tuple[np.ndarray, list[KVBlock]]:
    """Runs the prompts and all steps: (outputs f32[B K G STEPS Hv], what each step read).

    What a step read is the decoded block of all slots after it and, of a method with a side store, that of the store.
    """
    slots = layer.num_slots(bound)
    state = layer.compile_prefill(bound, slots)(*layer.prompt(tokens))
    outs, blocks = _compile_steps(bound.after_prompt)(state, layer.stack_steps(tokens))
    return np.asarray(outs), blocks


@functools.cache
def _compile_steps(bound: Any) -> Callable:
    """Compiles all steps, for methods that only select once for all of them."""

    def step(state: Any, token: layer.NewTokens) -> tuple[Any, Any]:
        outside = sink_partial(jnp.asarray(SINKS)[None], token[0], VALUE_DIM)
        out, state, _ = bound.extend(state, *token, 1, None, outside)
        return state, (out[:, :, :, 0], read_blocks(bound, state))

    def run(state: Any, tokens: layer.NewTokens) -> tuple[jax.Array, list[KVBlock]]:
        outs, blocks = lax.scan(step, state, tokens)[1]
        return jnp.moveaxis(outs, 0, 3), blocks

    return jax.jit(run)


def read_blocks(bound: Any, state: Any) -> list[KVBlock]:
    """What a state holds, decoded: the slots and, where there is one, the side store."""
    blocks = [bound.storage.decode(state.k, state.v, state.pos)]
    blocks[0] = KVBlock(blocks[0].k, blocks[0].v, state.pos, state.bias)
    if bound.method.side_store is not None:
        block = bound.method.side_store.visible_block(bound.storage, state.side_store)
        blocks += [] if block is None else [block]
    return blocks


def decoded_outputs(blocks: list[KVBlock]) -> np.ndarray:
    """Attention of each step's queries to what that step read, by NumPy in float64: [B K G STEPS Hv].

    Args:
      blocks: keys and values [STEPS B K|1 S ..], with positions and biases, over whose slots one softmax runs.
    """
    tokens, out = batch(), np.zeros((layer.B, layer.K, layer.G, layer.STEPS, VALUE_DIM))
    for step, b, head in np.ndindex(layer.STEPS, layer.B, layer.K):
        at = int(tokens.lengths[b]) + step
        k, v, pos, bias = [], [], [], []
        for block in blocks:

            def take(x: jax.Array) -> np.ndarray:
                per_head = np.asarray(x)[step, b]  # noqa: B023
                return per_head[head if len(per_head) > 1 else 0]  # noqa: B023

            k, v, pos = [*k, take(block.k)], [*v, take(block.v)], [*pos, take(block.pos)]
            bias.append(np.zeros(len(pos[-1])) if block.bias is None else take(block.bias))
        k, v, pos, bias = (np.concatenate(x).astype(np.float64) for x in (k, v, pos, bias))
        real = (pos >= 0) & (pos <= at)
        s = np.asarray(tokens.q, np.float64)[b, head, :, at] @ k[real].T / np.sqrt(layer.H)
        p = np.exp(SOFT_CAP * np.tanh(s / SOFT_CAP) + bias[real])
        out[b, head, :, step] = p @ v[real] / (p.sum(-1) + np.exp(SINKS[head]))[:, None]
    return out
