"""How many prompt tokens each layer keeps: plain integers, known before anything is traced."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import TYPE_CHECKING

import numpy as np

from kvjax.cache.binding import bind_component
from kvjax.cache.protocol import LayerSpec
from kvjax.errors import KvjaxError


class Budget:
    """Prompt tokens kept per row, layer and key/value head, sinks and recents included.

    A budget is a frozen dataclass with the methods `kept` and `most`. One that differs between layers also has a method
    `at(spec)`, which gives that of a layer.
    """

    relative = False  # a share of each row: of a short one it may be less than what is kept in any case

    def kept(self, length: int) -> int:
        """Tokens that are kept of a row of `length` tokens: at most `length`."""
        raise NotImplementedError

    def by_length(self, longest: int) -> np.ndarray:
        """i32[longest + 1]: `kept` of rows of 0..longest tokens; a budget that knows them all at once overrides it."""
        return np.array([self.kept(n) for n in range(longest + 1)], np.int32)

    def most(self) -> int | None:
        """Tokens that are kept of a row without end; None if there is no bound."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Uniform(Budget):
    """The same number of tokens in every layer."""

    tokens: int

    def __post_init__(self):
        _positive(self.tokens)

    def kept(self, length: int) -> int:
        return min(length, self.tokens)

    def most(self) -> int | None:
        return self.tokens


@dataclasses.dataclass(frozen=True)
class Ratio(Budget):
    """A share of each row's tokens, rounded down in floating point as kvpress does, but never 0 of a row."""

    relative = True
    share: float

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise KvjaxError(f"share must lie in (0, 1], got {self.share}; 0.25 keeps a quarter of each prompt")

    def kept(self, length: int) -> int:
        return min(length, max(1, int(length * self.share)))

    def most(self) -> int | None:
        return None

    def __str__(self) -> str:
        return f"{100 * self.share:.12g}%"


class Tokens:
    """What recipes take as a budget: a number of tokens, or a share of each prompt, "25%"; `Tokens(x)` is either."""

    def __new__(cls, given: int | str | Budget) -> int | Budget:
        if isinstance(given, Budget):
            return given
        try:
            if isinstance(given, str):
                return Ratio(float(given[:-1]) / 100) if given.endswith("%") else int(given)
        except (ValueError, KvjaxError):
            pass  # refused below, like what is no text
        if isinstance(given, numbers.Integral) and not isinstance(given, bool):
            return int(given)
        raise KvjaxError(
            f"a budget is a number of tokens, or a share of each prompt from above 0% to 100%, got {given!r:.60}"
            + _remedy(given)
        )


def _remedy(given: object) -> str:
    """What to write for something that is no budget; nothing where nobody can tell what was meant."""
    if isinstance(given, bool):
        return "; write a number of tokens, as in budget=256"
    try:
        value = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    if 0 < value < 1:
        # Of a text nobody knows whether it stood in quotes, in Python, or in none, in a method's string.
        share = f"{100 * value:.12g}%" if isinstance(given, str) else f'budget="{100 * value:.12g}%"'
        return f"; for this share write {share}"
    return f"; write budget={int(value)}, a whole number of tokens" if 1 <= value < math.inf else ""


@dataclasses.dataclass(frozen=True)
class Table(Budget):
    """One number of tokens for each layer, first to last."""

    tokens: tuple[int, ...]

    def __post_init__(self):
        for n in self.tokens:
            _positive(n)

    def at(self, spec: LayerSpec) -> Uniform:
        assert spec.index is not None
        n = spec.num_layers
        if len(self.tokens) != n:
            raise KvjaxError(f"the table has {len(self.tokens)} layers, the model has {n}: give {n} numbers")
        return Uniform(self.tokens[spec.index])


def budgets_of_layers(budget: Budget, spec: LayerSpec) -> tuple[Budget, ...]:
    """A method's budget, before it is bound, in each layer of the model that any of its specs tells."""
    return tuple(bind_component(budget, dataclasses.replace(spec, index=i)) for i in range(spec.num_layers))


@functools.lru_cache(maxsize=1024)
def kept_by_length(budget: Budget, longest: int, protected: int = 0) -> np.ndarray:
    """i32[longest + 1]: tokens kept of rows of 0..longest tokens, to be indexed with traced lengths.

    A row keeps its `protected` tokens (sinks and recents) in any case. Raises KvjaxError when a budget in tokens is
    below these for a row of `longest` tokens.
    """
    kept = budget.by_length(longest)
    if kept[-1] < min(longest, protected) and not budget.relative:
        raise KvjaxError(
            f"{budget} keeps {kept[-1]} of {longest} tokens in a layer, fewer than the {protected} sinks and "
            f"recents that are always kept; raise the budget to at least {protected} tokens or protect fewer"
        )
    kept = np.maximum(kept, np.minimum(np.arange(longest + 1), protected)).astype(np.int32)
    kept.flags.writeable = False
    return kept


def _positive(tokens: int) -> None:
    if not isinstance(tokens, numbers.Integral) or isinstance(tokens, bool):
        raise KvjaxError(f"a budget is a whole number of tokens per layer, got {tokens!r:.60}")
    if tokens < 1:
        raise KvjaxError(f"a budget is at least 1 token per layer, got {tokens}")


if TYPE_CHECKING:
    TokenBudget = int | str | Budget  # what a call may give
else:
    TokenBudget = Tokens  # what the parameter of a recipe makes of a text
