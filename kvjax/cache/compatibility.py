"""Which slots of a method can work together in one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.errors import IncompatibleMethod

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer

_WHY_NONE_LEAVES = {
    "k": "its tokens, or its heads, are held together",
    "v": "its tokens, or its heads, are held together",
    "read": "its copy, summary or choice of tokens would keep what has left",
}


def check_components(layer: MethodLayer) -> None:
    """Raises IncompatibleMethod for slots of a bound method that cannot; the message names them, and what to do."""
    m = layer.method
    for name in ("second_stage", "representatives", "merge", "layer_budgets"):
        slot = getattr(m, name)
        if slot is not None and m.select is None:
            raise IncompatibleMethod(
                f"{slot} (slot `{name}`) works on an eviction method's selection and has none to stand on; "
                "compose it with one, as in 'snapkv:budget=256 + kvcrush'"
            )
    if m.positions == "cache" and m.decode is None:
        raise IncompatibleMethod("positions inside the cache need a policy (slot `decode`), as `streaming_llm` has")
    for name in ("k", "v", "read"):
        slot = getattr(m, name)
        if m.decode is not None and not slot.supports_eviction:
            raise IncompatibleMethod(
                f"slot `decode` takes single tokens out of the cache, and slot `{name}`, {type(slot).__name__}, "
                f"cannot lose one: {_WHY_NONE_LEAVES[name]}; leave one of them out"
            )
    if m.attend is not None and layer.needs.prompt_chunk:
        raise IncompatibleMethod(
            f"slot `attend`, {m.attend}, and slot `read`, {type(m.read).__name__}, both say what the prompt's own "
            "queries read; leave one of them out"
        )
    if m.side_store is not None:
        m.side_store.check(layer)
    if m.layer_budgets is not None:
        m.layer_budgets.check(layer)
    if m.decode is not None:
        m.decode.check(layer)
