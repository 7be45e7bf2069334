"""A layer with random queries, keys and values, to which methods are bound; its programs are compiled once for all."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.method import Method
from kvjax.cache.protocol import BoundLayer, Cache, LayerSpec, num_layer_slots
from kvjax.core.attention import Rule, split_blocks
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.models.config import Config
from kvjax.registry.strings import method_of
from kvjax.testing import dense_attention
from kvjax.testing.rules import MethodRun

B, K, G, H = 3, 2, 2, 32
D = 8
LENGTHS = np.array([9, 1, 6], np.int32)  # ragged prompts, one of a single token
LONGEST = int(LENGTHS.max())
STEPS = 7
TOTAL = LENGTHS + STEPS
CAPACITY = 24

NewTokens = tuple[jax.Array, KVBlock]
"""The new tokens that `BoundLayer.extend` takes: q [B K G T H], and their block."""


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """Prompts and decoded tokens of a batch: q [B K G S H], k [B K S H], v [B K S Hv], left-aligned, padded behind."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    lengths: np.ndarray  # of the prompts

    def token(self, step: int) -> NewTokens:
        """One new token of each sequence."""
        return self.tokens(step, 1)

    def tokens(self, step: int | np.ndarray, num_tokens: int) -> NewTokens:
        """`num_tokens` new tokens of each sequence from a step on: one for all sequences, or one for each."""
        first = self.lengths[:, None] + np.reshape(step, (-1, 1))
        pos = jnp.asarray(first + np.arange(num_tokens)[None], jnp.int32)

        def take(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, pos.reshape(x.shape[0], *(1,) * (x.ndim - 3), -1, 1), -2)

        return take(self.q), KVBlock(take(self.k), take(self.v), pos[:, None])

    def exact(self, b: int, *head: int) -> tuple[np.ndarray, ...]:
        """Queries, keys and values of a sequence, or of one head of it, with all decoded tokens, in float64."""
        end = int(self.lengths[b]) + STEPS
        return tuple(np.asarray(x[(b, *head)][..., :end, :], np.float64) for x in (self.q, self.k, self.v))


def random_batch(
    seed: int = 0, padding: float = 0.0, dtype=jnp.float32, value_dim: int = H, loudness: float = 1.0
) -> SequenceBatch:
    """Random sequences; everything after a sequence's last token is `padding`, and `loudness` multiplies queries."""
    rng = np.random.default_rng(seed)
    S = int(TOTAL.max())
    is_token = np.arange(S)[None] < TOTAL[:, None]

    def pad(x: np.ndarray, is_token: np.ndarray) -> jax.Array:
        return jnp.asarray(np.where(is_token, x, padding), dtype)

    q = pad(rng.normal(size=(B, K, G, S, H)) * 2 * loudness, is_token[:, None, None, :, None])
    k, v = (pad(rng.normal(size=(B, K, S, width)), is_token[:, None, :, None]) for width in (H, value_dim))
    return SequenceBatch(q, k, v, LENGTHS)


def take_sequences(batch: SequenceBatch, indices: list[int]) -> SequenceBatch:
    """These sequences of a batch."""
    idx = np.asarray(indices)
    return SequenceBatch(batch.q[idx], batch.k[idx], batch.v[idx], batch.lengths[idx])


def truncate_chunk(chunk: NewTokens, counts: list[int], padding: float = np.inf) -> NewTokens:
    """Keeps the first counts[b] tokens of sequence b; the others become padding, with such keys and values."""
    q, block = chunk
    is_token = jnp.asarray(np.arange(q.shape[3])[None] < np.array(counts)[:, None])[:, None]
    k, v = (jnp.where(is_token[..., None], x, jnp.asarray(padding, x.dtype)) for x in (block.k, block.v))
    return q, KVBlock(k, v, jnp.where(is_token, block.pos, jnp.int32(-1)))


def spec(window: int | None = None, head_dim: int = H) -> LayerSpec:
    """The only layer of a model."""
    return LayerSpec(
        index=0, num_layers=1, num_kv_heads=K, num_groups=G, head_dim=head_dim, rope=Rope(head_dim), rule=Rule(window)
    )


def bind(method: Any, window: int | None = None, head_dim: int = H) -> BoundLayer:
    """Binds a method, or its string, to that layer."""
    method = method_of(method)
    if window is not None and isinstance(method, Method):  # tests of rings are in tests/cache/test_rings.py
        method = dataclasses.replace(method, windowed="method")
    return method.bind(spec(window, head_dim))


def prompt(batch: SequenceBatch, padding: float = 0.0, width: int = LONGEST) -> tuple[jax.Array, KVBlock]:
    """Queries and block of the prompts, `width` tokens wide; after each prompt they hold `padding`."""
    is_token = np.arange(width)[None] < batch.lengths[:, None]
    mask = jnp.asarray(is_token)[:, None, :, None]

    def pad_prompt(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, x[..., :width, :], jnp.asarray(padding, x.dtype))

    pos = jnp.asarray(np.where(is_token, np.arange(width)[None], -1), jnp.int32)
    return pad_prompt(batch.q, mask[:, None]), KVBlock(
        pad_prompt(batch.k, mask), pad_prompt(batch.v, mask), pos[:, None]
    )


def make_state(layer: BoundLayer, q: jax.Array, block: KVBlock, slots: int) -> Any:
    """Makes the state after the prompts as the decoder makes it."""
    if layer.needs.prompt_chunk:
        return _prefill_in_chunks(layer, q, block, slots)
    prompt, lengths = observe_prompt(layer, q, block)
    keep = None
    if layer.needs.global_budget:
        measures = layer.measure(*observed_block(layer, prompt, lengths))
        keep = layer.divide_budget(jax.tree.map(lambda x: x[None], measures), lengths)[0]
    return layer.prefill(*observed_block(layer, prompt, lengths, keep), slots)


def observe_prompt(layer: BoundLayer, q: jax.Array, block: KVBlock) -> tuple[LayerPrompt, jax.Array]:
    """Returns the prompts with all that the layer observes of them, and their lengths."""
    lengths = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    prompt = LayerPrompt(block.k, block.v, select_queries(layer, q, 0, lengths), *model_arrays(layer, q, block))
    if layer.needs.replay is not None:
        prompt = prompt._replace(replay_scores=_score_replay(layer, prompt, q, lengths))
    return prompt, lengths


def model_arrays(layer: BoundLayer, q: jax.Array, block: KVBlock) -> tuple[jax.Array | None, jax.Array | None]:
    """The model's arrays that a method may observe: hidden states [B 1 T D], and an output projection [1 K G H D]."""
    rng = np.random.default_rng(7)
    hidden = output = None
    if layer.needs.hidden_states:
        hidden = jnp.tanh(block.v[:, :1, :, :D])
    if layer.needs.output_projection:
        output = jnp.asarray(rng.normal(size=(1, *q.shape[1:3], block.v.shape[3], D)), block.v.dtype)
    return hidden, output


def _score_replay(layer: BoundLayer, prompt: LayerPrompt, q: jax.Array, lengths: jax.Array) -> jax.Array:
    """Scores of prompts that are repeated whole, with the same queries, keys and values."""
    block, observation = observed_block(layer, prompt, lengths)
    replay_pos = jnp.where(block.pos >= 0, block.pos + lengths[:, None, None], -1)
    new = KVBlock(block.k, block.v, replay_pos)
    no_scores = jnp.zeros(block.k.shape[:3], jnp.float32)
    copy = observation._replace(q=q, pos=replay_pos[:, 0])
    if layer.needs.replay.needs_gradients:
        copy = copy._replace(gradient_norms=jnp.linalg.norm(block.v[:, 0].astype(jnp.float32), axis=-1))
    return layer.update_scores(block, jnp.int32(0), copy, new, no_scores)


def _prefill_in_chunks(layer: BoundLayer, q: jax.Array, block: KVBlock, slots: int) -> Any:
    """Makes the state of a layer that takes a prompt in chunks of its own, as while decoding."""
    size = layer.needs.prompt_chunk

    def step(state: Any, chunk: NewTokens) -> tuple[Any, None]:
        return layer.extend(state, *chunk, size, None)[1], None

    state = layer.prefill(block.first(0), None, slots)
    blocks = KVBlock(
        split_blocks(block.k, 2, size), split_blocks(block.v, 2, size), split_blocks(block.pos, 2, size, -1)
    )
    return lax.scan(step, state, (split_blocks(q, 3, size), blocks))[0]


def num_slots(layer: BoundLayer, capacity: int = CAPACITY) -> int:
    """Slots of a layer that the battery's prompts fill."""
    return num_layer_slots(layer, tuple(map(int, LENGTHS)), capacity)


@functools.cache
def compile_prefill(layer: BoundLayer, slots: int) -> Callable:
    """Compiles (queries of the prompts, their block) -> the state after them."""
    return jax.jit(lambda q, block: make_state(layer, q, block, slots))


def prefill(layer: BoundLayer, batch: SequenceBatch, padding: float = 0.0) -> Any:
    """Returns the state after the prompts; after each prompt the block holds `padding`."""
    return compile_prefill(layer, num_slots(layer))(*prompt(batch, padding))


TRACES: Counter[BoundLayer] = Counter()
"""The number of times that `extend` was traced for single steps."""


@functools.cache
def compile_extend(layer: BoundLayer, commit: int = 1) -> Callable:
    """Compiles (state, new tokens) -> (out, state), as in the first layer, with no cross-layer value."""

    def extend(state: Any, new: NewTokens) -> tuple[jax.Array, Any]:
        TRACES[layer] += 1
        return layer.extend(state, *new, commit, None)[:2]

    return jax.jit(extend)


def scan_steps(layer: BoundLayer, state: Any, tokens: NewTokens) -> tuple[jax.Array, Any]:
    """Decodes one token after the other, of a stack of them -> (f32[B K G T H], the state)."""

    def step(state: Any, token: NewTokens) -> tuple[Any, jax.Array]:
        out, state, _ = layer.extend(state, *token, 1, None)
        return state, out[:, :, :, 0]

    state, outs = lax.scan(step, state, tokens)
    return jnp.moveaxis(outs, 0, 3), state


@functools.cache
def compile_scan(layer: BoundLayer) -> Callable:
    return jax.jit(functools.partial(scan_steps, layer))


def stack_steps(batch: SequenceBatch, num_steps: int = STEPS) -> NewTokens:
    """Stacks the new tokens of `num_steps` steps along a leading axis."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[batch.token(t) for t in range(num_steps)])


def decode(method: Any, batch: SequenceBatch, window: int | None = None, state: Any = None) -> np.ndarray:
    """Runs all decode steps one by one -> f32[B K G STEPS H]."""
    layer = bind(method, window)
    state = prefill(layer, batch) if state is None else state
    return np.asarray(compile_scan(layer)(state, stack_steps(batch))[0])


def assert_decodes_as(method: Any, oracle: Callable, window: int | None = None) -> None:
    """Asserts the outputs of oracle(q [K G S H], k, v [K S H], prompt tokens), whatever lies in empty slots."""
    batch = random_batch()
    expected = [oracle(*batch.exact(b), int(n)) for b, n in enumerate(batch.lengths)]
    actual = decode(method, batch, window)
    np.testing.assert_allclose(actual, np.stack(expected), atol=5e-6)
    noisy = prefill(bind(method, window), batch, np.inf)
    np.testing.assert_array_equal(decode(method, batch, window, noisy), actual)


def dense_outputs(batch: SequenceBatch, window: int | None = None) -> np.ndarray:
    """The outputs of exact attention in all steps, f64[B K G STEPS H]."""
    out = np.zeros((B, K, G, STEPS, H))
    for b, length in enumerate(batch.lengths):
        pos = length + np.arange(STEPS)
        q = np.asarray(batch.q[b])[:, :, pos].reshape(-1, STEPS, H)
        k, v = (np.asarray(x[b])[:, : length + STEPS] for x in (batch.k, batch.v))
        out[b] = dense_attention(q, k, v, pos, window).reshape(out[b].shape)
    return out


MODEL = Config.llama(2, D, layers=1, heads=K * G, kv_heads=K, head_dim=H, mlp_width=D)
"""A model of that layer, which is only counted."""


@dataclasses.dataclass(frozen=True)
class LayerRun(MethodRun):
    """A method on that layer: the tokens of a prompt are the indices of their vectors in a batch.

    A sequence that is read alone fills the batch with copies of itself, so that nothing more is compiled.
    """

    batch: SequenceBatch
    padding: float = 1e4  # what lies where a sequence of a batch has no token; 0 where it is alone
    ragged_counts: ClassVar = ((1, 3, 5), (3, 5, 1), (5, 1, 3), (2, 4, 6), (4, 6, 2), (6, 2, 4))

    @classmethod
    def of(cls, method: Any, batch: SequenceBatch | None = None) -> LayerRun:
        """Runs a method, or its string, on the prompts of a batch and the tokens that follow them."""
        batch = batch or random_batch()
        ids = np.arange(batch.k.shape[0] * batch.k.shape[2]).reshape(batch.k.shape[0], -1).tolist()
        pairs = [(row[:n], row[n : n + STEPS]) for row, n in zip(ids, batch.lengths, strict=True)]
        return cls(method_of(method), *map(list, zip(*pairs, strict=True)), batch)

    @functools.cached_property
    def layer(self) -> BoundLayer:
        """The bound layer."""
        return bind(self.method)

    @functools.cached_property
    def vectors(self) -> tuple[np.ndarray, ...]:
        """Queries [B*S K G H], keys and values [B*S K H] of all tokens."""
        arrays = (np.asarray(x) for x in (self.batch.q, self.batch.k, self.batch.v))
        return tuple(np.moveaxis(x, -2, 1).reshape(-1, *x.shape[1:-2], H) for x in arrays)

    def gather(self, tokens: list[list[int]], first: np.ndarray, width: int) -> NewTokens:
        """The vectors of tokens at positions from `first` on, padded to a width."""
        padding = self.padding if len({tuple(row) for row in tokens}) > 1 else 0.0
        is_token = np.arange(width)[None] < np.array([[len(row)] for row in tokens])
        ids = np.array([row + [0] * (width - len(row)) for row in tokens])
        arrays = []
        for table in self.vectors:
            mask = is_token.reshape(*ids.shape, *(1,) * (table.ndim - 1))
            arrays.append(jnp.asarray(np.moveaxis(np.where(mask, table[ids], np.float32(padding)), 1, -2)))
        pos = np.where(is_token, first[:, None] + np.arange(width), -1).astype(np.int32)
        return arrays[0], KVBlock(arrays[1], arrays[2], jnp.asarray(pos[:, None]))

    def read(self, sequences: list[int]) -> Cache:
        tokens = [self.prompts[i] for i in (sequences * B)[:B]]
        state = compile_prefill(self.layer, num_slots(self.layer))(*self.gather(tokens, np.zeros(B, int), LONGEST))
        lengths = jnp.asarray([len(row) for row in tokens], jnp.int32)
        return Cache((state,), lengths, CAPACITY, (self.layer,), MODEL, "float32")

    def feed(self, cache: Cache, tokens: list[list[int]]) -> tuple[np.ndarray, Cache]:
        tokens = (tokens * B)[:B]
        counts = np.array([len(row) for row in tokens])
        width = 1 if counts.max() == 1 else STEPS
        new = self.gather(tokens, np.asarray(cache.length), width)
        out, state = compile_extend(self.layer, width)(cache.layers[0], new)
        length = cache.length + jnp.asarray(counts, jnp.int32)
        out = np.moveaxis(np.asarray(out), 3, 1)
        return out, dataclasses.replace(cache, layers=(state,), length=length)

    def are_close(self, x: np.ndarray, y: np.ndarray, factor: int = 1) -> bool:
        return np.allclose(x, y, rtol=0, atol=2e-6)


def trace(fun: Callable, *args: Any) -> Any:
    """Returns the result of a function of tracers, such as their types; nothing is compiled."""
    results = []
    jax.make_jaxpr(lambda *xs: results.append(fun(*xs)))(*args)
    return results[0]
