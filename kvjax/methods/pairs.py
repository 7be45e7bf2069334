"""Which methods compose, and if not, why: decided by composing them and binding what comes out to a layer."""

from __future__ import annotations

from typing import NamedTuple

from kvjax.cache.compose import compose
from kvjax.cache.protocol import LayerSpec
from kvjax.core.rope import Rope
from kvjax.errors import ComponentConflict, IncompatibleMethod
from kvjax.methods.strings import parse

LAYER = LayerSpec(index=3, num_layers=4, num_kv_heads=2, num_groups=2, head_dim=32, window=None, rope=Rope(32))
"""A layer of the shipped model, for which tables ship; methods have their default sizes on it."""

SELECTION = "snapkv"
"""What a method stands on that works on another one's selection."""


BOTH = {
    "select": "both choose which prompt tokens stay",
    "second_stage": "both score a part of what stays anew",
    "representatives": "both choose what stands for the lost tokens",
    "merge": "both fold lost tokens into others",
    "layer_budgets": "both divide the budget among layers",
    "side_store": "both hold prompt tokens apart",
    "decode": "both say which token leaves while decoding",
    "positions": "both say how positions are counted",
    "k": "both say how keys are held",
    "v": "both say how values are held",
    "read": "both say which slots a query reads",
    "attend": "both say what the prompt's own queries read",
    "device_layers": "both say how many first layers stay on the device",
}
"""What two methods do that fill the same slot."""


class Verdict(NamedTuple):
    """Whether two methods compose; where they do not, the reason, in a sentence."""

    works: bool
    reason: str = ""
    over_selection: bool = False  # only together with a selection, as in 'snapkv + kvcrush'


def verdict(a: str, b: str) -> Verdict:
    """Of two method strings at their default sizes."""
    try:
        method = compose(parse(a), parse(b))
    except ComponentConflict as clash:
        return Verdict(False, BOTH[clash.component])
    try:
        method.bind(LAYER)
        return Verdict(True)
    except IncompatibleMethod as alone:
        if method.select is not None:
            return Verdict(False, str(alone))
    try:
        compose(parse(SELECTION), method).bind(LAYER)
    except IncompatibleMethod as over_selection:
        return Verdict(False, str(over_selection))
    return Verdict(True, over_selection=True)
