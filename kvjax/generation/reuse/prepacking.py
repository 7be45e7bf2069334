"""Prompts of unlike length, several in one row, so that little of a batch is padding (Prepacking).

Zhao et al. 2024, arXiv 2404.09529, section 3: prompts are packed into bins, in each of which positions start again at 0
and no prompt sees another; after the prefill each prompt gets its own keys and values back. Exact. The public code
leaves each prompt's last token out of its bin and runs it afterwards, for its logits; here it is run with the others.
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
from kvjax.engine.forward import Target, embed_at, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerPrompt, prompt_of_inputs
from kvjax.engine.modes import ForwardMode, LayerCall, LayerInputs, attend_all
from kvjax.errors import KvjaxError
from kvjax.generation.calls import room as capacity_for
from kvjax.generation.compiled import compiled_for
from kvjax.generation.context import ROOM, Context
from kvjax.generation.inputs import Prompts, round_up, token_ids
from kvjax.generation.reuse.full_kv import AllQueries, FullKV
from kvjax.generation.timing import Timer
from kvjax.models.model import Model
from kvjax.utils import arguments


def read_packed(
    model: Model,
    documents: Prompts,
    method: str | KVMethod,
    *,
    room: int = ROOM,
    capacity: int | None = None,
    width: int | None = None,
) -> Context:
    """`kvjax.read`, with short documents packed into rows of as many tokens as the longest has, or of `width`.

    Keys, values and queries of all layers are held at once, until the method has made its cache of them.
    """
    ids = token_ids(model, documents)
    if capacity is None:
        capacity = max(map(len, ids)) + arguments.integer("room", room, 0)
    exact = pack_exactly(model, ids, width)
    return exact.under(method, capacity_for(ids, capacity, 0))


def pack_exactly(model: Model, documents: Prompts, width: int | None = None) -> FullKV:
    """`kvjax.reuse.read_exactly`, with short documents packed into rows."""
    if model.mesh is not None:
        raise KvjaxError("documents are packed on one device; on a mesh use kvjax.read")
    ids = token_ids(model, documents)
    longest = max(map(len, ids))
    if width is not None and arguments.integer("width", width) < longest:
        raise KvjaxError(f"the longest document has {longest} tokens and width is {width}; use width={longest} or more")
    width = round_up(longest if width is None else width)
    places = pack_rows([len(row) for row in ids], width)
    tokens, pos, prompt_ids = _fill_rows(ids, places, width)
    rows, starts = (jnp.asarray(x, jnp.int32) for x in zip(*places, strict=True))
    lengths = jnp.asarray([len(row) for row in ids], jnp.int32)
    mode = PackedPrefill(pos, prompt_ids, rows, starts, lengths, round_up(longest))
    plan, target = (AllQueries(),) * model.config.layers, Target(model.config)
    compiled = compiled_for(model, tokens.size, in_place=False, logits_of=len(ids))
    with Timer().timed():
        hidden, angles = _embed_at(outer_params(model.params), tokens, pos, target=target)
        calls, nothing = layer_calls(plan, model.config), (None,) * len(plan)
        hidden, prompts = run_layers(model.params, hidden, angles, mode, calls, nothing, target, compiled)
        hidden = _take(hidden, rows, starts + lengths - 1)
        last = jax.block_until_ready(compiled.unembed(outer_params(model.params), hidden, target=target))
    return FullKV(model, prompts, lengths, last, ids)


@dataclasses.dataclass(frozen=True)
class OwnPrompt:
    """The pattern under which prompts of one row do not see each other; a position counts its prompt's place too."""

    width: int

    def is_visible(self, s: Array, t: Array) -> Array:
        """Whether both are of one prompt."""
        return s // self.width == t // self.width


@pytree
class PackedPrefill(ForwardMode):
    """Runs rows of several short prompts, and gives each prompt its own keys, values and queries (Prepacking)."""

    pos: Array  # i32[R T], of each token in its prompt, -1 for padding
    prompt_ids: Array  # i32[R T], the prompt of each token
    rows: Array  # i32[B], where each prompt lies
    starts: Array  # i32[B]
    lengths: Array  # i32[B]
    longest: int = dataclasses.field(metadata={"static": True})

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, LayerPrompt, Any]:
        width = self.pos.shape[1]
        # A position that counts the prompt too: differences within a prompt stay, and the pattern tells prompts apart.
        row_pos = jnp.where(self.pos >= 0, self.prompt_ids * width + self.pos, -1)
        block = KVBlock(inputs.k, inputs.v, row_pos[:, None])
        out = attend_all(inputs.q, row_pos, block, call.window, OwnPrompt(width))
        at = jnp.minimum(self.starts[:, None] + jnp.arange(self.longest, dtype=jnp.int32)[None], width - 1)

        def unpack(x: Array, axis: int) -> Array:
            """[R .. T ..] -> [B .. S ..]"""
            return jnp.moveaxis(jnp.moveaxis(x, axis, 1)[self.rows[:, None], at], 1, axis)

        own = inputs._replace(q=unpack(inputs.q, 3), k=unpack(inputs.k, 2), v=unpack(inputs.v, 2))
        return out, prompt_of_inputs(call.layer, own, self.lengths), cross_layer


_embed_at = jax.jit(embed_at, static_argnames="target")


@jax.jit
def _take(hidden: Array, row: Array, at: Array) -> Array:
    return hidden[row, at]


def pack_rows(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Prompts of these lengths in as few rows of `width` tokens as first-fit-decreasing finds: (row, start) of each."""
    used: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (row for row, n in enumerate(used) if n + lengths[number] <= width)
        row = next(fits, len(used))
        if row == len(used):
            used.append(0)
        places[number] = row, used[row]
        used[row] += lengths[number]
    return places


def _fill_rows(ids: Sequence[Sequence[int]], places: Sequence[tuple[int, int]], width: int) -> tuple[Array, ...]:
    """Tokens, their positions in their prompts (-1 for none), and the numbers of these prompts, each i32[P T]."""
    shape = (1 + max(row for row, _ in places), width)
    tokens, pos, prompt = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for number, (one, (row, start)) in enumerate(zip(ids, places, strict=True)):
        at = slice(start, start + len(one))
        tokens[row, at], pos[row, at], prompt[row, at] = one, np.arange(len(one)), number
    return jnp.asarray(tokens), jnp.asarray(pos), jnp.asarray(prompt)
