"""ArkVale: stores pages on the host, and recalls the pages that tighter boxes than Quest's find."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.methods.quest import Box, Boxes


@kv.exportable
class Digests(NamedTuple):
    """The boxes of all pages, and the keys of the unfinished page."""

    box: Box  # [B K U H]
    growing: kv.memory.Buffer  # [B K size H], the keys of the page in which the next token will lie


@dataclasses.dataclass(frozen=True)
class TightBoxes(Boxes):
    """Summarizes pages of keys by boxes c - d .. c + d (ArkVale, Chen et al., NeurIPS 2024).

    In each channel c is the middle between the least and the greatest key, and d the mean of |c - k| over the page, so
    a key may lie outside. d cannot be updated from a page's parts, so the unfinished page's keys are stored and its box
    is computed again. A page's score is Quest's, in the mean over all query heads of the layer.
    """

    size: int = 32
    shares_scores = True

    def summarize(self, keys: kv.Array, real: kv.Array) -> Box:
        box, real = super().summarize(keys, real), real[..., None]
        middle = (box.low.astype(jnp.float32) + box.high.astype(jnp.float32)) / 2
        distance = jnp.where(real, jnp.abs(middle[:, :, :, None] - keys.astype(jnp.float32)), 0.0)
        count = jnp.maximum(real.sum(3, dtype=jnp.int32), 1).astype(jnp.float32)
        reach = distance.sum(3) / count
        return Box((middle - reach).astype(keys.dtype), (middle + reach).astype(keys.dtype))

    def build(self, block: kv.KVBlock) -> Digests:
        n = (block.pos[:, :1] >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        slot = n // self.size * self.size + jnp.arange(self.size, dtype=jnp.int32)[None, None]
        keys = kv.memory.take(block.k, jnp.minimum(slot, block.pos.shape[2] - 1))
        growing = jnp.where((slot < n)[..., None], keys, jnp.zeros((), keys.dtype))
        return Digests(super().build(block), kv.memory.pack(growing))

    def append(self, reader_state: Digests, new_tokens: kv.KVBlock, at: kv.Array) -> Digests:
        count = new_tokens.pos.shape[2]
        if not count:
            return reader_state
        first, offset = jnp.divmod(at, self.size)
        pages = (count + self.size - 2) // self.size + 1  # that these tokens touch at most
        keys, real = self.split_units(new_tokens, offset, pages)
        before = jnp.arange(self.size, dtype=jnp.int32)[None, None] < offset[..., None]
        growing = jnp.where(before[..., None], kv.memory.unpack(reader_state.growing), keys[:, :, 0])
        keys, real = keys.at[:, :, 0].set(growing), real.at[:, :, 0].set(real[:, :, 0] | before)
        box = kv.memory.map_buffers(
            lambda stored, new: kv.memory.append(stored, new, first), reader_state.box, self.summarize(keys, real)
        )
        tokens = offset + (new_tokens.pos[:, :1] >= 0).sum(2, dtype=jnp.int32)
        next_page = jnp.minimum(tokens // self.size, pages - 1)[:, :, None, None, None]
        last = jnp.take_along_axis(jnp.where(real[..., None], keys, jnp.zeros((), keys.dtype)), next_page, 2)
        return Digests(box, kv.memory.pack(last[:, :, 0]))

    def score(self, summary: Digests, q: kv.Array) -> kv.Array:
        return kv.over_heads.mean(super().score(summary.box, q).mean(2, keepdims=True))


@kv.register_method(example="arkvale:budget=512,device_layers=1", family="host memory")
def arkvale(
    budget: int = 2048,
    page: kv.PositiveInt = 32,
    sinks: kv.NonNegativeInt = 2,
    window: kv.PositiveInt = 2,
    device_layers: int = 2,
) -> kv.Method:
    """Stores keys and values on the host; a query reads the pages that small bounding boxes recommend.

    No token is lost, and attention in the prompt is exact. All heads of a layer share their pages.

    Formula:
      c = (min + max) / 2, d = mean of |c - k| over a page's keys; score(page) = mean over the layer's query heads of
      sum over channels of max(q (c - d), q (c + d))

    Differs:
      The window counts tokens, not whole pages. Pages are fetched for every token, where the authors keep those of the
      last steps, the sinks and the window on the device.

    Args:
      budget: tokens that a query reads besides its own page, in whole pages, sinks and window included (the authors'
        code reads half of its device cache, 4,096 tokens in its example).
      page: tokens of a page.
      sinks: first pages that are always read.
      window: latest pages that are always read, the query's own included.
      device_layers: first layers that stay on the device and are read in full (the authors' evaluation: 2).

    Reference:
      ArkVale, Chen et al., NeurIPS 2024; constants of its public code
    """
    recalled = budget // page - sinks - (window - 1)
    if recalled < 1:
        least = (sinks + window) * page
        raise kv.KvjaxError(
            f"budget={budget} of ArkVale leaves no page of {page} tokens to recall after {sinks} sink pages and a "
            f"window of {window}; use budget={least} or more"
        )
    read = kv.Retrieve(TightBoxes(page), recalled, sinks * page, window * page)
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=read, device_layers=device_layers)
