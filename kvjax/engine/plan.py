"""Binding a method to every layer of a model."""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec
from kvjax.core import memory
from kvjax.core.rope import Rope
from kvjax.engine.forward import Plan
from kvjax.engine.straight_through import make_differentiable
from kvjax.models.config import Config
from kvjax.registry.strings import method_of


def specs(config: Config) -> tuple[LayerSpec, ...]:
    """Describes each layer of a model to methods."""
    method_layers = tuple(i for i in range(config.layers) if config.kind(i).attention.rule.window is None)
    return tuple(
        LayerSpec(
            index=i,
            num_layers=config.layers,
            num_kv_heads=attention.kv_heads,
            num_groups=attention.groups,
            head_dim=attention.head_dim,
            rope=attention.rope or Rope(0),
            rule=attention.rule,
            value_dim=attention.value_dim,
            # The keys of latent attention are the rotated channels and then the latent vector, which is the values.
            values_from=None if attention.latent is None else attention.head_dim - attention.latent.rank,
            method_layers=method_layers,
        )
        for i, attention in ((i, config.kind(i).attention) for i in range(config.layers))
    )


def bind(method: str | KVMethod | None, config: Config, differentiable: bool = False) -> Plan:
    """Binds a method, or its string, to every layer of a model; `bind_specs` of the model's own layers."""
    return bind_specs(method, specs(config), differentiable)


def bind_specs(method: str | KVMethod | None, specs: Sequence[LayerSpec], differentiable: bool = False) -> Plan:
    """Binds a method, or its string, to every layer; raises KvjaxError where it cannot serve the model.

    With `differentiable`, gradients pass through the stored keys and values, see `make_differentiable`.
    """
    method = method_of(method)
    if differentiable:
        method = make_differentiable(method)
    if method.traits.host:
        memory.require_host_memory()
    known: dict[BoundLayer, BoundLayer] = {}
    # Equal layers become one object: every step compares them, and the comparison then ends at identity.
    return tuple(known.setdefault(layer, layer) for layer in map(method.bind, specs))
