"""Cache-Craft: chunks of earlier prompts are reused, and recomputed as far as their old context mattered.

Agarwal et al. 2025, arXiv 2502.15734, section 3. Unverified: the authors published no code; the formulas are the
paper's as a public reimplementation has them. The store of chunks and its eviction are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.core.attention import Rule, scores, softmax
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import Prompts, round_up
from kvjax.models.decoder import sinks_of
from kvjax.reuse.chunk_layout import Span, chunk_slots, layout_chunks, recompute
from kvjax.reuse.full_kv import FullKV
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

QUERY_BLOCK_TOKENS = 64
"""Queries whose attention to all keys is in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a prompt, and its attention to the chunks that preceded it; attention is a mean of heads and layers."""

    span: Span
    tokens: tuple[int, ...]
    preceding: tuple[tuple[int, ...], ...]  # tokens of the chunks before it
    inter: tuple[float, ...]  # attention to each preceding chunk, summed over its own tokens
    impact: float  # cache context impact, from 0.5, where it depends on nothing before it, to 1
    attention_to_context: np.ndarray  # f64[tokens], attention of each token to all preceding chunks


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of prompts that were read exactly."""

    read: FullKV
    chunks: tuple[Chunk, ...]  # in the order of prompts, and within a prompt

    def reuse(self, order: Sequence[Sequence[int]], questions: Prompts, *, alpha: float = 1.0) -> FullKV:
        """Assembles texts from chunks, nearly as if each text had been read whole.

        In each chunk the ceil(tokens * alpha * impact * (1 - overlap)) tokens that attend most to its old context are
        run again, in all layers. A chunk after the same chunks as before is not run again. Attention is masked by true
        positions.

        Args:
          order: for each text the indices of its chunks.
          questions: the text after the chunks, one per text.
          alpha: higher for more tokens and more fidelity (the paper: about 1 to 3).

        Returns:
          The texts' keys and values; `.compress(method, capacity)` makes a context of them.
        """
        arguments.number("alpha", alpha, 0, math.inf, "; 1 is the measured impact")
        layout = layout_chunks(self.read, [chunk.span for chunk in self.chunks], order, questions)
        importance = np.zeros((len(order), round_up(max(map(len, layout.ids)))))
        for row, indices in zip(importance, order, strict=True):
            mask = self._recompute_mask(indices, alpha)
            row[: len(mask)] = mask
        return recompute(self.read, layout, importance.sum(1).astype(np.int64), importance, 0)[0]

    def _recompute_mask(self, indices: Sequence[int], alpha: float) -> np.ndarray:
        """Marks the tokens of these chunks that are run again by 1: f64[tokens]."""
        masks: list[float] = []
        for i, index in enumerate(indices):
            chunk = self.chunks[index]
            new_context = [self.chunks[j].tokens for j in indices[:i]]
            fraction = alpha * chunk.impact * (1 - overlap(chunk, new_context))
            by_attention = np.argsort(-chunk.attention_to_context, kind="stable")
            is_run = np.isin(np.arange(len(chunk.tokens)), by_attention[: math.ceil(fraction * len(chunk.tokens))])
            span = chunk.span
            masks += [
                float(slot >= span.start and is_run[slot - span.start])
                for slot in chunk_slots(self.read, span, is_first=i == 0)
            ]
        return np.array(masks)


def overlap(chunk: Chunk, new_context: Sequence[tuple[int, ...]]) -> float:
    """Prefix overlap in [0, 1]: the fraction of the chunk's original context that precedes it again.

    It is the fraction of its attention to earlier chunks that went to chunks which precede it again, times one minus
    the fraction of their pairs that are in another order (Kendall's tau). New chunks among the old ones do not count,
    as in the paper. A chunk that had no context overlaps with nothing.
    """
    if list(chunk.preceding) == list(new_context):  # also where both are empty
        return 1.0
    common = [tokens for tokens in chunk.preceding if tokens in new_context]
    total = sum(chunk.inter)
    if not common or not total:
        return 0.0
    attention = sum(x for tokens, x in zip(chunk.preceding, chunk.inter, strict=True) if tokens in new_context) / total
    pairs = list(itertools.combinations([list(new_context).index(tokens) for tokens in common], 2))
    swapped = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    return attention * (1 - swapped)


@checks_keywords
def cut(read: FullKV, lengths: Sequence[Sequence[int]]) -> Chunks:
    """Cuts prompts that were read exactly into chunks.

    Args:
      read: from `kvjax.reuse.read_exactly`.
      lengths: for each prompt the tokens of its chunks, from its start on. The text after the last chunk, such as a
        question, is no chunk.
    """
    if read.ids is None or not read.prompts[0].q.shape[3]:
        raise KvjaxError("chunks are cut from prompts with their tokens and queries; use kvjax.reuse.read_exactly")
    read.check_weights()
    fit = [min(sizes, default=1) >= 1 and sum(sizes) <= len(ids) for sizes, ids in zip(lengths, read.ids, strict=False)]
    if len(lengths) != len(read.ids) or not all(fit):
        raise KvjaxError(
            f"prompts of {list(map(len, read.ids))} tokens have no chunks of {lengths!r:.80} tokens; give a list of "
            "lengths for each prompt, 1 or more each"
        )
    attention, chunks = _attention_to_chunks(read, lengths), []
    for row, sizes in enumerate(lengths):
        ends = np.cumsum([0, *sizes])
        tokens = [tuple(read.ids[row][a:b]) for a, b in itertools.pairwise(ends)]
        for i, (start, stop) in enumerate(itertools.pairwise(ends.tolist())):
            own = attention[row, start:stop]
            inter, intra = own[:, :i].sum(0), own[:, i].sum()
            # Cache context impact: attention per pair of tokens, outside the chunk against inside it.
            outside = (inter / (sizes[i] * np.array(sizes[:i], np.int64))).sum()
            inside = max(intra / sizes[i] ** 2, 1e-30)  # a chunk attends to itself in every layer: 0 is rounding
            impact = 1 / (1 + math.exp(-outside / inside))
            span = Span(row, start, stop)
            chunks.append(Chunk(span, tokens[i], tuple(tokens[:i]), tuple(inter.tolist()), impact, own[:, :i].sum(1)))
    return Chunks(read, tuple(chunks))


def _attention_to_chunks(read: FullKV, lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """Computes the attention of each token to each chunk of its prompt, mean of heads and layers: f64[B T C]."""
    num_tokens = read.prompts[0].k.shape[2]
    chunk_of_token = np.full((len(lengths), num_tokens), -1)
    for row, sizes in zip(chunk_of_token, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    member = chunk_of_token[..., None] == np.arange(max(1, *map(len, lengths)))[None, None]
    config, pos = read.model.config, jnp.arange(num_tokens, dtype=jnp.int32)[None]
    pos = jnp.where(pos < read.lengths[:, None], pos, -1)
    layers = []
    for i, p in enumerate(read.prompts):
        rule, sinks = config.kind(i).attention.rule, sinks_of(read.model.auto_params[f"layer_{i}"])
        layers.append(_layer_attention_to_chunks(p.q, p.k, pos, jnp.asarray(member, jnp.float32), sinks, rule))
    return np.mean([to_numpy(x).astype(np.float64) for x in layers], 0)


@jax.jit(static_argnums=5)
def _layer_attention_to_chunks(q: Array, k: Array, pos: Array, member: Array, sinks: Array | None, rule: Rule) -> Array:
    """Sums the attention weights of queries [B K G T H] over keys [B K T H] by chunk, member f32[B T C]: f32[B T C]."""

    def attend(q: Array, q_pos: Array) -> Array:
        p = softmax(rule.logits(scores(q, k), pos[:, None], q_pos), sinks)
        return jnp.einsum("bkgts,bsc->bkgtc", p, member)

    return map_query_blocks(attend, q, pos, QUERY_BLOCK_TOKENS).mean((1, 2))
