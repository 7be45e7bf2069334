"""A bound layer of a method, driven by given queries, keys and values; its programs are compiled once for all tests."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.protocol import BoundLayer, LayerSpec, num_layer_slots
from kvjax.core.attention import split_blocks
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.methods.strings import method_of
from kvjax.testing import dense_attention

B, K, G, H = 3, 2, 2, 32
D = 8
LENGTHS = np.array([9, 1, 6], np.int32)  # ragged prompts, one of a single token
LONGEST = int(LENGTHS.max())
STEPS = 7
TOTAL = LENGTHS + STEPS
CAPACITY = 24

Fresh = tuple[jax.Array, KVBlock]
"""The new tokens that `BoundLayer.extend` takes: q [B K G T H], and their block."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Per row b, token t: q [B K G S H], k, v [B K S H], left-aligned; beyond a row's end lies `padding`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    lengths: np.ndarray

    def token(self, step: int) -> Fresh:
        """One fresh token of each row."""
        return self.tokens(step, 1)

    def tokens(self, step: int | np.ndarray, count: int) -> Fresh:
        """`count` fresh tokens of each row, from a step on: one for all rows, or one for each."""
        pos = jnp.asarray(self.lengths[:, None] + np.reshape(step, (-1, 1)) + np.arange(count)[None], jnp.int32)

        def take(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, pos.reshape(x.shape[0], *(1,) * (x.ndim - 3), -1, 1), -2)

        return take(self.q), KVBlock(take(self.k), take(self.v), pos[:, None])


def data(seed: int = 0, padding: float = 0.0, dtype=jnp.float32) -> Data:
    """Random rows; everything beyond a row's last token is `padding`."""
    rng = np.random.default_rng(seed)
    S = int(TOTAL.max())
    real = np.arange(S)[None] < TOTAL[:, None]

    def fill(x: np.ndarray, inside: np.ndarray) -> jax.Array:
        return jnp.asarray(np.where(inside, x, padding), dtype)

    q = fill(rng.normal(size=(B, K, G, S, H)) * 2, real[:, None, None, :, None])
    k, v = (fill(rng.normal(size=(B, K, S, H)), real[:, None, :, None]) for _ in range(2))
    return Data(q, k, v, LENGTHS)


def rows(d: Data, which: list[int]) -> Data:
    """These rows of a batch."""
    at = np.asarray(which)
    return Data(d.q[at], d.k[at], d.v[at], d.lengths[at])


def cut_short(fresh: Fresh, counts: list[int], padding: float = np.inf) -> Fresh:
    """Keeps the first counts[b] tokens of row b of a chunk; the others become padding, with such keys and values."""
    q, block = fresh
    real = jnp.asarray(np.arange(q.shape[3])[None] < np.array(counts)[:, None])[:, None]
    k, v = (jnp.where(real[..., None], x, jnp.asarray(padding, x.dtype)) for x in (block.k, block.v))
    return q, KVBlock(k, v, jnp.where(real, block.pos, jnp.int32(-1)))


def spec(window: int | None = None, head_dim: int = H) -> LayerSpec:
    """The only layer of a model."""
    return LayerSpec(
        index=0, num_layers=1, num_kv_heads=K, num_groups=G, head_dim=head_dim, window=window, rope=Rope(head_dim)
    )


def bound(method: Any, window: int | None = None, head_dim: int = H) -> BoundLayer:
    """A method, or its string, in that layer."""
    return method_of(method).bind(spec(window, head_dim))


def prompt(d: Data, padding: float = 0.0, width: int = LONGEST) -> tuple[jax.Array, KVBlock]:
    """Queries and block of the prompts, `width` tokens wide; beyond each prompt they hold `padding`."""
    pos = np.arange(width)[None] < d.lengths[:, None]
    inside = jnp.asarray(pos)[:, None, :, None]

    def cut(x: jax.Array, inside: jax.Array) -> jax.Array:
        return jnp.where(inside, x[..., :width, :], jnp.asarray(padding, x.dtype))

    pos = jnp.asarray(np.where(pos, np.arange(width)[None], -1), jnp.int32)
    return cut(d.q, inside[:, None]), KVBlock(cut(d.k, inside), cut(d.v, inside), pos[:, None])


def after_prompt(layer: BoundLayer, q: jax.Array, block: KVBlock, slots: int) -> Any:
    """The state after the prompts, made as the decoder makes it."""
    if layer.needs.prompt_chunk:
        return _prefill_in_chunks(layer, q, block, slots)
    prompt, lengths = observed(layer, q, block)
    keep = None
    if layer.needs.global_budget:
        measures = layer.measure(*observed_block(layer, prompt, lengths))
        keep = layer.divide_budget(jax.tree.map(lambda x: x[None], measures), lengths)[0]
    return layer.prefill(*observed_block(layer, prompt, lengths, keep), slots)


def observed(layer: BoundLayer, q: jax.Array, block: KVBlock) -> tuple[LayerPrompt, jax.Array]:
    """The prompts with all that the layer observes of them, and their lengths."""
    lengths = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    prompt = LayerPrompt(block.k, block.v, select_queries(layer, q, 0, lengths), *_model_of(layer, q, block))
    if layer.needs.replay is not None:
        prompt = prompt._replace(replay_scores=_score_replay(layer, prompt, q, lengths))
    return prompt, lengths


def _model_of(layer: BoundLayer, q: jax.Array, block: KVBlock) -> tuple[jax.Array | None, jax.Array | None]:
    """The model's arrays that a method may observe: hidden states [B 1 T D], and an output projection [1 K G H D]."""
    rng = np.random.default_rng(7)
    hidden = output = None
    if layer.needs.hidden_states:
        hidden = jnp.tanh(block.v[:, :1, :, :D])
    if layer.needs.output_projection:
        output = jnp.asarray(rng.normal(size=(1, *q.shape[1:3], block.v.shape[3], D)), block.v.dtype)
    return hidden, output


def _score_replay(layer: BoundLayer, prompt: LayerPrompt, q: jax.Array, lengths: jax.Array) -> jax.Array:
    """The scores of prompts that are repeated whole, with the same queries, keys and values."""
    block, observation = observed_block(layer, prompt, lengths)
    replay_pos = jnp.where(block.pos >= 0, block.pos + lengths[:, None, None], -1)
    new = KVBlock(block.k, block.v, replay_pos)
    no_scores = jnp.zeros(block.k.shape[:3], jnp.float32)
    return layer.update_scores(block, jnp.int32(0), observation._replace(q=q, pos=replay_pos[:, 0]), new, no_scores)


def _prefill_in_chunks(layer: BoundLayer, q: jax.Array, block: KVBlock, slots: int) -> Any:
    """The state of a layer that takes a prompt in chunks of its own, as while decoding."""
    size = layer.needs.prompt_chunk

    def step(state: Any, chunk: Fresh) -> tuple[Any, None]:
        return layer.extend(state, *chunk, size, None)[1], None

    state = layer.prefill(block.first(0), None, slots)
    blocks = KVBlock(
        split_blocks(block.k, 2, size), split_blocks(block.v, 2, size), split_blocks(block.pos, 2, size, -1)
    )
    return lax.scan(step, state, (split_blocks(q, 3, size), blocks))[0]


def slots(layer: BoundLayer, capacity: int = CAPACITY) -> int:
    """Slots of a layer that the battery's prompts fill."""
    return num_layer_slots(layer, tuple(map(int, LENGTHS)), capacity)


@functools.cache
def _prefill(layer: BoundLayer, slots: int):
    return jax.jit(lambda q, block: after_prompt(layer, q, block, slots))


def prefill(layer: BoundLayer, d: Data, padding: float = 0.0) -> Any:
    """The state after the prompts; beyond each prompt the block holds `padding`."""
    return _prefill(layer, slots(layer))(*prompt(d, padding))


TRACES: Counter[BoundLayer] = Counter()
"""How often `extend` was traced for single steps."""


@functools.cache
def extend(layer: BoundLayer, commit: int = 1):
    """The compiled function (state, new tokens) -> (out, state), as in the first layer, with no cross-layer value."""

    def run(state: Any, fresh: Fresh) -> tuple[jax.Array, Any]:
        TRACES[layer] += 1
        return layer.extend(state, *fresh, commit, None)[:2]

    return jax.jit(run)


def stepped(layer: BoundLayer, state: Any, fresh: Fresh) -> tuple[jax.Array, Any]:
    """One token after the other, of a stack of them -> (f32[B K G T H], the state)."""

    def step(state: Any, one: Fresh) -> tuple[Any, jax.Array]:
        out, state, _ = layer.extend(state, *one, 1, None)
        return state, out[:, :, :, 0]

    state, outs = lax.scan(step, state, fresh)
    return jnp.moveaxis(outs, 0, 3), state


@functools.cache
def _stepped(layer: BoundLayer):
    return jax.jit(functools.partial(stepped, layer))


def stack(d: Data, count: int = STEPS) -> Fresh:
    """The new tokens of `count` steps, stacked along a leading axis."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[d.token(t) for t in range(count)])


def run(method: Any, d: Data, window: int | None = None, state: Any = None) -> np.ndarray:
    """All decode steps one by one -> f32[B K G STEPS H]."""
    layer = bound(method, window)
    state = prefill(layer, d) if state is None else state
    return np.asarray(_stepped(layer)(state, stack(d))[0])


def dense(d: Data, window: int | None = None) -> np.ndarray:
    """The output of exact attention in all steps, f64[B K G STEPS H]."""
    out = np.zeros((B, K, G, STEPS, H))
    for b, n in enumerate(d.lengths):
        at = n + np.arange(STEPS)
        q = np.asarray(d.q[b])[:, :, at].reshape(-1, STEPS, H)
        total = n + STEPS
        o = dense_attention(q, np.asarray(d.k[b])[:, :total], np.asarray(d.v[b])[:, :total], at, window)
        out[b] = o.reshape(out[b].shape)
    return out


def traced(fun: Any, *args: Any) -> Any:
    """The result of a function of tracers, such as their types; nothing is compiled."""
    found = []
    jax.make_jaxpr(lambda *xs: found.append(fun(*xs)))(*args)
    return found[0]
