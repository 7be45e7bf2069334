"""The tiers of a selection do not depend on how the prompt was run."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError, functional
from kvjax.cache.side_store.mixed_precision import ScoredTiers
from kvjax.methods.kvzip import ReplayAttention
from kvjax.testing import toy_model


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model()


@pytest.mark.parametrize("method", ("snapkv:budget=24,window=4,kernel=3 + mikv", "keydiff:budget=24 + mikv"))
def test_the_tiers_of_a_selection_are_those_of_a_prompt_in_chunks(method):
    """A prompt that is run whole brings softmax sums over evicted tokens too; they must not rank the kept ones."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 50, (2, 48)), jnp.int32)
    lengths, plan = jnp.asarray([48, 41], jnp.int32), functional.bind(kvjax.parse(method), make_model().config)
    caches = [
        functional.prefill(make_model().params, tokens, lengths, plan, make_model().config, 64, chunk=chunk)[1]
        for chunk in (None, 16)
    ]
    for whole, chunked in zip(*(cache.layers for cache in caches), strict=True):
        np.testing.assert_array_equal(whole.pos, chunked.pos)
    more = jnp.ones((2, 1), jnp.int32)
    whole, chunked = (functional.extend(make_model().params, more, cache)[0] for cache in caches)
    np.testing.assert_allclose(whole, chunked, atol=1e-5)


def test_a_scorer_that_needs_more_than_a_tier_gets_is_refused():
    with pytest.raises(KvjaxError, match="ReplayAttention needs more; use it in the component `select`"):
        ScoredTiers(ReplayAttention(), 0.4)
