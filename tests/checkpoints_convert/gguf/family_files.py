"""Writes GGUF files of the newer families from Hugging Face directories, as llama.cpp's converter does.

`gguf_files` does so for the Llama family; names and rules here are of llama.cpp's `conversion/`, written anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize

from tests.checkpoints_convert.gguf.gguf_files import NAMES, add_value, interleave_halves, read_config, read_tensors

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "llama": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
}
OUTSIDE = {name: NAMES[name] for name in ("model.embed_tokens", "model.norm", "lm_head")}
INSIDE = NAMES | {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
RECURRENCE = {
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
}
Tensors = dict[str, np.ndarray]
EXPERT = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
ONE_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight")


def tile_value_heads(config: dict[str, Any], name: str, x: np.ndarray) -> np.ndarray:
    """Orders Qwen3.5's value heads: head 0 of key head 0, head 0 of key head 1, .., head 1 of key head 0, .."""
    kv_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = (
        1 if name in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else config["linear_value_head_dim"]
    )
    before = 2 * kv_heads * config["linear_key_head_dim"] if name in ("conv1d.weight", "in_proj_qkv.weight") else 0
    order = list(range(before))
    for g in range(heads // kv_heads):
        for n in range(kv_heads):
            first = before + (n * (heads // kv_heads) + g) * width
            order += range(first, first + width)
    return x[:, order] if name == "out_proj.weight" else x if name == "norm.weight" else x[order]


def recurrent_tensors(config: dict[str, Any], name: str, x: np.ndarray) -> Tensors:
    """The tensors of a file that one of a layer's `linear_attn` becomes, by the ends of their names."""
    if name == "in_proj_qkvz.weight":
        heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
        by_head, values = np.split(x, heads), x.shape[0] // heads // 2 - keys
        parts = zip(*(np.split(head, [keys, 2 * keys, 2 * keys + values]) for head in by_head), strict=True)
        q, k, v, gate = (np.concatenate(part) for part in parts)
        return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": gate}
    x = -np.exp(x) if name == "A_log" else x[:, 0] if name == "conv1d.weight" else x
    return {RECURRENCE[name]: x if config["model_type"] == "qwen3_next" else tile_value_heads(config, name, x)}


def own_tensors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a file by its names."""
    kind, found, experts = config["model_type"], {}, defaultdict(dict)
    for name, x in tensors.items():
        outside = name.rsplit(".", 1)[0]
        is_shifted = kind.startswith(("gemma", "qwen3_next", "qwen3_5")) and ".linear_attn." not in name
        if is_shifted and name.endswith("norm.weight"):
            x = x + np.float32(1)
        if outside in OUTSIDE:
            if not (outside == "lm_head" and config.get("tie_word_embeddings")):
                found[f"{OUTSIDE[outside]}.weight"] = x
            continue
        _, _, layer, inside = name.split(".", 3)
        module, _, suffix = inside.rpartition(".")
        own = f"blk.{layer}"
        if inside.startswith("linear_attn."):
            parts = recurrent_tensors(config, inside.removeprefix("linear_attn."), x)
            found |= {f"{own}.{name}": part for name, part in parts.items()}
        elif match := ONE_EXPERT.search(inside):
            experts[f"{own}.ffn_{EXPERT[match[2]]}_exps.weight"][int(match[1])] = x
        elif inside == "mlp.experts.gate_up_proj":  # gpt-oss, here and in the next four
            found[f"{own}.ffn_gate_exps.weight"], found[f"{own}.ffn_up_exps.weight"] = (
                x[..., i::2].swapaxes(1, 2) for i in (0, 1)
            )
        elif inside == "mlp.experts.gate_up_proj_bias":
            found[f"{own}.ffn_gate_exps.bias"], found[f"{own}.ffn_up_exps.bias"] = x[:, ::2], x[:, 1::2]
        elif inside == "mlp.experts.down_proj":
            found[f"{own}.ffn_down_exps.weight"] = x.swapaxes(1, 2)
        elif inside == "mlp.experts.down_proj_bias":
            found[f"{own}.ffn_down_exps.bias"] = x
        elif inside == "self_attn.sinks":
            found[f"{own}.attn_sinks.weight"] = x
        elif inside == "mlp.gate.e_score_correction_bias":
            found[f"{own}.exp_probs_b.bias"] = x
        elif module == "self_attn.kv_b_proj":
            by_head = x.reshape(config["num_attention_heads"], -1, x.shape[-1])
            found[f"{own}.attn_k_b.weight"] = by_head[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
            found[f"{own}.attn_v_b.weight"] = by_head[:, config["qk_nope_head_dim"] :]
        elif module == "post_attention_layernorm":
            is_after = kind in ("gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "olmo2", "olmo3", "seed_oss")
            is_after |= kind.startswith(("qwen3_next", "qwen3_5"))
            found[f"{own}.{'post_attention_norm' if is_after else 'ffn_norm'}.weight"] = x
        else:
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(module)
            if heads and kind in ("llama", "ministral3", "mixtral", "granite", "smollm3"):
                x = interleave_halves(x, config[heads])
            found[f"{own}.{INSIDE[module]}.{suffix}"] = x
    return found | {name: np.stack([x[i] for i in range(len(x))]) for name, x in experts.items()}


def split_experts(tensors: Tensors) -> Tensors:
    """The tensors as llama.cpp's converter wrote them for Mixtral until April 2024: one for each expert."""
    split = {}
    for name, x in tensors.items():
        if "_exps." in name:
            split |= {name.replace("_exps.", f".{e}."): one for e, one in enumerate(x)}
        else:
            split[name] = x
    return split


def own_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a file's architecture, without its name."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config["num_key_value_heads"]
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": int(size * config.get("partial_rotary_factor", 1.0)),
    }
    rope = config["rope_scaling"]
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
        keys["rope.freq_base"] = float(rope["rope_theta"])
    name = rope.get("rope_type", rope.get("type"))
    if name in ("linear", "yarn"):
        keys |= {"rope.scaling.type": name, "rope.scaling.factor": float(rope["factor"])}
        if name == "yarn":
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow") if key in rope}
    if name in ("longrope", "su"):
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
        factor = config["max_position_embeddings"] / original
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(factor) / np.log(original)))
    if config.get("sliding_window") and kind != "smollm3":
        keys["attention.sliding_window"] = config["sliding_window"]
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "olmo3"):
        keys["attention.sliding_window_pattern"] = [x == "sliding_attention" for x in config["layer_types"]]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            keys[key] = float(config[key])
    factors = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "routed_scaling_factor": "expert_weights_scale",
    }
    keys |= {own: float(config[theirs]) for theirs, own in factors.items() if theirs in config}
    counts = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "n_shared_experts": "expert_shared_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "first_k_dense_replace": "leading_dense_block_count",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "v_head_dim": "attention.value_length_mla",
        "qk_head_dim": "attention.key_length_mla",
    }
    keys |= {own: config[theirs] for theirs, own in counts.items() if config.get(theirs) is not None}
    if "linear_num_value_heads" in config:
        keys["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    if "mrope_section" in rope:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if kind == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if kind == "gpt_oss":
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if kind in ("deepseek_v3", "glm4_moe"):
        keys |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if kind in ("deepseek_v2", "deepseek_v3"):
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        keys |= {"attention.key_length": rank + rotated, "attention.value_length": rank, "attention.head_count_kv": 1}
        keys["rope.dimension_count"] = rotated
        if rope.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys


def write_family(
    directory: Path,
    file: Path,
    kind: str = "F32",
    change: Callable[[Tensors], Tensors] = lambda x: x,
    architecture: str | None = None,
    **changes: Any,
) -> Path:
    """Writes a directory as a GGUF file, with matrices of another type, and of another architecture.

    Changes of its keys are by `key__of__it`; `change` makes other tensors of those that llama.cpp's converter writes.
    """
    config = read_config(directory)
    writer = GGUFWriter(file, architecture or ARCHITECTURES[config["model_type"]])
    keys = own_metadata(config) | {key.replace("__", "."): x for key, x in changes.items()}
    for key, x in keys.items():
        if x is not None:
            add_value(writer, f"{writer.arch}.{key}", x)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    decoder = {name.replace(".language_model.", "."): x for name, x in read_tensors(directory).items()}
    decoder = {name: x for name, x in decoder.items() if ".visual." not in name}
    tensors = change(own_tensors(config, decoder))
    for key in ("long", "short"):
        if factors := config["rope_scaling"].get(f"{key}_factor"):
            tensors[f"rope_factors_{key}.weight"] = np.array(factors, np.float32)
    raw = GGMLQuantizationType[kind]
    for name, x in tensors.items():
        x = np.ascontiguousarray(x)
        if x.ndim == 1 or x.shape[-1] % GGML_QUANT_SIZES[raw][0]:  # no whole blocks
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, quantize(x, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
