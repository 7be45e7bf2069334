"""The metadata of a GGUF file as a transformers config.json; what cannot be obeyed is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from checkpoints_convert.families import FAMILIES
from checkpoints_convert.gguf.architectures import (
    ARCHITECTURES,
    PATTERN,
    WINDOW,
    File,
    read_longrope,
    read_yarn,
    shortest_decimal,
)
from checkpoints_convert.gguf.vocabulary import Metadata, check_metadata, read_end_ids, read_roles
from checkpoints_convert.hf_config import is_integer, is_number
from kvjax.errors import KvjaxError

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Key of the metadata -> key of config.json, for the positive integers that every file has."""

READ_ELSEWHERE = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
"""Other keys of an architecture that are obeyed."""

WITHOUT_EFFECT = (
    *("vocab_size", "tensor_data_layout"),  # the tensors have a vocabulary and a layout of their own
    "attention.layer_norm_epsilon",  # of LayerNorm, which no architecture here has
    "rope.scaling.finetuned",
)
"""Keys that change no number in an architecture and a RoPE scaling that are supported."""

SCALING_KEYS = {
    "yarn": ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
    "longrope": ("rope.scaling.attn_factor",),
}
"""Type of RoPE scaling -> further keys that are obeyed."""

WITHOUT_EFFECT_UNSCALED = ("rope.scaling.yarn_log_multiplier",)
"""Keys that change no number, unless RoPE is scaled in one of these types."""

OFF = (0, 0.0, False, "", None)
"""Values by which most other keys ask for nothing; a list of them does too."""

ASKS_FOR_NOTHING = {
    "attention.causal": (True,),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    "rope.scaling.alpha": (*OFF, 1.0),
    "rope.scaling.yarn_ext_factor": (0.0, -1.0),  # -1: as the type of the scaling has it
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (*OFF, 1.0)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale", "expert_weights_scale"), (*OFF, 1.0)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"), (*OFF, 1)),
}
"""Key -> values by which it asks for nothing, where these are not OFF."""

REPEATS = {
    "embedding_length_out": "embedding_length",
    **{f"{key}_swa": key for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")},
    "rope.freq_base_swa": "rope.freq_base",
}
"""Key of some layers, or of the outputs -> the key of all; it asks for nothing if both have one value."""

ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
"""Tensors by which frequencies are divided: Llama 3's, and those of LongRoPE for long and short texts."""

COUNT, NUMBER = "one positive integer for all layers", "a positive number"
KINDS: dict[str, Callable[[Any], bool]] = {
    COUNT: lambda x: is_integer(x) and x > 0,
    NUMBER: lambda x: is_number(x) and x > 0 and math.isfinite(x),
}
"""The kinds of values: a kind in words -> whether a value is of it."""

FACTOR_TOLERANCE = 1e-4
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The constants of Llama 3 RoPE scaling in all published models; a GGUF file holds only the resulting factors."""


def make_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Makes the config.json that a file stands for.

    A key that is missing has the value that llama.cpp gives it (src/llama-model.cpp, `load_hparams`):

    | key | default |
    |---|---|
    | attention.head_count_kv | attention.head_count |
    | attention.key_length, attention.value_length | embedding_length / attention.head_count, each |
    | rope.dimension_count | attention.key_length |
    | rope.freq_base | 10,000 |
    | rope.scaling.type | "linear" |
    | rope.scaling.factor | rope.scale_linear, its older name; 0 and no factor are 1 |
    | attention.sliding_window | none |

    The keys in SIZES and the epsilon of RMSNorm have no default, and a file without one is refused.

    Args:
      metadata: of the file.
      shapes: of the tensors, by their names in the file.
      rope_factors: those tensors of ROPE_FACTORS that the file has.

    Raises:
      KvjaxError: with the key that is missing, not a number, or not supported here.
    """
    name, raw = metadata.get("general.architecture"), {}
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        problems = [f"the architecture {name!r:.80} of this GGUF file is not supported; supported: {known}"]
    else:
        check_metadata(metadata)
        own = {key.removeprefix(f"{name}."): x for key, x in metadata.items() if key.startswith(f"{name}.")}
        problems = [
            f"the metadata of this GGUF file must have {kind} under '{name}.{key}', got {x!r:.60}; make it again"
            for key, (kind, x) in _list_values(own).items()
            if not KINDS[kind](x)
        ]
        if not problems:
            raw, problems = _translate(name, own, metadata, shapes, rope_factors)
    if problems:
        raise KvjaxError("\n".join(problems))
    return raw


def _list_values(own: Metadata) -> dict[str, tuple[str, Any]]:
    """Lists the numbers of an architecture by their keys: what each must be, and its value or default."""
    counts = {key: _read_count(own, key) for key in SIZES}
    if counts["feed_forward_length"] is None:  # as in models with experts in all layers
        counts["feed_forward_length"] = _read_count(own, "expert_feed_forward_length")
    if all(KINDS[COUNT](x) for x in counts.values()):  # the defaults of the others derive from these
        width, heads = counts["embedding_length"], counts["attention.head_count"]
        size = width // heads
        counts["attention.key_length"] = _read_count(own, "attention.key_length", None if width % heads else size)
        counts["attention.value_length"] = _read_count(own, "attention.value_length", size)
        counts["rope.dimension_count"] = _read_count(own, "rope.dimension_count", counts["attention.key_length"])
        counts["attention.head_count_kv"] = _read_count(own, "attention.head_count_kv", heads)
    factor_key = _scaling_key(own)
    numbers = {
        "attention.layer_norm_rms_epsilon": own.get("attention.layer_norm_rms_epsilon"),
        "rope.freq_base": own.get("rope.freq_base", 10_000.0),
        factor_key: 1.0 if own.get(factor_key) in OFF else own[factor_key],
    }
    return {key: (COUNT, x) for key, x in counts.items()} | {key: (NUMBER, x) for key, x in numbers.items()}


def _translate(
    name: str,
    own: Metadata,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, np.ndarray],
) -> tuple[dict[str, Any], list[str]]:
    """Makes the config.json of an architecture's keys, and lists what is not supported of them."""
    values, architecture = {key: x for key, (_, x) in _list_values(own).items()}, ARCHITECTURES[name]
    size, rotated = values["attention.key_length"], values["rope.dimension_count"]
    value_size = values["attention.value_length"]
    raw: dict[str, Any] = {key: values[ours] for ours, key in SIZES.items()}
    raw |= {
        "model_type": architecture.model_type,
        "sliding_window": _read_window(own),
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "num_key_value_heads": values["attention.head_count_kv"],
        "head_dim": size,
        "rms_norm_eps": shortest_decimal(values["attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest_decimal(values["rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "bos_token_id": read_roles(metadata).get("bos"),
        "eos_token_id": read_end_ids(metadata),
    }
    # Latent attention has widths of its own, which in some files are those of its absorbed form.
    is_latent = "attention.kv_lora_rank" in architecture.keys
    if rotated != size and not is_latent:
        raw["partial_rotary_factor"] = rotated / size
    raw["rope_scaling"], problems = _read_scaling(name, own, raw, rope_factors)
    entries, more = architecture.read(File(own, raw))
    raw, problems = raw | entries, problems + more
    kind = str((raw["rope_scaling"] or {}).get("rope_type"))
    if kind == "longrope":  # transformers looks for it here first, where Phi-3 has a default of its own
        raw["original_max_position_embeddings"] = raw["rope_scaling"].get("original_max_position_embeddings")
    obeyed = SCALING_KEYS.get(kind, WITHOUT_EFFECT_UNSCALED) + architecture.keys
    if unknown := [key for key, x in own.items() if key not in obeyed and not _is_harmless(own, key, x)]:
        asked = ", ".join(f"{name}.{key} = {own[key]!r:.60}" for key in unknown)
        problems.append(
            f"this GGUF file asks for what is not supported, and its numbers would be wrong without: {asked}; use a "
            "checkpoint of the model without it"
        )
    if "token_embd.weight" not in shapes:
        problems.append("this GGUF file has no tensor 'token_embd.weight'; give the file of a whole model")
    if value_size != size and not is_latent:
        problems.append(
            f"heads of {size} numbers a key and {value_size} a value are not supported ({name}.attention.key_length, "
            f"{name}.attention.value_length); they must be equal"
        )
    may_rotate_some = is_latent or FAMILIES[raw["model_type"]].partial_rotary
    if rotated > size or (rotated < size and not may_rotate_some):
        problems.append(
            f"{name}.rope.dimension_count is {rotated}, and the heads have {size} channels; an architecture {name!r} "
            "that rotates other than all of them is not supported"
        )
    return raw, problems


def _is_harmless(own: Metadata, key: str, value: Any) -> bool:
    """Whether a key is obeyed, changes no number, or asks for nothing by its value."""
    if key in SIZES or key in READ_ELSEWHERE or key in WITHOUT_EFFECT:
        return True
    if key == PATTERN and _read_window(own) is None:
        return True
    if key == "attention.scale" and is_number(value) and value > 0:
        width, heads = own.get("embedding_length"), own.get("attention.head_count")
        size = width / heads if is_number(width) and is_number(heads) and heads else None
        size = own.get("attention.key_length", size)
        return is_number(size) and size > 0 and math.isclose(value, size**-0.5, rel_tol=1e-6)
    if key in REPEATS and REPEATS[key] in own:
        return value in (*OFF, own[REPEATS[key]])
    values = value if isinstance(value, list) else [value]
    return all(x in ASKS_FOR_NOTHING.get(key, OFF) for x in values)


def _read_window(own: Metadata) -> int | None:
    """Returns the sliding window, None if there is none."""
    return own.get(WINDOW) or None


def _read_scaling(
    name: str, own: Metadata, raw: Mapping[str, Any], rope_factors: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Reads the scaling of RoPE, as config.json has it, and what is not supported of it."""
    kind, key = own.get("rope.scaling.type", "linear"), _scaling_key(own)
    factor = 1.0 if own.get(key) in OFF else shortest_decimal(own[key])
    tensors = {tensor: np.asarray(x, np.float64) for tensor, x in rope_factors.items()}
    is_scaled = {tensor for tensor, x in tensors.items() if not np.allclose(x, 1.0, rtol=FACTOR_TOLERANCE)}
    context = raw["max_position_embeddings"]
    if is_scaled - {ROPE_FREQS} or (kind == "longrope" and tensors.keys() - {ROPE_FREQS}):
        short, long = (
            [shortest_decimal(factor) for factor in rope_factors[tensor]] if tensor in rope_factors else None
            for tensor in (ROPE_SHORT, ROPE_LONG)
        )
        return read_longrope(own, context, short, long)
    tensors = {tensor: x for tensor, x in tensors.items() if tensor in is_scaled}
    scales_by_one = kind in ("yarn", "longrope") and key in own and factor == 1.0
    if kind == "yarn" and not scales_by_one and not tensors:
        return read_yarn(own, factor, context)
    if kind not in ("none", "linear") and not scales_by_one:
        return {"rope_type": kind}, []
    if kind == "none":  # llama.cpp drops the factor then, and applies the tensor
        factor = 1.0
    if not tensors:
        return (None if factor == 1.0 else {"rope_type": "linear", "factor": factor}), []
    llama3, problems = _infer_llama3(raw, tensors[ROPE_FREQS]), []
    if factor != 1.0:
        problems.append(
            f"this GGUF file scales RoPE twice, by {name}.{key} = {factor} and by the tensor {ROPE_FREQS!r}; one "
            "scaling is supported: convert the safetensors checkpoint instead"
        )
    if llama3 is None:
        problems.append(
            f"the tensor {ROPE_FREQS!r} holds {tensors[ROPE_FREQS].size} factors that are not those of the Llama 3 "
            f"RoPE scaling with {LLAMA3}; convert the safetensors checkpoint instead"
        )
    return llama3, problems


def _scaling_key(own: Metadata) -> str:
    """Returns the key of the factor of the RoPE scaling."""
    is_old = "rope.scaling.factor" not in own and "rope.scale_linear" in own
    return "rope.scale_linear" if is_old else "rope.scaling.factor"


def _read_count(own: Metadata, key: str, default: Any = None) -> Any:
    """Returns the value of a key, or the one of all layers where a list has one for each."""
    x = own.get(key, default)
    return x[0] if isinstance(x, list) and x and all(value == x[0] for value in x) else x


def _infer_llama3(raw: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any] | None:
    """Infers the parameters of Llama 3 RoPE scaling from the factor of each frequency; None where they are others."""
    theta, head_dim = raw["rope_theta"], raw["head_dim"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    # The largest factor is that of the scaling. The factors between 1 and it lie in the smooth band, and each of them
    # determines the original context.
    factor = round(float(factors.max(initial=1.0)), 3)
    in_band = (factors > 1.0 + FACTOR_TOLERANCE) & (factors < factor * (1 - FACTOR_TOLERANCE))
    if factors.shape != wavelength.shape or not in_band.any():
        return None
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = (1 / factors[in_band] - 1 / factor) / (1 - 1 / factor)
    context = round(float(np.median((smooth * (high - low) + low) * wavelength[in_band])))
    # Llama 3.1, `apply_scaling` of its reference code: do these parameters give the stored factors?
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=FACTOR_TOLERANCE):
        return None
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": context, **LLAMA3}
