"""`Method`: a KV-cache method as thirteen components, and how it is bound to the layers of a model."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

from kvjax.cache.binding import bind_fields
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.plain import Host, Plain, in_window
from kvjax.cache.codecs.quantizers import Absmax
from kvjax.cache.codecs.shared_values import SharedValues
from kvjax.cache.components import (
    Components,
    LayerBudgets,
    MergeRule,
    Policy,
    Reader,
    Representatives,
    SecondStageScorer,
    Selection,
    SideStore,
)
from kvjax.cache.eviction.budgets import budgets_by_layer
from kvjax.cache.protocol import LayerSpec, Traits
from kvjax.cache.readers.full import Full
from kvjax.cache.rings import RingLayer
from kvjax.cache.storage import Codec
from kvjax.cache.validation import check_component_type, check_hashable
from kvjax.core.attention import AttentionPattern
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


@dataclasses.dataclass(frozen=True, repr=False)
class Method(Components):
    """A KV-cache method assembled from independent components; each defaults to a no-op.

    A method is a frozen value without arrays: it is compared, hashed, and part of the key of a compiled program. `bind`
    turns it into a `MethodLayer`, which does the work; the life of a prompt and of a token is told there.

    Attributes:
      select: chooses which prompt tokens stay in the cache. None: all of them.
      second_stage: chooses among the selected tokens again, by other scores (CriticalKV). None: one stage.
      representatives: fills a part of the selection with tokens that stand for the evicted ones (KVCrush). None: scores
        alone decide.
      merge: adds the evicted tokens to the ones that stay (CaM, D2O). None: evicted tokens are lost.
      layer_budgets: divides the selection's budget among all layers of the model (CAKE). None: every layer has its own.
      side_store: stores prompt tokens outside the main slots, by head (AdaKV) or in fewer bits (MiKV). None: all tokens
        are in the main slots.
      decode: evicts tokens while decoding (H2O, StreamingLLM). None: every decoded token stays.
      positions: "true", a token's position in the text, or "cache", its index among the tokens that are still cached
        (StreamingLLM, FINCH). Default "true".
      k: codec of the keys: their precision, and the memory that holds them. Default: as computed, on the device.
      v: codec of the values, likewise.
      read: chooses which slots a query attends to (Quest). Default: all.
      attend: sparse attention pattern of the prompt's own queries (A-shape). None: causal attention.
      device_layers: number of first layers that stay on the device and are read in full, whatever `k`, `v` and `read`
        say (KCache, section 4.1). Default 0.
      windowed: what layers with a sliding window hold. "ring": the last tokens that their queries can see, stored by
        `k` and `v`, or in 8 bits by token where these code several tokens together, and read in full, whatever the
        other components say; these then work in the layers without a window alone, and divide what they divide among
        them. "method": what all components say, as in every other layer.
        Default "ring"; `in_windows` in a method's string asks for "method".
    """

    select: Selection | None = None
    second_stage: SecondStageScorer | None = None
    representatives: Representatives | None = None
    merge: MergeRule | None = None
    layer_budgets: LayerBudgets | None = None
    side_store: SideStore | None = None
    decode: Policy | None = None
    positions: Literal["true", "cache"] = "true"
    k: Codec = Plain()
    v: Codec = Plain()
    read: Reader = Full()
    attend: AttentionPattern | None = None
    device_layers: NonNegativeInt = 0
    # `registry.method_hash` leaves this field out at its default: records of runs older than it keep their hash.
    windowed: Literal["ring", "method"] = dataclasses.field(default="ring", metadata={"hash_default": False})
    # The method's string, for names in tables. It is not compared: two ways to write a method give the same value.
    string: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        check_fields(self)
        for name, kind in _COMPONENT_TYPES.items():
            check_component_type(name, getattr(self, name), kind)
            check_hashable(name, getattr(self, name))

    def __repr__(self) -> str:
        """Names the components that differ from their defaults."""
        compared = (f.name for f in dataclasses.fields(self) if f.compare)
        changed = (name for name in compared if getattr(self, name) != getattr(type(self), name))
        return f"Method({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @property
    def traits(self) -> Traits:
        """Facts about the method, for reports."""
        # A method is exact if nothing is left of it once its keys and values lie on the device.
        on_device = dataclasses.replace(
            self, k=self.k.on_device(), v=self.v.on_device(), device_layers=0, windowed="ring"
        )
        return Traits(
            evicts=self.select is not None or self.decode is not None,
            exact=on_device == Method(),
            constant=self.decode is not None and self.decode.is_constant(self),
            host=isinstance(self.k, Host)
            or isinstance(self.v, Host)
            or (self.side_store is not None and self.side_store.uses_host_memory),
            after_prompt=self.select is not None,
        )

    def bind(self, spec: LayerSpec) -> MethodLayer:
        """Binds the method to one layer of a model.

        Args:
          spec: the layer: its index, the model's numbers of layers and heads, its window and rotary embedding.

        Returns:
          The bound layer. It holds no index, so that layers which do the same are equal and share compiled programs.

        Raises:
          KvjaxError: a component does not fit the model, or components cannot work together (`IncompatibleMethod`).
        """
        if self.device_layers > spec.num_layers:
            raise KvjaxError(
                f"device_layers={self.device_layers} but the model has {spec.num_layers} layers; use "
                f"0..{spec.num_layers}"
            )
        index = spec.index
        assert index is not None
        # Neither the string that made the method nor the number of device layers may tell equal layers apart.
        given = dataclasses.replace(self, device_layers=0, string="", windowed="ring")
        if index < self.device_layers:
            given = dataclasses.replace(given, k=self.k.on_device(), v=self.v.on_device(), read=Full())
        if self.windowed == "method":
            spec = dataclasses.replace(spec, method_layers=None)
        elif spec.rule.window is not None:
            return _bind_to_window(given, spec)
        bound = _share_values(bind_fields(given, spec), spec)
        budgets: tuple[int | None, ...] = ()
        if self.layer_budgets is not None and self.select is not None:
            budgets = tuple(budget.max_kept() for budget in budgets_by_layer(self.select.budget, spec))
        # A side store or a reader may do nothing in this layer and something in another. Checking them as they were
        # given refuses an impossible method in its first layer, and not in the middle of a model.
        check_components(dataclasses.replace(bound, side_store=given.side_store, read=given.read), budgets)
        selection = bound.choose_from_prompt(spec.without_index, budgets)
        if selection is not None and bound.side_store is not None and bound.side_store.head_budgets is not None:
            # The selection's budget is that of all layers, which a store with heads of unlike sizes divides.
            assert self.select is not None
            budget, rule = bound.side_store.head_budgets.bind_budget(selection, self.select.budget, index)
            store: Any = bound.side_store  # a dataclass, which its base class does not say
            bound = dataclasses.replace(
                bound,
                select=dataclasses.replace(selection.select, budget=budget),
                side_store=dataclasses.replace(store, head_budgets=rule),
            )
        if selection is not None and bound.decode is not None:
            bound = dataclasses.replace(bound, decode=bound.decode.with_selection(selection))
        if selection is not None and bound.second_stage is not None:
            bound = dataclasses.replace(bound, second_stage=bound.second_stage.with_selection(selection))
        return MethodLayer(bound, spec.without_index, budgets)


def _bind_to_window(method: Method, spec: LayerSpec) -> MethodLayer:
    """Binds the codecs of a method to a layer with a sliding window, which holds all tokens of its window.

    Nothing is gained by choosing among the few tokens of a window, and a choice would cost exactness.
    """
    read = method.read if isinstance(method.read, Full) else Full()  # a `Full` of its own may name a kernel
    # Slots of a window are written over one by one. A codec of groups would need slots for whole groups and for tokens
    # that no query sees; 8 bits for each token take about as much, and lose less (docs/bytes.md).
    by_token = PerTokenCodec(Absmax())
    windowed = Method(k=in_window(method.k, by_token), v=in_window(method.v, by_token), read=read)
    return RingLayer(_share_values(bind_fields(windowed, spec), spec), spec.without_index)


def _share_values(bound: Method, spec: LayerSpec) -> Method:
    """Has a bound method store values with the keys, if they are channels of them and one codec is for both."""
    are_alike = bound.k.on_device() == bound.v.on_device()
    if spec.values_from is None or bound.merge is not None or not are_alike:
        return bound
    return dataclasses.replace(bound, v=SharedValues(bound.k, spec.without_index))


_COMPONENT_TYPES = {
    name: kind
    for name, kind in typing.get_type_hints(Method).items()
    if name not in ("positions", "device_layers", "windowed", "string")
}


def check_components(m: Components, budgets: tuple[int | None, ...] = ()) -> None:
    """Raises IncompatibleMethod, with the remedy, for components that cannot work together.

    Args:
      m: the components of a bound method.
      budgets: as in `PromptSelection`.
    """
    for name in ("second_stage", "representatives", "merge", "layer_budgets"):
        component = getattr(m, name)
        if component is not None and m.select is None:
            raise IncompatibleMethod(
                f"component `{name}` works on an eviction method's selection and has none to stand on; "
                "compose it with one, as in 'snapkv:budget=256 + kvcrush'"
            )
    if m.positions == "cache" and m.decode is None:
        if m.select is None:
            raise IncompatibleMethod(
                "positions inside the cache are those of the text where no token leaves it; compose `positions` with a "
                "method that evicts, as in 'snapkv:budget=256 + rerotated'"
            )
        for name, cannot in (("side_store", m.side_store is not None), ("read", not m.read.supports_eviction)):
            if cannot:
                raise IncompatibleMethod(
                    f"component `{name}`, {type(getattr(m, name)).__name__}, reads keys at their positions in the "
                    "text, and component `positions` counts them inside the cache; leave one of them out"
                )
    together = "its tokens, or its heads, are held together"
    reasons = {"k": together, "v": together, "read": "its copy, summary or choice of tokens would keep what has left"}
    for name, reason in reasons.items():
        if m.decode is not None and not getattr(m, name).supports_eviction:
            raise IncompatibleMethod(
                f"component `decode` takes single tokens out of the cache, and component `{name}`, "
                f"{type(getattr(m, name)).__name__}, cannot lose one: {reason}; leave one of them out"
            )
    if m.attend is not None and m.prompt_chunk:
        is_policys = m.decode is not None and m.decode.prompt_chunk > 0
        name, other = ("decode", m.decode) if is_policys else ("read", m.read)
        raise IncompatibleMethod(
            f"component `attend`, {m.attend}, and component `{name}`, {type(other).__name__}, both say what the "
            "prompt's own queries read; leave one of them out"
        )
    if m.second_stage is not None:
        m.second_stage.check(m)
    if m.side_store is not None:
        m.side_store.check(m)
    if m.layer_budgets is not None:
        m.layer_budgets.check(m, budgets)
    if m.decode is not None:
        m.decode.check(m)
