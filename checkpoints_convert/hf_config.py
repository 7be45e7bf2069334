"""A transformers config.json (versions 4 and 5) as a `kvjax.models.Config`; what cannot be obeyed is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from checkpoints_convert.families import Family, family
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling

Raw = Mapping[str, Any]

HARMLESS = ("rope_theta", "partial_rotary_factor", "rope_type", "type", "original_max_position_embeddings")
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


def is_integer(x: Any) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number; true and false are none."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether a value of JSON is a number; true and false are none."""
    return isinstance(x, int | float) and not isinstance(x, bool)


COUNT, NUMBER, SWITCH, IDS = (
    "be a positive integer",
    "be a positive number",
    "be true or false",
    "name tokens by their ids",
)
COUNT_OR_ZERO, NAMES = "be 0 or a positive integer", "be a list of names"
ONE_SET = "be one set for all layers, and not differ by layer type"
SLIDING = "sliding_attention"
KINDS: dict[str, Callable[[Any], bool]] = {
    COUNT: lambda x: is_integer(x) and x > 0,
    COUNT_OR_ZERO: lambda x: is_integer(x) and x >= 0,
    NUMBER: lambda x: is_number(x) and 0 < x <= sys.float_info.max,
    SWITCH: lambda x: x is None or isinstance(x, bool),
    IDS: lambda x: all(is_integer(i) and i >= 0 for i in (x if isinstance(x, list) else [x])),
    NAMES: lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
    ONE_SET: lambda x: isinstance(x, Mapping) and not any(isinstance(value, Mapping) for value in x.values()),
}
"""The kinds of values: a kind in words -> whether a value is of it."""


def read_value(values: Raw, key: str, kind: str, name: str = "config.json") -> Any:
    """Returns the value of a key; raises KvjaxError unless it is of one of KINDS."""
    x = values.get(key)
    if not KINDS[kind](x):
        raise KvjaxError(f"{name}: {key} must {kind}, got {x!r:.80}; copy config.json again")
    return x


def translate(raw: Raw, generation: Raw | None = None, tokenizer_eos_id: int | None = None) -> Config:
    """Translates config.json and generation_config.json; raises KvjaxError for what is not supported.

    Args:
      raw: config.json, as parsed.
      generation: generation_config.json, if there is one.
      tokenizer_eos_id: the id of the tokenizer's `eos_token`, which ends an answer too, as in vLLM.
    """
    read_value({"architectures": raw.get("architectures") or []}, "architectures", NAMES)
    kind = family(raw)
    values = {**kind.defaults, **raw}
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    rope = read_value({"RoPE parameters": rope}, "RoPE parameters", ONE_SET)
    sizes = {field: read_value(values, key, COUNT) for field, key in SIZES.items()}
    partial = {"partial_rotary_factor": rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))}
    is_partial = partial["partial_rotary_factor"] is not None
    fraction = float(read_value(partial, "partial_rotary_factor", NUMBER)) if is_partial else 1.0
    window = _read_window(values, kind)
    if problems := list(_find_unsupported(values, kind, rope, fraction, window)):
        raise KvjaxError("\n".join(f"config.json: {problem}" for problem in problems))
    # generation_config.json overrides config.json, as in transformers' `generate`.
    both_eos = ((generation or {}).get("eos_token_id"), values["eos_token_id"])
    eos_ids = [_read_ids(values, "eos_token_id", x) for x in both_eos if x is not None]
    own_eos = () if tokenizer_eos_id is None else _read_ids(values, "eos_token_id", tokenizer_eos_id)
    bos = values["bos_token_id"]
    bos_ids = () if bos is None else _read_ids(values, "bos_token_id", bos)
    kv_heads, head_dim = values["num_key_value_heads"], values["head_dim"]
    return Config(
        **sizes,
        kv_heads=sizes["heads"] if kv_heads is None else read_value(values, "num_key_value_heads", COUNT),
        head_dim=sizes["width"] // sizes["heads"] if head_dim is None else read_value(values, "head_dim", COUNT),
        norm_eps=float(read_value(values, "rms_norm_eps", NUMBER)),
        rope_theta=float(read_value({"rope_theta": values["rope_theta"]} | dict(rope), "rope_theta", NUMBER)),
        rope_fraction=fraction,
        rope_scaling=_read_scaling(values, rope),
        windows=_read_windows(values, kind, window),
        tie_embeddings=bool(read_value(values, "tie_word_embeddings", SWITCH)),
        eos_ids=tuple(dict.fromkeys((*(eos_ids[0] if eos_ids else ()), *own_eos))),
        bos_id=bos_ids[0] if bos_ids else None,
        **{field: True for field in kind.always},
        **{field: bool(read_value(values, key, SWITCH)) for key, fields in kind.switches.items() for field in fields},
    )


def _find_unsupported(values: Raw, kind: Family, rope: Raw, fraction: float, window: int | None) -> Iterator[str]:
    """Yields what would change the numbers and is not supported, each with its remedy."""
    for key, remedy in REFUSED.items():
        if values.get(key):
            yield f"{key} ({values[key]!r:.80}) is not supported; {remedy}"
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        yield f"hidden_act {values['hidden_act']!r:.80} is not supported; supported: 'silu'"
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if values["head_dim"] is None and width % heads:
        yield f"hidden_size {width} is no multiple of num_attention_heads {heads}; set head_dim"
    if fraction > 1 or (fraction < 1 and not kind.partial_rotary):
        yield f"partial_rotary_factor {fraction} is not supported for {kind.architecture}; leave it out"
    scaling = rope.get("rope_type") or rope.get("type")
    unnamed = {key: x for key, x in rope.items() if key not in HARMLESS and x is not None}
    if scaling is None and (unnamed.get("factor", 1) != 1 or unnamed.keys() - {"factor"}):
        yield (  # nothing says which formula such parameters belong to
            f"RoPE scaling {unnamed!r:.200} names no rope_type; add the one that the model was trained with, or remove "
            "it"
        )
    is_known = scaling in (None, "default", "linear", "llama3") or _scales_by_one(values, rope, scaling)
    if not is_known:
        yield (
            f"RoPE scaling {scaling!r:.80} is not supported; supported: 'default', 'linear', 'llama3'; it would change "
            "every logit, so use a checkpoint without it"
        )
    types, layers, names = values.get("layer_types"), values["num_hidden_layers"], ["full_attention", SLIDING]
    if types is None:
        return
    if not isinstance(types, list) or len(types) != layers or any(x not in names for x in types):
        yield f"layer_types must name {layers} layers, each one of {names}; got {types!r:.200}"
    elif kind.sliding != "by layer" and any((x == SLIDING) != (window is not None) for x in types):
        yield f"{kind.architecture} does not obey layer_types {types!r:.200}; remove the key"
    elif SLIDING in types and window is None:
        yield "layer_types has sliding layers, but sliding_window is unset or switched off; set it"


def _read_ids(values: Raw, key: str, raw: Any) -> tuple[int, ...]:
    """Reads one id, or a list of them, each once.

    Ids beyond the vocabulary, as defaults may be, are left out: they can be neither read nor generated.
    """
    ids = read_value({key: raw}, key, IDS, "config.json or generation_config.json")
    return tuple(i for i in dict.fromkeys(ids if isinstance(ids, list) else [ids]) if i < values["vocab_size"])


def _read_scaling(values: Raw, rope: Raw) -> RopeScaling | None:
    """Reads `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in ("linear", "llama3") or _scales_by_one(values, rope, kind):
        return None
    name = f"config.json, RoPE scaling {kind!r}"
    if kind == "linear":
        return RopeScaling("linear", float(read_value(rope, "factor", NUMBER, name)))
    # transformers prefers the key outside of the scaling; without either, the positions of the model itself.
    key = "original_max_position_embeddings"
    original = {key: values.get(key) or rope.get(key) or values["max_position_embeddings"]}
    low, high, factor = (
        float(read_value(rope, x, NUMBER, name)) for x in ("low_freq_factor", "high_freq_factor", "factor")
    )
    return RopeScaling("llama3", factor, low, high, read_value(original, key, COUNT))


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


def _read_window(values: Raw, kind: Family) -> int | None:
    """Reads the size of the sliding window, in latest positions that a query sees; None where none is used."""
    is_on = kind.sliding == "every layer" or (
        kind.sliding == "by layer" and read_value(values, "use_sliding_window", SWITCH)
    )
    return read_value(values, "sliding_window", COUNT) if is_on and values["sliding_window"] not in (None, 0) else None


def _read_windows(values: Raw, kind: Family, window: int | None) -> tuple[int | None, ...] | None:
    """Reads each layer's sliding window; None where no layer has one."""
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    first = 0
    if kind.sliding == "by layer" and types is not None:
        windows = tuple(window if x == SLIDING else None for x in types)
    else:
        if kind.sliding == "by layer" and window is not None:
            first = read_value(values, "max_window_layers", COUNT_OR_ZERO)
        windows = tuple(window if i >= first else None for i in range(layers))
    return windows if any(windows) else None


def refuse_missing_layers(raw: Raw, num_tensors: int) -> None:
    """Raises KvjaxError for more layers than tensors, before anything is made for each layer."""
    layers = raw.get("num_hidden_layers")
    if is_integer(layers) and layers > num_tensors:
        raise KvjaxError(
            f"config.json: num_hidden_layers is {layers:,}, but the checkpoint has only {num_tensors:,} tensors; copy "
            "both again"
        )
