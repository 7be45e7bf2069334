"""A transformers config.json (versions 4 and 5) as a `kvjax.models.Config`; whatever cannot be obeyed is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from checkpoints_convert.families import Family, family
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling

Raw = Mapping[str, Any]

UNSCALED = ("rope_theta", "partial_rotary_factor")
"""RoPE parameters that need no type of scaling."""

REFUSED = {
    "quantization_config": "save the weights dequantised (bf16, f16 or f32) and remove the key",
    "per_layer_config": "only decoders whose layers are all alike are supported",
}
"""Keys that change the numbers in ways no family here has, and the remedy."""

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
"""Fields of Config that are positive integers under another name."""


def translate(raw: Raw, generation: Raw | None = None) -> Config:
    """config.json and generation_config.json, as parsed -> Config; raises KvjaxError naming what is not supported."""
    kind = family(raw)
    for key, remedy in REFUSED.items():
        if raw.get(key):
            raise KvjaxError(f"config.json: {key} ({raw[key]!r:.80}) is not supported; {remedy}")
    values = {**kind.defaults, **raw}
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        raise KvjaxError(f"config.json: hidden_act {values['hidden_act']!r:.80} is not supported; supported: 'silu'")
    sizes = {field: _count(values, key) for field, key in SIZES.items()}
    theta, fraction, scaling = rope(values, kind)
    return Config(
        **sizes,
        kv_heads=sizes["heads"] if values["num_key_value_heads"] is None else _count(values, "num_key_value_heads"),
        head_dim=_head_dim(values),
        norm_eps=_number(values, "rms_norm_eps"),
        rope_theta=theta,
        rope_fraction=fraction,
        rope_scaling=scaling,
        windows=windows(values, kind),
        tie_embeddings=_switch(values, "tie_word_embeddings"),
        eos_ids=_eos(values, generation or {}),
        bos_id=_bos(values),
        **{field: True for field in kind.always},
        **{field: _switch(values, key) for key, fields in kind.switches.items() for field in fields},
    )


def _is_integer(x: Any) -> TypeGuard[int]:
    return isinstance(x, int) and not isinstance(x, bool)


def _count(values: Raw, key: str, least: int = 1) -> int:
    x = values.get(key)
    if not _is_integer(x) or x < least:
        wanted = "a positive integer" if least else "0 or a positive integer"
        raise KvjaxError(f"config.json: {key} must be {wanted}, got {x!r:.80}; copy config.json again")
    return x


def _number(values: Raw, key: str, where: str = "config.json") -> float:
    x = values.get(key)
    if not (_is_integer(x) or isinstance(x, float)) or not 0 < x <= sys.float_info.max:
        raise KvjaxError(f"{where}: {key} must be a positive number, got {x!r:.80}; copy config.json again")
    return float(x)


def _switch(values: Raw, key: str) -> bool:
    x = values.get(key)
    if x not in (True, False, None):
        raise KvjaxError(f"config.json: {key} must be true or false, got {x!r:.80}; copy config.json again")
    return bool(x)


def _head_dim(values: Raw) -> int:
    if values["head_dim"] is not None:
        return _count(values, "head_dim")
    width, heads = _count(values, "hidden_size"), _count(values, "num_attention_heads")
    if width % heads:
        raise KvjaxError(
            f"config.json: hidden_size {width} is no multiple of num_attention_heads {heads}; set head_dim"
        )
    return width // heads


def rope(values: Raw, kind: Family) -> tuple[float, float, RopeScaling | None]:
    """(theta, rotated share of a head, scaling) from `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    found = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or any(isinstance(x, Mapping) for x in found.values()):
        raise KvjaxError(
            f"config.json: RoPE parameters {found!r:.200} differ by layer type; one set for all is supported"
        )
    theta = _number({"rope_theta": values["rope_theta"]} | dict(found), "rope_theta")
    partial = found.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    fraction = 1.0 if partial is None else _number({"partial_rotary_factor": partial}, "partial_rotary_factor")
    if fraction > 1 or (fraction < 1 and not kind.partial_rotary):
        raise KvjaxError(f"config.json: partial_rotary_factor {fraction} is not supported for {kind.architecture}")
    return theta, fraction, _scaling(values, found)


def _scaling(values: Raw, found: Raw) -> RopeScaling | None:
    if not {"rope_type", "type"} & found.keys():
        _refuse_untyped(found)
        return None
    kind = found.get("rope_type", found.get("type"))
    number = lambda key: _number(found, key, f"config.json, RoPE scaling {kind!r}")  # noqa: E731
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    if kind == "llama3":
        # transformers prefers the key outside; without either, the positions of the model itself
        key = "original_max_position_embeddings"
        original = {key: values.get(key) or found.get(key) or values["max_position_embeddings"]}
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeScaling("llama3", number("factor"), low, high, _count(original, key))
    remedy = "it would change every logit, so use a checkpoint without it"
    raise KvjaxError(f"RoPE scaling {kind!r:.80} is not supported; supported: 'default', 'linear', 'llama3'; {remedy}")


def _refuse_untyped(found: Raw) -> None:
    """Raises KvjaxError for RoPE parameters that scale, and do not say how."""
    said = {key: x for key, x in found.items() if key not in UNSCALED and x is not None}
    if said.get("factor", 1) != 1 or said.keys() - {"factor"}:
        raise KvjaxError(
            f"config.json: RoPE scaling {said!r:.200} names no rope_type; add the one that the model was trained with, "
            "or remove it"
        )


def windows(values: Raw, kind: Family) -> tuple[int | None, ...] | None:
    """The sliding window of each layer: the most recent positions that a query sees, itself included; None: all."""
    layers, types = _count(values, "num_hidden_layers"), values.get("layer_types")
    on = kind.sliding == "every layer" or (kind.sliding == "by layer" and _switch(values, "use_sliding_window"))
    size = _count(values, "sliding_window") if on and values["sliding_window"] is not None else None
    if kind.sliding == "by layer" and types is not None:
        slides = _slides(types, layers)
    elif kind.sliding == "by layer":
        first = layers if size is None else _count(values, "max_window_layers", least=0)
        slides = [i >= first for i in range(layers)]
    else:
        slides = [size is not None] * layers
        if types is not None and _slides(types, layers) != slides:
            raise KvjaxError(
                f"config.json: {kind.architecture} does not obey layer_types {types!r:.200}; remove the key"
            )
    if any(slides) and size is None:
        raise KvjaxError(
            "config.json: layer_types has sliding layers, but sliding_window is unset or switched off; set it"
        )
    return tuple(size if s else None for s in slides) if any(slides) else None


def _slides(types: Any, layers: int) -> list[bool]:
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != layers or any(t not in list(names) for t in types):
        raise KvjaxError(
            f"config.json: layer_types must name {layers} layers, each one of {list(names)}; got {types!r:.200}"
        )
    return [names[t] for t in types]


def _eos(values: Raw, generation: Raw) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json overrides config.json, as in transformers' `generate`."""
    key = "eos_token_id"
    both = [_ids(values, key, said) for said in (generation.get(key), values[key]) if said is not None]
    return both[0] if both else ()


def _bos(values: Raw) -> int | None:
    key = "bos_token_id"
    if values[key] is None:
        return None
    known = _ids(values, key, values[key])
    return known[0] if known else None


def _ids(values: Raw, key: str, said: Any) -> tuple[int, ...]:
    """The one id that is said, or each of a list once.

    Those beyond the vocabulary, as defaults may be, are left out: they can be neither read nor generated.
    """
    ids = said if isinstance(said, list) else [said]
    if bad := [i for i in ids if not _is_integer(i) or i < 0]:
        raise KvjaxError(
            f"config.json or generation_config.json: {key} must name tokens by their ids, got {bad[0]!r:.80}; copy "
            "both again"
        )
    return tuple(i for i in dict.fromkeys(ids) if i < _count(values, "vocab_size"))


def refuse_missing_layers(raw: Raw, tensors: int) -> None:
    """Raises KvjaxError for more layers than the checkpoint has tensors: at once, before any layer is looked at."""
    layers = raw.get("num_hidden_layers")
    if _is_integer(layers) and layers > tensors:
        raise KvjaxError(
            f"config.json: num_hidden_layers is {layers:,}, but the checkpoint has only {tensors:,} tensors; copy both "
            "again"
        )
