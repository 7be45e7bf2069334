"""Seeds: all 64 bits count, and anything else is refused by name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError, random_model
from kvjax.core.random import key_from_seed
from kvjax.testing import toy_model


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_small_seeds_are_those_of_jax(seed):
    assert (jax.random.key_data(key_from_seed(seed)) == jax.random.key_data(jax.random.key(seed))).all()


def test_large_seeds_differ():
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1)
    assert len({tuple(jax.random.key_data(key_from_seed(s)).tolist()) for s in seeds}) == len(seeds)
    assert (jax.random.key_data(key_from_seed(np.int64(7))) == jax.random.key_data(key_from_seed(7))).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, 1.5, "1", None, True])
def test_other_seeds_are_refused(seed):
    with pytest.raises(KvjaxError, match="seed must be an integer from 0 to"):
        key_from_seed(seed)


def test_the_calls_that_take_seeds_use_them():
    with pytest.raises(KvjaxError, match="seed must be an integer"):
        random_model(toy_model().config, seed=-1)
    with pytest.raises(KvjaxError, match="seed must be an integer"):
        kvjax.speculative.speculate(
            toy_model(layers=1), [[1, 2]], "full", max_new_tokens=2, num_draft_tokens=1, seed=2**64
        )
