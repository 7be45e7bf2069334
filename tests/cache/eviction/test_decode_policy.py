"""Statistics of a prompt's tokens go into the slots that a policy gives these tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.eviction.decode_policy import policy_state_at
from kvjax.errors import KvjaxError

B, K, T, S = 2, 3, 5, 4
RNG = np.random.default_rng(0)
OF_HEADS = np.array([[[4, 0, -1], [1, 2, 3], [-1, -1, -1]], [[0, 1, 2], [3, -1, 0], [2, 4, -1]]], np.int32)
OF_ALL = np.array([[[3, 1, -1]], [[0, -1, -1]]], np.int32)
take = jax.jit(policy_state_at, static_argnums=2)


@pytest.mark.parametrize("chosen", [OF_HEADS, OF_ALL], ids=["by head", "for all heads"])
@pytest.mark.parametrize("shape", [(K, T), (1, T), (K, T, 6), (K, T, 2, 3), (1, T, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool, jnp.bfloat16], ids=lambda dtype: jnp.dtype(dtype).name)
def test_statistics_of_any_axes_follow_their_tokens(shape, chosen, dtype):
    statistics = RNG.integers(1, 99, (B, *shape)).astype(dtype)
    heads = max(shape[0], chosen.shape[1])
    every, chosen_by_all = (np.broadcast_to(x, (B, heads, *x.shape[2:])) for x in (statistics, chosen))
    want = np.zeros((B, heads, S, *shape[2:]), dtype)
    for b, k, i in np.ndindex(chosen_by_all.shape):
        if chosen_by_all[b, k, i] >= 0:
            want[b, k, i] = every[b, k, chosen_by_all[b, k, i]]
    got = take(jnp.asarray(statistics), chosen, S)
    assert got.dtype == statistics.dtype
    np.testing.assert_array_equal(got, want)


def test_statistics_may_be_a_pytree():
    x, y = RNG.normal(size=(B, K, T)), RNG.normal(size=(B, K, T, 2))
    got = take({"x": x, "y": (y, None)}, OF_HEADS, S)
    np.testing.assert_array_equal(got["x"], take(x, OF_HEADS, S))
    np.testing.assert_array_equal(got["y"][0], take(y, OF_HEADS, S))


@pytest.mark.parametrize("shape", [(), (B,), (B, T)])
def test_numbers_that_belong_to_no_token_are_named(shape):
    with pytest.raises(KvjaxError, match=rf"\[B K T \.\.\].*got the shape \({', '.join(map(str, shape))}"):
        policy_state_at(jnp.zeros(shape), OF_HEADS, S)


def test_more_tokens_than_slots_are_refused():
    with pytest.raises(KvjaxError, match="3 tokens are chosen for 2 slots; choose at most `num_slots`"):
        policy_state_at(jnp.zeros((B, K, T)), OF_HEADS, 2)
