"""The component `decode`: policies that evict tokens while decoding, and the steps that they have in common.

The order of slots means nothing under a policy: a new token goes into the first empty slot of each head, `pos` says
which token is where, and a token is evicted by setting its `pos` to -1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.components import Policy
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array
from kvjax.errors import KvjaxError


def check_policy_result(
    policy: Policy, member: str, result: Any, heads: tuple[int, ...], num_slots: int
) -> tuple[Array, Any]:
    """Returns what `init` or `after_token` of a policy returned; raises KvjaxError that names its author's mistake.

    Args:
      policy: the policy.
      member: "init" or "after_token".
      result: what it returned.
      heads: sequences and key/value heads, B and K.
      num_slots: of the state.
    """
    name = f"{type(policy).__name__}.{member}"
    first = "slots of the prompt i32[B 1|K n]" if member == "init" else "positions i32[B 1|K S]"
    is_pair = isinstance(result, tuple) and len(result) == 2
    pair: tuple[Any, Any] = result if is_pair else (None, None)
    chosen, policy_state = pair
    others = [x for x in jax.tree.leaves(policy_state) if not isinstance(x, jax.Array | np.ndarray)]
    B, K = heads
    if not is_pair:
        wanted = f"two things, {first} and the policy state (None if there is none)"
        returned = type(result).__name__
    elif (
        getattr(chosen, "ndim", 0) != 3
        or chosen.shape[0] != B
        or chosen.shape[1] not in (1, K)
        or not jnp.issubdtype(chosen.dtype, jnp.integer)
    ):
        wanted = f"{first}, here [{B}, 1 or {K}, ..]"
        returned = f"{chosen.dtype}{list(chosen.shape)}" if hasattr(chosen, "shape") else type(chosen).__name__
    elif member == "init" and chosen.shape[2] > num_slots:
        wanted = f"at most num_slots = {num_slots} slots of the prompt"
        returned = f"{chosen.shape[2]}"
    elif member != "init" and chosen.shape[2] != num_slots:
        wanted = f"the positions of all {num_slots} slots"
        returned = f"{chosen.shape[2]}"
    elif others:
        wanted = "a policy state of arrays, such as f32[B K S]"
        returned = f"one with a {type(others[0]).__name__}"
    else:
        return chosen, policy_state
    raise KvjaxError(f"{name} must return {wanted}, and returned {returned}")


def require_observation(observation: Observation | None, method: str, which: str) -> Observation:
    """Returns the observation; raises KvjaxError where the caller brought none."""
    if observation is None:
        raise KvjaxError(
            f"{method} needs {which} of the prompt in `observation`, got None; collect them in the prefill"
        )
    return observation


def sort_newest_first(score: Array, pos: Array) -> Array:
    """Sorts slots i32[B K S] from the highest score to the lowest; of equals the newer first, empty slots last."""
    # Three keys at once: `top_k` would give equal scores to the lower slot, and slots are in no order.
    slot = jnp.broadcast_to(jnp.arange(pos.shape[2], dtype=jnp.int32)[None, None], pos.shape)
    return lax.sort(((pos < 0).astype(jnp.int32), -score, -pos, slot), dimension=2, num_keys=3)[3]


def top_slots(score: Array, pos: Array, count: int) -> Array:
    """The slots i32[B K n] of the `count` tokens of highest score f32[B K S], -1 in unused places."""
    pos = jnp.broadcast_to(pos, score.shape)
    order = sort_newest_first(score, pos)[:, :, :count]
    return jnp.where(jnp.take_along_axis(pos, order, 2) >= 0, order, -1)


def evict_lowest(rank: Array, pos: Array, may_leave: Array, real: Array) -> Array:
    """Evicts the token of the lowest rank from each full head, of equals the oldest.

    Args:
      rank: f32[B K S].
      pos: i32[B K S].
      may_leave: bool[B K S], tokens that may be evicted.
      real: bool[B 1 1], sequences that took a token; others, and heads with an empty slot, evict nothing.

    Returns:
      `pos` with -1 for the evicted tokens.
    """
    rank = jnp.where(may_leave, rank, jnp.inf)
    is_lowest = may_leave & (rank == rank.min(2, keepdims=True))
    oldest = jnp.where(is_lowest, pos, jnp.iinfo(jnp.int32).max).min(2, keepdims=True)
    # A head with an empty slot has room for the next token already.
    is_full = (pos >= 0).all(2, keepdims=True) & real
    return jnp.where(is_full & is_lowest & (pos == oldest), -1, pos)


def policy_state_at(statistics: Any, chosen: Array, slots: int) -> Any:
    """Takes a prompt's statistics of chosen tokens into the slots of the policy's state.

    Args:
      statistics: an array [B #K T ..] of any dtype, with any further axes, or a pytree of such arrays.
      chosen: i32[B #K n], the tokens that stay, -1 where unused.
      slots: of the state, S.

    Returns:
      The statistics [B #K S ..]: those of token `chosen[.., i]` in slot i, and 0 in the other slots.
    """

    if chosen.shape[2] > slots:
        raise KvjaxError(f"{chosen.shape[2]} tokens are chosen for {slots} slots; choose at most `num_slots` of them")

    def take(x: Array) -> Array:
        if jnp.ndim(x) < 3:
            raise KvjaxError(
                f"statistics of a prompt's tokens are arrays [B K T ..], K may be 1, got the shape {jnp.shape(x)}; "
                "keep numbers that belong to no token apart from them"
            )
        index = chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 3))
        kept = jnp.take_along_axis(x, jnp.maximum(index, 0), 2)
        kept = jnp.where(index >= 0, kept, jnp.zeros((), x.dtype))
        return jnp.pad(kept, [(0, 0), (0, 0), (0, slots - chosen.shape[2]), *[(0, 0)] * (x.ndim - 3)])

    return jax.tree.map(take, statistics)
