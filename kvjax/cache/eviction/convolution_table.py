"""The table of LoCoCo's convolutions, and how they are fitted layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.calibration.table_kinds import TableKind, register_table_kind
from kvjax.cache.calibration.text_halves import split_halves
from kvjax.cache.eviction.convolution import Convolution, convolved
from kvjax.cache.eviction.merging import evicted_mask
from kvjax.cache.eviction.scorers import AccumulatedAttention
from kvjax.cache.eviction.selection import SelectedSlots, make_selection
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.base import map_query_blocks
from kvjax.core.attention import attend_dense, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens
from kvjax.errors import KvjaxError

RATE = 3e-3  # of learning, in calibration


@register_table_kind("lococo")
@dataclasses.dataclass(frozen=True)
class ConvolutionTable(TableKind):
    """The weights of LoCoCo's convolution for M mixed slots, as its public code lays them out.

    Of the `memory_saver` of each attention module: `weight` [M 2*H w] and `bias` [M], its only convolution,
    `layers.0.weight` and `layers.0.bias`, a token's key before its value, w odd; and `normalizer` [1].

    Calibrated layer by layer, where the authors train through the model: of each text's earlier half 2 * M tokens are
    kept, half of them mixed, and Adam makes what the later half's queries read like what they read of all tokens.
    slots: M. kernel: w. length: the first so many tokens of each text are used. steps: of Adam, each over all texts.
    """

    slots: int = 32
    kernel: int = 21
    length: int = 512
    steps: int = 100
    num_queries = None

    def __post_init__(self):
        if min(self.slots, self.length, self.steps) < 1 or self.kernel % 2 == 0:
            raise KvjaxError(f"{self} needs an odd kernel and all others at least 1; the authors' kernel is 21")

    def count(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> dict[str, Array]:
        assert observation is not None

        def cut(x: Array, axis: int) -> Array:
            x = lax.slice_in_dim(x, 0, min(self.length, x.shape[axis]), axis=axis)
            grow = [(0, self.length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
            return jnp.pad(x.astype(jnp.float32), grow)[:, :, None]  # the axis of texts, which `join` lengthens

        q = jnp.where((observation.pos >= 0)[:, None, None, :, None], observation.q, jnp.zeros((), observation.q.dtype))
        real = jnp.broadcast_to(block.pos >= 0, block.k.shape[:3])
        return {"q": cut(q, 3), "k": cut(block.k, 2), "v": cut(block.v, 2), "real": cut(real, 2)}

    def join(self, before: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.concatenate([before, more], 1)

    def arrays(self, counted: dict[str, np.ndarray], spec: LayerSpec) -> Mapping[str, np.ndarray]:
        q, k, v, real = (jnp.asarray(np.moveaxis(counted[x], 1, 0), jnp.float32) for x in ("q", "k", "v", "real"))
        pos = jnp.where(real[:, :1] > 0, jnp.arange(self.length, dtype=jnp.int32)[None, None], -1)
        texts = split_texts(KVBlock(k, v, pos), q, 2 * self.slots, spec)
        if not evicted_mask(texts.earlier, texts.choice).any():
            least = 4 * self.slots + 1
            raise KvjaxError(
                f"no text loses a token; give texts of {least} tokens or more, as `length`, or fewer slots"
            )
        found = fitted(self._start(spec), texts, self.slots, spec.window, self.steps)
        made = {name: np.asarray(array, np.float32) for name, array in found._asdict().items()}
        return made | {"weight": made["weight"].astype(np.float16)}

    def _start(self, spec: LayerSpec) -> Convolution:
        inputs = 2 * spec.head_dim
        weight = np.random.default_rng(spec.index).normal(size=(self.slots, inputs, self.kernel))
        weight = jnp.asarray(weight / np.sqrt(inputs * self.kernel), jnp.float32)
        return Convolution(weight, jnp.zeros(self.slots), jnp.full(1, 0.5))

    def example(self, spec: LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        made = {"weight": rng.normal(size=(3, 2 * spec.head_dim, 5)), "bias": rng.normal(size=3), "normalizer": [0.5]}
        return {name: np.asarray(array, np.float32) for name, array in made.items()}


class Texts(NamedTuple):
    """Texts in halves: what is kept of the earlier, and what the later one's queries read."""

    earlier: KVBlock
    choice: SelectedSlots
    q: Array  # [B K G T H]
    q_pos: Array  # i32[B T], -1 where a query is not of the later half
    later: Partial  # what the queries read of their own half
    want: Array  # f32[B K G T H], of both halves


@functools.partial(jax.jit, static_argnames=("budget", "spec"))
def split_texts(block: KVBlock, q: Array, budget: int, spec: LayerSpec) -> Texts:
    """Texts with all of their queries [B K G T H], of whose earlier halves so many tokens are kept."""
    pos = block.pos[:, 0]
    first, asking = split_halves(block, Observation(q, pos))
    # The earlier half lies at the front, so that its block needs no more room than that.
    earlier = dataclasses.replace(block, pos=jnp.where(first, block.pos, -1)).first(-(-pos.shape[1] // 2))
    keep = jnp.minimum(first.sum((1, 2), dtype=jnp.int32), budget)
    seen = Observation(q, jnp.where(first[:, 0], pos, -1))
    choice = make_selection(AccumulatedAttention(), budget).select_slots(earlier, seen, keep, budget, spec)
    own = dataclasses.replace(block, pos=jnp.where(asking[:, None], block.pos, -1))
    q_pos = jnp.where(asking, pos, -1)

    def read(part: KVBlock) -> Partial:
        return map_query_blocks(lambda q, at: attend_dense(q, part, at, spec.window), q, q_pos, 64)

    later = read(own)
    return Texts(earlier, choice, q, q_pos, later, merge([read(earlier), later]))


def relative_error(by: Convolution, texts: Texts, slots: int, window: int | None) -> Array:
    """How far the queries' outputs are from those over all tokens, as a share of their squares."""
    kept = gather_tokens(texts.earlier, texts.choice.slots)
    kept = convolved(texts.earlier, kept, texts.choice, by, slots, 0)
    found = merge([attend_dense(texts.q, kept, texts.q_pos, window), texts.later])
    asking = (texts.q_pos >= 0)[:, None, None, :, None]
    wrong, whole = (jnp.where(asking, jnp.square(x), 0.0).sum() for x in (found - texts.want, texts.want))
    return wrong / jnp.maximum(whole, 1e-30)


def fitted(start: Convolution, texts: Texts, slots: int, window: int | None, steps: int) -> Convolution:
    """The convolution after so many steps of Adam (Kingma & Ba, 2014), with its usual decays."""
    by, mean = start, jax.tree.map(jnp.zeros_like, start)
    square = mean
    for count in range(1, steps + 1):  # not lax.scan: in a loop XLA:CPU convolves ten times slower
        by, mean, square = _step(by, mean, square, jnp.float32(count), texts, slots, window)
    return by


@functools.partial(jax.jit, static_argnames=("slots", "window"))
def _step(
    by: Convolution, mean: Convolution, square: Convolution, count: Array, texts: Texts, slots: int, window: int | None
) -> tuple[Convolution, Convolution, Convolution]:
    slope = jax.grad(relative_error)(by, texts, slots, window)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, slope)
    first, second = RATE / (1 - 0.9**count), 1 / (1 - 0.999**count)
    by = jax.tree.map(lambda x, m, s: x - first * m / (jnp.sqrt(second * s) + 1e-8), by, mean, square)
    return by, mean, square
