"""CacheGen: keys and values of a context, quantized to few levels and entropy-coded in one file.

Liu et al. 2024, arXiv 2310.07240, section 5. Each token of a layer's keys or values is divided by its largest magnitude
over all channels and rounded to levels, fewer in higher layers; these are coded with a distribution for each layer and
channel. In the paper tokens form groups of ten: the first, the anchor, is written in 8 bits and the others as
differences to it. Public code (`cachegen_encoder.py`) has no anchors, and they are off here unless `group` is given:
on the shipped model differences take more bits, at no smaller error.

Differences to the paper: its distributions are profiled once per model; here each file has its own, as in public code.
Anchors share one for all channels of a layer's keys or values, since tables per channel would be as large as the
anchors. rANS replaces arithmetic coding. The streaming of chunks, and the controller that chooses levels or the text,
are left out. Unverified: the group of ten and the anchors' 8 bits, for which no code is public.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core.mesh import to_numpy
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.generation import archive
from kvjax.generation.context import Context
from kvjax.generation.inputs import place, round_up
from kvjax.models.model import Model
from kvjax.reuse import rans
from kvjax.reuse.full_kv import FullKV, full_kv_from_arrays, full_kv_from_context
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

__all__ = ["read", "write"]

FORMAT = archive.Format("kvjax-cachegen", 3, {"levels": list, "group": int})
ANCHOR_LEVELS = 256
BASE_LEVELS, FINE_LEVELS = 16, 32  # levels of most layers, and of the first ones
FINE_KEY_LAYERS, FINE_VALUE_LAYERS = 10 / 32, 2 / 32  # fraction of the layers with fine levels, as in public code

Levels = int | Sequence[tuple[int, int]]


@checks_keywords
def write(path: str | Path, context: FullKV | Context, *, levels: Levels | None = None, group: int = 0) -> Path:
    """Writes keys and values in few levels, whole or not at all.

    Args:
      path: of the file.
      context: from `kvjax.reuse.read_exactly`, or read under `full`.
      levels: of all layers, or (of keys, of values) of each layer, 4 to 256; by default as in public code.
      group: tokens of an anchor and of the differences to it, 10 in the paper; 0 for no anchors.

    Returns:
      The path.

    Raises:
      KvjaxError: other levels and groups, another method than `full`, and keys and values that are not finite.
    """
    exact = context if isinstance(context, FullKV) else full_kv_from_context(context)
    exact.check_weights()
    arguments.integer("group", group, 0, remedy="; give the tokens of a group, or 0 for no anchors")
    lengths, side_levels = to_numpy(exact.lengths), _levels_of_sides(levels, exact.model.config.layers)
    tokens = _flatten_tokens(lengths, group)
    sides, quantized = [x for prompt in exact.prompts for x in (prompt.k, prompt.v)], []
    # All sides have as many channels in the file, as the widest of them: zeros cost the coder almost nothing.
    num_channels = max(side.shape[1] * side.shape[3] for side in sides)
    for side, num_levels in zip(sides, side_levels, strict=True):
        x = to_numpy(side)[tokens.row, :, tokens.pos].astype(np.float32)
        x = x.reshape(len(x), -1)
        x = np.pad(x, [(0, 0), (0, num_channels - x.shape[1])])
        anchor = _quantize(x[tokens.is_anchor], ANCHOR_LEVELS)
        # The difference is to the anchor as it is read back, so that the anchor's rounding error does not add up.
        quantized.append((anchor, _quantize((x - _predictions(anchor, tokens))[~tokens.is_anchor], num_levels)))
    anchors, others = (
        Codes(np.stack([x.codes for x in codes]), np.stack([x.scales for x in codes]))
        for codes in zip(*quantized, strict=True)
    )
    anchor_counts = _count_levels(anchors.codes, ANCHOR_LEVELS).sum(1)
    counts = _count_levels(others.codes, max(side_levels))
    anchor_table, table = _tables(anchor_counts, counts)
    words, states = rans.encode([(_to_lanes(anchors.codes), anchor_table), (_to_lanes(others.codes), table)])
    # Scales are stored in bfloat16 and counts in as few bytes as they need: both are a good part of a small file.
    arrays = {
        "last": exact.last_logits,
        "length": lengths,
        "words": words,
        "states": states,
        "anchor counts": anchor_counts.astype(np.min_scalar_type(int(anchor_counts.max()))),
        "counts": counts.astype(np.min_scalar_type(int(counts.max()))),
        "anchor scales": anchors.scales,
        "scales": others.scales,
    }
    header = {"levels": side_levels, "group": group}
    return archive.write(path, FORMAT, exact.model, header, arrays, deflate=True)


@checks_keywords
def read(model: Model, path: str | Path) -> FullKV:
    """Reads the keys and values of a file, to compress under any method that observes no queries.

    Raises:
      KvjaxError: a damaged file, another version or another model.
    """
    header, arrays = archive.read(path, FORMAT, model)
    model = archive.writer_of(model, header)
    tokens = _flatten_tokens(arrays["length"], header["group"])
    num_anchors, num_others = (arrays[name].shape[1] for name in ("anchor scales", "scales"))
    anchor_table, table = _tables(arrays["anchor counts"], arrays["counts"])
    symbols = rans.decode(arrays["words"], arrays["states"], [(num_anchors, anchor_table), (num_others, table)])
    num_sides, C = arrays["counts"].shape[:2]
    anchor_codes, codes = (x.reshape(len(x), num_sides, C).swapaxes(0, 1) for x in symbols)
    B, S = int(tokens.row.max()) + 1, round_up(int(tokens.pos.max()) + 1)
    widths = [(spec.num_kv_heads, width) for spec in specs(model.config) for width in (spec.head_dim, spec.value_dim)]
    sides = []
    for i, levels in enumerate(header["levels"]):
        anchors, others = Codes(anchor_codes[i], arrays["anchor scales"][i]), Codes(codes[i], arrays["scales"][i])
        x = np.array(np.broadcast_to(_predictions(anchors, tokens), (len(tokens.row), C)))
        x[~tokens.is_anchor] += _dequantize(others, levels)
        K, H = widths[i]
        side = np.zeros((B, K, S, H), model.dtype)
        side[tokens.row, :, tokens.pos] = x[:, : K * H].reshape(-1, K, H)
        sides.append(place(model, side, "B K"))
    lengths = place(model, arrays["length"], "B")
    exact = full_kv_from_arrays(model, list(zip(sides[::2], sides[1::2], strict=True)), lengths)
    return dataclasses.replace(exact, last_logits=place(model, arrays["last"], "B"))


def default_levels(num_layers: int) -> list[tuple[int, int]]:
    """Returns the levels of keys and of values of each layer, as in public code for 32 layers, scaled to the depth."""
    keys, values = (
        [FINE_LEVELS if i < fraction * num_layers else BASE_LEVELS for i in range(num_layers)]
        for fraction in (FINE_KEY_LAYERS, FINE_VALUE_LAYERS)
    )
    return list(zip(keys, values, strict=True))


class Tokens(NamedTuple):
    """The tokens of all sequences, concatenated."""

    row: np.ndarray  # i64[n], index of the sequence
    pos: np.ndarray  # i64[n]
    is_anchor: np.ndarray  # bool[n], the first token of a group
    group: np.ndarray  # i64[n], index of the token's anchor among all anchors


class Codes(NamedTuple):
    """Token vectors in few levels."""

    codes: np.ndarray  # u8[n C]
    scales: np.ndarray  # bf16[n], the largest magnitude of each token


def _flatten_tokens(lengths: np.ndarray, group: int) -> Tokens:
    row = np.repeat(np.arange(len(lengths)), lengths)
    pos = np.concatenate([np.arange(n) for n in lengths])
    is_anchor = pos % group == 0 if group else np.zeros(len(pos), bool)
    return Tokens(row, pos, is_anchor, np.cumsum(is_anchor) - 1)


def _levels_of_sides(levels: Levels | None, num_layers: int) -> list[int]:
    """Lists the levels of the first layer's keys, its values, the second layer's keys, and so on, checked."""
    if levels is None:
        levels = default_levels(num_layers)
    elif isinstance(levels, int):
        levels = [(levels, levels)] * num_layers
    sides = [arguments.integer("levels", n, 4, 256) for pair in levels for n in pair]
    if len(sides) != 2 * num_layers:
        raise KvjaxError(
            f"{len(sides)} numbers of levels for the keys and values of {num_layers} layers; give two a layer"
        )
    return sides


def _predictions(anchors: Codes, tokens: Tokens) -> np.ndarray:
    """Returns each token's anchor as it is read back, f32[n C]; 0 without anchors."""
    if not tokens.is_anchor.any():
        return np.zeros((1, 1), np.float32)
    return _dequantize(anchors, ANCHOR_LEVELS)[tokens.group]


def _quantize(x: np.ndarray, levels: int) -> Codes:
    """Quantizes tokens f32[n C] to symmetric levels; a token of zeros has scale 0."""
    max_code = levels // 2 - 1
    scales = np.abs(x).max(1).astype(jnp.bfloat16)
    size = scales.astype(np.float32)[:, None]
    if not np.isfinite(size).all():
        raise KvjaxError("keys or values are not finite, or too large for bfloat16; they cannot be written in levels")
    codes = np.rint(x / np.where(size > 0, size, 1) * max_code)
    return Codes((np.clip(codes, -max_code, max_code) + max_code).astype(np.uint8), scales)


def _dequantize(x: Codes, levels: int) -> np.ndarray:
    max_code = levels // 2 - 1
    return (x.codes.astype(np.float32) - max_code) / max_code * x.scales.astype(np.float32)[:, None]


def _count_levels(codes: np.ndarray, levels: int) -> np.ndarray:
    """Counts the levels in each channel: codes u8[sides n C] -> i64[sides C levels]."""
    C = codes.shape[2]
    flat = (np.bincount((x + levels * np.arange(C)).ravel(), minlength=C * levels) for x in codes)
    return np.stack([x.reshape(C, levels) for x in flat])


def _tables(anchor_counts: np.ndarray, counts: np.ndarray) -> tuple[rans.Tables, rans.Tables]:
    """Makes one distribution per side for anchors, [sides A], and one per channel for the others, [sides C A]."""
    sides, C, levels = counts.shape
    side_of_lane = np.repeat(np.arange(sides), C)
    return rans.Tables(anchor_counts, side_of_lane), rans.Tables(counts.reshape(-1, levels), np.arange(sides * C))


def _to_lanes(codes: np.ndarray) -> np.ndarray:
    """u8[sides n C] -> u8[n sides*C]: each channel of each side is a lane of the coder."""
    sides, n, C = codes.shape
    return codes.swapaxes(0, 1).reshape(n, sides * C)
