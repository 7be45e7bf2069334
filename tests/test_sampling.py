"""Samplers against their definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention import NEG
from kvjax.core.types import KvjaxError
from kvjax.run.sampling import filtered, row_keys, sample, sampler

P = np.array([[0.5, 0.05, 0.25, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]])
LOGITS = jnp.asarray(np.log(P), jnp.float32)


def kept(**fields) -> list[list[int]]:
    out = filtered(sampler(temperature=1.0, **fields), LOGITS)
    return [np.flatnonzero(row > NEG / 2).tolist() for row in np.asarray(out)]


def test_greedy_takes_the_first_of_the_likeliest():
    assert sample(sampler(), LOGITS, row_keys(jax.random.key(0), 2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"top_k": 1}, [0], [0]),
        ({"top_k": 3}, [0, 2, 3], [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [0], [0, 1]),
        ({"top_p": 0.6}, [0, 2], [0, 1, 2]),
        ({"top_p": 0.76}, [0, 2, 3], [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0], [0]),
        ({"min_p": 0.4}, [0, 2], [0, 1, 2, 3, 4]),
        ({"min_p": 0.0}, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.6}, [0, 2], [0, 1]),
    ],
)
def test_filters_keep_what_they_define(fields, first, second):
    assert kept(**fields) == [first, second]


def test_draws_follow_the_probabilities():
    n = 20_000
    draw = jax.vmap(lambda k: sample(sampler(temperature=1.0), LOGITS[:1], k[None])[0])
    got = np.bincount(np.asarray(draw(jax.random.split(jax.random.key(0), n))), minlength=5) / n
    np.testing.assert_allclose(got, P[0], atol=5 * np.sqrt(0.25 / n))


def test_temperature_divides_the_logits():
    n = 20_000
    draw = jax.vmap(lambda k: sample(sampler(temperature=2.0), LOGITS[:1], k[None])[0])
    got = np.bincount(np.asarray(draw(jax.random.split(jax.random.key(1), n))), minlength=5) / n
    np.testing.assert_allclose(got, np.sqrt(P[0]) / np.sqrt(P[0]).sum(), atol=5 * np.sqrt(0.25 / n))


def test_a_rows_draw_does_not_depend_on_its_neighbours():
    s = sampler(temperature=1.0, top_p=0.9)
    keys = row_keys(jax.random.key(3), 2)
    assert sample(s, LOGITS, keys)[0] == sample(s, LOGITS[:1], row_keys(jax.random.key(3), 1))[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 1e-30 to 1e\\+30, got -1.0; 0 is greedy"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer from 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be a number from"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p must be a number from 0 to 1"),
        ({"temperature": 1e-40}, "temperature must be a number"),  # logits over it would be infinite
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_k": 2**31}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_p": 1e-40}, "top_p must be a number"),  # float32 has no such share
        ({"top_k": 5}, "need temperature > 0"),
    ],
)
def test_values_out_of_range_are_refused(fields, says):
    with pytest.raises(KvjaxError, match=says):
        sampler(**fields)
