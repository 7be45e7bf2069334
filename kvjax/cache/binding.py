"""Binds the components of a method to a layer, and resolves whatever depends on the layer's place among the others.

Bound layers that do the same are then equal values, and share their compiled programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from kvjax.cache.protocol import LayerSpec


@runtime_checkable
class LayerDependent(Protocol):
    """A component that differs between layers, or checks that it fits the layer."""

    def at(self, spec: LayerSpec) -> Any:
        """Returns the component that replaces it in one layer.

        That component keeps `spec.without_index` and, where it truly needs the layer's number, that number in a field
        of its own: if it kept the whole spec, every layer would have compiled programs of its own.
        """
        ...


def bind_component(component: Any, spec: LayerSpec) -> Any:
    """Resolves a component in one layer: by its method `at` if it is `LayerDependent`, else field by field."""
    if isinstance(component, LayerDependent) and not isinstance(component, type):
        return component.at(spec)
    return bind_fields(component, spec)


def bind_fields(component: Any, spec: LayerSpec) -> Any:
    """Resolves each field of a dataclass or element of a tuple; returns the value itself where none changes."""
    return map_fields(lambda x: bind_component(x, spec), component)


def map_fields(change: Callable[[Any], Any], component: Any) -> Any:
    """Changes each field of a dataclass or element of a tuple; returns the value itself where none changes."""
    if type(component) is tuple:
        parts = tuple(map(change, component))
        return parts if any(new is not old for new, old in zip(parts, component, strict=True)) else component
    if not dataclasses.is_dataclass(component) or isinstance(component, type):
        return component
    old = {f.name: getattr(component, f.name) for f in dataclasses.fields(component) if f.init}
    new = {name: change(value) for name, value in old.items()}
    changed = {name: value for name, value in new.items() if value is not old[name]}
    return dataclasses.replace(component, **changed) if changed else component
