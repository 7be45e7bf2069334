"""The level at which heads compete for a budget, as methods have it as a parameter: the model, a layer, or no level."""

from __future__ import annotations

from typing import Any

from kvjax.cache.eviction.ranking import BestOfLayer, BestOfModel, ModelRanking
from kvjax.cache.side_store.paged_heads import PagedHeads
from kvjax.errors import KvjaxError

LEVELS = "model", "layer", "head"


def level_slots(level: str, page: int) -> dict[str, Any]:
    """The slots of a `Method` beside its selection that divide a budget at a level.

    Args:
      level: "model", one ranking of the tokens of all heads of all layers; "layer", one of all heads of each layer;
        or "head", where each head keeps equally many.
      page: slots of the pages in which heads of unequal length are held.

    Returns:
      The values of `side_store` and `layer_budgets`; none for "head".

    Raises:
      KvjaxError: for another level.
    """
    if level not in LEVELS:
        raise KvjaxError(f"level must be {', '.join(map(repr, LEVELS[:-1]))} or {LEVELS[-1]!r}, got {level!r}")
    if level == "head":
        return {}
    if level == "layer":
        return {"side_store": PagedHeads(BestOfLayer(), page)}
    return {"side_store": PagedHeads(BestOfModel(), page), "layer_budgets": ModelRanking()}
