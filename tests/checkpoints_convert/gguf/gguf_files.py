"""Writes GGUF files from Hugging Face directories as llama.cpp's converter does, with names of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}


def gguf_name(hf_name: str) -> str:
    """Translates a Hugging Face name: model.layers.3.self_attn.q_proj.weight is blk.3.attn_q.weight."""
    module, kind = hf_name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleave_halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the two halves of every head's rows, as the llama format stores them."""
    halves = x.reshape(heads, 2, -1, *x.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(x.shape)


def llama3_factors(config: dict[str, Any]) -> np.ndarray | None:
    """The values of rope_freqs.weight, frequency by frequency, as llama.cpp's converter computes them."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    context, size = scaling["original_max_position_embeddings"], config["head_dim"]
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / size)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json, that of the text decoder, with the RoPE of transformers 5 spelled as in 4."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    rope = config.pop("rope_parameters", None) or {}
    return {"rope_scaling": rope, "rope_theta": 10_000.0} | rope | config


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of all files of a directory, in float32."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: x.astype(np.float32) for file in files for name, x in load_file(file).items()}


def write(directory: Path, file: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Writes a directory as a GGUF file, with matrices of another type; metadata: further values, by `key__of__it`."""
    config = read_config(directory)
    writer = GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    add_metadata(writer, config)
    for key, value in metadata.items():
        add_value(writer, key.replace("__", "."), value)
    for hf_name, x in read_tensors(directory).items():
        if hf_name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        add_tensor(writer, config, hf_name, x, kind)
    if (factors := llama3_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(int(size * config.get("partial_rotary_factor", 1.0)))
    if config["model_type"] in ("mistral", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) == "linear":
        add_value(writer, f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    for key, token in zip(("eos", "eot"), ends if isinstance(ends, list) else [ends], strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    kinds |= {bool: writer.add_bool}
    kinds[type(value)](key, value)


def add_tensor(writer: GGUFWriter, config: dict[str, Any], hf_name: str, x: np.ndarray, kind: str) -> None:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(hf_name.split(".")[-2])
    if heads and writer.arch == "llama":
        x = interleave_halves(x, config[heads])
    raw = GGMLQuantizationType[kind]
    if x.ndim == 1 or x.shape[-1] % GGML_QUANT_SIZES[raw][0]:  # no whole blocks
        writer.add_tensor(gguf_name(hf_name), x)
    else:
        writer.add_tensor(gguf_name(hf_name), quantize(x, raw), raw_dtype=raw)
