"""A transformers config.json (versions 4 and 5) as a `kvjax.models.Config`; what cannot be obeyed is refused."""

from __future__ import annotations

import functools
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
    "quantization_config": "save the weights dequantized (bf16, f16 or f32) and remove the key",
    "per_layer_config": "only decoders whose layers are all alike are supported",
}
"""Key -> remedy, for keys that change the numbers and that no family here has."""

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
"""Field of Config -> key, for positive integers."""


def translate(raw: Raw, generation: Raw | None = None, tokenizer_eos_id: int | None = None) -> Config:
    """Translates config.json and generation_config.json; raises KvjaxError for what is not supported.

    Args:
      raw: config.json, as parsed.
      generation: generation_config.json, if there is one.
      tokenizer_eos_id: the id of the tokenizer's `eos_token`, which ends an answer too, as in vLLM.
    """
    kind = family(raw)
    for key, remedy in REFUSED.items():
        if raw.get(key):
            raise KvjaxError(f"config.json: {key} ({raw[key]!r:.80}) is not supported; {remedy}")
    values = {**kind.defaults, **raw}
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        raise KvjaxError(f"config.json: hidden_act {values['hidden_act']!r:.80} is not supported; supported: 'silu'")
    sizes = {field: _read_count(values, key) for field, key in SIZES.items()}
    head_dim = values["head_dim"]
    if head_dim is None and sizes["width"] % sizes["heads"]:
        raise KvjaxError(
            f"config.json: hidden_size {sizes['width']} is no multiple of num_attention_heads {sizes['heads']}; set "
            "head_dim"
        )
    # generation_config.json overrides config.json, as in transformers' `generate`.
    both_eos = ((generation or {}).get("eos_token_id"), values["eos_token_id"])
    eos_ids = [_read_ids(values, "eos_token_id", x) for x in both_eos if x is not None]
    own_eos = () if tokenizer_eos_id is None else _read_ids(values, "eos_token_id", tokenizer_eos_id)
    bos = values["bos_token_id"]
    bos_ids = () if bos is None else _read_ids(values, "bos_token_id", bos)
    theta, fraction, scaling = read_rope(values, kind)
    return Config(
        **sizes,
        kv_heads=sizes["heads"]
        if values["num_key_value_heads"] is None
        else _read_count(values, "num_key_value_heads"),
        head_dim=sizes["width"] // sizes["heads"] if head_dim is None else _read_count(values, "head_dim"),
        norm_eps=_read_number(values, "rms_norm_eps"),
        rope_theta=theta,
        rope_fraction=fraction,
        rope_scaling=scaling,
        windows=read_windows(values, kind),
        tie_embeddings=_read_switch(values, "tie_word_embeddings"),
        eos_ids=tuple(dict.fromkeys((*(eos_ids[0] if eos_ids else ()), *own_eos))),
        bos_id=bos_ids[0] if bos_ids else None,
        **{field: True for field in kind.always},
        **{field: _read_switch(values, key) for key, fields in kind.switches.items() for field in fields},
    )


def _is_integer(x: Any) -> TypeGuard[int]:
    return isinstance(x, int) and not isinstance(x, bool)


def _read_count(values: Raw, key: str, least: int = 1) -> int:
    x = values.get(key)
    if not _is_integer(x) or x < least:
        kind = "a positive integer" if least else "0 or a positive integer"
        raise KvjaxError(f"config.json: {key} must be {kind}, got {x!r:.80}; copy config.json again")
    return x


def _read_number(values: Raw, key: str, name: str = "config.json") -> float:
    x = values.get(key)
    if not (_is_integer(x) or isinstance(x, float)) or not 0 < x <= sys.float_info.max:
        raise KvjaxError(f"{name}: {key} must be a positive number, got {x!r:.80}; copy config.json again")
    return float(x)


def _read_switch(values: Raw, key: str) -> bool:
    x = values.get(key)
    if x not in (True, False, None):
        raise KvjaxError(f"config.json: {key} must be true or false, got {x!r:.80}; copy config.json again")
    return bool(x)


def _read_ids(values: Raw, key: str, raw: Any) -> tuple[int, ...]:
    """Reads one id, or a list of them, each once.

    Ids beyond the vocabulary, as defaults may be, are left out: they can be neither read nor generated.
    """
    ids = raw if isinstance(raw, list) else [raw]
    if bad := [i for i in ids if not _is_integer(i) or i < 0]:
        raise KvjaxError(
            f"config.json or generation_config.json: {key} must name tokens by their ids, got {bad[0]!r:.80}; copy "
            "both again"
        )
    return tuple(i for i in dict.fromkeys(ids) if i < _read_count(values, "vocab_size"))


def read_rope(values: Raw, kind: Family) -> tuple[float, float, RopeScaling | None]:
    """Reads `rope_scaling` (transformers 4) or `rope_parameters` (5): (theta, rotated fraction of a head, scaling)."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(x, Mapping) for x in rope.values()):
        raise KvjaxError(
            f"config.json: RoPE parameters {rope!r:.200} differ by layer type; one set for all is supported"
        )
    theta = _read_number({"rope_theta": values["rope_theta"]} | dict(rope), "rope_theta")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    fraction = 1.0 if partial is None else _read_number({"partial_rotary_factor": partial}, "partial_rotary_factor")
    if fraction > 1 or (fraction < 1 and not kind.partial_rotary):
        raise KvjaxError(f"config.json: partial_rotary_factor {fraction} is not supported for {kind.architecture}")
    return theta, fraction, _read_scaling(values, rope)


def _read_scaling(values: Raw, rope: Raw) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type")
    if kind is None:
        # Nothing says which formula such parameters belong to.
        harmless = (*UNSCALED, "rope_type", "type", "original_max_position_embeddings")
        scaling = {key: x for key, x in rope.items() if key not in harmless and x is not None}
        if scaling.get("factor", 1) != 1 or scaling.keys() - {"factor"}:
            raise KvjaxError(
                f"config.json: RoPE scaling {scaling!r:.200} names no rope_type; add the one that the model was "
                "trained with, or remove it"
            )
        return None
    if kind == "default" or _scales_by_one(values, rope, kind):
        return None
    number = functools.partial(_read_number, rope, name=f"config.json, RoPE scaling {kind!r}")
    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    if kind == "llama3":
        # transformers prefers the key outside of the scaling; without either, the positions of the model itself.
        key = "original_max_position_embeddings"
        original = {key: values.get(key) or rope.get(key) or values["max_position_embeddings"]}
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeScaling("llama3", number("factor"), low, high, _read_count(original, key))
    remedy = "it would change every logit, so use a checkpoint without it"
    raise KvjaxError(f"RoPE scaling {kind!r:.80} is not supported; supported: 'default', 'linear', 'llama3'; {remedy}")


def _scales_by_one(values: Raw, rope: Raw, kind: Any) -> bool:
    """Whether a scaling of RoPE leaves every angle and the length of the vectors as they are."""
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factors = [1 if attention is None else attention]
    if kind == "longrope":  # the factor only sets the length of the vectors, by default from the two contexts
        key, context = "original_max_position_embeddings", values["max_position_embeddings"]
        original = values.get(key) or rope.get(key) or context
        factor = 1 if factor is None and original == context else factor
        for name in ("short_factor", "long_factor"):
            factors += rope[name] if isinstance(rope.get(name), list) and rope[name] else [None]
    is_known = kind in ("linear", "llama3", "yarn", "longrope")
    return is_known and all(x == 1 and not isinstance(x, bool) for x in (factor, *factors))


def read_windows(values: Raw, kind: Family) -> tuple[int | None, ...] | None:
    """Reads each layer's sliding window, in latest positions that a query sees; None where it sees all."""
    layers, types = _read_count(values, "num_hidden_layers"), values.get("layer_types")
    is_on = kind.sliding == "every layer" or (kind.sliding == "by layer" and _read_switch(values, "use_sliding_window"))
    size = _read_count(values, "sliding_window") if is_on and values["sliding_window"] not in (None, 0) else None
    if kind.sliding == "by layer" and types is not None:
        is_sliding = _read_layer_types(types, layers)
    elif kind.sliding == "by layer":
        first = layers if size is None else _read_count(values, "max_window_layers", least=0)
        is_sliding = [i >= first for i in range(layers)]
    else:
        is_sliding = [size is not None] * layers
        if types is not None and _read_layer_types(types, layers) != is_sliding:
            raise KvjaxError(
                f"config.json: {kind.architecture} does not obey layer_types {types!r:.200}; remove the key"
            )
    if any(is_sliding) and size is None:
        raise KvjaxError(
            "config.json: layer_types has sliding layers, but sliding_window is unset or switched off; set it"
        )
    return tuple(size if s else None for s in is_sliding) if any(is_sliding) else None


def _read_layer_types(types: Any, layers: int) -> list[bool]:
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != layers or any(t not in list(names) for t in types):
        raise KvjaxError(
            f"config.json: layer_types must name {layers} layers, each one of {list(names)}; got {types!r:.200}"
        )
    return [names[t] for t in types]


def refuse_missing_layers(raw: Raw, num_tensors: int) -> None:
    """Raises KvjaxError for more layers than tensors, before anything is made for each layer."""
    layers = raw.get("num_hidden_layers")
    if _is_integer(layers) and layers > num_tensors:
        raise KvjaxError(
            f"config.json: num_hidden_layers is {layers:,}, but the checkpoint has only {num_tensors:,} tensors; copy "
            "both again"
        )
