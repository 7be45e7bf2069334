"""Keys and values of a context in few levels, entropy-coded in one file (CacheGen).

Liu et al. 2024, arXiv 2310.07240, section 5. Each token of a layer's keys or values is divided by its largest magnitude
over all channels and rounded to levels, fewer in higher layers; these are coded with a distribution for each layer and
channel. In the paper tokens form groups of ten, of which the first, the anchor, is written in 8 bits and the others as
differences to it. Public code (`cachegen_encoder.py`) has no anchors, and they are off here unless `group` is given:
on the shipped model differences take more bits, at no smaller error.

Not as in the paper: its distributions are profiled once per model; these are the file's own, as in public code. Anchors
share one for all channels of a layer's keys or values, since tables per channel would be as large as the anchors. rANS
stands for arithmetic coding. Not here: the streaming of chunks, and the controller that chooses levels or the text.
Unverified: the group of ten and the anchors' 8 bits, for which no code is public.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError
from kvjax.generation.cache_ops import archive
from kvjax.generation.context import Context
from kvjax.generation.inputs import place, round_up
from kvjax.generation.reuse import rans
from kvjax.generation.reuse.full_kv import FullKV, full_kv_from_arrays, full_kv_from_context
from kvjax.models.model import Model

FORMAT = archive.Format("kvjax-cachegen", 2, {"levels": list, "group": int})
ANCHOR_LEVELS = 256
FEW, MANY = 16, 32  # levels of most layers, and of the first ones
MANY_KEYS, MANY_VALUES = 10 / 32, 2 / 32  # the share of the layers that have many, as in public code for 32 layers

Levels = int | Sequence[tuple[int, int]]


def write(path: str | Path, context: FullKV | Context, *, levels: Levels | None = None, group: int = 0) -> Path:
    """Writes keys and values in few levels, whole or not at all, for `read` to make exact prompts of; returns the path.

    context: from `kvjax.reuse.read_exactly`, or read under `full`. levels: of all layers, or (of keys, of values) of
    each, 4 to 256; default as in public code. group: tokens of an anchor and those that are written as differences to
    it, 10 in the paper; 0 for no anchors. Raises KvjaxError for other levels and groups, for another method than
    `full`, and for keys and values that are not finite.
    """
    exact = context if isinstance(context, FullKV) else full_kv_from_context(context)
    if group < 0:
        raise KvjaxError(f"group={group}; give the tokens of a group, or 0 for no anchors")
    lengths, of_sides = np.asarray(exact.lengths), _per_side(levels, exact.model.config.layers)
    tokens = _tokens(lengths, group)
    sides = [_quantised_side(x, n, tokens) for x, n in zip(_sides(exact), of_sides, strict=True)]
    anchors, others = (_stacked(rows) for rows in zip(*sides, strict=True))
    anchor_counts = _counts(anchors.codes, ANCHOR_LEVELS).sum(1)
    counts = _counts(others.codes, max(of_sides))
    of_anchors, of_others = _tables(anchor_counts, counts)
    words, states = rans.encode([(_lanes(anchors.codes), of_anchors), (_lanes(others.codes), of_others)])
    arrays = {
        "last": exact.last,
        "length": lengths,
        "words": words,
        "states": states,
        "anchor counts": _narrow(anchor_counts),
        "counts": _narrow(counts),
        "anchor scales": anchors.scales,
        "scales": others.scales,
    }
    header = {"levels": of_sides, "group": group}
    return archive.write(path, FORMAT, exact.model, header, arrays, deflate=True)


def read(model: Model, path: str | Path) -> FullKV:
    """The prompts of a file, with the keys and values that were written, to put under any method that needs no queries.

    Raises KvjaxError for a damaged file, one of another version and one of another model.
    """
    header, found = archive.read(path, FORMAT, model)
    tokens = _tokens(found["length"], header["group"])
    n_anchors, n_others = (found[name].shape[1] for name in ("anchor scales", "scales"))
    of_anchors, of_others = _tables(found["anchor counts"], found["counts"])
    symbols = rans.decode(found["words"], found["states"], [(n_anchors, of_anchors), (n_others, of_others)])
    sides, C = found["counts"].shape[:2]
    anchor_codes, codes = (x.reshape(len(x), sides, C).swapaxes(0, 1) for x in symbols)
    anchors = map(Rows, anchor_codes, found["anchor scales"])
    others = map(Rows, codes, found["scales"])
    rows = map(_restored_side, anchors, others, header["levels"], [tokens] * sides)
    arrays = [_padded(model, x, tokens) for x in rows]
    lengths = place(model, found["length"], "B")
    exact = full_kv_from_arrays(model, list(zip(arrays[::2], arrays[1::2], strict=True)), lengths)
    return dataclasses.replace(exact, last=place(model, found["last"], "B"))


def default_levels(layers: int) -> list[tuple[int, int]]:
    """(Levels of keys, of values) of each layer as in public code for 32 layers, in the same shares of the depth."""
    keys, values = ([MANY if i < share * layers else FEW for i in range(layers)] for share in (MANY_KEYS, MANY_VALUES))
    return list(zip(keys, values, strict=True))


class Tokens(NamedTuple):
    """The tokens of all rows, one row behind the other."""

    row: np.ndarray  # i64[n]
    pos: np.ndarray  # i64[n]
    anchor: np.ndarray  # bool[n], whether it is the first of its group
    group: np.ndarray  # i64[n], the number of its anchor among all anchors


class Rows(NamedTuple):
    """Tokens in few levels."""

    codes: np.ndarray  # u8[n C]
    scales: np.ndarray  # bf16[n], the largest magnitude of each token


def _tokens(lengths: np.ndarray, group: int) -> Tokens:
    row = np.repeat(np.arange(len(lengths)), lengths)
    pos = np.concatenate([np.arange(n) for n in lengths])
    anchor = pos % group == 0 if group else np.zeros(len(pos), bool)
    return Tokens(row, pos, anchor, np.cumsum(anchor) - 1)


def _per_side(levels: Levels | None, layers: int) -> list[int]:
    """The levels of the first layer's keys, of its values, of the second layer's keys, and so on."""
    if levels is None:
        levels = default_levels(layers)
    elif isinstance(levels, int):
        levels = [(levels, levels)] * layers
    found = [int(n) for pair in levels for n in pair]
    if len(found) != 2 * layers:
        raise KvjaxError(f"{len(found)} numbers of levels for the keys and values of {layers} layers; give two a layer")
    bad = next((n for n in found if not 4 <= n <= 256), None)
    if bad is not None:
        raise KvjaxError(f"keys or values in {bad} levels; give 4 to 256")
    return found


def _sides(exact: FullKV) -> Iterator[Array]:
    """Keys and values [B K S H] of each layer in turn."""
    for prompt in exact.prompts:
        yield prompt.k
        yield prompt.v


def _quantised_side(side: Array, levels: int, tokens: Tokens) -> tuple[Rows, Rows]:
    """(the anchors, the other tokens as differences to them) of keys or values [B K S H] of a layer."""
    x = np.asarray(side)[tokens.row, :, tokens.pos].astype(np.float32)
    x = x.reshape(len(x), -1)
    anchors = _quantised(x[tokens.anchor], ANCHOR_LEVELS)
    differences = (x - _bases(anchors, tokens))[~tokens.anchor]
    return anchors, _quantised(differences, levels)


def _restored_side(anchors: Rows, others: Rows, levels: int, tokens: Tokens) -> np.ndarray:
    """The keys or values f32[n C] of a layer."""
    x = np.array(np.broadcast_to(_bases(anchors, tokens), (len(tokens.row), others.codes.shape[1])))
    x[~tokens.anchor] += _restored(others, levels)
    return x


def _bases(anchors: Rows, tokens: Tokens) -> np.ndarray:
    """What each token is written as a difference to, f32[n C]: its anchor as it is read back; 0 without anchors."""
    if not tokens.anchor.any():
        return np.zeros((1, 1), np.float32)
    return _restored(anchors, ANCHOR_LEVELS)[tokens.group]


def _quantised(x: np.ndarray, levels: int) -> Rows:
    """Tokens f32[n C] in symmetric levels; one that is all zero has scale 0."""
    most = levels // 2 - 1
    scales = np.abs(x).max(1).astype(jnp.bfloat16)
    size = scales.astype(np.float32)[:, None]
    if not np.isfinite(size).all():
        raise KvjaxError("keys or values are not finite, or too large for bfloat16; they cannot be written in levels")
    codes = np.rint(x / np.where(size > 0, size, 1) * most)
    return Rows((np.clip(codes, -most, most) + most).astype(np.uint8), scales)


def _restored(rows: Rows, levels: int) -> np.ndarray:
    most = levels // 2 - 1
    return (rows.codes.astype(np.float32) - most) / most * rows.scales.astype(np.float32)[:, None]


def _counts(codes: np.ndarray, levels: int) -> np.ndarray:
    """How often each level occurs in each channel: codes u8[sides n C] -> i64[sides C levels]."""
    C = codes.shape[2]
    flat = (np.bincount((x + levels * np.arange(C)).ravel(), minlength=C * levels) for x in codes)
    return np.stack([x.reshape(C, levels) for x in flat])


def _tables(anchor_counts: np.ndarray, counts: np.ndarray) -> tuple[rans.Tables, rans.Tables]:
    """Distributions of anchors, one a side, and of the others, one a channel, of counts [sides A], [sides C A]."""
    sides, C, levels = counts.shape
    of_side = np.repeat(np.arange(sides), C)
    return rans.Tables(anchor_counts, of_side), rans.Tables(counts.reshape(-1, levels), np.arange(sides * C))


def _stacked(rows: Sequence[Rows]) -> Rows:
    """Those of all sides, u8[sides n C] and bf16[sides n]."""
    return Rows(np.stack([x.codes for x in rows]), np.stack([x.scales for x in rows]))


def _lanes(codes: np.ndarray) -> np.ndarray:
    """u8[sides n C] -> u8[n sides*C]."""
    sides, n, C = codes.shape
    return codes.swapaxes(0, 1).reshape(n, sides * C)


def _narrow(counts: np.ndarray) -> np.ndarray:
    """Counts in as few bytes as the largest needs."""
    return counts.astype(np.min_scalar_type(int(counts.max())))


def _padded(model: Model, x: np.ndarray, tokens: Tokens) -> Array:
    """Tokens f32[n C] as keys or values [B K S H] of the model's dtype, on its devices."""
    c, B, S = model.config, int(tokens.row.max()) + 1, round_up(int(tokens.pos.max()) + 1)
    rows = np.zeros((B, c.kv_heads, S, c.head_dim), model.dtype)
    rows[tokens.row, :, tokens.pos] = x.reshape(-1, c.kv_heads, c.head_dim)
    return place(model, rows, "B K")
