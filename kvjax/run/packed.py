"""Prompts of unlike length, several in one row, so that little of a batch is padding (Prepacking).

Zhao et al. 2024, arXiv 2404.09529, section 3: prompts are packed into bins, in each of which positions start again at 0
and no prompt sees another; after the prefill each prompt gets its own keys and values back. Exact. The public code
leaves each prompt's last token out of its bin and runs it afterwards, for its logits; here it is run with the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.cache.contract import KVMethod
from kvjax.cache.read.reader import by_query_blocks
from kvjax.core import arguments
from kvjax.core.attention import attend_dense, merge
from kvjax.core.program import Program
from kvjax.core.types import Array, Block, KvjaxError, Partial
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.run import forward
from kvjax.run.calls import room as capacity_for
from kvjax.run.context import ROOM, Context
from kvjax.run.exact import Exact
from kvjax.run.forward import Setting
from kvjax.run.prompts import Prompts, pad, round_up, token_ids
from kvjax.run.reading import Prompt


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


def pack_exactly(model: Model, documents: Prompts, width: int | None = None) -> Exact:
    """`kvjax.reuse.read_exactly`, with short documents packed into rows."""
    if model.mesh is not None:
        raise KvjaxError("documents are packed on one device; on a mesh use kvjax.read")
    ids = token_ids(model, documents)
    longest = max(map(len, ids))
    if width is not None and arguments.integer("width", width) < longest:
        raise KvjaxError(f"the longest document has {longest} tokens and width is {width}; use width={longest} or more")
    width = round_up(longest if width is None else width)
    places = packed([len(row) for row in ids], width)
    last, prompts = PACKED(
        params=model.params,
        **_rows(ids, places, width),
        place=Place(*(jnp.asarray(x, jnp.int32) for x in zip(*places, strict=True))),
        lengths=jnp.asarray([len(row) for row in ids], jnp.int32),
        setting=Setting(model.config),
        longest=round_up(longest),
    )
    _, lengths = pad(ids)
    return Exact(model, prompts, jnp.asarray(lengths), last, ids)


class Place(NamedTuple):
    """Where prompts lie: which row, and from which place in it on."""

    row: Array
    start: Array


@dataclasses.dataclass(frozen=True)
class OwnPrompt:
    """The pattern under which prompts of one row do not see each other; a position counts its prompt's place too."""

    width: int

    def sees(self, s: Array, t: Array) -> Array:
        """Whether both are of one prompt."""
        return s // self.width == t // self.width


def packed(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
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


def _rows(ids: Sequence[Sequence[int]], places: Sequence[tuple[int, int]], width: int) -> dict[str, Array]:
    """Tokens, their positions in their prompts (-1 for none), and the numbers of these prompts, each i32[P T]."""
    shape = (1 + max(row for row, _ in places), width)
    tokens, pos, prompt = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for number, (one, (row, start)) in enumerate(zip(ids, places, strict=True)):
        at = slice(start, start + len(one))
        tokens[row, at], pos[row, at], prompt[row, at] = one, np.arange(len(one)), number
    return {"tokens": jnp.asarray(tokens), "pos": jnp.asarray(pos), "prompt": jnp.asarray(prompt)}


def _packed(
    params: object,
    tokens: Array,
    pos: Array,
    prompt: Array,
    place: Place,
    lengths: Array,
    setting: Setting,
    longest: int,
) -> tuple[Array, tuple[Prompt, ...]]:
    """Rows of several prompts -> (logits of each prompt's last token f32[B V], the prompts' keys, values, queries)."""
    width = tokens.shape[1]
    counted = jnp.where(pos >= 0, prompt * width + pos, -1)
    slot = place.start[:, None] + jnp.arange(longest, dtype=jnp.int32)[None]
    slot = jnp.minimum(slot, width - 1)

    def own(x: Array) -> Array:
        """[P K T H] -> [B K S H]."""
        return jnp.moveaxis(x[place.row[:, None], :, slot], 1, 2)

    def attend(i: int, q: Array, k: Array, v: Array, x: Array) -> tuple[Array, Prompt]:
        block = Block(k, v, counted[:, None])

        def in_prompt(q: Array, q_pos: Array) -> Partial:
            return attend_dense(q, block, q_pos, setting.config.window(i), OwnPrompt(width))

        out = merge([by_query_blocks(in_prompt, q, counted, 128)])
        B, K, G, T, H = q.shape
        queries = own(q.reshape(B, K * G, T, H)).reshape(-1, K, G, longest, H)
        return out, Prompt(own(k), own(v), queries)

    hidden, prompts = forward.apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)
    return forward.unembed(params, hidden[place.row, place.start + lengths - 1], setting), prompts


PACKED = Program(_packed, static=("setting", "longest"))
