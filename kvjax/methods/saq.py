"""SAQ, staircase adaptive quantization: the bits of a token fall step by step with its age."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv


@kv.exportable
class Level(NamedTuple):
    """The tokens of one level of the staircase, as codes of one width."""

    codes: kv.memory.Buffer  # uint32 words [B K n W], packed along channels
    scale: kv.memory.Buffer  # [B K n/group H] per channel, or [B K n H/group] per token
    lo: kv.memory.Buffer  # as scale


@kv.pytree
class StaircaseState:
    """The keys or values of a `StaircaseQuantizer`: one block of exact tokens, and levels of codes.

    Slot i is at index i modulo `every` of `recent` and of all levels but the last; on the last level it is at index i.
    """

    recent: kv.Array  # [B K every H], in full precision
    levels: tuple[Level, ...]  # newest first; all but the last hold one block of `every` tokens
    num_quantized: kv.Array  # i32[B], slots that are codes, a multiple of `every`
    num_slots: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class StaircaseQuantizer(kv.Codec):
    """Quantizes blocks of `every` tokens in steps: every further block takes the older ones one level down.

    The newest tokens are exact until there are `every` of them. At the start of the next call they become codes on the
    first level; the block that was there is coded again, from its codes, in the fewer bits of the next level, and so
    on. The last level keeps what it gets. A prompt's tokens are coded once, from full precision, on the level of their
    age.

    The fields are the arguments of `saq`, and `axis` as in `Kivi`: "channel" for keys, "token" for values.
    """

    bits: tuple[int, ...]
    group: int = 32
    axis: str = "channel"
    every: int = 128

    sequential_writes = True  # in how many bits a query sees a token depends on when it asks

    def __post_init__(self):
        if not self.bits or any(newer < older for newer, older in zip(self.bits, self.bits[1:], strict=False)):
            raise kv.KvjaxError(f"bits must fall from step to step, got {self.bits}; for example 8, 4, 2")
        for level in range(len(self.bits)):
            self._group_codec(level)  # which checks the bits and the group

    def _group_codec(self, level: int) -> kv.Kivi:
        return kv.Kivi(self.bits[level], self.group, self.axis, self.every, packed="channels")

    def num_committed(self, stored: StaircaseState, n: kv.Array) -> kv.Array:
        return stored.num_quantized

    def encode(self, x: kv.Array, pos: kv.Array) -> StaircaseState:
        self._check_head_dim(x.shape[3])
        num_slots, last = x.shape[2], len(self.bits) - 1
        length = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        is_real = jnp.arange(num_slots, dtype=jnp.int32)[None] < length[:, None]
        x = jnp.where(is_real[:, None, :, None], x, jnp.zeros((), x.dtype))
        num_quantized = length // self.every * self.every

        def block_of_age(age: int) -> kv.Array:
            """The `every` tokens that became codes `age` blocks ago; at -1 the newest, which are exact."""
            back = jnp.arange(-(age + 1) * self.every, -age * self.every, dtype=jnp.int32)
            token = num_quantized[:, None] + back[None]
            return kv.memory.take(x, jnp.clip(token, 0, num_slots - 1)[:, None])

        # The last level has room for all whole blocks that the cache can hold, less those on the levels above. It is
        # filled with the whole prompt from slot 0: what is younger is never read there, and is overwritten in time.
        last_level_tokens = max(num_slots // self.every - last, 1) * self.every
        padding = [(0, 0), (0, 0), (0, max(last_level_tokens - num_slots, 0)), (0, 0)]
        oldest = jnp.pad(x, padding)[:, :, :last_level_tokens]
        levels = [self._quantize(level, block_of_age(level)) for level in range(last)]
        return StaircaseState(block_of_age(-1), (*levels, self._quantize(last, oldest)), num_quantized, num_slots)

    def _check_head_dim(self, H: int) -> None:
        for level, bits in enumerate(self.bits):
            codec = self._group_codec(level)
            codec.on_device().check_head_dim(H)  # the groups alone
            if H % codec.per:
                fit = [b for b in kv.bit_packing.BITS if H % (32 // b) == 0]
                wider = f"use no step of fewer than {min(fit)} bits, or `kivi`" if fit else "use `kivi`"
                raise kv.KvjaxError(
                    f"{bits}-bit codes on a step are packed {codec.per} channels to a word, which does not divide the "
                    f"head size {H}; {wider}, which packs along the tokens"
                )

    def used_part(self, stored: StaircaseState, num_tokens: int) -> StaircaseState:
        # A short text has not reached the lower levels, nor all places of the exact block.
        reached = stored.levels[: num_tokens // self.every]
        return dataclasses.replace(stored, recent=stored.recent[:, :, :num_tokens], levels=reached)

    def append(self, stored: StaircaseState, x: kv.Array, at: kv.Array) -> StaircaseState:
        """Moves down the blocks that are due, then stores x [B K 0|1 H] exactly, at slot at i32[B 1]."""
        is_due = at[:, 0] - stored.num_quantized >= self.every
        # A block is complete once in `every` calls, and most calls skip the work by the condition.
        stored = lax.cond(is_due.any(), lambda s: self._move_down(s, is_due), lambda s: s, stored)
        return dataclasses.replace(stored, recent=kv.memory.put(stored.recent, x, at % self.every))

    def _move_down(self, stored: StaircaseState, is_due: kv.Array) -> StaircaseState:
        """Moves all blocks of the sequences that are due, bool[B], down by one level."""
        moving, levels, last = stored.recent, [], len(self.bits) - 1
        whole_block = jnp.arange(self.every, dtype=jnp.int32)
        whole_block = jnp.broadcast_to(whole_block, (*moving.shape[:2], self.every))
        for i, level in enumerate(stored.levels):
            incoming = self._quantize(i, moving)
            if i < last:
                moving = self._group_codec(i).gather_codes(level, whole_block)
                start, is_written = jnp.zeros_like(stored.num_quantized), is_due
            else:
                # The last level gets its first block only when each level above has one.
                start = stored.num_quantized - last * self.every
                start, is_written = jnp.maximum(start, 0), is_due & (start >= 0)
            start_group = start // self.group if self.axis == "channel" else start
            codes = kv.memory.append(level.codes, incoming.codes.data, start[:, None], is_written)
            scale = kv.memory.append(level.scale, incoming.scale.data, start_group[:, None], is_written)
            lo = kv.memory.append(level.lo, incoming.lo.data, start_group[:, None], is_written)
            levels.append(Level(codes, scale, lo))
        num_quantized = jnp.where(is_due, stored.num_quantized + self.every, stored.num_quantized)
        return dataclasses.replace(stored, levels=tuple(levels), num_quantized=num_quantized)

    def decode(self, stored: StaircaseState) -> kv.Array:
        slots = jnp.arange(stored.num_slots, dtype=jnp.int32)[None, None]
        return self.gather(stored, jnp.broadcast_to(slots, (*stored.recent.shape[:2], stored.num_slots)))

    def gather(self, stored: StaircaseState, idx: kv.Array) -> kv.Array:
        age = (stored.num_quantized[:, None, None] - 1 - idx) // self.every  # in blocks; negative for exact tokens
        x = kv.memory.take(stored.recent, idx % self.every)
        for i, level in enumerate(stored.levels):
            is_last = i == len(self.bits) - 1
            is_here, index = (age >= i, idx) if is_last else (age == i, idx % self.every)
            x = jnp.where(is_here[..., None], self._group_codec(i).gather_codes(level, index), x)
        return x

    def _quantize(self, level: int, x: kv.Array) -> Level:
        """Codes tokens [B K n H], whole groups, in the bits of a level."""
        codes, scale, lo = self._group_codec(level).quantize(x)
        return Level(*map(kv.memory.pack, (kv.bit_packing.pack(codes, self.bits[level], 3), scale, lo)))


@kv.register_method(example="saq:every=32", family="quantization by channel and group")
def saq(bits: str = "8-4-2", group: int = 32, every: int = 128) -> kv.Method:
    """Keeps the newest tokens exact, and stores older ones in fewer bits with every block of tokens that follows them.

    Attention in the prompt is exact; so is all of it while prompt and answer together are fewer than `every` tokens.

    Formula:
      a token of the a-th newest full block of `every` tokens has bits[min(a, last)] bits, coded from the codes that it
      had before; groups, scales and minima as in KIVI

    Differs:
      The paper's listing was read for keys; unverified are its number of bits, that values move in the same blocks, and
      its prompt: here each token is coded once, on the step of its age. The last step's tokens are not coded again,
      where the listing does so with every block, to the same bits.

    Args:
      bits: bits of the codes on each step, newest first; each but the last holds `every` tokens.
      group: tokens of a channel (keys) or channels of a token (values) that share a scale and a minimum (KIVI: 32).
      every: tokens that stay exact at most, and move together (KIVI: 128).

    Reference:
      The Nature of Mathematical Modeling and Probabilistic Optimization Engineering in Generative AI, Li 2024, arXiv
      2410.18441, SAQ; groups: KIVI, arXiv 2402.02750
    """
    try:
        steps = tuple(int(b) for b in bits.split("-"))
    except ValueError:
        raise kv.KvjaxError(f"bits must be numbers with '-' between them, got {bits!r}; for example '8-4-2'") from None
    return kv.Method(
        k=StaircaseQuantizer(steps, group, "channel", every), v=StaircaseQuantizer(steps, group, "token", every)
    )
