"""The metadata of a GGUF file as a transformers config.json; whatever cannot be obeyed is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints_convert.gguf.vocabulary import value
from kvjax.errors import KvjaxError

Metadata = Mapping[str, Any]

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
"""general.architecture -> model_type."""

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Positive integers that every file has -> their keys in config.json."""

READ_ELSEWHERE = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("vocab_size", "tensor_data_layout"),
)
"""Other keys of an architecture that are obeyed, or that say nothing about the numbers."""

OFF = (0, 0.0, False, "", None)  # a key with such a value asks for nothing
TOLERANCE = 1e-4
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""What all published models of the Llama 3 RoPE scaling use; a GGUF file holds only the factors that follow from it."""


def config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The config.json that the file stands for.

    shapes: of the tensors, by their names in the file. rope_factors: the tensor `rope_freqs.weight`, where there is
    one. Raises KvjaxError naming the key for what is missing, no number, or not supported here.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise KvjaxError(f"the architecture {name!r:.80} of this GGUF file is not supported; supported: {known}")
    own = {key.removeprefix(f"{name}."): x for key, x in metadata.items() if key.startswith(f"{name}.")}
    _refuse_unknown(name, own)
    raw: dict[str, Any] = {key: _count(name, own, ours) for ours, key in SIZES.items()}
    window = own.get("attention.sliding_window") or None
    raw |= {
        "model_type": "mistral" if name == "llama" and window else ARCHITECTURES[name],
        "sliding_window": window,
        "vocab_size": _vocabulary(shapes),
        "num_key_value_heads": _count(name, own, "attention.head_count_kv", raw["num_attention_heads"]),
        "rms_norm_eps": _number(name, own, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(name, own, "rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "bos_token_id": value(metadata, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _ends(metadata),
    }
    raw |= _head(name, own, raw)
    raw["rope_scaling"] = _scaling(name, own, raw, shapes, rope_factors)
    return raw


def _refuse_unknown(name: str, own: Metadata) -> None:
    unknown = [key for key, x in own.items() if key not in SIZES and key not in READ_ELSEWHERE and x not in OFF]
    if unknown:
        said = ", ".join(f"{name}.{key} = {own[key]!r:.60}" for key in unknown)
        raise KvjaxError(
            f"this GGUF file asks for what is not supported, and its numbers would be wrong without: {said}; "
            "use a checkpoint of the model without it"
        )


def _missing(key: str, found: Any, wanted: str) -> KvjaxError:
    return KvjaxError(
        f"the metadata of this GGUF file must have {wanted} under {key!r}, got {found!r:.60}; make it again"
    )


def _count(name: str, own: Metadata, key: str, default: int | None = None) -> int:
    x = own.get(key, default)
    if not isinstance(x, int) or isinstance(x, bool) or x < 1:
        raise _missing(f"{name}.{key}", x, "one positive integer for all layers")
    return x


def _number(name: str, own: Metadata, key: str, default: float | None = None) -> float:
    x = own.get(key, default)
    if not isinstance(x, int | float) or isinstance(x, bool) or not (x > 0 and math.isfinite(x)):
        raise _missing(f"{name}.{key}", x, "a positive number")
    return _short(x)


def _short(x: float) -> float:
    """The shortest decimal number that is this float32: 1e-05 for 9.999999747378752e-06, which config.json held."""
    return float(str(np.float32(x)))


def _vocabulary(shapes: Mapping[str, tuple[int, ...]]) -> int:
    if "token_embd.weight" not in shapes:
        raise KvjaxError("this GGUF file has no tensor 'token_embd.weight'; give the file of a whole model")
    return shapes["token_embd.weight"][0]


def _ends(metadata: Metadata) -> list[int]:
    """The ids that end a text: of the text itself, of a turn, and of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [value(metadata, f"tokenizer.ggml.{key}", int) for key in keys]
    return list(dict.fromkeys(x for x in found if x is not None))


def _head(name: str, own: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a head, and the share of it that is rotated."""
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    if "attention.key_length" not in own and width % heads:
        raise _missing(f"{name}.attention.key_length", None, f"the size of a head ({width} is no multiple of {heads})")
    size = _count(name, own, "attention.key_length", width // heads)
    values, rotated = (_count(name, own, key, size) for key in ("attention.value_length", "rope.dimension_count"))
    if values != size:
        raise KvjaxError(f"heads of {size} numbers a key and {values} a value are not supported; they must be equal")
    return {"head_dim": size} | ({} if rotated == size else {"partial_rotary_factor": rotated / size})


def _scaling(
    name: str, own: Metadata, raw: Mapping[str, Any], shapes: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if any(tensor.startswith("rope_factors_") for tensor in shapes):
        kind = "longrope"
    if kind == "linear":
        return {"rope_type": kind, "factor": _number(name, own, "rope.scaling.factor")}
    if kind != "none":
        return {"rope_type": kind}  # which is refused by its name
    return None if factors is None else _llama3(raw, np.asarray(factors, np.float64))


def _llama3(raw: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The scaling of Llama 3 whose factors these are, one for each pair of rotated numbers.

    Those that lie between 1 and the largest say for how many positions the model was first trained.
    """
    theta, rotated = raw["rope_theta"], raw["head_dim"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    factor = round(float(factors.max(initial=1.0)), 3)
    between = (factors > 1.0 + TOLERANCE) & (factors < factor * (1 - TOLERANCE))
    if factors.shape != wavelength.shape or not between.any():
        raise _other_factors(factors)
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    context = round(float(np.median((smooth * (high - low) + low) * wavelength[between])))
    if not np.allclose(factors, _llama3_factors(wavelength, factor, context), rtol=TOLERANCE):
        raise _other_factors(factors)
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": context, **LLAMA3}


def _llama3_factors(wavelength: np.ndarray, factor: float, context: int) -> np.ndarray:
    """By what each frequency is divided (Llama 3.1, `apply_scaling` of its reference code)."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _other_factors(factors: np.ndarray) -> KvjaxError:
    return KvjaxError(
        f"the tensor 'rope_freqs.weight' holds {factors.size} factors that are not those of the Llama 3 RoPE scaling "
        f"with {LLAMA3}; convert the safetensors checkpoint instead"
    )
