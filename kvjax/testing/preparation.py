"""Prepares a method for `check_method`: sizes at which tokens leave, company if it needs any, a model that suits it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.protocol import KVMethod
from kvjax.cache.validation import check_hashable
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.model import Model, load
from kvjax.registry.loading import load_all
from kvjax.registry.registration import Part
from kvjax.registry.strings import format_methods, method_of, name_of, parse, parse_parts, split_methods
from kvjax.testing.helpers import toy_model

LEAST_SCALED = 32
"""A parameter below this number is no size of a cache: a kernel, a page, a few sinks, a number of bits."""


class Preparation(NamedTuple):
    """A method as it is checked, made twice, the model that it is checked on, and a sentence for each change."""

    name: str
    method: KVMethod
    twin: KVMethod
    model: Model
    notes: tuple[str, ...]


def prepare(method: str | KVMethod, model: Model | None, length: int) -> Preparation:
    """Prepares a method for prompts of `length` tokens.

    Nothing is run: whether a method fits a model is known from shapes.

    Args:
      method: a value, or its string.
      model: the model to check it on; None for the toy model, or the testbed model if the toy model does not suit it.
      length: tokens of the longest prompt.

    Raises:
      KvjaxError: no model suits the method; the error is the first model's.
    """
    value, errors = method_of(method), []
    check_hashable("method", value)
    # A method with a part that is equal to itself alone is unequal to what its own string makes, and `name_of` a value.
    name = method if isinstance(method, str) else name_of(value)
    for make_model in [lambda: model] if model else [toy_model, lambda: load("testbed")]:
        candidate, reasons, names = cast(Model, make_model()), tuple(errors), [name]
        for text in names:
            for sized in (*_with_smaller_sizes(text, length), text):
                try:
                    checked = value if sized == name else parse(sized)
                    planned_bytes(checked, candidate, length)
                except IncompatibleMethod as e:
                    errors.append(e)
                    names += _with_company(name) if len(names) == 1 else []
                except KvjaxError as e:
                    errors.append(e)
                else:
                    twin = parse(sized) if isinstance(method, str) or sized != name else copy.deepcopy(value)
                    notes = _describe(name, text, sized, length, reasons)
                    return Preparation(sized, checked, twin, candidate, notes)
    raise errors[0]


def _with_company(name: str) -> list[str]:
    """The strings that give a method a selection to work on: that of its example, or another."""
    parts = split_methods(name)
    if len(parts) != 1:
        return []
    alone, example = parse_parts(name)[0], parse_parts(load_all()[parts[0].name].example)
    if len(example) == 1:  # of a user's method, which need not have one
        example = (Part("snapkv", {"budget": 512}), example[0])
    return [format_methods(alone if part.name == alone.name else part for part in example)]


def _with_smaller_sizes(name: str, length: int) -> list[str]:
    """Strings of a method with sizes below the prompt's length, all divided alike; none where its own are below."""
    parts = split_methods(name)
    if not any(sum(_sizes(part).values()) >= length for part in parts):
        return []
    texts = [name]
    if len(parts) == 1 and not parse_parts(name)[0].values:
        texts.append(load_all()[parts[0].name].example)  # whose sizes fit one another, if divided defaults do not
    return [format_methods(_divide(text, length // 2)) for text in texts]


def _divide(text: str, most: int) -> list[Part]:
    """Divides the sizes in a string by a power of two, which divides the groups and pages of most methods."""
    parts, factor = split_methods(text), 1
    while any(sum(value // factor for value in _sizes(part).values()) > most for part in parts):
        factor *= 2
    return [
        Part(part.name, given.values | {key: max(x // factor, 1) for key, x in _scalable(part.values).items()})
        for part, given in zip(parts, parse_parts(text), strict=True)
    ]


def _scalable(values: Mapping[str, Any]) -> dict[str, int]:
    """The parameters that are numbers of tokens, as far as numbers tell."""
    return {
        key: value for key, value in values.items() if type(value) is int and value >= LEAST_SCALED and key != "seed"
    }


def _sizes(part: Part) -> dict[str, int]:
    """The parameters that say how many tokens a method keeps: the declared ones, or else its largest number."""
    entry, scalable = load_all()[part.name], _scalable(part.values)
    budgets = {name for name, p in entry.parameters.items() if p.annotation is TokenBudget}
    declared = {key: value for key, value in scalable.items() if key in budgets.union(entry.size_parameters)}
    if declared or not scalable:
        return declared
    largest = max(scalable, key=scalable.__getitem__)
    return {largest: scalable[largest]}


def _describe(name: str, text: str, sized: str, length: int, reasons: Sequence[KvjaxError]) -> tuple[str, ...]:
    """Says in a sentence each what was changed for the check; `reasons` are those against the toy model."""
    notes = []
    if text != name:
        notes.append(f"{name} works on a selection, and is checked as {sized}")
    elif sized != name:
        notes.append(f"{name} keeps more than the check's prompt of {length} tokens, and is checked as {sized}")
    if sized != text:
        notes[-1] += "; --length N (`length` in Python) makes the prompt longer"
    if reasons:
        notes.append(f"the toy model does not suit it, and the testbed model is taken: {reasons[-1]}")
    return tuple(notes)
