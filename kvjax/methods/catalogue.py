"""The register of published methods: each file of this folder adds its own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import kvjax.methods
from kvjax.methods.trial import Trial


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published method: how to make it, and where it comes from."""

    name: str
    make: Callable[..., Any]
    source: str
    trials: tuple[Trial, ...] = ()  # rows of the battery of tests
    formula: str = ""  # what it computes, for its page
    differs: str = ""  # in a sentence, what is not as in the public code or the paper
    example: str = ""  # the string with which its page measures it on contexts of 2,048 tokens; default its name
    sized_by: str = ""  # the parameters, separated by commas, that say how much it holds; default `budget` or `bits`

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its parameters with types and defaults."""
        return dict(inspect.signature(self.make, eval_str=True).parameters)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The parameters that say how many tokens it holds, or in how many bits; none for a method of one size."""
        default = next((name for name in ("budget", "bits") if name in self.parameters), "")
        return tuple(filter(None, (self.sized_by or default).split(",")))

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return inspect.getdoc(self.make).splitlines()[0]


RECIPES: dict[str, Recipe] = {}


def recipe(
    source: str, *trials: Trial, formula: str = "", differs: str = "", example: str = "", sized_by: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that returns a method, with its citation, under the function's name; see `Recipe`."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def named(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(make).bind(*args, **kwargs).arguments
            text = ",".join(f"{k}={v}" for k, v in given.items())
            return dataclasses.replace(make(*args, **kwargs), recipe=make.__name__ + (f":{text}" if text else ""))

        name = make.__name__
        RECIPES[name] = Recipe(name, named, source, trials, formula, differs, example or name, sized_by)
        return named

    return register


def load_all() -> dict[str, Recipe]:
    """All recipes: every file of this folder has been imported."""
    for module in pkgutil.iter_modules(kvjax.methods.__path__):
        importlib.import_module(f"kvjax.methods.{module.name}")
    return RECIPES
