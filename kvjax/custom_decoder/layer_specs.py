"""Describes the layers of a decoder that is not kvjax's to methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope
from kvjax.engine.plan import describe_layers
from kvjax.errors import KvjaxError
from kvjax.models.kinds import AttentionKind
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.parameter_types import NonNegativeInt, check_value


@checks_keywords
def specs_of(
    num_layers: int,
    heads: int | Sequence[int],
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    *,
    rope: Rope | None | Sequence[Rope | None],
    window: int | None | Sequence[int | None] = None,
    soft_cap: float | None | Sequence[float | None] = None,
    value_dim: int | None | Sequence[int | None] = None,
    values_from: int | None | Sequence[int | None] = None,
) -> tuple[LayerSpec, ...]:
    """Describes the layers of a decoder to methods; what differs between layers is a sequence, one entry a layer.

    Args:
      num_layers: layers of the decoder.
      heads: query heads.
      kv_heads: key/value heads; query head n reads key/value head n // (heads // kv_heads).
      head_dim: width of queries and keys.
      rope: the rotary embedding by which queries and keys were rotated, `Rope(dim, theta, scaling)`; None for a layer
        without. `check_rope` compares it with a decoder's own function.
      window: latest positions that a query sees, its own included; None for all.
      soft_cap: c in c * tanh(s / c), which bounds the logits s (Gemma 2); None for none.
      value_dim: width of values; None: `head_dim`.
      values_from: first channel of the keys that is one of the values, where values are channels of their keys (latent
        attention: behind those that `rope` turns), so that they are stored once; None where they are not.

    Returns:
      The specs, for `attach`.

    Raises:
      KvjaxError: sizes that do not fit together, or a sequence of another length.
    """
    num_layers = arguments.integer("num_layers", num_layers)
    by_layer = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": rope,
        "window": window,
        "soft_cap": soft_cap,
        "value_dim": value_dim,
        "values_from": values_from,
    }
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for name, value in by_layer.items():
        for fields, entry in zip(layers, _entries(name, value, num_layers), strict=True):
            fields[name] = entry
    firsts = [fields.pop("values_from") for fields in layers]
    kinds = []
    for i, fields in enumerate(layers):
        try:
            check_value("specs_of", "values_from", NonNegativeInt | None, firsts[i])
            rule = Rule(fields.pop("window"), fields.pop("soft_cap"))
            kinds.append(AttentionKind(**fields, rule=rule))
        except KvjaxError as e:
            raise KvjaxError(f"layer {i}: {e}") from e
    specs = zip(describe_layers(kinds), firsts, strict=True)
    return tuple(dataclasses.replace(spec, values_from=first) for spec, first in specs)


def _entries(name: str, value: Any, num_layers: int) -> list[Any]:
    """Returns the value of each layer; raises KvjaxError for a sequence that has another number of them."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * num_layers
    if len(value) != num_layers:
        raise KvjaxError(
            f"{name} has {len(value)} entries and the model {num_layers} layers; give one for each layer, or one value "
            "for all"
        )
    return list(value)
