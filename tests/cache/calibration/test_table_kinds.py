"""Kinds of tables: every kind ships example tables, and a new kind is one class."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_kinds
from kvjax.cache.calibration.table_file import SHIPPED_TABLES, TableFile
from kvjax.cache.calibration.table_kinds import TABLE_KINDS, TableKind, register_table_kind
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.registry.loading import load_all
from tests.contract import layer, test_devices

load_all()


@pytest.mark.parametrize("kind", sorted(TABLE_KINDS))
def test_a_table_ships_for_the_tests_layers_and_for_the_shipped_model(kind):
    """`python -m experiments.tables.build` makes these tables."""
    devices = dataclasses.replace(layer.spec(), num_kv_heads=test_devices.K)
    for spec in (layer.spec(), devices, *specs(kvjax.load("testbed").config)):
        assert TableFile("shipped", kind).layer_arrays(spec) == {}  # it is found, and no array was asked for


def test_no_table_ships_without_its_kind():
    assert {folder.name for folder in SHIPPED_TABLES.iterdir()} == set(TABLE_KINDS)


def test_a_kind_of_learned_arrays_is_one_class(monkeypatch):
    monkeypatch.setattr(table_kinds, "TABLE_KINDS", {})

    @register_table_kind("gates")
    class Gates(TableKind):
        def example(self, spec, rng):
            return {"gates": rng.random(spec.num_kv_heads)}

    arrays = table_kinds.TABLE_KINDS["gates"].example(layer.spec(), np.random.default_rng(0))
    assert arrays["gates"].shape == (layer.K,)
    with pytest.raises(KvjaxError, match="of gates holds what no statistics of a text give; train it"):
        table_kinds.TABLE_KINDS["gates"].count(None, None, layer.spec())
    with pytest.raises(KvjaxError, match="no table of gates can be read from 'nowhere'"):
        Gates.table_file("nowhere")
