"""KIVI: keys and values held in 1, 2, 4 or 8 bits, the most recent tokens in full precision."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs import blockwise
from kvjax.cache.codecs.base import Codec, PagedArrays
from kvjax.core import attention, memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.kernels import products
from kvjax.core.kernels.packed import Codes
from kvjax.core.types import Array, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError


@pytree
class Packed:
    """Slots 0..settled-1 as codes; the others, the newest, as they came, slot i at place i modulo P."""

    codes: memory.Buffer  # uint32 words, [B K S/per H] packed along tokens, or [B K S H/per] along channels
    scale: memory.Buffer  # [B K S/group H] per channel, or [B K S H/group] per token
    lo: memory.Buffer  # as scale
    recent: Array  # [B K P H]
    num_quantized: Array  # i32[B]
    slots: int = dataclasses.field(metadata={"static": True})  # of the cache; codes have room for those that may settle


@dataclasses.dataclass(frozen=True)
class Kivi(Codec):
    """Group quantisation with a residual window (Liu et al. 2024, arXiv 2402.02750, section 3.2 and Algorithm 1).

    bits: 1, 2, 4 or 8. axis: "channel", groups of `group` consecutive tokens per channel (the paper's keys), or
    "token", groups of `group` channels per token (its values). residual: that many recent tokens R stay in full
    precision; keys leave in blocks of R as soon as one is complete, values one by one, as the paper's code does. What
    a step's end makes due leaves at the start of the next, before anything is read. one_bit: levels of one-bit codes,
    see `quant.quantize`. packed: words run along "tokens" (read as a whole, fast) or along "channels" (read by rows,
    as from the host). A group is quantised once, in the dtype that it came in, from real tokens of its row only.
    """

    bits: int = 2
    group: int = 32
    axis: str = "channel"
    residual: int = 128
    one_bit: str = "improved"
    packed: str = "tokens"

    sequential_writes = True  # tokens enter one at a time: what a query sees in low bits depends on its own time
    supports_eviction = False  # a group of tokens shares its scale, and none of them can leave it

    def __post_init__(self):
        if self.bits not in quant.BITS:
            near = min(quant.BITS, key=lambda b: abs(b - self.bits))
            raise KvjaxError(f"bits must be 1, 2, 4 or 8, got {self.bits}; the nearest is {near}")
        if self.one_bit not in quant.ONE_BIT:
            raise KvjaxError(f"one_bit must be 'improved' or 'original', got {self.one_bit!r}")
        if self.group < 1:
            raise KvjaxError(f"group must be at least 1, got {self.group}; the paper uses 32")
        if self.residual < 1 or self.residual % self.group:
            raise KvjaxError(
                f"residual {self.residual} is no multiple of group {self.group}: keys leave it in whole groups; "
                f"the nearest are {_multiples(self.residual, self.group)}"
            )

    @property
    def per(self) -> int:
        """Codes per 32-bit word."""
        return 32 // self.bits

    @property
    def places(self) -> int:
        """P: a value stays one step longer than R, until its successor has come."""
        return self.residual if self.axis == "channel" else self.residual + 1

    @property
    def leaves(self) -> int:
        """Tokens that leave the residual at a time."""
        return self.residual if self.axis == "channel" else 1

    def room(self, slots: int) -> int:
        """Slots that codes have room for in a cache of `slots`: all whole residuals, in whole words and groups."""
        whole = math.lcm(self.per, self.group)
        return max(-(-(slots // self.residual * self.residual) // whole), 1) * whole

    def on_device(self) -> Kivi:
        return dataclasses.replace(self, packed="tokens")

    def on_host(self) -> Kivi:
        return dataclasses.replace(self, packed="channels")

    def in_pages(self, page: int) -> PagedKivi:
        if self.axis == "channel" and page % self.group:
            raise IncompatibleMethod(
                f"slot `side_store` holds heads in pages of {page} slots, which groups of {self.group} tokens of keys "
                f"(slot `k`) do not divide; give page={-(-page // self.group) * self.group} to the method that divides "
                f"the heads, or kivi:group={math.gcd(page, self.group)}"
            )
        return PagedKivi(self, page)

    def num_quantized(self, n: Array) -> Array:
        """Of n i32[B] tokens of each row, how many are held as codes once their flush has happened."""
        if self.axis == "channel":
            return n // self.residual * self.residual
        return jnp.maximum(n - self.residual, 0)

    def num_committed(self, stored: Packed, n: Array) -> Array:
        """Codes stay codes: a row keeps those that it has, and the residual that fewer tokens would not have left."""
        if self.axis == "channel":
            return stored.num_quantized
        return jnp.where(stored.num_quantized > 0, stored.num_quantized + self.residual, 0)

    def encode(self, x: Array, pos: Array) -> Packed:
        self.check_head_dim(x.shape[3])
        n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        settled, slots = self.num_quantized(n), x.shape[2]
        recent = memory.take(_resized(x, max(slots, 1), 2), self._held(settled, n)[:, None])
        x = _resized(x, self.room(slots), 2)
        inside = (jnp.arange(x.shape[2], dtype=jnp.int32)[None] < settled[:, None])[:, None, :, None]
        codes, scale, lo = self.quantize(x)
        known = inside if self.axis == "token" else inside[:, :, :: self.group]

        def keep(a, ok):
            return jnp.where(ok, a, jnp.zeros((), a.dtype))

        return Packed(
            memory.pack(quant.pack(keep(codes, inside), self.bits, self._word_axis)),
            memory.pack(keep(scale, known)),
            memory.pack(keep(lo, known)),
            recent,
            settled,
            slots,
        )

    def filled(self, stored: Packed, num_tokens: int) -> Any:
        """Without the codes where the window still holds all tokens, and without the places that none has come to."""
        recent = stored.recent[:, :, :num_tokens]
        return recent if num_tokens < self.places else dataclasses.replace(stored, recent=recent)

    def append(self, stored: Packed, x: Array, at: Array) -> Packed:
        """Flushes what is due, then holds x [B K 0|1 H] at slot at i32[B 1] in full precision."""
        at = at[:, 0]
        due = at - stored.num_quantized >= self.places
        if self.axis == "token":
            stored = self._flush(stored, due)
        elif self.leaves <= self.room(stored.slots):  # a shorter cache stays in the window
            stored = lax.cond(due.any(), lambda s: self._flush(s, due), lambda s: s, stored)
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, (at % self.places)[:, None]))

    def _flush(self, stored: Packed, due: Array) -> Packed:
        at, count = stored.num_quantized, self.leaves
        leaving = stored.recent
        if count < self.places:
            leaving = memory.take(leaving, (at % self.places)[:, None, None])
        codes, scale, lo = self.quantize(leaving)
        groups = at // self.group if self.axis == "channel" else at
        return Packed(
            self._add_codes(stored.codes, codes, at, due),
            memory.append(stored.scale, scale, groups[:, None], due),
            memory.append(stored.lo, lo, groups[:, None], due),
            stored.recent,
            jnp.where(due, at + count, at),
            stored.slots,
        )

    def _add_codes(self, words: memory.Buffer, codes: Array, at: Array, due: Array) -> memory.Buffer:
        if self.packed == "channels":
            return memory.append(words, quant.pack(codes, self.bits, 3), at[:, None], due)
        slot = at[:, None] + jnp.arange(codes.shape[2], dtype=jnp.int32)[None]
        shift = (slot % self.per * self.bits).astype(jnp.uint32)[:, None, :, None]
        slot = jnp.where(due[:, None], slot // self.per, words.data.shape[2])
        return dataclasses.replace(words, data=memory.add(words.data, codes << shift, slot))

    def decode(self, stored: Packed) -> Array:
        """[B K S H] in the dtype that came in."""
        codes = quant.unpack(stored.codes.data, self.bits, self._word_axis)
        held = self.join(codes, memory.unpack(stored.scale), memory.unpack(stored.lo), quant.dequantize)
        S = stored.slots
        held = _resized(held, S, 2)
        slot = jnp.arange(S, dtype=jnp.int32)[None]
        newest = jnp.take(stored.recent, slot[0] % self.places, axis=2)
        return jnp.where((slot < stored.num_quantized[:, None])[:, None, :, None], held, newest)

    def gather(self, stored: Packed, idx: Array) -> Array:
        """Rows idx i32[B K n] -> [B K n H]; of codes on the host only theirs cross."""
        newest = memory.take(stored.recent, idx % self.places)
        settled = (idx < stored.num_quantized[:, None, None])[..., None]
        return jnp.where(settled, self.gather_codes(stored, idx), newest)

    def gather_codes(self, stored: Any, idx: Array) -> Array:
        """`gather` of tokens that are codes: stored has the arrays `codes`, `scale` and `lo` of `Packed`."""
        in_words = idx if self.packed == "channels" else idx // self.per
        codes = memory.gather_tokens(stored.codes, in_words)
        if self.packed == "channels":
            codes = quant.unpack(codes, self.bits, 3)
        else:
            codes = codes >> (idx % self.per * self.bits).astype(jnp.uint32)[..., None] & jnp.uint32(2**self.bits - 1)
        groups = idx // self.group if self.axis == "channel" else idx
        scale, lo = memory.gather_tokens(stored.scale, groups), memory.gather_tokens(stored.lo, groups)
        if self.axis == "token":
            scale, lo = (jnp.repeat(a, self.group, -1) for a in (scale, lo))
        return quant.dequantize(codes, scale, lo)

    def scores(self, q: Array, stored: Packed) -> Array:
        """Straight from the codes, a piece of heads and slots at a time."""
        S = stored.slots
        if self._has_kernel(q, stored):
            held = products.scores(q, self.codes(stored), bits=self.bits)
        else:
            piece = functools.partial(self._piece, stored)
            held = blockwise.scores(q, self.room(S), self._piece_size(stored), piece)
        newest = attention.scores(q.astype(jnp.float32), stored.recent.astype(jnp.float32))
        newest = jnp.tile(newest, -(-S // self.places))[..., :S]
        return jnp.where(self._is_settled(stored, S), _resized(held, S, 4), newest)

    def mix(self, p: Array, stored: Packed) -> Array:
        """Straight from the codes, a piece of heads and slots at a time."""
        held = _resized(jnp.where(self._is_settled(stored, stored.slots), p, 0.0), self.room(stored.slots), 4)
        if self._has_kernel(p, stored):
            out = products.mix(held, self.codes(stored), stored.recent.dtype, bits=self.bits)
        else:
            piece = functools.partial(self._piece, stored)
            out = blockwise.mix(held, stored.recent.shape[3], self._piece_size(stored), piece)
        slot = self._held(stored.num_quantized)
        newest = jnp.take_along_axis(p, jnp.minimum(slot, stored.slots - 1)[:, None, None, None], 4)
        newest = jnp.where((slot < stored.slots)[:, None, None, None], newest, 0.0)
        return out + attention.mix(newest, stored.recent.astype(jnp.float32))

    def codes(self, stored: Packed) -> Codes:
        """What kernels read."""
        return Codes(stored.codes.data, memory.unpack(stored.scale), memory.unpack(stored.lo))

    def _has_kernel(self, q: Array, stored: Packed) -> bool:
        """Whether a kernel multiplies queries or weights [B K G T ...] with the codes here."""
        readable = self.packed == "tokens" and jax.default_backend() == "gpu"
        return readable and products.fits(q, self.codes(stored))

    def _piece_size(self, stored: Packed) -> blockwise.Size:
        """In whole words and whole groups."""
        B, K, _, H = stored.recent.shape
        return blockwise.size_of(B * K, self.room(stored.slots), H, math.lcm(self.per, self.group))

    def _piece(self, stored: Packed, row: Array, rows: int, start: Array | int, count: int) -> Array:
        """Slots start..start+count-1 of some rows of B * K, dequantised, f32[rows count H]; finite if unsettled."""
        per_group = self.group if self.axis == "channel" else 1

        def of(buf, n):
            return memory.slice_tokens(buf, row, rows, start // n, count // n)

        codes = quant.unpack(
            of(stored.codes, self.per if self.packed == "tokens" else 1), self.bits, self._word_axis - 1
        )
        scale, lo = (of(x, per_group).astype(jnp.float32) for x in (stored.scale, stored.lo))
        return self.join(codes[None], scale[None], lo[None], lambda c, s, m: quant.number(c) * s + m)[0]

    def join(self, codes: Array, scale: Array, lo: Array, rule: Any) -> Array:
        """codes [B K S H] with the scale and lo of each group -> [B K S H]."""
        B, K, S, H = codes.shape
        if self.axis == "channel":
            split, a = (B, K, S // self.group, self.group, H), 3
        else:
            split, a = (B, K, S, H // self.group, self.group), 4
        return rule(codes.reshape(split), jnp.expand_dims(scale, a), jnp.expand_dims(lo, a)).reshape(codes.shape)

    def quantize(self, x: Array) -> tuple[Array, Array, Array]:
        """x [B K T H] -> codes [B K T H], scale and lo [B K T/group H] or [B K T H/group]."""
        B, K, T, H = x.shape
        x = refuse_gradient(x, f"codes of {type(self).__name__}")
        if self.axis == "token":
            codes, scale, lo = quant.quantize(x.reshape(B, K, T, -1, self.group), self.bits, self.one_bit)
            return codes.reshape(x.shape), scale[..., 0], lo[..., 0]
        groups = x.reshape(B, K, -1, self.group, H).swapaxes(3, 4)
        codes, scale, lo = quant.quantize(groups, self.bits, self.one_bit)
        return codes.swapaxes(3, 4).reshape(x.shape), scale[..., 0], lo[..., 0]

    def _held(self, settled: Array, n: Array | None = None) -> Array:
        """i32[B P]: the slot at each place of `recent`; clipped to the last of n where there is none yet."""
        place = jnp.arange(self.places, dtype=jnp.int32)[None]
        slot = settled[:, None] + (place - settled[:, None]) % self.places
        return slot if n is None else jnp.clip(slot, 0, jnp.maximum(n[:, None] - 1, 0))

    def _is_settled(self, stored: Packed, S: int) -> Array:
        slot = jnp.arange(S, dtype=jnp.int32)[None]
        return (slot < stored.num_quantized[:, None])[:, None, None, None]

    @property
    def _word_axis(self) -> int:
        return 2 if self.packed == "tokens" else 3

    def check_head_dim(self, H: int) -> None:
        """Raises KvjaxError for a head size that groups or words do not divide."""
        if self.axis == "token" and H % self.group:
            near = [g for g in range(1, H + 1) if H % g == 0]
            best = min(near, key=lambda g: abs(g - self.group))
            raise KvjaxError(
                f"group {self.group} does not divide the head size {H}; the nearest group that does is {best}"
            )
        if self.packed == "channels" and H % self.per:
            raise KvjaxError(
                f"{self.bits}-bit codes on the host are packed {self.per} channels to a word, which does not "
                f"divide the head size {H}; keep them on the device, or use more bits"
            )


@pytree
class Coded(PagedArrays):
    """Pages of tokens as codes, P pages of each shelf."""

    codes: memory.Buffer  # uint32 words [B K P W], those of a page one behind the other
    scale: memory.Buffer  # [B K P page*H/group], of the page's groups
    lo: memory.Buffer  # as scale


@dataclasses.dataclass(frozen=True)
class PagedKivi(Codec):
    """Pages of tokens that never change, in the groups of `rule` and without a residual: all of them are codes.

    A page belongs to one head and holds whole groups of tokens, so that no group mixes heads. The last group of a head
    is made of the tokens that it has.
    """

    rule: Kivi
    page: int

    def encode(self, x: Array, pos: Array) -> Coded:
        self.rule.on_device().check_head_dim(x.shape[3])
        real = jnp.broadcast_to(pos >= 0, x.shape[:3])[..., None]
        tokens = self.rule.group if self.rule.axis == "channel" else 1
        # An empty slot repeats the first token of its group: that changes no minimum and no maximum.
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        codes, scale, lo = self.rule.quantize(jnp.where(real, x, jnp.repeat(x[:, :, ::tokens], tokens, 2)))
        by_page = (*x.shape[:2], x.shape[2] // self.page, -1)
        codes, scale, lo = (a.reshape(by_page) for a in (jnp.where(real, codes, jnp.uint32(0)), scale, lo))
        codes = jnp.pad(codes, [(0, 0), (0, 0), (0, 0), (0, -codes.shape[3] % self.rule.per)])
        return Coded(memory.pack(quant.pack(codes, self.rule.bits, 3)), memory.pack(scale), memory.pack(lo))

    def decode(self, stored: Coded) -> Array:
        """[B K P*page H] in the dtype that came in; empty slots are finite."""
        scale, lo = memory.unpack(stored.scale), memory.unpack(stored.lo)
        B, K, P, n = scale.shape
        H = n * self.rule.group // self.page
        codes = quant.unpack(stored.codes.data, self.rule.bits, 3)[..., : self.page * H]
        groups = (B, K, P * self.page // self.rule.group, H)
        if self.rule.axis == "token":
            groups = (B, K, P * self.page, H // self.rule.group)
        codes = codes.reshape(B, K, P * self.page, H)
        return self.rule.join(codes, scale.reshape(groups), lo.reshape(groups), quant.dequantize)


def _resized(x: Array, n: int, axis: int) -> Array:
    """x with n entries along an axis: the first ones, or zeros behind it."""
    if n <= x.shape[axis]:
        return lax.slice_in_dim(x, 0, n, axis=axis)
    return jnp.pad(x, [(0, n - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])


def _multiples(n: int, of: int) -> str:
    low = max(n // of, 1) * of
    return str(low) if n <= of else f"{low} and {low + of}"
