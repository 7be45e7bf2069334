"""The state of a token in two bytes: how it is stored, and the error of its key and value."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kvjax.cache.token_status import TokenStatus
from kvjax.core.types import Array
from kvjax.explore.recorder import TokenRoles

HELD = 1  # the first byte, bit by bit: a query finds the token; without this bit it is gone, or yet to come
KEY_HOST, VALUE_HOST = 2, 4  # its key, its value come from host memory
REPRESENTS, MERGED = 8, 16  # it was chosen to stand for others; others were folded into it
UNTOLD = 32  # the method does not tell how it is stored
LEAVES = 64  # this is the last step that finds it

LEVELS = 15  # the second byte: the key's level times 16, plus the value's; 0 is exact
LEAST_LOG2, STEP_LOG2 = -9.0, 0.6  # level n is an error of 2 ** (LEAST_LOG2 + STEP_LOG2 * n), 0.3% to all of the length


def encode_status(status: TokenStatus, roles: TokenRoles, tolerance: float) -> tuple[Array, Array]:
    """Encodes the tokens of the first sequence.

    Args:
      status: of all tokens, by position.
      roles: of all tokens, by position.
      tolerance: errors up to this one count as exact: two programs may round the same number in two ways.

    Returns:
      (the first byte, the second byte), u8[K C] each; both are 0 for a token that no query finds.
    """
    errors = jnp.stack([status.key, status.value])
    untold = jnp.isnan(errors).any(0)
    bits = (
        (True, HELD),
        (status.key_host, KEY_HOST),
        (status.value_host, VALUE_HOST),
        (roles.represents, REPRESENTS),
        (roles.merged, MERGED),
        (untold, UNTOLD),
    )
    byte = sum(jnp.where(where, jnp.uint8(bit), jnp.uint8(0)) for where, bit in bits)
    level = jnp.round((jnp.log2(jnp.maximum(errors, 1e-9)) - LEAST_LOG2) / STEP_LOG2)
    key, value = jnp.where(untold[None] | (errors <= tolerance), 0, jnp.clip(level, 1, LEVELS)).astype(jnp.uint8)
    byte, levels = (jnp.where(status.held, x, jnp.uint8(0))[0] for x in (byte, key * 16 + value))
    return byte, levels


def codes_of_step(before: tuple, after: tuple, newest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the tokens that a step's query finds.

    A token that is stored after the step is read in that form: a codec encodes due tokens before anything is read. A
    token that was there before and is not after the step leaves in it: a policy evicts when the step has read.

    Args:
      before: both bytes before the step.
      after: both bytes after the step.
      newest: position of the step's token.
    """
    (status, error), (status_after, error_after) = before, after
    status = status.copy()
    status[..., newest] |= HELD  # a query always reads its own token
    leaves = (status & HELD).astype(bool) & ~(status_after & HELD).astype(bool)
    return np.where(leaves, status | LEAVES, status_after), np.where(leaves, error, error_after)
