"""KIVI: groups of tokens or channels quantized to 1, 2, 4 or 8 bits, with the most recent tokens in full precision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing, blockwise
from kvjax.cache.storage import Codec, HostLayout, PagedArrays
from kvjax.core import attention, memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.kernels import products, use_kernels
from kvjax.core.kernels.packed_attention import PackedCodes
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.utils.parameter_types import OneOf, PositiveInt, check_fields


@pytree
class KiviState:
    """Slots 0..num_quantized-1 as codes; the newest tokens are exact, slot i at index i modulo P of `recent`."""

    codes: memory.Buffer  # uint32 words, [B K S/per H] packed along tokens, or [B K S H/per] along channels
    scale: memory.Buffer  # [B K S/group H] per channel, or [B K S H/group] per token
    lo: memory.Buffer  # as scale
    recent: Array  # [B K P H]
    num_quantized: Array  # i32[B]
    slots: int = dataclasses.field(metadata={"static": True})  # of the cache; codes have `Kivi.capacity(slots)`


@dataclasses.dataclass(frozen=True)
class Kivi(Codec, HostLayout):
    """Group quantization with a residual window (Liu et al. 2024, arXiv 2402.02750, section 3.2 and Algorithm 1).

    As in the authors' code, keys leave the residual R at a time, once it is full, and values one by one. Tokens that a
    step makes due leave at the start of the next step, before anything is read. A group is quantized once, from real
    tokens of one sequence, in the dtype that they came in.

    Args:
      bits: 1, 2, 4 or 8.
      group: consecutive tokens of a channel, or channels of a token, that share a scale and a minimum.
      axis: "channel", groups of tokens per channel (the paper's keys), or "token", groups of channels (its values).
      residual: R, the recent tokens that stay in full precision.
      one_bit: levels of 1-bit codes, "improved" or "original"; see `bit_packing.quantize`.
      packed: words run along "tokens", which reads all codes fast, or along "channels", so that a single token can be
        gathered, as from the host.
    """

    bits: Annotated[int, OneOf(bit_packing.BITS)] = 2
    group: PositiveInt = 32
    axis: str = "channel"
    residual: int = 128
    one_bit: Literal["improved", "original"] = "improved"
    packed: str = "tokens"

    sequential_writes = True  # the tokens of a group share a scale, and the newest ones are exact

    def __post_init__(self):
        check_fields(self)
        if self.residual < 1 or self.residual % self.group:
            low = max(self.residual // self.group, 1) * self.group
            nearest = str(low) if self.residual <= self.group else f"{low} and {low + self.group}"
            raise KvjaxError(
                f"residual {self.residual} is no multiple of group {self.group}: keys leave it in whole groups; "
                f"the nearest are {nearest}"
            )

    @property
    def per(self) -> int:
        """Codes per 32-bit word."""
        return 32 // self.bits

    @property
    def num_recent(self) -> int:
        """P, the tokens that fit into `recent`: a value stays one step longer than R, until its successor has come."""
        # Keys leave R at a time, and the buffer is empty when the next one comes. A value leaves alone, at the start of
        # the next step: until then R + 1 are exact.
        return self.residual if self.axis == "channel" else self.residual + 1

    @property
    def _word_axis(self) -> int:
        return 2 if self.packed == "tokens" else 3

    def capacity(self, slots: int) -> int:
        """Codes per channel in a cache of `slots`: all whole residuals, rounded up to whole words and groups."""
        # At least one word and group: buffers without elements would need branches in every reader.
        multiple = math.lcm(self.per, self.group)
        return max(-(-(slots // self.residual * self.residual) // multiple), 1) * multiple

    def on_device(self) -> Kivi:
        return dataclasses.replace(self, packed="tokens")

    def on_host(self) -> Kivi:
        # A host gathers single tokens; words along tokens would bring 32 / bits of them over the bus for each one.
        return dataclasses.replace(self, packed="channels")

    def in_pages(self, page: int) -> PagedKivi:
        if self.axis == "channel" and page % self.group:
            raise IncompatibleMethod(
                f"component `side_store` holds heads in pages of {page} slots, which groups of {self.group} tokens of "
                f"keys (component `k`) do not divide; give page={-(-page // self.group) * self.group} to the method "
                f"that divides the heads, or kivi:group={math.gcd(page, self.group)}"
            )
        return PagedKivi(self, page)

    def num_quantized(self, n: Array) -> Array:
        """The number of the first n tokens i32[B] that are codes when the next token is read."""
        if self.axis == "channel":
            # As in the authors' code: a prompt's keys beyond whole residuals stay exact, and its last R values.
            return n // self.residual * self.residual
        return jnp.maximum(n - self.residual, 0)

    def num_committed(self, stored: KiviState, n: Array) -> Array:
        # Codes cannot become exact again: with fewer tokens than this, some of them would lie within the residual.
        if self.axis == "channel":
            return stored.num_quantized
        return jnp.where(stored.num_quantized > 0, stored.num_quantized + self.residual, 0)

    def encode(self, x: Array, pos: Array) -> KiviState:
        self.check_head_dim(x.shape[3])
        slots, n = x.shape[2], (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        num_quantized = self.num_quantized(n)
        # Places of `recent` that hold no token yet repeat a real one: what lies there meets a weight of 0, and must be
        # finite.
        recent_index = jnp.clip(self._recent_index(num_quantized), 0, jnp.maximum(n[:, None] - 1, 0))
        recent = memory.take(_resize(x, max(slots, 1), 2), recent_index[:, None])
        x = _resize(x, self.capacity(slots), 2)
        codes, scale, lo = self.quantize(x)
        # All slots are quantized at once. The codes of later tokens must be 0: a flush adds its bits to the words.
        slot = jnp.arange(x.shape[2], dtype=jnp.int32)[None]
        is_code = (slot < num_quantized[:, None])[:, None, :, None]
        is_group = is_code if self.axis == "token" else is_code[:, :, :: self.group]
        codes = jnp.where(is_code, codes, jnp.zeros((), codes.dtype))
        scale, lo = (jnp.where(is_group, a, jnp.zeros((), a.dtype)) for a in (scale, lo))
        words = bit_packing.pack(codes, self.bits, self._word_axis)
        return KiviState(memory.pack(words), memory.pack(scale), memory.pack(lo), recent, num_quantized, slots)

    def used_part(self, stored: KiviState, num_tokens: int) -> Any:
        # A cache whose tokens all fit into the residual has no codes.
        recent = stored.recent[:, :, :num_tokens]
        return recent if num_tokens < self.num_recent else dataclasses.replace(stored, recent=recent)

    def append(self, stored: KiviState, x: Array, at: Array) -> KiviState:
        """Flushes the tokens that are due, then stores x [B K 0|1 H] exactly, in slot at i32[B 1]."""
        at = at[:, 0]
        is_due = at - stored.num_quantized >= self.num_recent
        # Once the residual is full a value leaves in every step, and a condition would only add a branch.
        if self.axis == "token":
            stored = self._flush(stored, is_due)
        elif self.residual <= self.capacity(stored.slots):  # a shorter cache stays in the residual
            stored = lax.cond(is_due.any(), lambda s: self._flush(s, is_due), lambda s: s, stored)
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, (at % self.num_recent)[:, None]))

    def _flush(self, stored: KiviState, is_due: Array) -> KiviState:
        """Quantizes what leaves the residual of the sequences that are due, bool[B]: all of it, or its oldest value."""
        at, tokens, num_flushed = stored.num_quantized, stored.recent, self.residual
        if self.axis == "token":
            tokens, num_flushed = memory.take(tokens, (at % self.num_recent)[:, None, None]), 1
        codes, scale, lo = self.quantize(tokens)
        if self.packed == "channels":
            words = memory.append(stored.codes, bit_packing.pack(codes, self.bits, 3), at[:, None], is_due)
        else:
            # The words of these tokens may hold older ones already, and have zeros in the new ones' places.
            slot = at[:, None] + jnp.arange(codes.shape[2], dtype=jnp.int32)[None]
            shift = (slot % self.per * self.bits).astype(jnp.uint32)[:, None, :, None]
            word = jnp.where(is_due[:, None], slot // self.per, stored.codes.data.shape[2])
            words = dataclasses.replace(stored.codes, data=memory.add(stored.codes.data, codes << shift, word))
        # Groups begin anew with each flush: R is a multiple of the group, so none mixes tokens of two flushes.
        first_group = (at // self.group if self.axis == "channel" else at)[:, None]
        return KiviState(
            words,
            memory.append(stored.scale, scale, first_group, is_due),
            memory.append(stored.lo, lo, first_group, is_due),
            stored.recent,
            jnp.where(is_due, at + num_flushed, at),
            stored.slots,
        )

    def decode(self, stored: KiviState) -> Array:
        codes = bit_packing.unpack(memory.read_data(stored.codes), self.bits, self._word_axis)
        x = self.restore_groups(codes, memory.unpack(stored.scale), memory.unpack(stored.lo), bit_packing.dequantize)
        slot = jnp.arange(stored.slots, dtype=jnp.int32)
        # Both are made for all slots and one is chosen. Putting the few exact ones into their slots would be a scatter.
        recent = jnp.take(stored.recent, slot % self.num_recent, axis=2)
        is_quantized = (slot[None] < stored.num_quantized[:, None])[:, None, :, None]
        return jnp.where(is_quantized, _resize(x, stored.slots, 2), recent)

    def gather(self, stored: KiviState, idx: Array) -> Array:
        recent = memory.take(stored.recent, idx % self.num_recent)
        is_quantized = (idx < stored.num_quantized[:, None, None])[..., None]
        return jnp.where(is_quantized, self.gather_codes(stored, idx), recent)

    def read_bytes(self, stored: KiviState, tokens: int | None = None) -> StepBytes:
        if tokens is None:
            return super().read_bytes(stored)
        places = stored.recent.shape[2]
        taken = tokens + (self.axis == "token")  # with the value that leaves the residual in this step
        recent = StepBytes.of_all(stored.recent).device * min(taken, places) // places
        codes = stored.codes, stored.scale, stored.lo, stored.num_quantized
        return StepBytes.of_tokens(codes, tokens) + StepBytes(device=recent)

    def gather_codes(self, stored: Any, idx: Array) -> Array:
        """`gather` for tokens that are codes; `stored` has the arrays `codes`, `scale` and `lo` of a `KiviState`."""
        word = idx if self.packed == "channels" else idx // self.per
        codes = memory.gather_tokens(stored.codes, word)
        if self.packed == "channels":
            codes = bit_packing.unpack(codes, self.bits, 3)
        else:
            codes = codes >> (idx % self.per * self.bits).astype(jnp.uint32)[..., None] & jnp.uint32(2**self.bits - 1)
        group = idx // self.group if self.axis == "channel" else idx
        scale, lo = memory.gather_tokens(stored.scale, group), memory.gather_tokens(stored.lo, group)
        if self.axis == "token":
            scale, lo = (jnp.repeat(a, self.group, -1) for a in (scale, lo))
        return bit_packing.dequantize(codes, scale, lo)

    def scores(self, q: Array, stored: KiviState) -> Array:
        S = stored.slots
        if self._has_kernel(q, stored):
            s = products.scores(q, self.packed_codes(stored), bits=self.bits)
        else:
            s = blockwise.scores(q, self.capacity(S), *self._tiles(stored))
        recent = attention.scores(q.astype(jnp.float32), stored.recent.astype(jnp.float32))
        # Slot i is at i modulo P, so that repeating the few exact scores puts each where `where` looks for it.
        recent = jnp.tile(recent, -(-S // self.num_recent))[..., :S]
        return jnp.where(self.quantized_mask(stored), _resize(s, S, 4), recent)

    def mix(self, p: Array, stored: KiviState) -> Array:
        # Weights are split between codes and exact tokens, and both sums added: the two are never put into one array.
        p_codes = _resize(jnp.where(self.quantized_mask(stored), p, 0.0), self.capacity(stored.slots), 4)
        if self._has_kernel(p, stored):
            out = products.mix(p_codes, self.packed_codes(stored), stored.recent.dtype, bits=self.bits)
        else:
            out = blockwise.mix(p_codes, stored.recent.shape[3], *self._tiles(stored))
        slot = self._recent_index(stored.num_quantized)
        p_recent = jnp.take_along_axis(p, jnp.minimum(slot, stored.slots - 1)[:, None, None, None], 4)
        p_recent = jnp.where((slot < stored.slots)[:, None, None, None], p_recent, 0.0)
        return out + attention.mix(p_recent, stored.recent.astype(jnp.float32))

    def packed_codes(self, stored: KiviState) -> PackedCodes:
        """The arrays that kernels read."""
        return PackedCodes(memory.read_data(stored.codes), memory.unpack(stored.scale), memory.unpack(stored.lo))

    def _has_kernel(self, x: Array, stored: KiviState) -> bool:
        """Whether a kernel multiplies queries or weights x [B K G T ...] with the codes here."""
        return self.packed == "tokens" and use_kernels() and products.fits(x, self.packed_codes(stored))

    def _tiles(self, stored: KiviState) -> tuple[blockwise.TileSize, blockwise.DecodeTile]:
        """The size of a tile, in whole words and groups, and the function that decodes one."""
        per_word = self.per if self.packed == "tokens" else 1
        per_group = self.group if self.axis == "channel" else 1

        def decode_tile(head: Array, num_heads: int, start: Array | int, count: int) -> Array:
            def load(buffer: memory.Buffer, n: int) -> Array:
                return memory.slice_tokens(buffer, head, num_heads, start // n, count // n)

            codes = bit_packing.unpack(load(stored.codes, per_word), self.bits, self._word_axis - 1)
            scale, lo = (load(x, per_group).astype(jnp.float32)[None] for x in (stored.scale, stored.lo))

            # `bit_packing.dequantize` rounds to 16 bits; these numbers are used in float32 and never stored.
            def dequantize(codes: Array, scale: Array, lo: Array) -> Array:
                return bit_packing.codes_to_float(codes) * scale + lo

            return self.restore_groups(codes[None], scale, lo, dequantize)[0]

        B, K, _, H = stored.recent.shape
        # Tiles, since all keys in float32 would be eight times the bytes of 4-bit codes, written and read again.
        size = blockwise.tile_size(B * K, self.capacity(stored.slots), H, math.lcm(self.per, self.group))
        return size, decode_tile

    def restore_groups(
        self, codes: Array, scale: Array, lo: Array, dequantize: Callable[[Array, Array, Array], Array]
    ) -> Array:
        """codes [B K S H], with the scale and lo of each group -> [B K S H]."""
        B, K, S, H = codes.shape
        if self.axis == "channel":
            split, group_axis = (B, K, S // self.group, self.group, H), 3
        else:
            split, group_axis = (B, K, S, H // self.group, self.group), 4
        scale, lo = jnp.expand_dims(scale, group_axis), jnp.expand_dims(lo, group_axis)
        return dequantize(codes.reshape(split), scale, lo).reshape(codes.shape)

    def quantize(self, x: Array) -> tuple[Array, Array, Array]:
        """Quantizes tokens x [B K T H], whole groups of real tokens.

        Returns:
          codes [B K T H], scale and lo [B K T/group H] per channel, or [B K T H/group] per token.
        """
        B, K, T, H = x.shape
        x = refuse_gradient(x, f"codes of {type(self).__name__}")
        if self.axis == "token":
            codes, scale, lo = bit_packing.quantize(x.reshape(B, K, T, -1, self.group), self.bits, self.one_bit)
            return codes.reshape(x.shape), scale[..., 0], lo[..., 0]
        # `bit_packing.quantize` takes groups along the last axis, so that both axes share its rounding.
        groups = x.reshape(B, K, -1, self.group, H).swapaxes(3, 4)
        codes, scale, lo = bit_packing.quantize(groups, self.bits, self.one_bit)
        return codes.swapaxes(3, 4).reshape(x.shape), scale[..., 0], lo[..., 0]

    def _recent_index(self, num_quantized: Array) -> Array:
        """i32[B P]: the slot whose token each place of `recent` holds, or will hold."""
        index = jnp.arange(self.num_recent, dtype=jnp.int32)[None]
        return num_quantized[:, None] + (index - num_quantized[:, None]) % self.num_recent

    def quantized_mask(self, stored: KiviState) -> Array:
        """bool[B 1 1 1 S]: the slots that are read as codes."""
        slot = jnp.arange(stored.slots, dtype=jnp.int32)[None]
        return (slot < stored.num_quantized[:, None])[:, None, None, None]

    def check_head_dim(self, H: int) -> None:
        """Raises KvjaxError for a head size that groups or words do not divide."""
        if self.axis == "token":
            bit_packing.check_divides("group", self.group, H)
        if self.packed == "channels" and H % self.per:
            raise KvjaxError(
                f"{self.bits}-bit codes on the host are packed {self.per} channels to a word, which does not "
                f"divide the head size {H}; keep them on the device, or use more bits"
            )


@pytree
class PageCodes(PagedArrays):
    """Pages of tokens as codes, P pages of each pool."""

    codes: memory.Buffer  # uint32 words [B K P W], all codes of a page one after the other
    scale: memory.Buffer  # [B K P page*H/group], of the page's groups
    lo: memory.Buffer  # as scale


@dataclasses.dataclass(frozen=True)
class PagedKivi(Codec):
    """Quantizes pages of tokens that never change, by the groups of `rule` and without a residual.

    A page belongs to one head and holds whole groups of tokens, so no group mixes heads. The last group of a head
    consists of the tokens that there are.
    """

    rule: Kivi
    page: int

    def encode(self, x: Array, pos: Array) -> PageCodes:
        self.rule.on_device().check_head_dim(x.shape[3])
        real = jnp.broadcast_to(pos >= 0, x.shape[:3])[..., None]
        tokens = self.rule.group if self.rule.axis == "channel" else 1
        # Empty slots repeat the first token of their group, which changes no minimum and no maximum.
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        codes, scale, lo = self.rule.quantize(jnp.where(real, x, jnp.repeat(x[:, :, ::tokens], tokens, 2)))
        by_page = (*x.shape[:2], x.shape[2] // self.page, -1)
        codes, scale, lo = (a.reshape(by_page) for a in (jnp.where(real, codes, jnp.uint32(0)), scale, lo))
        # A page is flat, so that its codes fill words whatever the head size; only its own end is padded.
        codes = jnp.pad(codes, [(0, 0), (0, 0), (0, 0), (0, -codes.shape[3] % self.rule.per)])
        return PageCodes(memory.pack(bit_packing.pack(codes, self.rule.bits, 3)), memory.pack(scale), memory.pack(lo))

    def decode(self, stored: PageCodes) -> Array:
        scale, lo = memory.unpack(stored.scale), memory.unpack(stored.lo)
        B, K, P, n = scale.shape
        H = n * self.rule.group // self.page
        codes = bit_packing.unpack(memory.read_data(stored.codes), self.rule.bits, 3)[..., : self.page * H]
        groups = (B, K, P * self.page // self.rule.group, H)
        if self.rule.axis == "token":
            groups = (B, K, P * self.page, H // self.rule.group)
        codes = codes.reshape(B, K, P * self.page, H)
        return self.rule.restore_groups(codes, scale.reshape(groups), lo.reshape(groups), bit_packing.dequantize)


def _resize(x: Array, n: int, axis: int) -> Array:
    """x with n entries along an axis, cut or padded with zeros at its end."""
    if n <= x.shape[axis]:
        return lax.slice_in_dim(x, 0, n, axis=axis)
    return jnp.pad(x, [(0, n - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])
