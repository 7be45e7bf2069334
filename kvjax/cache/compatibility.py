"""Compatibility of a method's components in one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer

_WHY_NO_EVICTION = {
    "k": "its tokens, or its heads, are held together",
    "v": "its tokens, or its heads, are held together",
    "read": "its copy, summary or choice of tokens would keep what has left",
}


def check_components(layer: MethodLayer) -> None:
    """Raises IncompatibleMethod, with the remedy, for components of a bound method that cannot work together."""
    m = layer.method
    for name in ("second_stage", "representatives", "merge", "layer_budgets"):
        component = getattr(m, name)
        if component is not None and m.select is None:
            raise IncompatibleMethod(
                f"{component} (component `{name}`) works on an eviction method's selection and has none to stand on; "
                "compose it with one, as in 'snapkv:budget=256 + kvcrush'"
            )
    if m.positions == "cache" and m.decode is None:
        raise IncompatibleMethod(
            "positions inside the cache need a policy (component `decode`), as `streaming_llm` has"
        )
    for name in ("k", "v", "read"):
        component = getattr(m, name)
        if m.decode is not None and not component.supports_eviction:
            raise IncompatibleMethod(
                f"component `decode` takes single tokens out of the cache, and component `{name}`, "
                f"{type(component).__name__}, cannot lose one: {_WHY_NO_EVICTION[name]}; leave one of them out"
            )
    if m.attend is not None and layer.needs.prompt_chunk:
        raise IncompatibleMethod(
            f"component `attend`, {m.attend}, and component `read`, {type(m.read).__name__}, both say what the "
            "prompt's own queries read; leave one of them out"
        )
    for component in (m.side_store, m.layer_budgets, m.decode):
        if component is not None:
            component.check(layer)
