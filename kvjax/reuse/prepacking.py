"""Prepacking: several short prompts in one sequence, so that little of a batch is padding.

Zhao et al. 2024, arXiv 2404.09529, section 3: prompts are packed into sequences of one width. Positions start at 0 in
each prompt, and no prompt attends to another; after the prefill each prompt gets its own keys and values back. Exact.
The public code leaves out each prompt's last token and runs it afterwards, for its logits; here it is run with the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import KVMethod
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.engine.forward import embed_at, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerCall, LayerInputs, LayerPrompt, prompt_of_inputs
from kvjax.engine.modes import ForwardMode, attend_all
from kvjax.errors import KvjaxError
from kvjax.generation.context import DEFAULT_HEADROOM_TOKENS, Context
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import Prompts, round_up, token_ids
from kvjax.generation.model_calls import capacity_for, model_for
from kvjax.generation.programs import Timer, target_for
from kvjax.models.model import Model
from kvjax.reuse.full_kv import AllQueries, FullKV
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def read_packed(
    model: Model,
    documents: Prompts,
    method: str | KVMethod,
    *,
    headroom: int | None = None,
    capacity: int | None = None,
    width: int | None = None,
) -> Context:
    """Reads documents as `kvjax.read` does, with short ones packed into one sequence.

    Keys, values and queries of all layers are in memory at once until they are compressed.

    Args:
      model: from `kvjax.load`, on one device.
      documents: texts, or lists of ids.
      method: a method or its string.
      headroom: tokens per document that may follow; 512 by default.
      capacity: tokens that a document may grow to, in place of `headroom`.
      width: tokens of a packed sequence; by default those of the longest document.
    """
    ids = token_ids(model, documents, begins=True)
    longest = max(map(len, ids))
    if capacity is None and headroom is not None:
        capacity = longest + arguments.integer("headroom", headroom, 0)
    rounded = capacity_for(ids, longest + DEFAULT_HEADROOM_TOKENS if capacity is None else capacity, 0)
    return pack_exactly(model_for(model, ids, capacity or 0), ids, width).compress(method, rounded)


@checks_keywords
def pack_exactly(model: Model, documents: Prompts, width: int | None = None) -> FullKV:
    """Runs documents as `kvjax.reuse.read_exactly` does, with short ones packed into one sequence of `width` tokens."""
    if model.mesh is not None:
        raise KvjaxError("documents are packed on one device; on a mesh use kvjax.read")
    ids = token_ids(model, documents, begins=True)
    model, longest = model_for(model, ids, 0), max(map(len, ids))
    if width is not None:
        arguments.integer("width", width, longest, remedy=f"; the longest document has {longest} tokens")
    width = round_up(longest if width is None else width)
    places = pack_rows([len(row) for row in ids], width)
    shape = (1 + max(row for row, _ in places), width)
    tokens, pos, prompt_ids = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for i, (prompt, (row, start)) in enumerate(zip(ids, places, strict=True)):
        at = slice(start, start + len(prompt))
        tokens[row, at], pos[row, at], prompt_ids[row, at] = prompt, np.arange(len(prompt)), i
    tokens, pos, prompt_ids = (jnp.asarray(x) for x in (tokens, pos, prompt_ids))
    rows, starts = (jnp.asarray(x, jnp.int32) for x in zip(*places, strict=True))
    lengths = jnp.asarray([len(row) for row in ids], jnp.int32)
    mode = PackedPrefill(pos, prompt_ids, rows, starts, lengths, round_up(longest))
    plan = (AllQueries(),) * model.config.layers
    target = target_for(model, tokens.size, in_place=False, num_logits=len(ids))
    with Timer().timed():
        hidden, angles = embed_at(outer_params(model.auto_params), tokens, pos, target=target)
        calls, no_states = layer_calls(plan, model.config), (None,) * len(plan)
        hidden, prompts = run_layers(model.auto_params, hidden, angles, mode, calls, no_states, target=target)
        hidden = hidden[rows, starts + lengths - 1]  # each prompt's last token
        last = jax.block_until_ready(target.unembed(outer_params(model.auto_params), hidden, target=target))
    check_logits(model, last, ids)
    return FullKV(model, prompts, lengths, last, ids)


@dataclasses.dataclass(frozen=True)
class OwnPrompt:
    """An attention pattern in which a token attends to its own prompt only, see `PackedPrefill`."""

    width: int

    def is_visible(self, s: Array, t: Array) -> Array:
        """Whether two positions belong to one prompt."""
        return s // self.width == t // self.width


@pytree
class PackedPrefill(ForwardMode):
    """Runs sequences of several short prompts, and gives each prompt its own keys, values and queries (Prepacking)."""

    pos: Array  # i32[R T], of each token in its prompt, -1 for padding
    prompt_ids: Array  # i32[R T], the prompt of each token
    rows: Array  # i32[B], the packed sequence of each prompt
    starts: Array  # i32[B], its first token there
    lengths: Array  # i32[B]
    longest: int = dataclasses.field(metadata={"static": True})

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, LayerPrompt, Any]:
        width = self.pos.shape[1]
        # Positions are offset by the prompt's index: their differences within a prompt stay, so that windows hold, and
        # `OwnPrompt` can tell prompts apart.
        row_pos = jnp.where(self.pos >= 0, self.prompt_ids * width + self.pos, -1)
        block = KVBlock(inputs.k, inputs.v, row_pos[:, None])
        out = attend_all(inputs.q, row_pos, block, call.rule, OwnPrompt(width), inputs.outside)
        at = jnp.minimum(self.starts[:, None] + jnp.arange(self.longest, dtype=jnp.int32)[None], width - 1)

        def unpack(x: Array, axis: int) -> Array:
            """[R .. T ..] -> [B .. S ..]"""
            return jnp.moveaxis(jnp.moveaxis(x, axis, 1)[self.rows[:, None], at], 1, axis)

        own = inputs._replace(q=unpack(inputs.q, 3), k=unpack(inputs.k, 2), v=unpack(inputs.v, 2))
        return out, prompt_of_inputs(call.layer, own, self.lengths), cross_layer


def pack_rows(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Packs prompts of these lengths into rows of `width` tokens by first-fit-decreasing: (row, start) of each."""
    used: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, n in enumerate(used) if n + lengths[i] <= width), len(used))
        if row == len(used):
            used.append(0)
        places[i] = row, used[row]
        used[row] += lengths[i]
    return places
