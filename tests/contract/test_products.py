"""Every way to select, hold, place and read together: shapes of all of them, exact limits of some."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.cache import parse
from kvjax.cache.hold.codecs import Host
from kvjax.cache.hold.groups import Kivi
from kvjax.cache.read.readers import TopV
from kvjax.cache.select.budgets import Uniform
from kvjax.methods.specache import Speculative
from tests.contract import layer
from tests.contract.composition import products
from tests.contract.test_contract import dense


def sized(text: str, budget: int, many: int, residual: int):
    """The method at a size that suits a few tokens."""
    method = dataclasses.replace(parse(text), device_layers=0)
    select = dataclasses.replace(method.select, budget=Uniform(budget), recent=min(method.select.recent, 3), sinks=0)
    if hasattr(select.scorer, "kernel"):
        select = dataclasses.replace(select, scorer=dataclasses.replace(select.scorer, queries=2, kernel=3), recent=2)

    def codec(c):
        inner = c.inner if isinstance(c, Host) else c
        if isinstance(inner, Kivi):
            inner = dataclasses.replace(inner, group=4, residual=residual)
        return Host(inner) if isinstance(c, Host) else inner

    read = method.read
    if isinstance(read, TopV):
        read = TopV(many)
    if isinstance(read, Speculative):
        low = [dataclasses.replace(c, group=4, residual=4) for c in (read.k, read.v)]
        read = dataclasses.replace(read, topk=many, k=low[0], v=low[1])
    return dataclasses.replace(method, select=select, k=codec(method.k), v=codec(method.v), read=read)


@pytest.mark.parametrize("text", products())
def test_a_step_keeps_shapes_dtypes_and_memory_kinds(text):
    method, d = sized(text, budget=5, many=3, residual=4), layer.data()
    types = []

    def both(fresh):
        state = layer.prefill(method, d)
        after = layer.extend(method)(state, fresh)[1]
        types.extend(jax.tree.map(jax.typeof, s) for s in (state, after))
        return after

    jax.make_jaxpr(both)(d.token(0))
    assert types[0] == types[1]


@pytest.mark.parametrize("text", [t for t in products() if t.startswith("snapkv + kvcrush")])
def test_at_its_limit_it_is_dense_attention(text):
    method, d = sized(text, budget=100, many=100, residual=24), layer.data()
    first = int("specache" in text)
    np.testing.assert_allclose(layer.run(method, d)[..., first:, :], dense(d, None)[..., first:, :], atol=5e-6)
