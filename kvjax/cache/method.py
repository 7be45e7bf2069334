"""A KV-cache method by slots: what becomes of a prompt's keys and values, and of each token after it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

from kvjax.cache.binding import bind_fields
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Codec, Host, Plain
from kvjax.cache.eviction.budget_allocation import LayerBudgets
from kvjax.cache.eviction.budgets import budgets_of_layers
from kvjax.cache.eviction.decode_policy import Policy
from kvjax.cache.eviction.merging import MergeRule
from kvjax.cache.eviction.representatives import Representatives
from kvjax.cache.eviction.rescoring import SecondStageScorer
from kvjax.cache.eviction.selection import Selection
from kvjax.cache.protocol import LayerSpec, Traits
from kvjax.cache.readers.base import Reader
from kvjax.cache.readers.full import Full
from kvjax.cache.side_store.base import SideStore
from kvjax.cache.validation import check_hashable, check_kind
from kvjax.core.attention import AttentionPattern
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True, repr=False)
class Method:
    """What is stored where, and what a query reads: slots that compose, each with a default that changes nothing.

    After the prompt. select: which of its tokens stay. second_stage: by what other scores a part of these is chosen.
    representatives: a share of these that stands for the lost ones.
    merge: what of the lost is folded into those that stay. layer_budgets: how the budget is divided among all layers.
    side_store: tokens that are held in a store of their own, by head or in fewer bits.
    While decoding. decode: the policy that says which tokens leave; without one, all that is decoded stays.
    positions: "true", or "cache", where a token's position is its index among those held (StreamingLLM).
    Holding and reading. k, v: codecs of keys and values, and where they lie. read: which slots a query reads.
    attend: what the prompt's own attention reads; without one it is exact.
    device_layers: so many first layers stay on the device and are read in full (KCache, section 4.1).
    """

    select: Selection | None = None
    second_stage: SecondStageScorer | None = None
    representatives: Representatives | None = None
    merge: MergeRule | None = None
    layer_budgets: LayerBudgets | None = None
    side_store: SideStore | None = None
    decode: Policy | None = None
    positions: str = "true"
    k: Codec = Plain()
    v: Codec = Plain()
    read: Reader = Full()
    attend: AttentionPattern | None = None
    device_layers: int = 0
    recipe: str = dataclasses.field(default="", compare=False)  # the string that made it, as `name_of` checks

    def __post_init__(self):
        for slot, kind in _kinds().items():
            check_kind(slot, getattr(self, slot), kind)
            check_hashable(slot, getattr(self, slot))
        if self.device_layers < 0:
            raise KvjaxError(f"device_layers must be 0 or more layers, got {self.device_layers}")
        if self.positions not in ("true", "cache"):
            raise KvjaxError(f"positions must be 'true' or 'cache', got {self.positions!r}")

    def __repr__(self) -> str:
        """The slots that are filled."""
        shown = (f.name for f in dataclasses.fields(self) if f.compare)
        filled = (name for name in shown if getattr(self, name) != getattr(type(self), name))
        return f"Method({', '.join(f'{name}={getattr(self, name)!r}' for name in filled)})"

    @property
    def traits(self) -> Traits:
        """What reports may say of it."""
        on_device = dataclasses.replace(self, k=self.k.on_device(), v=self.v.on_device(), device_layers=0)
        return Traits(
            evicts=self.select is not None or self.decode is not None,
            exact=on_device == Method(),
            constant=self.decode is not None,
            host=isinstance(self.k, Host)
            or isinstance(self.v, Host)
            or (self.side_store is not None and self.side_store.uses_host_memory),
            after_prompt=self.select is not None,
        )

    def bind(self, spec: LayerSpec) -> MethodLayer:
        """The method in one layer; raises for slots that cannot work together."""
        if self.device_layers > spec.num_layers:
            raise KvjaxError(
                f"device_layers={self.device_layers} but the model has {spec.num_layers} layers; use "
                f"0..{spec.num_layers}"
            )
        given = dataclasses.replace(self, device_layers=0, recipe="")
        assert spec.index is not None
        if spec.index < self.device_layers:
            given = dataclasses.replace(given, k=self.k.on_device(), v=self.v.on_device(), read=Full())
        here = bind_fields(given, spec)
        budgets: tuple[int | None, ...] = ()
        if self.layer_budgets is not None and self.select is not None:
            budgets = tuple(budget.most() for budget in budgets_of_layers(self.select.budget, spec))
        # These two are checked as they were given: in some layers they do nothing, and would be refused only in others.
        checked = dataclasses.replace(here, side_store=given.side_store, read=given.read)
        MethodLayer(checked, spec.without_index, budgets).check()
        if here.side_store is not None and self.select is not None:
            here = here.side_store.bind_budget(here, self.select.budget, spec)
        return MethodLayer(here, spec.without_index, budgets)


@functools.cache
def _kinds() -> dict[str, Any]:
    """What each slot may hold."""
    return {name: kind for name, kind in typing.get_type_hints(Method).items() if name != "recipe"}
