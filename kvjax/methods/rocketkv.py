"""RocketKV: selects prompt tokens as SnapKV; each query reads the best pages of these, found by a few channels."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.methods.quest import Box, Boxes


@dataclasses.dataclass(frozen=True)
class HybridBoxes(Boxes):
    """Scores boxes around pages by a `share` of the channels (RocketKV, Behnam et al. 2025, arXiv 2502.14051).

    The channels are those of the greatest |q| in the mean over a key/value head's query heads; in each, all query heads
    take the side of the box that the sign of their sum prefers. A query head's score is a softmax over pages, at
    SparQ's temperature for the channels left out; the key/value head takes the mean.
    """

    size: int = 4
    share: Annotated[float, kv.Within("(0, 1]")] = 0.25

    def score(self, summary: Box, q: kv.Array) -> kv.Array:
        magnitude, zero = jnp.abs(q.astype(jnp.float32)), jnp.zeros((), q.dtype)
        takes_high = q.astype(jnp.float32).sum(2, keepdims=True) > 0
        H = q.shape[-1]
        channel = kv.top_k(magnitude.mean(2), max(1, int(H * self.share)))[1]
        is_read = (channel[..., None] == jnp.arange(H, dtype=jnp.int32)[None, None, None, None]).any(3)[:, :, None]
        high = kv.attention.scores(jnp.where(is_read & takes_high, q, zero), summary.high)
        low = kv.attention.scores(jnp.where(is_read & ~takes_high, q, zero), summary.low)
        # SparQ's temperature: `scores` divides by the root of H, and only this fraction of |q| was read.
        known = jnp.where(is_read, magnitude, 0.0).sum(-1) / jnp.maximum(magnitude.sum(-1), 1e-30)
        return (high + low) / jnp.sqrt(jnp.maximum(known, 1e-12))[..., None]

    def rescale(self, score: kv.Array, candidates: kv.Array) -> kv.Array:
        return kv.attention.softmax(jnp.where(candidates, score, kv.MASKED_LOGIT)).mean(2, keepdims=True)


@kv.register_method(example="rocketkv:budget=1024,topk=256", family="sparse reading")
def rocketkv(
    budget: int = 2048,
    topk: int = 256,
    page: kv.PositiveInt = 4,
    channels: Annotated[float, kv.Within("(0, 1]")] = 0.25,
    window: kv.PositiveInt = 32,
    kernel: int = 63,
) -> kv.Method:
    """Keeps a generous selection by SnapKV; a query then reads only the best pages of it.

    Attention in the prompt is exact.

    Formula:
      score(page) = mean over query heads of softmax(sum over channels c of q_c M_c / t), M_c the page's max or min by
      the sign of the heads' summed q_c, t = sqrt(H sum_c |q_c| / sum |q|), c the channels of the largest |q|

    Differs:
      The prompt's last queries choose for all turns: what they pass over is gone for later questions. The authors'
      RocketKV-MT holds every token, as much as `full`, and the last queries of each turn choose anew which tokens its
      answer looks through; with a `budget` of the whole text an answer here looks through all of them, at the same
      memory. At 1,024 tokens of SmolLM2-135M that is 126% of the exact cache's bytes, boxes included, and 31% with
      budget=256; of later questions the first answers 17% and the second none (paired difference -18 to 41, 8
      contexts), of which the exact cache answers 67%. Whole pages are read instead of single tokens, and always the
      query's own; the page length is fixed, whatever the length of the text.

    Args:
      budget: prompt tokens kept per layer and key/value head, the window included.
      topk: tokens that a query reads, in whole pages, its own page included (TensorRT-LLM: 64 pages).
      page: tokens of a page.
      channels: fraction of the head size by which pages are found (the authors shrink tokens and channels alike: 1 /
        page; TensorRT-LLM takes all).
      window, kernel: as in `snapkv`; the pooling is a maximum.

    Reference:
      RocketKV, Behnam et al. 2025, arXiv 2502.14051; constants of TensorRT-LLM
    """
    if topk < 2 * page:
        raise kv.KvjaxError(f"topk of RocketKV must be at least 2 pages of {page} tokens, got {topk}; use {2 * page}")
    select = kv.make_selection(kv.WindowAttention(window, kernel, "max", reduce_first=True), budget, recent=window)
    return kv.Method(select=select, read=kv.Retrieve(HybridBoxes(page, channels), topk // page - 1, per="head"))
