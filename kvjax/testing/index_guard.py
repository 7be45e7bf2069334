"""A guard that finds bound layers which use the layer index of their spec, although it is None."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, Traits


class IndexRead(Exception):
    """A bound layer has used the index of its spec, which is None."""


def _raise_index_read(*_: Any) -> Any:
    raise IndexRead


# It stands for the missing index, and raises where None would silently be unequal or false.
_NO_INDEX: Any = type("_NoIndex", (), dict.fromkeys(("__eq__", "__hash__", "__bool__"), _raise_index_read))()


class _GuardedSpec(LayerSpec):
    """The spec of a bound layer, with `_NO_INDEX` in the place of None; its other fields decide equality."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GuardedSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return tuple(value for name, value in vars(self).items() if name != "index")


def guard_index(value: Any) -> Any:
    """Returns a bound layer, or a component of it, in which every spec without an index is guarded."""
    if isinstance(value, LayerSpec):
        return _GuardedSpec(**vars(value) | {"index": _NO_INDEX}) if value.index is None else value
    # A value without such a spec is returned itself: a copy of it might compare as unequal.
    if type(value) is tuple:
        items = tuple(map(guard_index, value))
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    new = {name: guard_index(x) for name, x in old.items()}
    changed = {name: x for name, x in new.items() if x is not old[name]}
    return dataclasses.replace(value, **changed) if changed else value


@dataclasses.dataclass(frozen=True)
class GuardedMethod:
    """A method whose bound layers raise `IndexRead` when they use the index that they lack."""

    method: KVMethod

    @property
    def traits(self) -> Traits:
        """Traits of the method itself."""
        return self.method.traits

    def bind(self, spec: LayerSpec) -> BoundLayer:
        """Binds the method, and guards its layer."""
        return guard_index(self.method.bind(spec))
