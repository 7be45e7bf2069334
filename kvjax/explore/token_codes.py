"""The state of a token in two bytes: where it is held and what for, and how far key and value are off."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.cache.token_status import TokenStatus
from kvjax.core.types import Array
from kvjax.explore.recorder import Notes

HELD = 1  # the first byte, bit by bit: a query finds it; without this bit the token is gone, or yet to come
KEY_HOST, VALUE_HOST = 2, 4  # its key, its value come from host memory
REPRESENTS, MERGED = 8, 16  # it was chosen to stand for others; others were folded into it
UNTOLD = 32  # the method does not tell how it is held
LEAVES = 64  # this is the last step that finds it

LEVELS = 15  # the second byte: the key's level times 16, plus the value's; 0 is exact
LEAST, STEP = -9.0, 0.6  # level n is an error of 2 ** (LEAST + STEP * n), from 0.3 % to all of the row's length


def coded(fates: TokenStatus, notes: Notes, exact: float) -> tuple[Array, Array]:
    """Both bytes of the tokens of one row, u8[K C] each; errors up to `exact` are none.

    A number that is computed in two programs may be rounded in two ways, so the least difference is not held to be one.
    """
    untold = jnp.isnan(fates.key) | jnp.isnan(fates.value)
    bits = (
        (True, HELD),
        (fates.key_host, KEY_HOST),
        (fates.value_host, VALUE_HOST),
        (notes.represents, REPRESENTS),
        (notes.merged, MERGED),
        (untold, UNTOLD),
    )
    byte = sum(jnp.where(where, jnp.uint8(bit), jnp.uint8(0)) for where, bit in bits)
    key, value = (jnp.where(untold, 0, _level(x, exact)) for x in (fates.key, fates.value))
    both = (key * 16 + value).astype(jnp.uint8)
    byte, both = (jnp.where(fates.held, x, jnp.uint8(0))[0] for x in (byte, both))
    return byte, both


def _level(error: Array, exact: float) -> Array:
    level = jnp.round((jnp.log2(jnp.maximum(error, 1e-9)) - LEAST) / STEP)
    return jnp.where(error <= exact, 0, jnp.clip(level, 1, LEVELS)).astype(jnp.int32)


def error_of(level: int) -> float:
    """How far a row of this level is off, as a share of its length."""
    return 2.0 ** (LEAST + STEP * level) if level else 0.0


def found(before: tuple, after: tuple, newest: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of what the query of a step finds, by those before and after the step that brought token `newest`.

    What is held after the step is read as it is then: a codec takes what is due before anything is read. A token that
    was there before and is not after it leaves in this step; a policy makes it leave when the step has read it.
    """
    (held, off), (then, then_off) = before, after
    held = held.copy()
    held[..., newest] |= HELD  # a query always reads its own token
    leaves = (held & HELD).astype(bool) & ~(then & HELD).astype(bool)
    return np.where(leaves, held | LEAVES, then), np.where(leaves, off, then_off)
