"""On a mesh of four devices everything equals one device, and host state stays sharded on the host."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.errors import KvjaxError
from kvjax.models.sharding import param_shardings
from kvjax.testing import toy_model

SIZES = {"kv_heads": 4, "heads": 8, "vocab_size": 96}
PROMPTS = [[1, 2, 3, 4, 5], [7]]


def mesh(data: int, model: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def shard_model(model: kvjax.Model, m: Mesh) -> kvjax.Model:
    params = jax.device_put(model.params, param_shardings(model.config, m))
    return dataclasses.replace(model, params=params, mesh=m)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("method", ["full", "offload", "kcache:n=3"])
def test_sharded_equals_unsharded(shape, method):
    one, parsed = toy_model(**SIZES), kvjax.parse(method)
    four = shard_model(one, mesh(*shape))
    np.testing.assert_allclose(kvjax.logits(four, PROMPTS), kvjax.logits(one, PROMPTS), atol=1e-4)
    last, state = kvjax.prefill(four, PROMPTS, parsed)
    np.testing.assert_allclose(last, kvjax.prefill(one, PROMPTS, parsed)[0], atol=1e-4)
    a, b = (kvjax.generate(m, PROMPTS, parsed, max_new_tokens=5) for m in (four, one))
    assert a.tokens == b.tokens and a.bytes == b.bytes
    v = state.layers[-1].v.data
    assert v.sharding.memory_kind == ("device" if method == "full" else "pinned_host")
    assert v.addressable_shards[0].data.size == v.size // 4


def test_an_axis_that_does_not_divide_is_named():
    with pytest.raises(KvjaxError, match="axis K of size 2 does not divide over the 4 devices of mesh axis 'model'"):
        param_shardings(toy_model().config, mesh(1, 4))
