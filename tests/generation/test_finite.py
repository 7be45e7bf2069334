"""Logits that are no numbers end in an error that says where in the model they begin."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import kvjax
from kvjax import KvjaxError
from kvjax.generation import finite
from kvjax.testing import toy_model

IDS = [[1, 2, 3], [4, 5]]


def changed(model, path, value):
    """The model with one number of one parameter set."""
    flat = flatten_dict(model.params, sep="/")
    flat[path] = flat[path].at[(0,) * flat[path].ndim].set(value)
    return dataclasses.replace(model, params=unflatten_dict(flat, sep="/"))


def check(model):
    last, _ = kvjax.prefill(model, IDS, "full")
    finite.check_finite(model, IDS, last)


def test_sound_logits_cost_no_second_pass(monkeypatch):
    monkeypatch.setattr(finite, "_first", None)
    check(toy_model())


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("layer_1/mlp/up/kernel", np.nan, "in the parameter layer_1/mlp/up/kernel"),
        ("embedding", np.inf, "in the parameter embedding"),
        ("layer_1/mlp_norm/scale", 3e38, "those of layer_1, mlp_norm"),
        ("layer_2/attention/o/kernel", 3e38, "those of layer_2, attention"),
        ("layer_0/mlp/down/kernel", 3e38, "those of layer_0, mlp"),
        ("final_norm/scale", 3e38, "those of final_norm"),
    ],
)
def test_where_they_begin(path, value, where):
    model = changed(toy_model(), path, value)
    with pytest.raises(KvjaxError, match=f"prompt . makes the model compute what float32 .* {where}"):
        finite.check_finite(model, IDS, jnp.full((2, 97), np.nan))


def test_overflow_that_a_norm_turns_into_equal_logits_is_found():
    model = toy_model()
    flat = flatten_dict(model.params, sep="/") | {"embedding": jnp.full_like(model.params["embedding"], 3e38)}
    model = dataclasses.replace(model, params=unflatten_dict(flat, sep="/"))
    with pytest.raises(KvjaxError, match="the first such numbers are those of layer_0"):
        check(model)


def test_a_method_that_breaks_them_is_told_apart_and_equal_logits_are_allowed():
    model = toy_model()
    with pytest.raises(KvjaxError, match="after prompt 1 are not finite, although .* exact attention is"):
        finite.check_finite(model, IDS, jnp.zeros((2, 97)).at[1, 3].set(jnp.inf))
    finite.check_finite(model, IDS, jnp.zeros((2, 97)))
    zero = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
    check(zero)
