"""A transformers config.json (versions 4 and 5) as a `kvjax.models.Config`; what cannot be obeyed is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from checkpoints_convert.families import FAMILIES, Family
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling

Raw = Mapping[str, Any]

ORIGINAL, ROPE = "original_max_position_embeddings", "RoPE parameters"
HARMLESS = ("rope_theta", "partial_rotary_factor", "rope_type", "type", ORIGINAL)
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


def translate(
    raw: Raw, generation: Raw | None = None, tokenizer_eos_id: int | None = None, num_tensors: int | None = None
) -> Config:
    """Translates config.json and generation_config.json; raises KvjaxError for what is not supported.

    Args:
      raw: config.json, as parsed.
      generation: generation_config.json, if there is one.
      tokenizer_eos_id: the id of the tokenizer's `eos_token`, which ends an answer too, as in vLLM.
      num_tensors: of the checkpoint, which has fewer layers than tensors; None for a config alone.
    """
    if problems := list(_find_problems(raw, generation or {}, num_tensors)):
        raise KvjaxError("\n".join(f"config.json: {problem}" for problem in problems))
    kind = FAMILIES[raw["model_type"]]
    values = _complete(raw, kind)
    sizes = {field: values[key] for field, key in SIZES.items()}
    kv_heads, head_dim = values["num_key_value_heads"], values["head_dim"]
    # generation_config.json overrides config.json, as in transformers' `generate`.
    both_eos = ((generation or {}).get("eos_token_id"), values["eos_token_id"])
    eos_ids = _read_ids(next((x for x in both_eos if x is not None), None), values)
    bos_ids = _read_ids(values["bos_token_id"], values)
    return Config.llama(
        **sizes,
        kv_heads=sizes["heads"] if kv_heads is None else kv_heads,
        head_dim=sizes["width"] // sizes["heads"] if head_dim is None else head_dim,
        norm_eps=float(values["rms_norm_eps"]),
        rope_theta=float(values["rope_theta"]),
        rope_fraction=float(values["partial_rotary_factor"]),
        rope_scaling=_read_scaling(values),
        windows=_read_windows(values, kind),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        eos_ids=tuple(dict.fromkeys((*eos_ids, *_read_ids(tokenizer_eos_id, values)))),
        bos_id=bos_ids[0] if bos_ids else None,
        **{field: True for field in kind.always},
        **{field: bool(values[key]) for key, fields in kind.switches.items() for field in fields},
    )


def _find_problems(raw: Raw, generation: Raw, num_tensors: int | None) -> Iterator[str]:
    """Yields what cannot be obeyed: an unknown family, else values of a wrong kind, else what is not supported."""
    model_type, names = raw.get("model_type"), raw.get("architectures") or []
    kind = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if not KINDS[NAMES](names):
        yield f"architectures must {NAMES}, got {names!r:.80}; copy config.json again"
        return
    if kind is None or (names and kind.architecture not in names):
        what = f"model_type {model_type!r:.80}"
        if kind is not None:
            what = f"architecture {names[0]!r:.80} of {what}"
        supported = ", ".join(f"{name} ({known.architecture})" for name, known in FAMILIES.items())
        yield f"{what} is not supported; supported: {supported}"
        return
    values = _complete(raw, kind)
    wrong = [(name, must, x) for name, must, x in _list_values(values, kind, generation) if not KINDS[must](x)]
    for name, must, x in wrong:
        yield f"{name} must {must}, got {x!r:.80}; copy config.json again"
    if wrong:
        return
    # Before anything is made for each layer.
    layers = raw.get("num_hidden_layers", 0)
    if num_tensors is not None and layers > num_tensors:
        yield f"num_hidden_layers is {layers:,}, but the checkpoint has only {num_tensors:,} tensors; copy both again"
        return
    yield from _find_unsupported(values, kind)


def _list_values(values: Raw, kind: Family, generation: Raw) -> Iterator[tuple[str, str, Any]]:
    """Lists the values that `translate` reads: (name, one of KINDS, value)."""
    yield ROPE, ONE_SET, values[ROPE]
    if not isinstance(values[ROPE], Mapping):
        return
    for key in SIZES.values():
        yield key, COUNT, values[key]
    for key in ("num_key_value_heads", "head_dim"):
        if values[key] is not None:
            yield key, COUNT, values[key]
    for key in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        yield key, NUMBER, values[key]
    by_layer = kind.sliding == "by layer"
    for key in ("tie_word_embeddings", *kind.switches, *(["use_sliding_window"] if by_layer else [])):
        yield key, SWITCH, values[key]
    window = _read_window(values, kind)
    if window is not None:
        yield "sliding_window", COUNT, window
        if by_layer and values.get("layer_types") is None:
            yield "max_window_layers", COUNT_OR_ZERO, values["max_window_layers"]
    ids = {"eos_token_id": values["eos_token_id"], "bos_token_id": values["bos_token_id"]}
    for key, x in (*ids.items(), ("generation_config.json's eos_token_id", generation.get("eos_token_id"))):
        if x is not None:
            yield key, IDS, x
    scaling = _scaling_type(values)
    if scaling is not None:
        numbers = ("factor",) if scaling == "linear" else ("low_freq_factor", "high_freq_factor", "factor")
        for key in numbers:
            yield f"RoPE scaling {scaling!r}: {key}", NUMBER, values[ROPE].get(key)
    if scaling == "llama3":
        yield f"RoPE scaling {scaling!r}: {ORIGINAL}", COUNT, _read_original(values)


def _find_unsupported(values: Raw, kind: Family) -> Iterator[str]:
    """Yields what would change the numbers and is not supported, each with its remedy."""
    rope, window, fraction = values[ROPE], _read_window(values, kind), values["partial_rotary_factor"]
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
    is_known = scaling in (None, "default", "linear", "llama3") or _scales_by_one(values, scaling)
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


def _read_ids(raw: Any, values: Raw) -> tuple[int, ...]:
    """Reads one id, or a list of them, each once; none for None.

    Ids beyond the vocabulary, as defaults may be, are left out: they can be neither read nor generated.
    """
    ids = raw if isinstance(raw, list) else [raw]
    return tuple(i for i in dict.fromkeys(ids) if i is not None and i < values["vocab_size"])


def _complete(raw: Raw, kind: Family) -> dict[str, Any]:
    """Adds the defaults of the family, and the parameters of RoPE in one place for both versions of transformers."""
    values = {**kind.defaults, **raw}
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    inner = rope if isinstance(rope, Mapping) else {}
    fraction = inner.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    theta = inner.get("rope_theta", values["rope_theta"])
    return values | {ROPE: rope, "rope_theta": theta, "partial_rotary_factor": 1.0 if fraction is None else fraction}


def _read_scaling(values: Raw) -> RopeScaling | None:
    """Reads the scaling of RoPE; None where it changes nothing."""
    kind, rope = _scaling_type(values), values[ROPE]
    if kind is None:
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    return RopeScaling("llama3", factor, low, high, _read_original(values))


def _scaling_type(values: Raw) -> str | None:
    """Returns "linear" or "llama3", None for a scaling of another type and for one that changes nothing."""
    kind = values[ROPE].get("rope_type") or values[ROPE].get("type")
    return kind if kind in ("linear", "llama3") and not _scales_by_one(values, kind) else None


def _read_original(values: Raw) -> Any:
    """Returns the positions before scaling: transformers prefers the key outside of it; by default the model's own."""
    return values.get(ORIGINAL) or values[ROPE].get(ORIGINAL) or values["max_position_embeddings"]


def _scales_by_one(values: Raw, kind: Any) -> bool:
    """Whether a scaling of RoPE leaves every angle and the length of the vectors as they are."""
    rope = values[ROPE]
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factors = [1 if attention is None else attention]
    if kind == "longrope":  # the factor only sets the length of the vectors, by default from the two contexts
        is_original = _read_original(values) == values["max_position_embeddings"]
        factor = 1 if factor is None and is_original else factor
        for name in ("short_factor", "long_factor"):
            factors += rope[name] if isinstance(rope.get(name), list) and rope[name] else [None]
    is_known = kind in ("linear", "llama3", "yarn", "longrope")
    return is_known and all(x == 1 and not isinstance(x, bool) for x in (factor, *factors))


def _read_window(values: Raw, kind: Family) -> int | None:
    """Reads the size of the sliding window, in latest positions that a query sees; None where none is used."""
    is_on = kind.sliding == "every layer" or (kind.sliding == "by layer" and values["use_sliding_window"])
    return values["sliding_window"] if is_on and values["sliding_window"] not in (None, 0) else None


def _read_windows(values: Raw, kind: Family) -> tuple[int | None, ...] | None:
    """Reads each layer's sliding window; None where no layer has one."""
    layers, types, window, first = values["num_hidden_layers"], values.get("layer_types"), _read_window(values, kind), 0
    if kind.sliding == "by layer" and types is not None:
        windows = tuple(window if x == SLIDING else None for x in types)
    else:
        if kind.sliding == "by layer" and window is not None:
            first = values["max_window_layers"]
        windows = tuple(window if i >= first else None for i in range(layers))
    return windows if any(windows) else None
