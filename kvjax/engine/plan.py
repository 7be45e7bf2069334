"""Binding a method to every layer of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.cache.protocol import BoundLayer, KVMethod, LayerSpec, ReadableLayer
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.cache.uses import READ_BY_OTHER_LAYERS
from kvjax.core import memory
from kvjax.core.rope import Rope
from kvjax.engine.forward import BoundLayers
from kvjax.engine.straight_through import make_differentiable
from kvjax.errors import IncompatibleMethod
from kvjax.models.config import Config
from kvjax.models.kinds import AttentionKind
from kvjax.registry.strings import method_of


def specs(config: Config) -> tuple[LayerSpec, ...]:
    """Describes each layer of a model to methods."""
    return describe_layers([config.kind(i).attention for i in range(config.layers)])


def describe_layers(every: Sequence[AttentionKind]) -> tuple[LayerSpec, ...]:
    """Describes layers to methods, by their attention."""
    reading_layers = tuple(i for i, attention in enumerate(every) if attention.reads_layer is not None)
    recurrent_layers = tuple(i for i, attention in enumerate(every) if attention.recurrence is not None)
    without_window = (i for i, attention in enumerate(every) if attention.rule.window is None)
    method_layers = tuple(i for i in without_window if i not in reading_layers and i not in recurrent_layers)
    return tuple(
        LayerSpec(
            index=i,
            num_layers=len(every),
            num_kv_heads=attention.kv_heads,
            num_groups=attention.groups,
            head_dim=attention.head_dim,
            rope=attention.rope or Rope(0),
            rule=attention.rule,
            value_dim=attention.value_dim,
            # The keys of latent attention are the rotated channels and then the latent vector, which is the values.
            values_from=None if attention.latent is None else attention.head_dim - attention.latent.rank,
            method_layers=method_layers,
            reads_layer=attention.reads_layer,
            reading_layers=reading_layers,
            recurrence=attention.recurrence,
            recurrent_layers=recurrent_layers,
        )
        for i, attention in enumerate(every)
    )


def bind(method: str | KVMethod | None, config: Config, differentiable: bool = False) -> BoundLayers:
    """Binds a method, or its string, to every layer of a model; `bind_specs` of the model's own layers."""
    return bind_specs(method, specs(config), differentiable)


def bind_specs(method: str | KVMethod | None, specs: Sequence[LayerSpec], differentiable: bool = False) -> BoundLayers:
    """Binds a method, or its string, to every layer; raises KvjaxError where it cannot serve the model.

    With `differentiable`, gradients pass through the stored keys and values, see `make_differentiable`.
    """
    method = method_of(method)
    if differentiable:
        method = make_differentiable(method)
    if method.traits.host:
        memory.require_host_memory()
    known: dict[BoundLayer, BoundLayer] = {}

    def bind_layer(spec: LayerSpec) -> BoundLayer:
        if spec.recurrence is not None:
            return RecurrentLayer(spec.num_groups, spec.head_dim, spec.value_dim, spec.recurrence.kernel_tokens)
        if spec.reads_layer is None:
            return method.bind(spec)
        source = method.bind(dataclasses.replace(specs[spec.reads_layer], num_groups=spec.num_groups))
        if not isinstance(source, ReadableLayer):
            raise IncompatibleMethod(
                f"layer {spec.index} of this model reads the cache of layer {spec.reads_layer}, and "
                f"{type(source).__name__} says of none of its states how another layer reads it; use a method such as "
                "'full', 'snapkv', 'int8' or 'quest' by itself, or write the members of "
                "kvjax.cache.protocol.ReadableLayer"
            )
        source.check_use(READ_BY_OTHER_LAYERS)
        return ReadingLayer(source)

    # Equal layers become one object: every step compares them, and the comparison then ends at identity.
    return tuple(known.setdefault(layer, layer) for layer in map(bind_layer, specs))
