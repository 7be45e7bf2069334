"""The parameter `level` of methods: whether the heads of the model, of a layer, or none compete for a budget."""

from __future__ import annotations

from typing import Any

from kvjax.cache.eviction.ranking import BestOfLayer, BestOfModel, ModelRanking
from kvjax.cache.side_store.paged_heads import PagedHeads
from kvjax.errors import KvjaxError


def level_components(level: str, page: int) -> dict[str, Any]:
    """Returns the components of a `Method` that let heads compete for a selection's budget.

    Args:
      level: "model", one ranking of the tokens of all heads of all layers; "layer", one of all heads of each layer;
        or "head", where each head keeps equally many.
      page: slots of the pages that hold heads of unequal length.

    Returns:
      The values of `side_store` and `layer_budgets`; none for "head".

    Raises:
      KvjaxError: for another level.
    """
    if level == "head":
        return {}
    if level == "layer":
        return {"side_store": PagedHeads(BestOfLayer(), page)}
    if level == "model":
        return {"side_store": PagedHeads(BestOfModel(), page), "layer_budgets": ModelRanking()}
    raise KvjaxError(f"level must be 'model', 'layer' or 'head', got {level!r}")
