"""Model families as tables: source tensor -> our parameter, and the defaults that a config.json leaves out.

Axes have the letters of `kvjax.core.types`, in the notation of einops: a source weight "(K G H) D" holds the query
heads of all KV heads in its rows. `{i}` is the layer's number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A parameter, and the axes that turn a source tensor into it."""

    path: str
    axes: str  # "source axes -> our axes"


class Rule(NamedTuple):
    """A source tensor, and the parameters that it holds along its first axis."""

    source: str
    targets: tuple[Target, ...]


def _rule(source: str, path: str, axes: str) -> Rule:
    return Rule(source, (Target(path, axes),))


LAYER, OURS = "model.layers.{i}", "layer_{i}"

LLAMA = (
    _rule("model.embed_tokens.weight", "embedding", "V D -> V D"),
    _rule(f"{LAYER}.input_layernorm.weight", f"{OURS}/attention_norm/scale", "D -> D"),
    _rule(f"{LAYER}.self_attn.q_proj.weight", f"{OURS}/attention/q/kernel", "(K G H) D -> D K G H"),
    _rule(f"{LAYER}.self_attn.k_proj.weight", f"{OURS}/attention/k/kernel", "(K H) D -> D K H"),
    _rule(f"{LAYER}.self_attn.v_proj.weight", f"{OURS}/attention/v/kernel", "(K H) D -> D K H"),
    _rule(f"{LAYER}.self_attn.o_proj.weight", f"{OURS}/attention/o/kernel", "D (K G H) -> K G H D"),
    _rule(f"{LAYER}.self_attn.q_proj.bias", f"{OURS}/attention/q/bias", "(K G H) -> K G H"),
    _rule(f"{LAYER}.self_attn.k_proj.bias", f"{OURS}/attention/k/bias", "(K H) -> K H"),
    _rule(f"{LAYER}.self_attn.v_proj.bias", f"{OURS}/attention/v/bias", "(K H) -> K H"),
    _rule(f"{LAYER}.self_attn.o_proj.bias", f"{OURS}/attention/o/bias", "D -> D"),
    _rule(f"{LAYER}.self_attn.q_norm.weight", f"{OURS}/attention/q_norm/scale", "H -> H"),
    _rule(f"{LAYER}.self_attn.k_norm.weight", f"{OURS}/attention/k_norm/scale", "H -> H"),
    _rule(f"{LAYER}.post_attention_layernorm.weight", f"{OURS}/mlp_norm/scale", "D -> D"),
    _rule(f"{LAYER}.mlp.gate_proj.weight", f"{OURS}/mlp/gate/kernel", "F D -> D F"),
    _rule(f"{LAYER}.mlp.up_proj.weight", f"{OURS}/mlp/up/kernel", "F D -> D F"),
    _rule(f"{LAYER}.mlp.down_proj.weight", f"{OURS}/mlp/down/kernel", "D F -> F D"),
    _rule(f"{LAYER}.mlp.gate_proj.bias", f"{OURS}/mlp/gate/bias", "F -> F"),
    _rule(f"{LAYER}.mlp.up_proj.bias", f"{OURS}/mlp/up/bias", "F -> F"),
    _rule(f"{LAYER}.mlp.down_proj.bias", f"{OURS}/mlp/down/bias", "D -> D"),
    _rule("model.norm.weight", "final_norm/scale", "D -> D"),
    _rule("lm_head.weight", "head/kernel", "V D -> D V"),
)
"""All tensors that a Llama-like decoder can have; a rule whose parameter the config lacks does not apply."""

IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)position_ids$")
"""Buffers of old checkpoints, which the config determines."""


def fuse(table: tuple[Rule, ...], joins: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
    """Returns the rules where modules are stored as one: {"qkv_proj": ("q_proj", ...)} stacks rows in table order."""
    names = {member: name for name, members in joins.items() for member in members}
    joined: dict[str, tuple[Target, ...]] = {}
    for rule in table:
        source = ".".join(names.get(word, word) for word in rule.source.split("."))
        joined[source] = joined.get(source, ()) + rule.targets
    return tuple(Rule(*item) for item in joined.items())


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`, as transformers reads it: its tensors, its defaults, and the config keys that it obeys."""

    architecture: str
    defaults: Mapping[str, Any]  # of its config class, for keys that config.json leaves out
    rules: tuple[Rule, ...] = LLAMA
    always: tuple[str, ...] = ()  # boolean fields of kvjax.models.Config that are always true
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # config.json key -> such fields
    sliding: str = "never"  # "never" | "every layer" | "by layer": which layers `sliding_window` is for
    partial_rotary: bool = False  # whether `partial_rotary_factor` is obeyed


COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_size": 4096,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN = COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False},
        switches={"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        sliding="every layer",
    ),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, always=("qkv_bias",), sliding="by layer"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        QWEN | {"head_dim": 128, "attention_bias": False},
        always=("qk_norm",),
        switches={"attention_bias": ("qkv_bias", "out_bias")},
        sliding="by layer",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        COMMON
        | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096}
        | {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000},
        rules=fuse(LLAMA, {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}),
        sliding="every layer",
        partial_rotary=True,
    ),
}
