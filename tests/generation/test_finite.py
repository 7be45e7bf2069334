"""Non-finite logits raise an error with a remedy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import kvjax
from kvjax import KvjaxError
from kvjax.testing import toy_model

IDS = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("path", "value"),
    [("layer_1/mlp/up/kernel", np.nan), ("embedding", np.inf)],
)
def test_the_prompt_is_named_and_what_helps(path, value):
    model = toy_model()
    flat = flatten_dict(model.params, sep="/")
    flat[path] = flat[path].at[(slice(None) if path == "embedding" else 0,) * flat[path].ndim].set(value)
    model = dataclasses.replace(model, params=unflatten_dict(flat, sep="/"))
    with pytest.raises(KvjaxError, match="after prompt 0 are not finite: .* float32 cannot hold; .*jax_debug_nans"):
        kvjax.generate(model, IDS, "full", max_new_tokens=2)


def test_sound_logits_pass():
    assert kvjax.generate(toy_model(), IDS, "full", max_new_tokens=2).tokens
