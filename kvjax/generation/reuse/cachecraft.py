"""Cache-Craft: chunks are taken from prompts that were read before, and mended as far as their old context mattered.

Agarwal et al. 2025, arXiv 2502.15734, section 3. Unverified: the authors published no code; the formulas are the
paper's as a public reimplementation of it has them. Where to store the chunks, and what to evict, is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.readers.base import map_query_blocks
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import Prompts
from kvjax.generation.reuse.chunk_layout import Span, again, lay
from kvjax.generation.reuse.full_kv import FullKV


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a prompt that was read, and what it took from the chunks before it."""

    span: Span
    tokens: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]  # the chunks before it, by their tokens
    inter: tuple[float, ...]  # the attention that it pays to each of them, over its tokens; mean of heads and layers
    impact: float  # cache context impact, 0.5 where it depends on nothing before it .. 1
    looks_back: np.ndarray  # f64[tokens], the attention that each token pays to all of them


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """What prompts left of their chunks."""

    read: FullKV
    chunks: tuple[Chunk, ...]  # in the order of prompts, and within a prompt

    def reuse(self, order: Sequence[Sequence[int]], questions: Prompts, *, alpha: float = 1.0) -> FullKV:
        """Texts of the chunks of these numbers, with a question behind each, nearly as if each had been read whole.

        Of each chunk the ceil(tokens * alpha * impact * (1 - overlap)) tokens are run again, in all layers, that look
        back most. alpha: higher for more tokens and more fidelity (the paper: about 1 to 3). A chunk behind the chunks
        that it had before is not run again. `.under(method, capacity)` makes a context of what comes out. Attention is
        masked by true positions.
        """
        if alpha < 0:
            raise KvjaxError(f"alpha must be 0 or more, got {alpha}; 1 is the measured impact")
        laid = lay(self.read, [chunk.span for chunk in self.chunks], order, questions)
        marks = [self._marks(row, alpha) for row in order]
        width = -(-max(map(len, laid.ids)) // 64) * 64
        worth = np.zeros((len(order), width))
        for row, mark in zip(worth, marks, strict=True):
            row[: len(mark)] = mark
        return again(self.read, laid, worth.sum(1).astype(np.int64), worth, 0)[0]

    def _marks(self, numbers: Sequence[int], alpha: float) -> np.ndarray:
        """f64[tokens of these chunks]: 1 for those that are run again."""
        marks = [np.zeros(0)]
        for i, number in enumerate(numbers):
            chunk = self.chunks[number]
            share = alpha * chunk.impact * (1 - overlap(chunk, [self.chunks[n].tokens for n in numbers[:i]]))
            run = np.argsort(-chunk.looks_back, kind="stable")[: math.ceil(share * len(chunk.tokens))]
            marks.append(np.isin(np.arange(len(chunk.tokens)), run).astype(float))
        return np.concatenate(marks)


def overlap(chunk: Chunk, now: Sequence[tuple[int, ...]]) -> float:
    """How much of what a chunk took from before is before it now, 0..1.

    The share of its attention to earlier chunks that goes to those which are there again, times one minus the share of
    their pairs that have changed places (Kendall's tau). New chunks among the old ones count for nothing, as in the
    paper. A chunk that had nothing before it overlaps with nothing.
    """
    if list(chunk.before) == list(now):  # also of none
        return 1.0
    old = [tokens for tokens in chunk.before if tokens in now]
    total = sum(chunk.inter)
    if not old or not total:
        return 0.0
    found = sum(x for tokens, x in zip(chunk.before, chunk.inter, strict=True) if tokens in now) / total
    places = [list(now).index(tokens) for tokens in old]
    pairs = list(itertools.combinations(places, 2))
    swapped = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    return found * (1 - swapped)


def cut(read: FullKV, lengths: Sequence[Sequence[int]]) -> Chunks:
    """The chunks of prompts that were read exactly: for each prompt the lengths of its chunks, from its start on.

    What is behind the last chunk, such as the question, is no chunk.
    """
    if read.ids is None or not read.prompts[0].q.shape[3]:
        raise KvjaxError("chunks are cut from prompts with their tokens and queries; use kvjax.reuse.read_exactly")
    if len(lengths) != len(read.ids):
        raise KvjaxError(f"{len(lengths)} lists of lengths for {len(read.ids)} prompts; give one per prompt")
    for i, (row, ids) in enumerate(zip(lengths, read.ids, strict=True)):
        if min(row, default=1) < 1 or sum(row) > len(ids):
            raise KvjaxError(
                f"prompt {i} of {len(ids)} tokens has no chunks of {list(row)} tokens; give 1 or more each"
            )
    paid = _paid(read, lengths)
    chunks = []
    for row, sizes in enumerate(lengths):
        ends = np.cumsum([0, *sizes])
        spans = [Span(row, int(a), int(b)) for a, b in itertools.pairwise(ends)]
        chunks += [_chunk(read, spans, i, paid[row]) for i in range(len(spans))]
    return Chunks(read, tuple(chunks))


def _chunk(read: FullKV, spans: Sequence[Span], i: int, paid: np.ndarray) -> Chunk:
    """Chunk i of a prompt, of which paid f64[T C] is the attention that tokens pay to chunks."""
    assert read.ids is not None
    sizes = np.array([span.stop - span.start for span in spans])
    mine = paid[spans[i].start : spans[i].stop]
    inter, intra = mine[:, :i].sum(0), mine[:, i].sum()
    outside = (inter / (sizes[i] * sizes[:i])).sum()
    inside = max(intra / sizes[i] ** 2, 1e-30)  # a window may hide a chunk from itself in no layer, but in rounding
    tokens = [tuple(read.ids[s.row][s.start : s.stop]) for s in spans[: i + 1]]
    impact = 1 / (1 + math.exp(-outside / inside))
    return Chunk(spans[i], tokens[-1], tuple(tokens[:-1]), tuple(inter.tolist()), impact, mine[:, :i].sum(1))


def _paid(read: FullKV, lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """f64[B T C]: the attention that each token pays to each chunk of its prompt, mean of heads and layers."""
    total = read.prompts[0].k.shape[2]
    which = np.full((len(lengths), total), -1)
    for row, sizes in zip(which, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    member = which[..., None] == np.arange(max(1, *map(len, lengths)))[None, None]
    config, pos = read.model.config, jnp.arange(total, dtype=jnp.int32)[None]
    pos = jnp.where(pos < read.lengths[:, None], pos, -1)
    layers = [
        _to_chunks(p.q, p.k, pos, jnp.asarray(member, jnp.float32), config.window(i))
        for i, p in enumerate(read.prompts)
    ]
    return np.mean([np.asarray(x, np.float64) for x in layers], 0)


@jax.jit(static_argnums=4)
def _to_chunks(q: Array, k: Array, pos: Array, member: Array, window: int | None) -> Array:
    """Queries [B K G T H] over keys [B K T H] -> f32[B T C], mean of heads; member f32[B T C]: whose a key is."""

    def attend(q: Array, q_pos: Array) -> Array:
        s = jnp.where(visible(pos[:, None], q_pos, window), scores(q, k), MASKED_LOGIT)
        p, _, l = weights(s)
        return jnp.einsum("bkgts,bsc->bkgtc", p / jnp.maximum(l, 1e-30)[..., None], member)

    return map_query_blocks(attend, q, pos, 64).mean((1, 2))
