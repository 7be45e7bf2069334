"""Texts that are assembled from chunks with known keys and values, each followed by new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.engine.layer_prompt import LayerPrompt
from kvjax.errors import KvjaxError
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import Prompts, pad, token_ids
from kvjax.generation.programs import Timer, target_for
from kvjax.reuse.full_kv import FullKV
from kvjax.reuse.partial_recompute import KnownTokens, RecomputeChoice, partial_prefill


class Span(NamedTuple):
    """The place of a chunk in prompts with known keys and values."""

    row: int  # the prompt's index in the batch
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """The tokens of each text, and where their keys and values are known from."""

    ids: list[list[int]]
    source: list[list[tuple[int, int]]]  # of each token: (row, slot) in the known prompts, (0, -1) if it is new

    @property
    def num_known(self) -> np.ndarray:
        """i64[B]: tokens of each text whose keys and values are known."""
        return np.array([sum(slot >= 0 for _, slot in row) for row in self.source])


def layout_chunks(
    known: FullKV, spans: Sequence[Span], order: Sequence[Sequence[int]], questions: Prompts
) -> ChunkLayout:
    """Lays out texts of the chunks with these indices, in this order, each followed by a question.

    The special tokens that stand before a text, as bos, are those of the first chunk's prompt, and stand there alone.
    """
    question_ids = token_ids(known.model, questions, begins=False)
    if known.ids is None:
        raise KvjaxError("the tokens of these chunks are not known; read them with kvjax.reuse.read_exactly")
    unknown = [index for row in order for index in row if not 0 <= index < len(spans)]
    if unknown or len(order) != len(question_ids):
        raise KvjaxError(
            f"{len(order)} orders of chunks but {len(question_ids)} questions; give one question per text"
            if not unknown
            else f"there are chunks 0..{len(spans) - 1}, got {unknown[0]}"
        )
    ids, source = [], []
    for row, question in zip(order, question_ids, strict=True):
        chunks = [spans[index] for index in row]
        places = [(chunk.row, slot) for i, chunk in enumerate(chunks) for slot in chunk_slots(known, chunk, not i)]
        ids.append([known.ids[prompt][slot] for prompt, slot in places] + list(question))
        source.append(places + [(0, -1)] * len(question))
    return ChunkLayout(ids, source)


def chunk_slots(known: FullKV, chunk: Span, is_first: bool) -> list[int]:
    """Lists the slots of a chunk; those of the special tokens before its prompt belong to a first chunk alone."""
    assert known.ids is not None
    tokenizer = known.model.tokenizer
    opening = [] if tokenizer is None else tokenizer.opening_ids
    num_opening = len(opening) if list(known.ids[chunk.row][: len(opening)]) == opening else 0
    return list(range(num_opening if is_first else 0)) + list(range(max(chunk.start, num_opening), chunk.stop))


def recompute(
    known: FullKV, layout: ChunkLayout, num_recomputed: np.ndarray, importance: np.ndarray | None, layer: int
) -> tuple[FullKV, Array]:
    """Runs the new tokens of each text, and some of the known ones again.

    Args:
      known: prompts with known keys and values.
      layout: texts that are made of them.
      num_recomputed: i64[B], known tokens of each text that are run again.
      importance: f64[B T], the known tokens of highest importance are run again; None: those whose values deviate most.
      layer: the first layer from which on only chosen tokens are run.

    Returns:
      The texts' keys and values, and the tokens that were run, i32[B n], -1 unused.
    """
    known.check_weights()
    model = known.model
    if model.mesh is not None:
        raise KvjaxError("chunks are put together on one device; load the model without a mesh")
    tokens, lengths = pad(layout.ids)
    rows, slots = (pad([[place[i] for place in row] for row in layout.source], tokens.shape[1])[0] for i in (0, 1))
    prompts = [LayerPrompt(p.k, p.v, p.q[:, :, :, :0]) for p in known.prompts]
    choice = RecomputeChoice(
        jnp.asarray(num_recomputed, jnp.int32), None if importance is None else jnp.asarray(importance, jnp.float32)
    )
    lengths, max_run = jnp.asarray(lengths), int((num_recomputed + lengths - layout.num_known).max())
    target = target_for(model, tokens.size, in_place=False, num_logits=len(tokens))
    with Timer().timed():
        outputs = partial_prefill(
            model.auto_params,
            jnp.asarray(tokens),
            lengths,
            prompts,
            KnownTokens(jnp.asarray(rows), jnp.asarray(slots)),
            choice,
            target=target,
            layer=layer,
            max_run=max_run,
        )
        last, prompts, at = jax.block_until_ready(outputs)
    check_logits(model, last, layout.ids, what="text")
    return FullKV(model, prompts, lengths, last), at
