"""KVarN: tiles of tokens, rotated, scaled to equal variances by channel and by token, and rounded to few bits."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.codecs import blockwise
from kvjax.cache.codecs.per_token import hadamard

MAX_FLOAT16 = float(jnp.finfo(jnp.float16).max)
LOG_SCALES = (-0.3, 10.0)
"""The least and the largest logarithm of a scale, as in the authors' code."""


@kv.pytree
class TileState:
    """The rotated keys or values of a `NormalizedTiles`: slots 0..num_coded-1 as codes, the others exactly."""

    codes: kv.memory.Buffer  # uint32[B K S words], packed along the channels
    by_token: kv.memory.Buffer  # f16[B K S n], the scale; or the step and the least number (axis "token")
    by_channel: kv.memory.Buffer  # f16[B K tiles n*H], the step and the least number; or the scale (axis "token")
    unfinished: kv.Array  # [B K tile H], slot i at place i modulo `tile`
    num_coded: kv.Array  # i32[B], a multiple of `tile`


@dataclasses.dataclass(frozen=True)
class NormalizedTiles(kv.Codec):
    """Codes tiles of `tile` tokens whose channels and tokens were scaled to equal standard deviations.

    Vectors are rotated by Hadamard's matrix first, and stored so. A tile becomes codes at the start of the call after
    the one that filled it; a prompt's whole tiles do so at once.

    The fields are the arguments of `kvarn`, and `axis`: a step and a least number belong to each "channel" of a tile,
    or to each "token".
    """

    bits: kv.RowBits = 4
    axis: Literal["channel", "token"] = "channel"
    tile: Annotated[int, kv.Within("[2, inf)")] = 128
    iterations: kv.NonNegativeInt = 16

    sequential_writes = True  # the tokens of a tile share their scales

    __post_init__ = kv.check_fields

    def encode(self, x: kv.Array, pos: kv.Array) -> TileState:
        S, H = x.shape[2:]
        kv.bit_packing.check_fills(H, self.bits)
        num_coded = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32) // self.tile * self.tile
        x = _rotate(jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))).astype(x.dtype)
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, -S % self.tile), (0, 0)])
        codes, by_token, by_channel = self._code(padded)
        last = num_coded[:, None] + jnp.arange(self.tile, dtype=jnp.int32)[None]
        unfinished = kv.memory.take(padded, jnp.minimum(last, padded.shape[2] - 1)[:, None])
        codes, by_token = kv.memory.pack(codes[:, :, :S]), kv.memory.pack(by_token[:, :, :S])
        return TileState(codes, by_token, kv.memory.pack(by_channel), unfinished, num_coded)

    def append(self, stored: TileState, x: kv.Array, at: kv.Array) -> TileState:
        if self.tile <= stored.codes.data.shape[2]:  # a shorter cache never fills a tile
            is_due = at[:, 0] - stored.num_coded >= self.tile
            # Once in `tile` calls for each sequence; most calls skip the work by the condition.
            stored = lax.cond(is_due.any(), lambda s: self._close_tiles(s, is_due), lambda s: s, stored)
        rotated = _rotate(x).astype(x.dtype)
        return dataclasses.replace(stored, unfinished=kv.memory.put(stored.unfinished, rotated, at % self.tile))

    def _close_tiles(self, stored: TileState, is_due: kv.Array) -> TileState:
        """Codes the full tiles of the sequences that are due, bool[B]."""
        codes, by_token, by_channel = self._code(stored.unfinished)
        first = stored.num_coded[:, None]
        return TileState(
            kv.memory.append(stored.codes, codes, first, is_due),
            kv.memory.append(stored.by_token, by_token, first, is_due),
            kv.memory.append(stored.by_channel, by_channel, first // self.tile, is_due),
            stored.unfinished,
            jnp.where(is_due, stored.num_coded + self.tile, stored.num_coded),
        )

    def decode(self, stored: TileState) -> kv.Array:
        B, K, S, _ = stored.codes.data.shape
        return self.gather(stored, jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, K, S)))

    def gather(self, stored: TileState, idx: kv.Array) -> kv.Array:
        buffers = (stored.codes, idx), (stored.by_token, idx), (stored.by_channel, idx // self.tile)
        coded = self._restore(*(kv.memory.gather_tokens(buffer, index) for buffer, index in buffers))
        exact = kv.memory.take(stored.unfinished, idx % self.tile)
        is_coded = (idx < stored.num_coded[:, None, None])[..., None]
        return _rotate(jnp.where(is_coded, coded, exact.astype(jnp.float32))).astype(exact.dtype)

    def scores(self, q: kv.Array, stored: TileState) -> kv.Array:
        S, q = stored.codes.data.shape[2], _rotate(q)  # keys stay rotated, since that changes no dot product
        size, decode_tile = self._tiles(stored)
        coded = blockwise.scores(q, S, size, decode_tile)
        exact = kv.attention.scores(q, stored.unfinished.astype(jnp.float32))
        exact = jnp.tile(exact, -(-S // self.tile))[..., :S]  # slot i is at place i modulo `tile`
        return jnp.where(self._coded_mask(stored), coded, exact)

    def mix(self, p: kv.Array, stored: TileState) -> kv.Array:
        size, decode_tile = self._tiles(stored)
        S, H = p.shape[4], stored.unfinished.shape[3]
        out = blockwise.mix(jnp.where(self._coded_mask(stored), p, 0.0), H, size, decode_tile)
        slot = (stored.num_coded[:, None] + jnp.arange(self.tile, dtype=jnp.int32)[None])[:, None, None, None]
        exact = jnp.take_along_axis(p, jnp.minimum(slot, S - 1), 4)
        out = out + kv.attention.mix(jnp.where(slot < S, exact, 0.0), stored.unfinished.astype(jnp.float32))
        return _rotate(out)  # the rotation is linear: one sum is rotated back instead of every value

    def num_committed(self, stored: TileState, n: kv.Array) -> kv.Array:
        return stored.num_coded

    def used_part(self, stored: TileState, num_tokens: int) -> TileState | kv.Array:
        unfinished = stored.unfinished[:, :, :num_tokens]
        return unfinished if num_tokens < self.tile else dataclasses.replace(stored, unfinished=unfinished)

    def _coded_mask(self, stored: TileState) -> kv.Array:
        """bool[B 1 1 1 S]: the slots that are read as codes."""
        slot = jnp.arange(stored.codes.data.shape[2], dtype=jnp.int32)[None]
        return (slot < stored.num_coded[:, None])[:, None, None, None]

    def _tiles(self, stored: TileState) -> tuple[blockwise.TileSize, blockwise.DecodeTile]:
        """The size of a block of whole tiles, and the function that decodes one, still rotated."""

        def decode_tile(head: kv.Array, num_heads: int, start: kv.Array | int, count: int) -> kv.Array:
            codes, by_token = (
                kv.memory.slice_tokens(b, head, num_heads, start, count) for b in (stored.codes, stored.by_token)
            )
            num_tiles = -(-count // self.tile)  # the last one may lack tokens
            scales = kv.memory.slice_tokens(stored.by_channel, head, num_heads, start // self.tile, num_tiles)
            return self._restore(codes, by_token, jnp.repeat(scales, self.tile, 1)[:, :count])

        B, K, S, _ = stored.codes.data.shape
        return blockwise.tile_size(B * K, S, stored.unfinished.shape[3], self.tile), decode_tile

    def _code(self, x: kv.Array) -> tuple[kv.Array, kv.Array, kv.Array]:
        """Codes whole tiles of rotated tokens [B K n H]: what a `TileState` has of them, not yet packed."""
        B, K, n, H = x.shape
        x = kv.refuse_gradient(x, f"codes of {type(self).__name__}").astype(jnp.float32)
        tiles = x.reshape(B, K, n // self.tile, self.tile, H)
        if self.axis == "channel":
            tiles = tiles.swapaxes(3, 4)  # a row is what has a step and a least number of its own
        row_scale, column_scale = balance(tiles, self.iterations)
        balanced, top = tiles / column_scale / row_scale, 2.0**self.bits - 1
        least = balanced.min(4, keepdims=True)
        step = kv.step_size(balanced.max(4, keepdims=True) - least, top, 1e-10)
        codes = jnp.clip(jnp.round((balanced - least) / step), 0.0, top).astype(jnp.uint32)
        ends = jnp.concatenate([row_scale * step, row_scale * least], 4)  # [B K tiles rows 2]
        ends, column_scale = (jnp.clip(a, -MAX_FLOAT16, MAX_FLOAT16).astype(jnp.float16) for a in (ends, column_scale))
        if self.axis == "channel":
            codes = codes.swapaxes(3, 4)
            by_token, by_channel = column_scale.reshape(B, K, n, 1), ends.swapaxes(3, 4).reshape(B, K, -1, 2 * H)
        else:
            by_token, by_channel = ends.reshape(B, K, n, 2), column_scale.reshape(B, K, -1, H)
        return kv.bit_packing.pack(codes.reshape(x.shape), self.bits, 3), by_token, by_channel

    def _restore(self, codes: kv.Array, by_token: kv.Array, by_channel: kv.Array) -> kv.Array:
        """Restores rotated tokens f32[.. H] from words [.. words] and the scales of each token and of its tile."""
        levels = kv.bit_packing.codes_to_float(kv.bit_packing.unpack(codes, self.bits, -1))
        by_token, by_channel = by_token.astype(jnp.float32), by_channel.astype(jnp.float32)
        if self.axis == "channel":
            step, least = jnp.split(by_channel, 2, -1)
            return (levels * step + least) * by_token
        return (levels * by_token[..., :1] + by_token[..., 1:]) * by_channel


def balance(tiles: kv.Array, iterations: int) -> tuple[kv.Array, kv.Array]:
    """Finds scales of rows and columns under which all of them have nearly one standard deviation.

    Args:
      tiles: f32[.. R C].
      iterations: alternating normalizations of columns and rows. The scales of the least imbalance are kept, those
        before the first normalization included.

    Returns:
      f32[.. R 1] and f32[.. 1 C]; the tile divided by both is balanced.
    """

    def scale(logs: tuple[kv.Array, kv.Array]) -> kv.Array:
        return tiles / jnp.exp(logs[1]) / jnp.exp(logs[0])

    def imbalance(balanced: kv.Array) -> kv.Array:
        ratios = []
        for axis in (-2, -1):
            deviation = balanced.std(axis, ddof=1, keepdims=True)
            least = jnp.maximum(deviation.min((-2, -1), keepdims=True), 1e-8)
            ratios.append(deviation.max((-2, -1), keepdims=True) / least)
        return ratios[0] + ratios[1]

    def normalize(balanced: kv.Array, logs: kv.Array, axis: int) -> kv.Array:
        deviation = jnp.clip(balanced.std(axis, ddof=1, keepdims=True), 1e-3, 1e3)
        return jnp.clip(logs + jnp.log(deviation), *LOG_SCALES)

    def step(_: kv.Array, carry: tuple) -> tuple:
        (rows, columns), best, least = carry
        columns = normalize(scale((rows, columns)), columns, -2)
        rows = normalize(scale((rows, columns)), rows, -1)
        found = imbalance(scale((rows, columns)))
        is_better = found <= least
        best = tuple(jnp.where(is_better, new, old) for new, old in zip((rows, columns), best, strict=True))
        return (rows, columns), best, jnp.where(is_better, found, least)

    zeros = jnp.zeros_like(tiles[..., :1]), jnp.zeros_like(tiles[..., :1, :])
    _, (rows, columns), _ = lax.fori_loop(0, iterations, step, (zeros, zeros, imbalance(tiles)))
    return jnp.exp(rows), jnp.exp(columns)


def _rotate(x: kv.Array) -> kv.Array:
    """Rotates x [.. H] in float32; the rotation is its own inverse."""
    matrix = jnp.asarray(hadamard(x.shape[-1]))
    return jnp.einsum("...h,hj->...j", x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST)


@kv.register_method(example="kvarn:tile=32,sinks=32", family="quantization by channel and group")
def kvarn(
    k_bits: kv.RowBits = 4,
    v_bits: kv.RowBits = 2,
    tile: int = 128,
    sinks: kv.NonNegativeInt = 128,
    iterations: int = 16,
) -> kv.Method:
    """Balances the variances of each tile's channels and tokens, then rounds keys by channel and values by token.

    Attention in the prompt is exact; so is all of it while prompt and answer together are shorter than a tile.

    Formula:
      a tile is `tile` tokens of a head, times H / sqrt(d); 16 times c += log std of columns, r += log std of rows, both
      limited to -0.3..10; e^c and e^r of the least (max / min std of columns + max / min std of rows) divide the tile;
      x' = (round((x - min) / s) s + min) e^r e^c, s = (max - min) / (2^bits - 1) of a row; a row is a channel of keys,
      or a token of values

    Differs:
      The numbers of a tile are those of vLLM's pull request 46812 and of huawei-csl/KVarN (Apache-2.0). There a full
      tile becomes codes in the step that fills it, and here in the next one; the unfinished tile is rotated in the
      model's dtype. vLLM normalizes 8 times.

    Args:
      k_bits: bits of a key's number (the authors: 4).
      v_bits: bits of a value's number (the authors: 2, or 4).
      tile: tokens that are coded together (the authors: 128, or 64).
      sinks: first tokens that are stored exactly as well (the authors: 128).
      iterations: normalizations of columns and rows (the paper: 16).

    Reference:
      KVarN, Muller et al. 2026, arXiv 2606.03458; vLLM, kv_cache_dtype kvarn_k4v2_g128
    """
    keys = NormalizedTiles(k_bits, "channel", tile, iterations)
    return kv.Method(
        k=kv.ExactPrefix(keys, sinks), v=kv.ExactPrefix(NormalizedTiles(v_bits, "token", tile, iterations), sinks)
    )
