"""The components of methods, and whether two methods compose: by composing them and binding the result to a layer."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

from docs.generate.entries import builtin_entries
from kvjax.cache.compose import compose
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.rope import Rope
from kvjax.errors import ComponentConflict, IncompatibleMethod
from kvjax.registry.strings import parse

LAYER = LayerSpec(index=3, num_layers=4, num_kv_heads=2, num_groups=2, head_dim=32, rope=Rope(32))
"""A layer of the shipped model, which has calibrated tables, so that every method binds at its default sizes."""

SELECTION = "snapkv"
"""The selection below a method that only refines another one's."""

SHARED_COMPONENT = {
    "select": "both select the prompt tokens that stay",
    "second_stage": "both score a part of the kept tokens anew",
    "representatives": "both choose representatives of the evicted tokens",
    "merge": "both merge evicted tokens into others",
    "layer_budgets": "both divide the budget among layers",
    "side_store": "both store prompt tokens in a side store",
    "decode": "both evict tokens while decoding",
    "positions": "both define how positions are counted",
    "k": "both define the codec of keys",
    "v": "both define the codec of values",
    "read": "both define the slots that a query reads",
    "attend": "both define the attention of the prompt",
    "windowed": "both say what layers with a window hold",
    "device_layers": "both define how many first layers stay on the device",
}
"""Component -> the reason why two methods that define it do not compose."""


def defined_components(method: Method) -> dict[str, Any]:
    """The components that a method defines, by name: those that differ from the default."""
    default = Method()
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(Method) if field.compare}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


class Verdict(NamedTuple):
    """Whether two methods compose, and the reason where they do not."""

    composes: bool
    reason: str = ""
    needs_selection: bool = False  # they compose only with a selection, as in 'snapkv + kvcrush'


def judge_pair(a: str, b: str) -> Verdict:
    """Whether two methods compose at their default sizes; the order does not matter."""
    return _judge_sorted_pair(*sorted((a, b)))


_parse_once = functools.cache(parse)


@functools.cache
def _judge_sorted_pair(a: str, b: str) -> Verdict:
    try:
        method = compose(_parse_once(a), _parse_once(b))
    except ComponentConflict as clash:
        return Verdict(False, SHARED_COMPONENT[clash.component])
    try:
        method.bind(LAYER)
        return Verdict(True)
    except IncompatibleMethod as alone:
        if method.select is not None:
            return Verdict(False, str(alone))
    try:
        compose(_parse_once(SELECTION), method).bind(LAYER)
    except IncompatibleMethod as over_selection:
        return Verdict(False, str(over_selection))
    return Verdict(True, needs_selection=True)


def refusals(name: str) -> dict[str, list[str]]:
    """The short reasons why a method does not compose with others -> the names of these."""
    found: dict[str, list[str]] = {}
    for other in builtin_entries():
        if other == name or (verdict := judge_pair(name, other)).composes:
            continue
        # An error reads "component `a`: the reason; the remedy"; the table needs the reason alone.
        inside = re.search(r": ([^:;]+); [a-z]+ .*$", verdict.reason)
        found.setdefault(inside[1] if inside else verdict.reason.split(";")[0], []).append(other)
    return found
