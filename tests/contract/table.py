"""What the battery runs over: all trials of all methods, which stand in the methods' own files, and all their pairs."""

from __future__ import annotations

import functools
import itertools

from kvjax.cache.protocol import BoundLayer
from kvjax.errors import IncompatibleMethod
from kvjax.methods.registry import MethodEntry, load_all
from kvjax.methods.strings import parse
from kvjax.methods.trial import Sizes, Trial
from tests.contract import layer

REGISTRY = load_all()
TRIALS: dict[str, Trial] = {
    f"{recipe.name}, {trial.name}" if trial.name else recipe.name: trial
    for recipe in REGISTRY.values()
    for trial in recipe.trials
}
PAIRS = tuple(itertools.combinations(REGISTRY, 2))


def sizes(itemsize: int) -> Sizes:
    """The layer of the battery, for the methods' formulas."""
    return Sizes(layer.B, layer.K, layer.G, layer.H, layer.CAPACITY, layer.LONGEST, itemsize)


def parts(recipe: MethodEntry, limit: bool = False) -> tuple[list[str], list[str]]:
    """Of a recipe's first trial, small or at its limit: (what names the recipe itself, the selection it stands on)."""
    trial = recipe.trials[0]
    every = [part.strip() for part in (trial.limit if limit else trial.small).split("+")]
    own = [part for part in every if part.split(":")[0] == recipe.name]
    return own, [part for part in every if part not in own]


def together(a: str, b: str, limit: bool = False) -> str:
    """The string of two recipes; where one of them stands on a selection and the other is none, over a selection."""
    (x, below_x), (y, below_y) = (parts(REGISTRY[name], limit) for name in (a, b))
    if any(parse(part).select for part in x + y):
        return " + ".join(x + y)
    return " + ".join((below_x or below_y) + x + y)


@functools.cache
def pair(a: str, b: str) -> BoundLayer | IncompatibleMethod:
    """Two recipes composed and bound to the battery's layer, or the error that says why they cannot be."""
    try:
        return layer.bound(together(a, b))
    except IncompatibleMethod as e:
        return e
