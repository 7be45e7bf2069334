"""Functions that see `Auto` axes return arrays with types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.explicit_axes import accepts_explicit_axes, leave_explicit_mesh, spec_of
from kvjax.core.mesh import auto_mesh, foreign_axes
from kvjax.errors import KvjaxError
from kvjax.utils.mesh_context import outside_callers_mesh

P = PartitionSpec


def make_mesh(axis_type: AxisType = AxisType.Explicit, names: Any = ("a", "b"), shape: Any = (2, 2)) -> Mesh:
    return jax.make_mesh(shape, names, devices=jax.devices()[:4], axis_types=(axis_type,) * len(names))


def put(spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    return jax.device_put(jnp.arange(24.0).reshape(4, 6), NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("asked", "got"),
    [(P("a", "b"), P("a", "b")), (P("a", "a"), P("a", None)), (P(("a", "b"), "b"), P(("a", "b"), None))]
    + [(P(None, ("a", "b")), P(None, None)), (P(), P(None, None))],
)
def test_axes_that_stand_twice_or_do_not_divide_are_left_out(asked, got):
    @accepts_explicit_axes(lambda *_: asked)
    def double(x):
        assert not jax.typeof(x).sharding.mesh.explicit_axes
        return jax.lax.map(lambda row: 2 * row, x)

    x = put(P("a", "b"), make_mesh())
    for out in (double(x), jax.jit(double)(x)):
        np.testing.assert_array_equal(out, 2 * np.asarray(x))
        assert jax.typeof(out).sharding.spec == got


def test_without_explicit_axes_nothing_is_done():
    def fail(*_):
        raise AssertionError

    same = accepts_explicit_axes(fail)(lambda x: x)
    for x in (jnp.ones(3), put(P("a", "b"), make_mesh(AxisType.Auto)), np.ones(3), None):
        assert same(x) is x


def test_buffers_stay_where_they_are():
    x = put(P("a", "b"), make_mesh())
    (y,) = leave_explicit_mesh([x])
    assert y.sharding.mesh == make_mesh(AxisType.Auto) and spec_of(y) == spec_of(x)
    for before, after in zip(x.addressable_shards, y.addressable_shards, strict=True):
        assert before.data.unsafe_buffer_pointer() == after.data.unsafe_buffer_pointer()


def test_the_callers_mesh_is_left_and_found_again_and_kept_within_a_trace():
    mesh = make_mesh()

    @jax.jit
    def traced():
        with outside_callers_mesh():
            return jnp.array(jax.sharding.get_abstract_mesh().empty)

    with jax.set_mesh(mesh):
        with outside_callers_mesh():
            assert jax.sharding.get_abstract_mesh().empty
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
        assert not traced()


@pytest.mark.parametrize(
    ("shape", "names", "remedy"),
    [
        ((2, 2), ("x", "y"), r'"Mesh\(mesh.devices, '),
        ((2, 2, 1), ("x", "y", "z"), r"reshape\(2, 2\)"),
        ((2, 2, 1), ("data", "y", "model"), r"reshape\(2, 2\)"),
        ((1, 2, 2), ("data", "model", "sequence"), r"reshape\(1, 4\)"),
        ((4,), ("tp",), r"reshape\(1, 4\)"),
    ],
)
def test_axes_that_would_divide_nothing_are_refused(shape, names, remedy):
    mesh = make_mesh(names=names, shape=shape)
    with pytest.raises(KvjaxError, match=remedy.replace('"', "")):
        auto_mesh(mesh)
    assert foreign_axes(mesh)


@pytest.mark.parametrize("names", [("data", "model"), ("model", "data"), ("data", "sequence"), ("model",)])
def test_axes_of_one_device_may_have_any_name(names):
    mesh = make_mesh(names=names, shape=(4, 1)[: len(names)])
    assert auto_mesh(mesh) == make_mesh(AxisType.Auto, names, (4, 1)[: len(names)])


def test_a_mesh_of_devices_that_are_not_there_is_taken():
    mesh = AbstractMesh((1, 2), ("data", "model"))
    assert auto_mesh(mesh) is mesh


def test_what_is_no_mesh_is_refused():
    with pytest.raises(KvjaxError, match=r'"data" and "model", got \(2, 2\)'):
        auto_mesh((2, 2))
