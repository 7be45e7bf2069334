"""A transformers config.json (versions 4 and 5) as a `kvjax.models.Config`; what cannot be obeyed is refused.

transformers is the reference for what a key means: keys that the classes of a family do not read are not read here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from checkpoints_convert import fp8, mxfp4
from checkpoints_convert.families import (
    BIDIRECTIONAL,
    COUNT,
    COUNT_OR_NULL,
    COUNT_OR_ZERO,
    COUNT_OR_ZERO_OR_NULL,
    FACTOR,
    FAMILIES,
    FULL,
    INDICES,
    NUMBER,
    NUMBER_OR_NULL,
    ORIGINAL,
    OVERRIDES,
    ROPE,
    SLIDING,
    SWITCH,
    SWITCHES,
    Family,
    find_family,
)
from kvjax.core.attention import Rule
from kvjax.core.rope import SCALING_KINDS, Rope, RopeScaling, longrope_scaling, yarn_scaling
from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.kinds import Activation, AttentionKind, LayerKind, MlpKind
from kvjax.utils.parameter_types import MAX_SIZE

Raw = Mapping[str, Any]

HEAD_DIM = "width of a rotated head"
HARMLESS = ("rope_theta", "partial_rotary_factor", "rope_type", "type", ORIGINAL, "truncate")
# Which channels turn with which of an image token's three positions, which are equal for tokens of text.
HARMLESS += ("mrope_section", "mrope_interleaved")
"""RoPE parameters that need no type of scaling."""

REFUSED = {
    "quantization_config": "save the weights dequantized (bf16, f16 or f32) and remove the key",
    "per_layer_config": "only the differences between layers that transformers' own classes have are supported",
}
"""Key -> remedy, for keys that change the numbers and that no family here has."""

RELATIVES = {
    "llama4": "llama",
    "llama4_text": "llama",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "kimi_linear": "kimi_k2",
    "mistral4": "deepseek_v3",
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "gemma3"),
}
"""Family that is often asked for -> the supported family that it resembles and that lacks some of its parts."""

SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
"""Size -> key, for positive integers."""

ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"), "gelu_tanh"),
}
"""Names of activations in transformers, several for one function -> `MlpKind.activation`."""


def is_integer(x: Any) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number; true and false are none."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether a value of JSON is a number; true and false are none."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_positive(x: Any) -> bool:
    return is_number(x) and 0 < x <= sys.float_info.max


def _is_override(layer: Any, own: Any) -> bool:
    """Whether an entry of `per_layer_config` says sizes of one layer's heads, and nothing else."""
    is_layer = isinstance(layer, str) and layer.isascii() and layer.isdigit()
    known = isinstance(own, Mapping) and own.keys() <= {"head_dim", "num_key_value_heads"}
    return is_layer and known and all(is_integer(x) and 0 < x <= MAX_SIZE for x in own.values())


IDS, NAMES, NUMBERS = "name tokens by their ids", "be a list of names", "be a list of positive numbers"
ONE_SET = "be one set for all layers, and not differ by layer type"
KINDS: dict[str, Callable[[Any], bool]] = {
    COUNT: lambda x: is_integer(x) and 0 < x <= MAX_SIZE,
    COUNT_OR_ZERO: lambda x: is_integer(x) and 0 <= x <= MAX_SIZE,
    COUNT_OR_NULL: lambda x: x is None or (is_integer(x) and 0 < x <= MAX_SIZE),
    COUNT_OR_ZERO_OR_NULL: lambda x: x is None or (is_integer(x) and 0 <= x <= MAX_SIZE),
    NUMBER: _is_positive,
    NUMBER_OR_NULL: lambda x: x is None or _is_positive(x),
    FACTOR: lambda x: x is None or (is_number(x) and 0 <= x <= sys.float_info.max),
    NUMBERS: lambda x: isinstance(x, list) and bool(x) and all(map(_is_positive, x)),
    SWITCH: lambda x: x is None or isinstance(x, bool),
    INDICES: lambda x: x is None or (isinstance(x, list) and all(is_integer(i) and i >= 0 for i in x)),
    SWITCHES: lambda x: x is None or (isinstance(x, list) and all(i in (0, 1) for i in x)),
    BIDIRECTIONAL: lambda x: x in (None, "vision", "all"),
    OVERRIDES: lambda x: x is None or (isinstance(x, Mapping) and all(map(_is_override, x, x.values()))),
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
    family = find_family(raw)
    assert family is not None
    values = _complete(raw, family)
    types = _read_types(values, family)
    layers = [_read_layer(values, family, types, i) for i in range(values["num_hidden_layers"])]
    kinds = tuple(dict.fromkeys(layers))
    # generation_config.json overrides config.json, as in transformers' `generate`.
    both_eos = ((generation or {}).get("eos_token_id"), values["eos_token_id"])
    eos_ids = _read_ids(next((x for x in both_eos if x is not None), None), values)
    bos_ids = _read_ids(values["bos_token_id"], values)
    return Config(
        values["vocab_size"],
        values["hidden_size"],
        kinds,
        tuple(kinds.index(layer) for layer in layers),
        max_positions=values["max_position_embeddings"],
        norm_eps=float(values["rms_norm_eps"]),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        eos_ids=tuple(dict.fromkeys((*eos_ids, *_read_ids(tokenizer_eos_id, values)))),
        bos_id=bos_ids[0] if bos_ids else None,
        **family.outside(values),
    )


def _read_layer(values: Raw, family: Family, types: list[str], i: int) -> LayerKind:
    """Reads the kind of layer i; `types` has the type of each layer."""
    heads, kv_heads, head_dim = values["num_attention_heads"], values["num_key_value_heads"], _read_head_dim(values)
    rope = values[ROPE][types[i] if family.rope_by_type else ""]
    is_proportional = rope.get("rope_type") == "proportional"  # a scaling of all pairs, some of them by 0
    rotary_dim = head_dim if is_proportional else int(head_dim * rope["partial_rotary_factor"])
    biases = {name: True for key, names in family.switches.items() if values[key] for name in names}
    has_mlp_bias = biases.pop("mlp_bias", False)
    attention = AttentionKind(
        heads,
        heads if kv_heads is None else kv_heads,
        head_dim,
        Rope(rotary_dim, float(rope["rope_theta"]), _read_scaling(values, rope)),
        Rule(_read_window(values, family) if types[i] == SLIDING else None),
        **{**family.attention, **biases},
    )
    mlp = MlpKind(values["intermediate_size"], ACTIVATIONS[values[family.activation]], has_mlp_bias)
    return family.refine(LayerKind(attention, mlp, **family.layer), values, i)


def _find_problems(raw: Raw, generation: Raw, num_tensors: int | None) -> Iterator[str]:
    """Yields what cannot be obeyed: an unknown family, else values of a wrong kind, else what is not supported."""
    model_type, names = raw.get("model_type"), raw.get("architectures") or []
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if not KINDS[NAMES](names):
        yield f"architectures must {NAMES}, got {names!r:.80}; copy config.json again"
        return
    # A model may have been saved without its head: Qwen3Model, Gemma3TextModel.
    bases = {re.sub(r"For\w+$", base, family.architecture) for base in ("Model", "TextModel")} if family else set()
    if family is None or (names and bases.isdisjoint(names) and family.architecture not in names):
        what = f"model_type {model_type!r:.80}"
        if family is not None:
            what = f"architecture {names[0]!r:.80} of {what}"
        supported = ", ".join(f"{name} ({known.architecture})" for name, known in FAMILIES.items())
        yield f"{what} is not supported; supported: {supported}"
        if family is None and isinstance(model_type, str) and (relative := RELATIVES.get(model_type)):
            yield f"{model_type} has parts that {relative} lacks, so it cannot be converted as {relative}"
        return
    if decoders := family.decoders:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            yield f"text_config must be the config of the decoder, got {text!r:.80}; copy config.json again"
            return
        family = find_family(raw)
        if family is None:
            supported = ", ".join(decoders)
            yield f"text_config's model_type {text['model_type']!r:.80} is not supported; supported: {supported}"
            return
    for alias, key in family.aliases.items():
        # The raw values are compared, since what they must be is checked only later.
        if raw.get(alias) is not None and raw.get(key) is not None and raw[alias] != raw[key]:
            yield f"{alias} is {raw[alias]!r:.80} and {key}, which means the same, {raw[key]!r:.80}; remove one of them"
            return
    if problems := list(_check_rope_sets(_unwrap(raw), family)):
        yield from problems
        return
    values = _complete(raw, family)
    # This is checked first, because the later checks make a list of all layers.
    layers = values["num_hidden_layers"]
    if num_tensors is not None and is_integer(layers) and layers > num_tensors:
        yield f"num_hidden_layers is {layers:,}, but the checkpoint has only {num_tensors:,} tensors; copy both again"
        return
    wrong = [(name, must, x) for name, must, x in _list_values(values, family, generation) if not KINDS[must](x)]
    for name, must, x in wrong:
        yield f"{name} must {must}, got {x!r:.80}; copy config.json again"
    if wrong:
        return
    yield from _find_unsupported(values, family)


def _list_values(values: Raw, family: Family, generation: Raw) -> Iterator[tuple[str, str, Any]]:
    """Lists the values that `translate` reads: (name, one of KINDS, value)."""
    for key in SIZES.values():
        yield key, COUNT, values[key]
    for key, x in (("num_key_value_heads", values["num_key_value_heads"]), (family.head_dim, values[HEAD_DIM])):
        if x is not None:
            yield key, COUNT, x
    yield "rms_norm_eps", NUMBER, values["rms_norm_eps"]
    window_switch = ["use_sliding_window"] if family.window_switch else []
    for key in ("tie_word_embeddings", *family.switches, *window_switch):
        yield key, SWITCH, values[key]
    for key, must in family.keys.items():
        yield key, must, values[key]
    window = _read_window(values, family)
    if window is not None:
        yield "sliding_window", COUNT, window
        if family.layer_types is not None and "max_window_layers" in values and values.get("layer_types") is None:
            yield "max_window_layers", COUNT_OR_ZERO, values["max_window_layers"]
    ids = {"eos_token_id": values["eos_token_id"], "bos_token_id": values["bos_token_id"]}
    for key, x in (*ids.items(), ("generation_config.json's eos_token_id", generation.get("eos_token_id"))):
        if x is not None:
            yield key, IDS, x
    for rope in values[ROPE].values():
        for key, must in family.rope_keys.items():
            yield f"RoPE parameters: {key}", must, rope.get(key)
        yield "rope_theta", NUMBER, rope["rope_theta"]
        yield "partial_rotary_factor", NUMBER, rope["partial_rotary_factor"]
        kind = _scaling_type(values, rope)
        for key, must in _SCALING_VALUES.get(kind or "", {}).items():
            x = rope.get(key)
            if key == "factor" and key in rope and x is None and kind == "yarn":
                continue  # the quotient of the two contexts
            if key == ORIGINAL:
                x = _read_original(values, rope)
            yield f"RoPE scaling {kind!r}: {key}", must, x


_SCALING_VALUES = {
    "linear": {"factor": NUMBER},
    "llama3": dict.fromkeys(("low_freq_factor", "high_freq_factor", "factor"), NUMBER) | {ORIGINAL: COUNT},
    "yarn": {"factor": NUMBER, ORIGINAL: COUNT, "truncate": SWITCH}
    | dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), NUMBER_OR_NULL)
    | dict.fromkeys(("mscale", "mscale_all_dim"), FACTOR),
    "longrope": {"short_factor": NUMBERS, "long_factor": NUMBERS, ORIGINAL: COUNT}
    | {"factor": NUMBER_OR_NULL, "attention_factor": NUMBER_OR_NULL},
    "proportional": {"factor": NUMBER_OR_NULL},
}
"""Type of scaling -> its parameters and what their values must be."""


def _find_unsupported(values: Raw, family: Family) -> Iterator[str]:
    """Yields what would change the numbers and is not supported, each with its remedy."""
    for key, remedy in REFUSED.items():
        is_read = key == "quantization_config" and (mxfp4.is_used(values) or fp8.read_block(values) is not None)
        if values.get(key) and not is_read and key not in family.keys:
            yield f"{key} ({values[key]!r:.80}) is not supported; {remedy}"
    activation = values[family.activation]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        supported = ", ".join(map(repr, ACTIVATIONS))
        yield f"{family.activation} {activation!r:.80} is not supported; supported: {supported}"
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if values[HEAD_DIM] is None and width % heads:
        yield f"hidden_size {width} is no multiple of num_attention_heads {heads}; set head_dim"
    for rope in values[ROPE].values():
        yield from _find_unsupported_rope(values, family, rope)
    yield from family.find_unsupported(values)
    window, sliding = _read_window(values, family), family.sliding
    types, layers, names = values.get("layer_types"), values["num_hidden_layers"], list(family.types)
    if types is None:
        if sliding == "by layer" and window is None and SLIDING in _read_types(values, family):
            yield "sliding_window is unset, and layers of this family have one; set it, or set layer_types"
    elif not isinstance(types, list) or len(types) != layers or any(x not in names for x in types):
        yield f"layer_types must name {layers} layers, each one of {names}; got {types!r:.200}"
    elif sliding != "by layer" and any((x == SLIDING) != (window is not None) for x in types):
        yield f"{family.architecture} does not obey layer_types {types!r:.200}; remove the key"
    elif SLIDING in types and window is None:
        yield "layer_types has sliding layers, but sliding_window is unset or switched off; set it"


def _find_unsupported_rope(values: Raw, family: Family, rope: Raw) -> Iterator[str]:
    fraction, scaling = rope["partial_rotary_factor"], rope.get("rope_type")
    is_proportional = scaling == "proportional" and scaling in family.rope_types
    if fraction > 1 or (fraction < 1 and not family.partial_rotary and not is_proportional):
        yield f"partial_rotary_factor {fraction} is not supported for {family.architecture}; leave it out"
    unnamed = {key: x for key, x in rope.items() if key not in HARMLESS and x is not None}
    if scaling is None and (unnamed.get("factor", 1) != 1 or unnamed.keys() - {"factor"}):
        # Nothing says which formula such parameters belong to.
        remedy = "add the one that the model was trained with, or remove it"
        yield f"RoPE scaling {unnamed!r:.200} names no rope_type; {remedy}"
    if scaling not in (None, "default", *family.rope_types):
        supported = ", ".join(map(repr, ("default", *family.rope_types)))
        yield (
            f"RoPE scaling {scaling!r:.80} is not supported; supported: {supported}; it would change every logit, so "
            "use a checkpoint without it"
        )
    if _scaling_type(values, rope) == "longrope":
        pairs = int(_read_head_dim(values) * fraction) // 2
        for key in ("short_factor", "long_factor"):
            if len(rope[key]) != pairs:
                numbers = f"{len(rope[key])} numbers for {pairs} pairs of channels"
                yield f"RoPE scaling 'longrope': {key} has {numbers}; copy config.json again"


def _read_ids(raw: Any, values: Raw) -> tuple[int, ...]:
    """Reads one id, or a list of them, each once; none for None.

    Ids beyond the vocabulary, as defaults may be, are left out: they can be neither read nor generated.
    """
    ids = raw if isinstance(raw, list) else [raw]
    return tuple(i for i in dict.fromkeys(ids) if i is not None and i < values["vocab_size"])


def _unwrap(raw: Raw) -> Raw:
    """Returns the config of the decoder, which may be inside that of a model that reads images too."""
    if not FAMILIES[raw["model_type"]].decoders:
        return raw
    outer = ("model_type", "architectures", "tie_word_embeddings", "eos_token_id", "bos_token_id")
    kept = {key: raw[key] for key in (*outer, *REFUSED) if raw.get(key) is not None}
    return {**raw["text_config"], **kept}


def _complete(raw: Raw, family: Family) -> dict[str, Any]:
    """Adds the defaults of the family, and the parameters of RoPE in one place for both versions of transformers.

    These have one set, under "", or one for each type of layers.
    """
    raw = _unwrap(raw)
    aliases = {key: raw[alias] for alias, key in family.aliases.items() if alias in raw and raw.get(key) is None}
    values = {**family.defaults, **raw, **aliases}
    scaling, parameters = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    if family.rope_by_type:
        parameters = parameters or family.defaults.get("rope_parameters", {})
    thetas = {"": values["rope_theta"]}
    if family.rope_by_type:
        thetas = {FULL: values["rope_theta"], SLIDING: values[family.rope_by_type]}
        # transformers looks for `truncate` outside of the two sets, where it is not.
        sets = {kind: {**(parameters.get(kind) or {}), "truncate": True} for kind in thetas}
        sets[FULL] |= scaling
    else:
        sets = {"": scaling or parameters or family.defaults.get("rope_parameters", {})}
    ropes = {}
    for kind, theta in thetas.items():
        rope = {"rope_theta": theta, "partial_rotary_factor": values.get("partial_rotary_factor"), **sets[kind]}
        if (name := rope.get("rope_type") or rope.get("type")) is not None:
            rope["rope_type"] = "longrope" if name in family.longrope_names else name
        if rope["partial_rotary_factor"] is None:
            rope["partial_rotary_factor"] = 1.0
        ropes[kind] = rope
    head_dim = values[family.head_dim]
    activation = values[family.activation]
    if isinstance(activation, str):
        values[family.activation] = family.activation_names.get(activation, activation)
    return values | {ROPE: ropes, HEAD_DIM: head_dim}


def _check_rope_sets(raw: Raw, family: Family) -> Iterator[str]:
    """Yields what is wrong with the outer form of the parameters of RoPE."""
    by_type = (FULL, SLIDING)
    for key in ("rope_scaling", "rope_parameters"):
        x = raw.get(key)
        if family.rope_by_type and key == "rope_parameters" and x is not None:
            if not isinstance(x, Mapping) or x.keys() - by_type or not all(KINDS[ONE_SET](x[k] or {}) for k in x):
                must = f"have one set for each of {', '.join(by_type)}"
                yield f"{key} must {must}, got {x!r:.200}; copy config.json again"
        elif x is not None and not KINDS[ONE_SET](x):
            yield f"{ROPE} must {ONE_SET}, got {x!r:.80}; copy config.json again"


def _read_scaling(values: Raw, rope: Raw) -> RopeScaling | None:
    """Reads the scaling of RoPE; None where it changes nothing."""
    kind = _scaling_type(values, rope)
    if kind is None:
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "proportional":
        return RopeScaling(kind, float(rope.get("factor") or 1), rotated_fraction=float(rope["partial_rotary_factor"]))
    original, positions = _read_original(values, rope), values["max_position_embeddings"]
    factor = positions / original if rope.get("factor") is None else float(rope["factor"])
    if kind == "llama3":
        low, high = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, low, high, original)
    if kind == "longrope":
        # transformers takes the long factors in passes beyond the original context; see `kvjax.core.rope.RopeScaling`.
        short, long = (tuple(map(float, rope[key])) for key in ("short_factor", "long_factor"))
        is_long, attention_factor = positions > original, rope.get("attention_factor")
        return longrope_scaling(short, long, factor, original, is_long, attention_factor)
    return yarn_scaling(
        factor,
        original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
    )


def _scaling_type(values: Raw, rope: Raw) -> str | None:
    """Returns one of SCALING_KINDS, None for a scaling of another type and for one that changes nothing."""
    kind = rope.get("rope_type")
    return kind if kind in SCALING_KINDS and not _scales_by_one(values, rope, kind) else None


def _read_original(values: Raw, rope: Raw) -> Any:
    """Returns the positions before scaling: transformers prefers the key outside of it; by default the model's own."""
    return values.get(ORIGINAL) or rope.get(ORIGINAL) or values["max_position_embeddings"]


def _scales_by_one(values: Raw, rope: Raw, kind: str) -> bool:
    """Whether a scaling of RoPE leaves every angle and the length of the vectors as they are."""
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    factors = [1 if attention is None else attention]
    if kind == "proportional":
        factor = 1 if factor is None else factor
        factors = [rope["partial_rotary_factor"]]
    if kind == "longrope":  # the factor only sets the length of the vectors, by default from the two contexts
        is_original = _read_original(values, rope) == values["max_position_embeddings"]
        factor = 1 if factor is None and is_original else factor
        for name in ("short_factor", "long_factor"):
            factors += rope[name] if isinstance(rope.get(name), list) and rope[name] else [None]
    return all(x == 1 and not isinstance(x, bool) for x in (factor, *factors))


def _read_head_dim(values: Raw) -> int:
    head_dim = values[HEAD_DIM]
    return values["hidden_size"] // values["num_attention_heads"] if head_dim is None else head_dim


def _read_window(values: Raw, family: Family) -> int | None:
    """Reads the size of the sliding window, in latest positions that a query sees; None where none is used."""
    is_on = family.sliding != "never" and (not family.window_switch or values["use_sliding_window"])
    return values["sliding_window"] if is_on and values["sliding_window"] not in (None, 0) else None


def _read_types(values: Raw, family: Family) -> list[str]:
    """Reads the type of each layer, which says whether it has the window."""
    if family.layer_types is not None:
        return values.get("layer_types") or family.layer_types(values)
    return [FULL if _read_window(values, family) is None else SLIDING] * values["num_hidden_layers"]
