"""Every published method by its name: `kvjax.zoo.kcache(n=64)`."""

from __future__ import annotations

from kvjax.methods.catalogue import RECIPES, load_all

globals().update({name: recipe.make for name, recipe in load_all().items()})

__all__ = sorted(["RECIPES", *RECIPES])
