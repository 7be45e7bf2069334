"""Static fields survive JSON, and a foreign file neither imports nor calls anything."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from kvjax import functional
from kvjax.core import static_fields
from kvjax.core.types import Array, exportable, pytree
from kvjax.errors import KvjaxError
from kvjax.testing import toy_model
from tests.contract.cases import CASES


@dataclasses.dataclass(frozen=True)
class Setting:
    """A static field that a user defines."""

    sizes: tuple[int | float | None, ...]
    name: str = "a"


@exportable
class Pair(NamedTuple):
    """A part of a state that a user defines."""

    a: Array
    b: Array


@pytree
class State:
    """A state that a user defines."""

    pair: Pair
    setting: Setting = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass
class Mutable:
    """A class whose instances are no values."""

    x: int = 0


def test_plans_of_all_methods_come_back():
    config = toy_model(layers=1, width=8, head_dim=32, mlp_width=16).config
    for case in CASES:
        values = (functional.bind(case.small, config), config, 3, "float32")
        assert static_fields.loads(static_fields.dumps(values)) == values


def test_a_state_of_ones_own_is_exported():
    def double(state: State) -> State:
        return jax.tree.map(lambda x: x + x, state)

    state = State(Pair(jnp.ones(2), jnp.zeros(3)), Setting((1, 2.5, None)))
    exported = jax.export.export(jax.jit(double))(state)
    doubled = jax.export.deserialize(exported.serialize()).call(state)
    assert doubled.setting == state.setting
    assert (doubled.pair.a == 2).all()


def test_two_classes_of_one_name_are_told_apart():
    def make(static: int) -> Any:
        @pytree
        class Local:
            x: Array

        return Local(jnp.ones(static))

    first, second = make(1), make(2)
    exported = jax.export.export(jax.jit(lambda x, y: (x, y)))(first, second)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.in_tree == exported.in_tree


def setting_json(**changes: Any) -> bytes:
    fields = {"sizes": [1], "name": "b"}
    return json.dumps({"module": __name__, "class": "Setting", "fields": fields} | changes).encode()


def test_what_a_foreign_file_names_is_neither_imported_nor_called():
    assert static_fields.loads(setting_json()) == Setting((1,), "b")
    with pytest.raises(KvjaxError, match=r"antigravity\.Setting is needed .* not imported; import it first"):
        static_fields.loads(setting_json(module="antigravity"))
    for module, name in (("os", "system"), ("subprocess", "Popen"), (__name__, "Mutable"), (__name__, "pytest")):
        with pytest.raises(KvjaxError, match="neither a frozen dataclass nor a named tuple"):
            static_fields.loads(json.dumps({"module": module, "class": name, "fields": {}}).encode())
    for damaged in (b"\xff", b"{", b"{}", setting_json(fields={"other": 1}), setting_json(**{"class": "Nobody"})):
        with pytest.raises(KvjaxError, match="export it again"):
            static_fields.loads(damaged)


def test_a_value_that_is_no_plain_one_is_refused():
    for value in (Mutable(), Setting((jnp.ones(1),)), [1]):
        with pytest.raises(KvjaxError, match="neither a number, a text, a tuple, a frozen dataclass nor a named tuple"):
            static_fields.dumps(value)


def test_a_table_is_known_by_its_content_and_not_read():
    config = toy_model(layers=1, width=8, head_dim=32, mlp_width=16).config
    plan = functional.bind("matryoshka:keys=0.25,values=0.5", config)
    plan_json = static_fields.dumps(plan)
    assert static_fields.loads(plan_json.replace(b'"path": "shipped"', b'"path": "/nowhere"')) == plan
    assert static_fields.loads(re.sub(rb'"digest": "\w+"', b'"digest": "other"', plan_json)) != plan
