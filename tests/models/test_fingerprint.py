"""The fingerprint of a model's weights: every number counts, and where it lies does not."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kvjax.models import fingerprint as fingerprints
from kvjax.models.model import Model
from kvjax.models.sharding import param_shardings
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)


@functools.cache
def make_model() -> Model:
    return toy_model(layers=2, vocab_size=96)


def changed(path: str, change) -> Model:
    """The toy model with one parameter changed."""

    def visit(at, x):
        return change(x) if jax.tree_util.keystr(at, simple=True, separator="/") == path else x

    return dataclasses.replace(make_model(), params=jax.tree_util.tree_map_with_path(visit, make_model().params))


UP = "layer_1/mlp/up/kernel"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("embedding", lambda x: x.at[5:].multiply(1.5)),  # a fine-tuned model
        ("embedding", lambda x: x.at[-1, -1].add(1e-3)),
        ("embedding", lambda x: -x),
        ("embedding", lambda x: 2 * x),
        ("embedding", lambda x: x[::-1]),
        ("embedding", lambda x: x.at[jnp.array([7, 8])].set(x[jnp.array([8, 7])])),
        (UP, lambda x: x[:, ::-1]),
        (UP, lambda x: x.at[-1, -1].set(jnp.nextafter(x[-1, -1], 1))),
        (UP, lambda x: x.at[9, 9].multiply(-1).at[11, 7].multiply(-1)),
        (UP, lambda x: x.reshape(x.shape[::-1])),
        (UP, lambda x: x.astype(jnp.bfloat16)),
        ("final_norm/scale", lambda x: x.at[-1].add(0.5)),
    ],
)
def test_any_change_of_any_number_shows(path, change):
    assert changed(path, change).fingerprint != make_model().fingerprint


def test_parameters_that_change_places_show():
    params = dict(make_model().params)
    params["layer_0"], params["layer_1"] = params["layer_1"], params["layer_0"]
    assert dataclasses.replace(make_model(), params=params).fingerprint != make_model().fingerprint
    renamed = {"other" if name == "final_norm" else name: x for name, x in make_model().params.items()}
    assert fingerprints.fingerprint(renamed) != make_model().fingerprint


def test_equal_numbers_are_equal_wherever_they_lie():
    assert toy_model(layers=2, vocab_size=96).fingerprint == make_model().fingerprint
    in_numpy = jax.tree.map(np.asarray, make_model().params)
    assert dataclasses.replace(make_model(), params=in_numpy).fingerprint == make_model().fingerprint
    for shape in ((2, 2), (4, 1)):
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model"))
        params = jax.device_put(make_model().params, param_shardings(make_model().config, mesh))
        assert dataclasses.replace(make_model(), params=params, mesh=mesh).fingerprint == make_model().fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (257, 129)])
def test_a_device_and_a_cpu_add_up_alike(dtype, shape):
    """An accelerator adds up where the numbers lie, and a CPU without a compiled program."""
    x = jnp.asarray(RNG.normal(size=shape) * 50).astype(dtype)
    assert int(fingerprints._sum_on_device(x)) == int(fingerprints._sum_in_memory(x))


def test_shards_add_up_to_the_whole():
    x = jnp.asarray(RNG.normal(size=(8, 6, 4)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    for spec in (jax.P("x", "y"), jax.P(None, "y", "x"), jax.P(("x", "y"))):
        spread = jax.device_put(x, jax.NamedSharding(mesh, spec))
        assert int(fingerprints._sum_on_device(spread)) == int(fingerprints._sum_in_memory(x))


def test_it_is_computed_once_and_again_where_the_arrays_are_others(monkeypatch):
    model, calls = toy_model(layers=1), []

    def count(params):
        calls.append(params)
        return fingerprints.fingerprint(params)

    monkeypatch.setattr("kvjax.models.model.fingerprint", count)
    first = model.fingerprint
    assert model.fingerprint == first and len(calls) == 1
    other = dataclasses.replace(model, params=jax.tree.map(lambda x: x * 2, model.params))
    assert other.fingerprint != first
    named = dataclasses.replace(model, name="other")
    assert named.fingerprint == first
    assert copy.copy(model).fingerprint == first
    model.params["embedding"] = model.params["embedding"] * 2  # a tree of parameters is a dict, which can be changed
    assert model.fingerprint != first
    del model.params["embedding"]
    assert model.fingerprint != first


def test_numpy_parameters_that_are_changed_in_place_show():
    model = dataclasses.replace(make_model(), params=jax.tree.map(np.array, make_model().params))
    assert model.fingerprint == make_model().fingerprint
    model.params["embedding"][60, 3] += 1
    assert model.fingerprint != make_model().fingerprint
