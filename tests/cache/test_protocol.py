"""The layer interface: a layer has an optional ability if it has the members."""

import dataclasses
from typing import Any

import pytest

import kvjax
from kvjax.cache import protocol
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.protocol import EditableLayer, KVMethod, LayerSpec, RewindableLayer, SizedLayer, Traits
from kvjax.cache.shared_prefix import SharedPrefixLayer, SharedPrefixMethod
from kvjax.core.rope import Rope
from kvjax.errors import IncompatibleMethod

SPEC = LayerSpec(0, 1, 2, 2, 8, Rope(8, 10000.0))
ABILITIES = [
    value
    for name, value in vars(protocol).items()
    if name.endswith("Layer") and getattr(value, "_is_runtime_protocol", False)
]


class Bare:
    """A bound layer from outside kvjax, without any optional ability."""

    def bind(self, spec: LayerSpec) -> Any:
        return self

    traits = Traits()


class Rewindable(Bare):
    """The same with the members of one ability, but without inheriting from its protocol."""

    def max_rollback(self, state: Any) -> Any:
        return state

    def crop(self, state: Any, count: Any) -> Any:
        return state - count


def test_an_ability_is_its_members_alone():
    assert isinstance(Rewindable(), RewindableLayer) and not isinstance(Rewindable(), EditableLayer)
    assert not any(isinstance(Bare(), ability) for ability in ABILITIES)
    assert isinstance(Bare(), KVMethod)


def test_a_layer_of_components_offers_all_but_what_shared_states_need():
    layer = kvjax.parse("full").bind(SPEC)
    assert isinstance(layer, MethodLayer)
    assert [ability.__name__ for ability in ABILITIES if not isinstance(layer, ability)] == ["BatchedLayer"]
    shared = SharedPrefixMethod(kvjax.parse("full"), kvjax.parse("full")).bind(SPEC)
    assert isinstance(shared, protocol.BatchedLayer) and isinstance(shared, SizedLayer)


def test_what_cannot_be_edited_or_shared_is_told_by_name():
    with pytest.raises(IncompatibleMethod, match="Bare cannot be read together with other tokens"):
        SharedPrefixMethod(Bare(), kvjax.parse("full")).bind(SPEC)
    layer = kvjax.parse("full").bind(SPEC)
    with pytest.raises(IncompatibleMethod, match="Bare does not say how its cache could give back tokens"):
        dataclasses.replace(SharedPrefixLayer(layer, layer), own=Bare()).decoded_block(type("State", (), {"own": None}))
