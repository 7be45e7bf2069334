"""The methods, cases and pairs that the battery runs over."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

from kvjax.cache.protocol import BoundLayer
from kvjax.errors import IncompatibleMethod
from kvjax.registry.loading import load_all
from kvjax.registry.strings import parse
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.method_case import LayerShape

REGISTRY = dict(sorted(load_all().items()))  # by name, whichever methods the tests have imported first
PAIRS = tuple(itertools.combinations(REGISTRY, 2))


def layer_shape(itemsize: int) -> LayerShape:
    """The battery's layer, as the formulas of bytes take it."""
    return LayerShape(layer.B, layer.K, layer.G, layer.H, layer.CAPACITY, layer.LONGEST, itemsize)


def split_case(method: str, lossless: bool = False) -> tuple[list[str], list[str]]:
    """Splits a method's first case into the method itself and the selection below it."""
    if method not in FIRST_CASES:
        raise KeyError(f"{method} has no line in CASES of tests/contract/cases.py")
    case = FIRST_CASES[method]
    components = [component.strip() for component in (case.lossless if lossless else case.small).split("+")]
    own = [component for component in components if component.split(":")[0] == method]
    return own, [component for component in components if component not in own]


@functools.cache
def _selects(component: str) -> bool:
    return parse(component).select is not None


def pair_string(a: str, b: str, lossless: bool = False) -> str:
    """The string of two methods, with a selection if one of them needs it and the other is none."""
    (own_a, below_a), (own_b, below_b) = (split_case(name, lossless) for name in (a, b))
    if any(map(_selects, own_a + own_b)):
        return " + ".join(own_a + own_b)
    return " + ".join((below_a or below_b) + own_a + own_b)


@functools.cache
def bind_pair(a: str, b: str) -> BoundLayer | IncompatibleMethod:
    """Composes two methods and binds them to the battery's layer, or returns the error that explains why not."""
    try:
        return layer.bind(pair_string(a, b))
    except IncompatibleMethod as error:
        return error


STEP_COMPONENTS = ("k", "v", "side_store", "read", "attend", "decode")


def component_classes(component: Any) -> set[type]:
    """The classes of a component and of the components that it is made of."""
    if not dataclasses.is_dataclass(component):
        return set()
    fields = (getattr(component, field.name) for field in dataclasses.fields(component))
    return {type(component)}.union(*map(component_classes, fields))


@functools.cache
def representative_methods() -> tuple[str, ...]:
    """Methods whose steps together run every class of component, for faults that are a component's and no method's."""
    methods, known = [], set()
    for name, case in FIRST_CASES.items():
        bound_layer = layer.bind(case.small)
        method = getattr(bound_layer, "method", bound_layer)
        components = (getattr(x, part, None) for x in (method, bound_layer) for part in STEP_COMPONENTS)
        new = {type(bound_layer)}.union(*map(component_classes, components)) - known
        if new:
            methods.append(name)
            known |= new
    return tuple(methods)


LINKED = ("a2ats", "adakv", "cake", "kcache", "kvzip", "minicache", "specache", "tidal_decode")
"""Methods whose layers pass values to each other or share a budget, which the battery's single layer does not show."""


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _parts(method: Any) -> dict[str, Any]:
    """The components of a method and of its selection, by their slots, without the scorer."""
    parts = _fields(method)
    selection = parts.pop("select", None)
    if selection is not None:
        parts |= _fields(selection)
        del parts["scorer"]
    return parts


def _slots_and_needs(name: str) -> set[Any]:
    """Lists what a method's first case asks of a decoder: its kind of layer, the slots that it fills, and its needs."""
    method, bound_layer = parse(FIRST_CASES[name].small), layer.bind(FIRST_CASES[name].small)
    slots = {(slot, dataclasses.is_dataclass(part) or bool(part)) for slot, part in _parts(method).items()}
    needs = {(need, value is None, bool(value)) for need, value in _fields(bound_layer.needs).items()}
    return {type(method), type(bound_layer)} | slots | needs


@functools.cache
def methods_of_distinct_parts() -> tuple[str, ...]:
    """Methods that together have every class of component but scorers, and ask a decoder for all that one may ask.

    For passes of whole prompts, where a scorer is one more function of arrays; its oracle says what it returns.
    """
    methods, known = [], set()
    for name, case in FIRST_CASES.items():
        new = _slots_and_needs(name).union(*map(component_classes, _parts(parse(case.small)).values()))
        if name in LINKED or new - known:
            methods.append(name)
            known |= new
    return tuple(methods)


@functools.cache
def methods_of_every_slot_and_need() -> tuple[str, ...]:
    """A few methods that together fill every slot, leave every slot empty, and have every need.

    For what surrounds a component and does not depend on its class: the decoder, the batch, the transformation.
    """
    asked = {name: _slots_and_needs(name) for name in FIRST_CASES}
    chosen = list(LINKED)
    missing = set().union(*asked.values()).difference(*(asked[name] for name in chosen))
    while missing:
        most = max(asked, key=lambda name: len(asked[name] & missing))
        chosen.append(most)
        missing -= asked[most]
    return tuple(sorted(chosen))
