"""Architectures of GGUF: the keys that only one of them has, translated to keys of its family's config.json.

A key that is missing has the value that llama.cpp gives it (src/models, `load_arch_hparams`). Some properties of models
are in no file, because llama.cpp's code has them: Gemma's local RoPE, SmolLM3's layers without RoPE, and the sum of
one that Qwen3-MoE's weights of experts have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints_convert.families import FULL, IN_GROUPS, LINEAR, SLIDING, TEMPERATURE
from checkpoints_convert.hf_config import is_integer, is_number
from kvjax.core.rope import longrope_length_factor, yarn_length_factor

Entries = dict[str, Any]
Problems = list[str]


class File(NamedTuple):
    """The metadata that an architecture reads.

    Attributes:
      own: the keys of the architecture, without its name.
      raw: config.json as far as all architectures have it.
    """

    own: Mapping[str, Any]
    raw: Mapping[str, Any]


Read = Callable[[File], tuple[Entries, Problems]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
      model_type: of its config.json.
      keys: further keys that are obeyed.
      read: reads what is its own: entries of config.json, and what is not supported.
      swaps_halves: whether the channels of queries and keys are stored in neighboring pairs, where Hugging Face has
        the first half of them and then the second.
      adds_one: whether the scales of norms are stored plus one; those of a recurrence never are.
    """

    model_type: str
    keys: tuple[str, ...] = ()
    read: Read = lambda file: ({}, [])
    swaps_halves: bool = False
    adds_one: bool = False


EXPERTS = ("expert_count", "expert_used_count")
SIGMOID_EXPERTS = (
    *(*EXPERTS, "expert_shared_count", "expert_feed_forward_length", "expert_gating_func", "nextn_predict_layers"),
    *("expert_group_count", "expert_group_used_count", "expert_weights_scale", "expert_weights_norm"),
    "leading_dense_block_count",
)
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_THETA = "rope.freq_base_swa"
LOG_MULTIPLIER, GROWTH = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
RECURRENCE = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
INNER_SIZE, INTERVAL, RECURRENT = "ssm.inner_size", "full_attention_interval", "attention.recurrent_layers"
OF_QWEN35 = (*RECURRENCE, INNER_SIZE, INTERVAL, RECURRENT, "nextn_predict_layers")
OF_SHARED_EXPERT = (
    *(*EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm"),
)
OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys of Qwen3-VL that change nothing for a text, whose tokens have one position, and no vectors of an image."""


def read_llama(file: File) -> tuple[Entries, Problems]:
    """Llama, Mistral where there is a window, and Mixtral where there are experts."""
    if file.own.get("expert_count"):
        entries, problems = _read_experts(file, "num_local_experts")
        return {"model_type": "mixtral", **entries}, problems
    return {"model_type": "mistral"} if file.raw["sliding_window"] else {}, []


def read_mistral3(file: File) -> tuple[Entries, Problems]:
    """Ministral 3, whose queries grow with their position, and Mistral Small 3.1, whose do not."""
    scaling, growth = file.raw["rope_scaling"], file.own.get(GROWTH)
    if scaling is None or scaling["rope_type"] != "yarn":
        problem = f"mistral3.{GROWTH} is {growth} in a file whose RoPE is not scaled by 'yarn'; make it again"
        return {"rope_scaling": scaling or {"rope_type": "default"}}, [problem] if growth else []
    if stored := file.own.get(LOG_MULTIPLIER):
        scaling = scaling | {"mscale": 1.0, "mscale_all_dim": shortest_decimal(stored)}
    if growth:
        scaling = scaling | {TEMPERATURE: shortest_decimal(growth)}
    return {"rope_scaling": scaling}, []


def read_qwen3_moe(file: File) -> tuple[Entries, Problems]:
    """Qwen3-MoE: experts in all layers, whose weights sum to one."""
    entries, problems = _read_experts(file, "num_experts")
    width = file.own.get("expert_feed_forward_length")
    if width is None and not problems:
        width = file.raw["intermediate_size"] // entries["num_experts_per_tok"]
    return entries | {"moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1}, problems


def read_qwen35(file: File) -> tuple[Entries, Problems]:
    """Qwen3.5: a gated delta rule in all layers but every fourth, or those that a list names."""
    own, needed = file.own, (*RECURRENCE, INNER_SIZE)
    if any(not is_integer(own.get(key)) or own[key] < 1 for key in needed):
        return {}, [f"this GGUF file must have positive integers under {', '.join(needed)}; make it again"]
    entries, problems = {theirs: own[key] for key, theirs in RECURRENCE.items()}, []
    heads, kv_heads = own["ssm.time_step_rank"], own["ssm.group_count"]
    if own[INNER_SIZE] % heads or heads % kv_heads:
        problems.append(
            f"{INNER_SIZE} {own[INNER_SIZE]}, ssm.time_step_rank {heads} and ssm.group_count {kv_heads} of this GGUF "
            "file must be multiples of each other in this order; make it again"
        )
    entries |= {"linear_value_head_dim": own[INNER_SIZE] // heads, **_read_later_layers(file)}
    layers, interval, listed = entries["num_hidden_layers"], own.get(INTERVAL, 4), own.get(RECURRENT)
    if listed is None and is_integer(interval) and interval > 0:
        entries[INTERVAL] = interval
    elif isinstance(listed, list) and is_integer(layers) and len(listed) >= layers and all(x in (0, 1) for x in listed):
        entries["layer_types"] = [LINEAR if x else FULL for x in listed[:layers]]
    else:
        problems.append(
            f"{INTERVAL} is {interval!r:.80} and {RECURRENT} {listed!r:.80}: the first must be a positive integer, or "
            "the second true or false for each layer; make the file again"
        )
    return entries, problems


def read_qwen3_next(file: File) -> tuple[Entries, Problems]:
    """Qwen3-Next, and Qwen3.5 with experts: the experts of Qwen3-MoE and one of all tokens."""
    experts, problems = read_qwen3_moe(file)
    entries, more = read_qwen35(file)
    width = file.own.get("expert_shared_feed_forward_length", file.raw["intermediate_size"])
    return experts | entries | {"shared_expert_intermediate_size": width}, problems + more


def read_gpt_oss(file: File) -> tuple[Entries, Problems]:
    """gpt-oss. Its YaRN does not round the ends of the ramp to whole pairs, for which the format has no key."""
    entries, problems = _read_experts(file, "num_local_experts")
    types, more = _read_layer_types(file, 2)
    scaling = file.raw["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = scaling | {"truncate": False}
    width = file.own.get("expert_feed_forward_length", file.raw["intermediate_size"])
    entries |= {"layer_types": types, "rope_scaling": scaling, "intermediate_size": width}
    return entries, problems + more + _find_local_theta(file)


def read_gemma2(file: File) -> tuple[Entries, Problems]:
    """Gemma 2: every other layer has a window, of 4,096 for a file that does not say."""
    types, problems = _read_layer_types(file, 2)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    entries = {key: file.own.get(key, default) or None for key, default in caps.items()}
    entries |= {"layer_types": types, "sliding_window": file.own.get(WINDOW, 4096), **_read_gemma(file, 46)}
    return entries, problems + _find_local_theta(file)


def read_gemma3(file: File) -> tuple[Entries, Problems]:
    """Gemma 3: all layers but every sixth have a window and a RoPE of their own, which no factor scales."""
    has_window = bool(file.raw["sliding_window"])
    types, problems = _read_layer_types(file, 6 if has_window else 1)
    entries = {
        "layer_types": types,
        "final_logit_softcapping": file.own.get("final_logit_softcapping") or None,
        "rope_local_base_freq": shortest_decimal(file.own.get(LOCAL_THETA, 10_000.0)),
        **_read_gemma(file, 62),
    }
    return entries, problems


def read_granite(file: File) -> tuple[Entries, Problems]:
    """Granite: four factors."""
    size = file.raw["head_dim"]
    factors = {
        "attention_multiplier": file.own.get("attention.scale") or size**-0.5,
        "embedding_multiplier": file.own.get("embedding_scale") or 1.0,
        "residual_multiplier": file.own.get("residual_scale") or 1.0,
        "logits_scaling": file.own.get("logit_scale"),
    }
    problems = []
    if not factors["logits_scaling"]:
        problems.append("this GGUF file must have the number 'granite.logit_scale'; make it again")
    if file.own.get("rope.scaling.finetuned") is False:  # which llama.cpp reads as: no RoPE
        problems.append(
            "granite.rope.scaling.finetuned is false, by which this file asks for a model without RoPE, which is not "
            "supported; use a Granite model with RoPE"
        )
    return {key: shortest_decimal(x) if is_number(x) else x for key, x in factors.items()}, problems


def read_olmo2(file: File) -> tuple[Entries, Problems]:
    """OLMo 2; with a window it is OLMo 3, in which all layers but every fourth have it, and a RoPE without scaling."""
    if not file.raw["sliding_window"]:
        return {}, []
    types, problems = _read_layer_types(file, 4)
    return {"model_type": "olmo3", "layer_types": types}, problems + _find_local_theta(file)


def read_deepseek2(file: File) -> tuple[Entries, Problems]:
    """DeepSeek-V2 and V3, in new files, whose heads are those of the absorbed form, and in old ones."""
    own, problems = file.own, []
    counts = {
        "n_routed_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "n_shared_experts": own.get("expert_shared_count"),
        "moe_intermediate_size": own.get("expert_feed_forward_length"),
        "kv_lora_rank": own.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": own.get("rope.dimension_count"),
        "v_head_dim": own.get("attention.value_length_mla", own.get("attention.value_length")),
    }
    key_size = own.get("attention.key_length_mla", own.get("attention.key_length"))
    wrong = [key for key, x in (*counts.items(), ("the width of a key", key_size)) if not is_integer(x) or x < 1]
    if wrong:
        return {}, [f"this GGUF file does not say {', '.join(wrong)} in positive integers; make it again"]
    kind, groups = own.get("expert_gating_func") or SOFTMAX, own.get("expert_group_count") or 1
    if kind not in (SOFTMAX, SIGMOID):
        problems.append(
            f"deepseek2.expert_gating_func is {kind!r:.60}: experts that are chosen otherwise than by a softmax (1) or "
            "by sigmoids (2) are not supported; use a model of DeepSeek-V2 or V3"
        )
    if own.get("expert_weights_norm") and kind == SOFTMAX:
        problems.append(
            "deepseek2.expert_weights_norm is true, which is not supported; use a model of DeepSeek-V2 or V3"
        )
    entries = counts | {
        "q_lora_rank": own.get("attention.q_lora_rank") or None,
        "qk_nope_head_dim": key_size - counts["qk_rope_head_dim"],
        "first_k_dense_replace": own.get("leading_dense_block_count", 0),
        "routed_scaling_factor": shortest_decimal(own.get("expert_weights_scale") or 1.0),
        "n_group": groups,
        "topk_group": own.get("expert_group_used_count") or 1,
        "num_key_value_heads": None,
        "head_dim": None,
    }
    if kind == SIGMOID:
        entries |= {"model_type": "deepseek_v3", "norm_topk_prob": bool(own.get("expert_weights_norm"))}
        entries |= _read_later_layers(file)
    else:
        entries["topk_method"] = IN_GROUPS if groups > 1 else "greedy"
    scaling, stored = file.raw["rope_scaling"], own.get(LOG_MULTIPLIER)
    if stored and scaling is not None and scaling["rope_type"] == "yarn":
        # llama.cpp's converter writes a tenth of mscale_all_dim, and no mscale, which is equal to it in all models.
        mscale = round(shortest_decimal(stored) * 10, 6)
        entries["rope_scaling"] = scaling | {"mscale": mscale, "mscale_all_dim": mscale}
    return entries, problems


def read_glm4_moe(file: File) -> tuple[Entries, Problems]:
    """GLM-4.5; a file that does not say how experts are chosen means sigmoids."""
    entries, problems = _read_experts(file, "n_routed_experts")
    own, kind = file.own, file.own.get("expert_gating_func") or SIGMOID
    if kind != SIGMOID:
        problems.append(
            f"glm4moe.expert_gating_func is {kind!r:.60}: experts that are chosen otherwise than by sigmoids (2) are "
            "not supported; use a model of GLM-4.5"
        )
    entries |= {
        "n_shared_experts": own.get("expert_shared_count"),
        "moe_intermediate_size": own.get("expert_feed_forward_length"),
        "first_k_dense_replace": own.get("leading_dense_block_count", 0),
        "routed_scaling_factor": shortest_decimal(own.get("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(own.get("expert_weights_norm")),
        "n_group": own.get("expert_group_count") or 1,
        "topk_group": own.get("expert_group_used_count") or 1,
    }
    return entries | _read_later_layers(file), problems


def _read_later_layers(file: File) -> Entries:
    """Reads the number of layers after the decoder's, which a file counts among its blocks."""
    later = file.own.get("nextn_predict_layers") or 0
    layers = file.raw["num_hidden_layers"] - later if is_integer(later) else later  # refused as no number of layers
    return {"num_nextn_predict_layers": later, "num_hidden_layers": layers}


def _read_experts(file: File, name: str) -> tuple[Entries, Problems]:
    counts = {name: file.own.get("expert_count"), "num_experts_per_tok": file.own.get("expert_used_count")}
    if any(not is_integer(x) or x < 1 for x in counts.values()):
        return counts, [f"this GGUF file must have positive integers under {', '.join(EXPERTS)}; make it again"]
    return counts, []


def _read_gemma(file: File, layers_of_27b: int) -> Entries:
    """Reads the entries that Gemma 2 and 3 share; the largest model of each has another scale, as in llama.cpp."""
    raw = file.raw
    is_27b = raw["num_hidden_layers"] == layers_of_27b
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if is_27b else raw["head_dim"],
    }


def _read_layer_types(file: File, default: int) -> tuple[list[str] | None, Problems]:
    """Reads which layers have the window: all but every n-th, or the layers that a list names."""
    pattern, layers = file.own.get(PATTERN, default), file.raw["num_hidden_layers"]
    if isinstance(pattern, list) and len(pattern) >= layers and all(x in (0, 1) for x in pattern):
        slides = [bool(x) for x in pattern[:layers]]
    elif is_integer(pattern) and pattern >= 0:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    else:
        return None, [f"{PATTERN} is {pattern!r:.80}: it must be an integer, or true or false for each layer"]
    return [SLIDING if x else FULL for x in slides], []


def _find_local_theta(file: File) -> Problems:
    """Refuses a RoPE of layers with a window that differs from the RoPE of all layers."""
    if file.own.get(LOCAL_THETA) in (None, 0.0, file.own.get("rope.freq_base", 10_000.0)):
        return []
    return [f"{LOCAL_THETA} is {file.own[LOCAL_THETA]}: another RoPE in layers with a window is not supported"]


def read_yarn(own: Mapping[str, Any], factor: float, context: int) -> tuple[Entries, Problems]:
    """Reads YaRN's parameters.

    `rope.scaling.attn_factor` multiplies the factor of rotated vectors that YaRN derives from its own.
    """
    problems, default = [], yarn_length_factor(factor)
    scaling: Entries = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length") or context,
    }
    for key in ("beta_fast", "beta_slow"):
        if (x := own.get(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = shortest_decimal(x)
    if (more := own.get("rope.scaling.attn_factor")) not in (None, 1.0):
        scaling["attention_factor"] = default * shortest_decimal(more)
    # llama.cpp's converter writes transformers' attention_factor here, and llama.cpp does not read it.
    stored = own.get("rope.scaling.yarn_attn_factor")
    if stored not in (None, 1.0) and not math.isclose(stored, default, rel_tol=1e-6):
        problems.append(
            f"rope.scaling.yarn_attn_factor is {stored}, and not YaRN's {default:.6g} for a factor of {factor:g}: "
            "programs disagree about what it means; convert the safetensors checkpoint instead"
        )
    if own.get("rope.scaling.yarn_ext_factor") not in (None, 1.0, -1.0):
        problems.append(
            f"rope.scaling.yarn_ext_factor is {own['rope.scaling.yarn_ext_factor']}: only that of 1 is supported"
        )
    return scaling, problems


def read_longrope(
    own: Mapping[str, Any], context: int, short: list[float] | None, long: list[float] | None
) -> tuple[Entries, Problems]:
    """Reads LongRoPE's parameters; its two lists of factors are tensors."""
    if short is None or long is None:
        missing = "rope_factors_short.weight" if short is None else "rope_factors_long.weight"
        return {}, [f"this GGUF file scales RoPE by lists of factors, and has no tensor {missing!r}; make it again"]
    original = own.get("rope.scaling.original_context_length") or context
    scaling: Entries = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    stored = own.get("rope.scaling.attn_factor", 1.0)
    if not math.isclose(stored, longrope_length_factor(context / original, original), rel_tol=1e-6):
        scaling["attention_factor"] = shortest_decimal(stored)
    return scaling, []


def shortest_decimal(x: Any) -> float:
    """Returns the shortest decimal that is this float32: config.json had 1e-05, the file has 9.999999747378752e-06."""
    return float(str(np.asarray(x, np.float32)[()]))


ARCHITECTURES = {
    "llama": Architecture("llama", EXPERTS, read_llama, swaps_halves=True),
    "mistral3": Architecture("ministral3", (LOG_MULTIPLIER, GROWTH), read_mistral3, swaps_halves=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3vl": Architecture("qwen3", OF_IMAGES),
    "phi3": Architecture("phi3"),
    "granite": Architecture(
        "granite",
        ("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"),
        read_granite,
        swaps_halves=True,
    ),
    "olmo2": Architecture("olmo2", (PATTERN, LOCAL_THETA), read_olmo2),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", (), lambda file: ({"no_rope_layer_interval": 4}, []), swaps_halves=True),
    "qwen3moe": Architecture(
        "qwen3_moe", (*EXPERTS, "expert_feed_forward_length", "expert_weights_norm"), read_qwen3_moe
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", (*EXPERTS, "expert_feed_forward_length", "expert_weights_norm", *OF_IMAGES), read_qwen3_moe
    ),
    "qwen3next": Architecture("qwen3_next", (*OF_QWEN35, *OF_SHARED_EXPERT), read_qwen3_next, adds_one=True),
    "qwen35": Architecture("qwen3_5_text", (*OF_QWEN35, *OF_IMAGES), read_qwen35, adds_one=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", (*OF_QWEN35, *OF_SHARED_EXPERT, *OF_IMAGES), read_qwen3_next, adds_one=True
    ),
    "gemma": Architecture("gemma", (), lambda file: ({"hidden_act": "gelu_pytorch_tanh"}, []), adds_one=True),
    "gemma2": Architecture(
        "gemma2",
        (PATTERN, LOCAL_THETA, "attn_logit_softcapping", "final_logit_softcapping"),
        read_gemma2,
        adds_one=True,
    ),
    "gemma3": Architecture(
        "gemma3_text", (PATTERN, LOCAL_THETA, "final_logit_softcapping"), read_gemma3, adds_one=True
    ),
    "gpt-oss": Architecture("gpt_oss", (*EXPERTS, "expert_feed_forward_length", PATTERN, LOCAL_THETA), read_gpt_oss),
    "deepseek2": Architecture(
        "deepseek_v2",
        (
            *(*SIGMOID_EXPERTS, "attention.kv_lora_rank", "attention.q_lora_rank"),
            *("attention.key_length_mla", "attention.value_length_mla", LOG_MULTIPLIER),
        ),
        read_deepseek2,
    ),
    "glm4moe": Architecture("glm4_moe", SIGMOID_EXPERTS, read_glm4_moe),
}
"""general.architecture -> what it says."""
