"""Quest: bounds the logits of each page by a box around its keys, and reads the best pages."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp

from kvjax import method_api as kv


@kv.exportable
class Box(NamedTuple):
    """The least and the greatest number of each channel over the keys of a page, both [B K U H] for U pages."""

    low: kv.Array
    high: kv.Array


@dataclasses.dataclass(frozen=True)
class Boxes(kv.Index):
    """Summarizes pages of `size` keys by boxes (Quest, Tang et al. 2024, arXiv 2406.10774, section 3.3).

    A page's score is the greatest logit that any key inside its box could have: in each channel the query takes the
    side of the box that its sign prefers.
    """

    size: kv.PositiveInt = 16

    __post_init__ = kv.check_fields

    def summarize(self, keys: kv.Array, real: kv.Array) -> Box:
        # Keys [B K U size H] and real bool[B 1|K U size]: the box spans the page's tokens, axis 3.
        most = jnp.asarray(jnp.finfo(keys.dtype).max, keys.dtype)
        low, high = (jnp.where(real[..., None], keys, side) for side in (most, -most))
        return Box(low.min(3), high.max(3))

    def join(self, before: Box, more: Box) -> Box:
        return Box(jnp.minimum(before.low, more.low), jnp.maximum(before.high, more.high))

    def score(self, summary: Box, q: kv.Array) -> kv.Array:
        zero = jnp.zeros((), q.dtype)
        return kv.attention.scores(jnp.maximum(q, zero), summary.high) + kv.attention.scores(
            jnp.minimum(q, zero), summary.low
        )


@kv.register_method(example="quest:budget=512", family="sparse reading")
def quest(
    budget: kv.PositiveInt = 1024,
    page: kv.PositiveInt = 16,
    per: Literal["query", "head"] = "query",
    device_layers: int = 2,
) -> kv.Method:
    """Reads only the pages of keys whose bounding box promises the highest logits; no token is lost.

    Attention in the prompt is exact.

    Formula:
      score(page) = sum over channels c of max(q_c min_c, q_c max_c), min and max over the page's keys

    Differs:
      The current page is always read, as in the authors' CUDA code; their evaluation code may drop it.

    Args:
      budget: tokens that a query reads, in whole pages; at least three pages, the current one included.
      page: tokens of a page.
      per: "query", where each query head has pages of its own (the paper), or "head", one set per key/value head.
      device_layers: first layers that are read in full (the paper: 2).

    Reference:
      Quest, Tang et al. 2024, arXiv 2406.10774, section 3.3 and Algorithm 1
    """
    index = Boxes(page)
    # The reader adds the current page. At least three pages, as in the authors' code, leave two to choose.
    num_chosen = max(3, budget // page) - 1
    return kv.Method(read=kv.Retrieve(index, num_chosen, per=per), device_layers=device_layers)
