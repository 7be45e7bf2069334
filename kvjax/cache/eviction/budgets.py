"""Budgets: how many prompt tokens each layer keeps, as plain integers that are known before anything is traced."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Annotated

from kvjax.cache.binding import bind_component
from kvjax.cache.components import Budget
from kvjax.cache.protocol import LayerSpec
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import Within, check_fields


@dataclasses.dataclass(frozen=True)
class Uniform(Budget):
    """The same number of tokens in every layer."""

    tokens: int

    def __post_init__(self):
        _check_tokens(self.tokens)

    def num_kept(self, length: int) -> int:
        return min(length, self.tokens)

    def max_kept(self) -> int | None:
        return self.tokens


@dataclasses.dataclass(frozen=True)
class PromptFraction(Budget):
    """A fraction of each prompt's tokens, at least 1 token.

    It is rounded down in floating point, as kvpress does, so that both keep equally many tokens.
    """

    is_fraction = True
    fraction: Annotated[float, Within("(0, 1]")]

    __post_init__ = check_fields

    def num_kept(self, length: int) -> int:
        return min(length, max(1, int(length * self.fraction)))

    def max_kept(self) -> int | None:
        return None

    def __str__(self) -> str:
        return f"{100 * self.fraction:.12g}%"


@dataclasses.dataclass(frozen=True)
class PerLayer(Budget):
    """One number of tokens for each layer, first to last."""

    tokens: tuple[int, ...]

    def __post_init__(self):
        for n in self.tokens:
            _check_tokens(n)

    def at(self, spec: LayerSpec) -> Uniform:
        assert spec.index is not None
        n = spec.num_layers
        if len(self.tokens) != n:
            raise KvjaxError(f"the table has {len(self.tokens)} layers, the model has {n}: give {n} numbers")
        return Uniform(self.tokens[spec.index])


def _check_tokens(tokens: int) -> None:
    if not isinstance(tokens, numbers.Integral) or isinstance(tokens, bool):
        raise KvjaxError(f"a budget is a whole number of tokens per layer, got {tokens!r:.60}")
    if tokens < 1:
        raise KvjaxError(f"a budget is at least 1 token per layer, got {tokens}")


def parse_budget(value: int | str | Budget) -> int | Budget:
    """Parses the budget of a method's string: tokens, or a fraction of each prompt as "25%"; a `Budget` stays itself.

    Raises:
      KvjaxError: for anything else, with the budget that was most likely meant.
    """
    if isinstance(value, Budget):
        return value
    try:
        if isinstance(value, str):
            return PromptFraction(float(value[:-1]) / 100) if value.endswith("%") else int(value)
    except (ValueError, KvjaxError):
        pass  # refused below, with the values that are no text
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise KvjaxError(
        f"a budget is a number of tokens, or a fraction of each prompt from above 0% to 100%, got {value!r:.60}"
        + _suggest_budget(value)
    )


def _suggest_budget(value: object) -> str:
    """The budget to write instead of something that is none; empty where nobody can tell what was meant."""
    if isinstance(value, bool):
        return "; write a number of tokens, as in budget=256"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    if 0 < number < 1:
        # A text may come from a method's string, which has no quotes, or from Python, where they would be needed.
        text = f"{100 * number:.12g}%" if isinstance(value, str) else f'budget="{100 * number:.12g}%"'
        return f"; for this fraction write {text}"
    return f"; write budget={int(number)}, a whole number of tokens" if 1 <= number < math.inf else ""


if TYPE_CHECKING:
    TokenBudget = int | str | Budget
else:

    class TokenBudget:
        """The type of a method's parameter `budget`: the registry calls it on the text, as it calls `int`."""

        def __new__(cls, value: int | str | Budget) -> int | Budget:
            return parse_budget(value)


def budgets_by_layer(budget: Budget, spec: LayerSpec) -> tuple[Budget, ...]:
    """An unbound budget as it is in each layer that the method works in; `spec` may be the one of any layer."""
    return tuple(bind_component(budget, dataclasses.replace(spec, index=i)) for i in spec.method_layers)
