"""LOOK-M: evicts image tokens before text, and merges evicted tokens into the nearest kept ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.scorers import rank_below_others

Rule = Literal["pivot", "average", "weighted", "normalised"]


@dataclasses.dataclass(frozen=True)
class TextPrior(kv.Scorer):
    """Scores by attention summed over the prompt, with image tokens below all text (Wan et al. 2024, 2406.18139).

    Args:
      images: first and last positions of each image.
    """

    images: tuple[tuple[int, int], ...] = ()
    num_queries: ClassVar[int | None] = None

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        attention = kv.AccumulatedAttention().scores(block, observation, spec)
        is_image = jnp.zeros(block.pos.shape, bool)
        for first, last in self.images:
            is_image |= (block.pos >= first) & (block.pos <= last)
        per_query_head = rank_below_others(attention.per_query_head, is_image[:, :, None])
        return kv.head_scores(per_query_head, rank_below_others(attention.per_kv_head, is_image), block)


@dataclasses.dataclass(frozen=True)
class NearestMerge:
    """Merges keys and values of evicted tokens into the kept token with the nearest key.

    Args:
      rule: for a kept x and N evicted x_e: "average", (x + sum of x_e) / (1 + N); "pivot", each x_e is first averaged
        with x; "weighted", each x_e is first multiplied by its cosine u_e, so that keys and values shrink;
        "normalised", weights w_e = (u_e + 1) / 2, over 1 + sum of w_e (KVCache-Factory's weighted).
    """

    rule: Rule = "pivot"

    __post_init__ = kv.check_fields

    def __call__(self, block: kv.KVBlock, kept: kv.KVBlock, choice: kv.SelectedSlots, spec: kv.LayerSpec) -> kv.KVBlock:
        block, kept = block.clean(), kept.clean()
        lost, n = kv.match_evicted(block, kept, choice), kept.k.shape[2]
        num_merged = kv.scatter_add(jnp.ones(lost.slot.shape), lost.slot, n)
        own = 1.0 + num_merged / 2 if self.rule == "pivot" else jnp.ones(num_merged.shape)
        if self.rule == "weighted":
            weight = lost.cosine
        elif self.rule == "normalised":
            weight = jnp.maximum((lost.cosine + 1.0) / 2, 1e-6)
        else:
            weight = jnp.full(lost.cosine.shape, 0.5 if self.rule == "pivot" else 1.0)
        total = 1.0 + (kv.scatter_add(weight, lost.slot, n) if self.rule == "normalised" else num_merged)
        k, v = (
            kv.fold_into_kept(x, own[..., None], y, weight, lost.slot, total)
            for x, y in ((kept.k, block.k), (kept.v, block.v))
        )
        return dataclasses.replace(kept, k=k, v=v)


def _parse_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parses ranges of positions as "5-580/600-1175"; raises KvjaxError for anything else."""
    ranges = []
    for part in filter(None, text.split("/")):
        first, dash, last = part.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise kv.KvjaxError(
                f"images of LOOK-M must be ranges of positions, first to last, got {part!r}; write '5-580' for one, "
                "'5-580/600-1175' for two, or leave it empty"
            )
        ranges.append((int(first), int(last)))
    return tuple(ranges)


@kv.register_method(example="lookm:budget=512,recent=256", family="merging")
def lookm(
    budget: kv.TokenBudget = 1024, recent: int = 512, sinks: int = 4, rule: Rule = "pivot", images: str = ""
) -> kv.Method:
    """Keeps heavy hitters and recent tokens, text before images, and merges evicted tokens into the nearest kept ones.

    Formula:
      e = argmax cos(k_e, k_kept); pivot: x <- (x + sum of (x_e + x) / 2) / (1 + N), for keys and values

    Differs:
      The public code keeps all text in addition to its budget, here text has the first claim on it. Its 'average' and
      'weighted' leave out evicted tokens of low similarity (the latter is then `d2o`, and the former confuses its
      tokens); here, as in the paper, all are merged. Merging happens once, when the prompt ends.

    Args:
      budget: as in `make_selection` (the public code: a fifth of the prompt).
      recent: as in `make_selection` (the public code: a tenth of the prompt).
      sinks: as in `make_selection` (the public code: 4 where nothing tells images from text).
      rule: "pivot", "average" or "weighted" of the paper, or "normalised" of KVCache-Factory; see `NearestMerge`.
      images: positions that leave first, in every sequence, as in "5-580/600-1175". For a text model it can name a part
        of the prompt that matters less, such as a pasted table. If empty, no token has a prior, and the selection is
        H2O's.

    Reference:
      LOOK-M, Wan et al. 2024, arXiv 2406.18139; its public code, SUSTechBruce/LOOK-M
    """
    return kv.Method(
        select=kv.make_selection(TextPrior(_parse_ranges(images)), budget, sinks, recent),
        merge=NearestMerge(rule),
    )
