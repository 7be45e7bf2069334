"""The metadata of a GGUF file as a transformers config.json; what cannot be obeyed is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints_convert.gguf.vocabulary import Metadata, read_value
from kvjax.errors import KvjaxError

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
"""general.architecture -> model_type."""

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
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("vocab_size", "tensor_data_layout"),
)
"""Other keys of an architecture that are obeyed, or that do not affect the numbers."""

OFF = (0, 0.0, False, "", None)  # values by which a key asks for nothing
FACTOR_TOLERANCE = 1e-4
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The constants of Llama 3 RoPE scaling in all published models; a GGUF file holds only the resulting factors."""


def make_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """Makes the config.json that a file stands for.

    Args:
      metadata: of the file.
      shapes: of the tensors, by their names in the file.
      rope_factors: the tensor `rope_freqs.weight`, if there is one.

    Raises:
      KvjaxError: with the key that is missing, not a number, or not supported here.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise KvjaxError(f"the architecture {name!r:.80} of this GGUF file is not supported; supported: {known}")
    own = {key.removeprefix(f"{name}."): x for key, x in metadata.items() if key.startswith(f"{name}.")}
    unknown = [key for key, x in own.items() if key not in SIZES and key not in READ_ELSEWHERE and x not in OFF]
    if unknown:
        entries = ", ".join(f"{name}.{key} = {own[key]!r:.60}" for key in unknown)
        raise KvjaxError(
            f"this GGUF file asks for what is not supported, and its numbers would be wrong without: {entries}; "
            "use a checkpoint of the model without it"
        )
    raw: dict[str, Any] = {key: _read_count(name, own, ours) for ours, key in SIZES.items()}
    window = own.get("attention.sliding_window") or None
    if "token_embd.weight" not in shapes:
        raise KvjaxError("this GGUF file has no tensor 'token_embd.weight'; give the file of a whole model")
    # A text may end with itself, with a turn or with a message.
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    end_ids = [read_value(metadata, f"tokenizer.ggml.{key}", int) for key in end_keys]
    raw |= {
        "model_type": "mistral" if name == "llama" and window else ARCHITECTURES[name],
        "sliding_window": window,
        "vocab_size": shapes["token_embd.weight"][0],
        "num_key_value_heads": _read_count(name, own, "attention.head_count_kv", raw["num_attention_heads"]),
        "rms_norm_eps": _read_number(name, own, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _read_number(name, own, "rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "bos_token_id": read_value(metadata, "tokenizer.ggml.bos_token_id", int),
        "eos_token_id": list(dict.fromkeys(x for x in end_ids if x is not None)),
    }
    raw |= _read_head_dim(name, own, raw)
    scaling = own.get("rope.scaling.type", "none")
    if any(tensor.startswith("rope_factors_") for tensor in shapes):
        scaling = "longrope"
    if scaling == "linear":
        raw["rope_scaling"] = {"rope_type": scaling, "factor": _read_number(name, own, "rope.scaling.factor")}
    elif scaling != "none":
        raw["rope_scaling"] = {"rope_type": scaling}  # `hf_config.translate` refuses it by its name
    else:
        raw["rope_scaling"] = None if rope_factors is None else _infer_llama3(raw, np.asarray(rope_factors, np.float64))
    return raw


def _missing_error(key: str, value: Any, expected: str) -> KvjaxError:
    return KvjaxError(
        f"the metadata of this GGUF file must have {expected} under {key!r}, got {value!r:.60}; make it again"
    )


def _read_count(name: str, own: Metadata, key: str, default: int | None = None) -> int:
    x = own.get(key, default)
    if not isinstance(x, int) or isinstance(x, bool) or x < 1:
        raise _missing_error(f"{name}.{key}", x, "one positive integer for all layers")
    return x


def _read_number(name: str, own: Metadata, key: str, default: float | None = None) -> float:
    x = own.get(key, default)
    if not isinstance(x, int | float) or isinstance(x, bool) or not (x > 0 and math.isfinite(x)):
        raise _missing_error(f"{name}.{key}", x, "a positive number")
    # The shortest decimal that is this float32: config.json had 1e-05, and the file has 9.999999747378752e-06.
    return float(str(np.float32(x)))


def _read_head_dim(name: str, own: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the size of a head, and the fraction of it that is rotated unless that is all."""
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    if "attention.key_length" not in own and width % heads:
        key = f"{name}.attention.key_length"
        raise _missing_error(key, None, f"the size of a head ({width} is no multiple of {heads})")
    size = _read_count(name, own, "attention.key_length", width // heads)
    value_size = _read_count(name, own, "attention.value_length", size)
    rotated = _read_count(name, own, "rope.dimension_count", size)
    if value_size != size:
        raise KvjaxError(
            f"heads of {size} numbers a key and {value_size} a value are not supported; they must be equal"
        )
    return {"head_dim": size} | ({} if rotated == size else {"partial_rotary_factor": rotated / size})


def _infer_llama3(raw: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Infers the parameters of Llama 3 RoPE scaling from the factor by which each frequency is divided."""
    error = KvjaxError(
        f"the tensor 'rope_freqs.weight' holds {factors.size} factors that are not those of the Llama 3 RoPE scaling "
        f"with {LLAMA3}; convert the safetensors checkpoint instead"
    )
    theta, head_dim = raw["rope_theta"], raw["head_dim"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    # The largest factor is that of the scaling. The factors between 1 and it lie in the smooth band, and each of them
    # determines the original context.
    factor = round(float(factors.max(initial=1.0)), 3)
    in_band = (factors > 1.0 + FACTOR_TOLERANCE) & (factors < factor * (1 - FACTOR_TOLERANCE))
    if factors.shape != wavelength.shape or not in_band.any():
        raise error
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = (1 / factors[in_band] - 1 / factor) / (1 - 1 / factor)
    context = round(float(np.median((smooth * (high - low) + low) * wavelength[in_band])))
    # Llama 3.1, `apply_scaling` of its reference code: do these parameters give the stored factors?
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=FACTOR_TOLERANCE):
        raise error
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": context, **LLAMA3}
