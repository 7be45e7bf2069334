"""Texts that are made of known chunks, and of new tokens behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.engine.forward import Target
from kvjax.engine.layer_prompt import LayerPrompt
from kvjax.errors import KvjaxError
from kvjax.generation.compiled import compiled_for
from kvjax.generation.inputs import Prompts, pad, token_ids
from kvjax.generation.reuse.full_kv import FullKV
from kvjax.generation.reuse.partial_recompute import Choice, Source, partial_prefill
from kvjax.generation.timing import Timer


class Span(NamedTuple):
    """Where a chunk lies in what was read exactly."""

    row: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """The tokens of each text, and where their keys and values are known from."""

    ids: list[list[int]]
    source: list[list[tuple[int, int]]]  # of each token: (row, slot), (0, -1) if it is new

    @property
    def reused(self) -> np.ndarray:
        """i64[B]: known tokens of each text."""
        return np.array([sum(slot >= 0 for _, slot in row) for row in self.source])


def lay(read: FullKV, spans: Sequence[Span], order: Sequence[Sequence[int]], questions: Prompts) -> ChunkLayout:
    """Texts of the chunks of these numbers, in this order, and a question behind each."""
    asked = token_ids(read.model, questions)
    if read.ids is None:
        raise KvjaxError("the tokens of these chunks are not known; read them with kvjax.reuse.read_exactly")
    if len(order) != len(asked):
        raise KvjaxError(f"{len(order)} orders of chunks but {len(asked)} questions; give one question per text")
    for number in (number for row in order for number in row):
        if not 0 <= number < len(spans):
            raise KvjaxError(f"there are chunks 0..{len(spans) - 1}, got {number}")
    ids, source = [], []
    for row, question in zip(order, asked, strict=True):
        places = [(spans[c].row, slot) for c in row for slot in range(spans[c].start, spans[c].stop)]
        ids.append([read.ids[r][s] for r, s in places] + list(question))
        source.append(places + [(0, -1)] * len(question))
    return ChunkLayout(ids, source)


def again(
    read: FullKV, laid: ChunkLayout, count: np.ndarray, worth: np.ndarray | None, layer: int
) -> tuple[FullKV, Array]:
    """Runs what is new, and count i64[B] known tokens of highest worth f64[B T], or of the greatest deviation.

    Returns (the texts' keys and values, which tokens were run i32[B n], -1 unused).
    """
    model = read.model
    if model.mesh is not None:
        raise KvjaxError("chunks are put together on one device; load the model without a mesh")
    tokens, lengths = pad(laid.ids)
    rows, slots = (pad([[place[i] for place in row] for row in laid.source], tokens.shape[1])[0] for i in (0, 1))
    known = [LayerPrompt(p.k, p.v, p.q[:, :, :, :0]) for p in read.prompts]
    source = Source(jnp.asarray(rows), jnp.asarray(slots))
    choice = Choice(jnp.asarray(count, jnp.int32), None if worth is None else jnp.asarray(worth, jnp.float32))
    lengths, most = jnp.asarray(lengths), int((count + lengths - laid.reused).max())
    compiled = compiled_for(model, tokens.size, in_place=False, logits_of=len(tokens))
    arguments = model.params, jnp.asarray(tokens), lengths, known, source, choice, Target(model.config)
    with Timer().timed():
        last, prompts, at = jax.block_until_ready(partial_prefill(*arguments, layer, most, compiled))
    return FullKV(model, prompts, lengths, last), at
