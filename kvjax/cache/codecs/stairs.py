"""Bits that fall with age: the newest tokens exact, then steps of codes that are narrower one by one."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.group_quant import Kivi
from kvjax.core import memory
from kvjax.core.types import Array, exportable, pytree
from kvjax.errors import KvjaxError


@exportable
class Step(NamedTuple):
    """Tokens as codes of one width."""

    codes: memory.Buffer  # uint32 words [B K n W], packed along channels
    scale: memory.Buffer  # [B K n/group H] per channel, or [B K n H/group] per token
    lo: memory.Buffer  # as scale


@pytree
class Stairs:
    """The newest tokens as they came, the others on steps; slot i at place i modulo `every`, on the last step at i."""

    recent: Array  # [B K every H]
    steps: tuple[Step, ...]  # from the newest to the oldest; all but the last hold `every` tokens
    num_quantized: Array  # i32[B], slots that are codes, a multiple of `every`
    slots: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class StaircaseQuantizer(Codec):
    """Staircase adaptive quantisation (Li 2024, arXiv 2410.18441), with KIVI's groups.

    bits: of the codes on each step, the newest first. Tokens stay as they came until `every` of them are there; then
    these become codes on the first step, at the start of the next call, what was there goes one step down, from its
    codes to fewer bits, and the last step takes what comes and keeps it. Of a prompt each token is coded once, from its
    full precision, on the step of its age. axis and group: as in `Kivi`.
    """

    bits: tuple[int, ...]
    group: int = 32
    axis: str = "channel"
    every: int = 128

    sequential_writes = True  # what a query sees in low bits depends on its own time
    supports_eviction = False  # a group of tokens shares its scale, and none of them can leave it

    def __post_init__(self):
        if not self.bits or any(a < b for a, b in zip(self.bits, self.bits[1:], strict=False)):
            raise KvjaxError(f"bits must fall from step to step, got {self.bits}; for example 8, 4, 2")
        for i in range(len(self.bits)):
            self._rule(i)

    def _rule(self, i: int) -> Kivi:
        """How the tokens on a step are coded."""
        return Kivi(self.bits[i], self.group, self.axis, self.every, packed="channels")

    @property
    def last(self) -> int:
        """The index of the last step."""
        return len(self.bits) - 1

    def num_quantized(self, n: Array) -> Array:
        return n // self.every * self.every

    def num_committed(self, stored: Stairs, n: Array) -> Array:
        return stored.num_quantized

    def encode(self, x: Array, pos: Array) -> Stairs:
        self._check_head_dim(x.shape[3])
        S = x.shape[2]
        n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        x = jnp.where((jnp.arange(S, dtype=jnp.int32)[None] < n[:, None])[:, None, :, None], x, jnp.zeros((), x.dtype))
        settled = self.num_quantized(n)

        def block(age: int) -> Array:
            """The `every` tokens that became codes so many blocks ago; the newest, which are none yet, at -1."""
            back = jnp.arange(-(age + 1) * self.every, -age * self.every, dtype=jnp.int32)
            return memory.take(x, jnp.clip(settled[:, None] + back[None], 0, S - 1)[:, None])

        oldest = max(S // self.every - self.last, 1) * self.every  # that the last step may have to hold
        grown = jnp.pad(x, [(0, 0), (0, 0), (0, max(oldest - S, 0)), (0, 0)])[:, :, :oldest]
        steps = [*(self._coded(i, block(i)) for i in range(self.last)), self._coded(self.last, grown)]
        return Stairs(block(-1), tuple(steps), settled, S)

    def _check_head_dim(self, H: int) -> None:
        """Raises KvjaxError for a head size that the groups, or a step's words, do not divide."""
        for i, bits in enumerate(self.bits):
            rule = self._rule(i)
            rule.on_device().check_head_dim(H)  # the groups alone
            if H % rule.per:
                fit = [b for b in quant.BITS if H % (32 // b) == 0]
                wider = f"use no step of fewer than {min(fit)} bits, or `kivi`" if fit else "use `kivi`"
                raise KvjaxError(
                    f"{bits}-bit codes on a step are packed {rule.per} channels to a word, which does not divide the "
                    f"head size {H}; {wider}, which packs along the tokens"
                )

    def used_part(self, stored: Stairs, num_tokens: int) -> Stairs:
        """Without the steps that no token has come down to, and without the empty places of the newest tokens."""
        reached = stored.steps[: num_tokens // self.every]
        return dataclasses.replace(stored, recent=stored.recent[:, :, :num_tokens], steps=reached)

    def append(self, stored: Stairs, x: Array, at: Array) -> Stairs:
        """Takes what is due a step down, then holds x [B K 0|1 H] at slot at i32[B 1] in full precision."""
        due = at[:, 0] - stored.num_quantized >= self.every
        stored = lax.cond(due.any(), lambda s: self._down(s, due), lambda s: s, stored)
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, at % self.every))

    def _down(self, stored: Stairs, due: Array) -> Stairs:
        """All blocks of the rows that are due bool[B] one step down."""
        moving, steps = stored.recent, []
        every = jnp.broadcast_to(jnp.arange(self.every, dtype=jnp.int32), (*moving.shape[:2], self.every))
        for i, step in enumerate(stored.steps):
            new = self._coded(i, moving)
            if i < self.last:
                moving = self._tokens(i, step, every)
                steps.append(self._onto(step, new, jnp.zeros_like(stored.num_quantized), due))
            else:  # its first tokens come when all other steps are full
                at = stored.num_quantized - self.last * self.every
                steps.append(self._onto(step, new, jnp.maximum(at, 0), due & (at >= 0)))
        settled = jnp.where(due, stored.num_quantized + self.every, stored.num_quantized)
        return dataclasses.replace(stored, steps=tuple(steps), num_quantized=settled)

    def _onto(self, step: Step, new: Step, at: Array, due: Array) -> Step:
        """A step with new tokens at the places from at i32[B] on, of the rows that are due bool[B]."""
        groups = at // self.group if self.axis == "channel" else at
        return Step(
            memory.append(step.codes, new.codes.data, at[:, None], due),
            memory.append(step.scale, new.scale.data, groups[:, None], due),
            memory.append(step.lo, new.lo.data, groups[:, None], due),
        )

    def decode(self, stored: Stairs) -> Array:
        """[B K S H] in the dtype that came in."""
        slot = jnp.arange(stored.slots, dtype=jnp.int32)[None, None]
        return self.gather(stored, jnp.broadcast_to(slot, (*stored.recent.shape[:2], stored.slots)))

    def gather(self, stored: Stairs, idx: Array) -> Array:
        """Rows idx i32[B K n] -> [B K n H]; of codes on the host only those that may be meant cross."""
        age = (stored.num_quantized[:, None, None] - 1 - idx) // self.every  # in blocks; below 0 for the newest tokens
        found = memory.take(stored.recent, idx % self.every)
        for i, step in enumerate(stored.steps):
            here, place = (age >= i, idx) if i == self.last else (age == i, idx % self.every)
            found = jnp.where(here[..., None], self._tokens(i, step, place), found)
        return found

    def _coded(self, i: int, x: Array) -> Step:
        """Tokens x [B K n H], whole groups, as a step holds them."""
        codes, scale, lo = self._rule(i).quantize(x)
        return Step(*map(memory.pack, (quant.pack(codes, self.bits[i], 3), scale, lo)))

    def _tokens(self, i: int, step: Step, place: Array) -> Array:
        """What a step holds at places i32[B K n], clipped -> [B K n H]."""
        return self._rule(i).gather_codes(step, place)
