"""Model families: how each differs from a Llama, and its table from source tensors to our parameters.

A family is a function from config.json to the kind of each layer (`Family.refine`, on top of what all families share,
which `hf_config` reads), and one or more tables of tensors.

Axes have the letters of `kvjax.core.types`, in the notation of einops: a source weight "(K G H) D" holds the query
heads of all KV heads in its rows. Further letters: E experts, S the shared MLP's width, W the width of a value head
before the output projection; of latent attention R its rank, Q that of queries, P and U the channels of a query head
with and without position, X = P + U, Y = P + R, Z = U + W; L layers and J the width of their own vectors of the tokens;
of a recurrence N the tokens of its convolution, C its channels, X = 2 H + 2 G W. `{i}` is the layer's number, `{e}` an
expert's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from kvjax.core.rope import yarn_length_factor
from kvjax.models.config import Config
from kvjax.models.kinds import (
    AttentionKind,
    Experts,
    GatedDelta,
    Latent,
    LayerKind,
    MlpKind,
    PerLayerEmbedding,
    QueryTemperature,
)
from kvjax.models.quantized_params import DECAY_BIAS, LOG_RATE

Values = Mapping[str, Any]
"""A config.json with the defaults of its family."""


class TargetParameter(NamedTuple):
    """A parameter, and the axes that turn a source tensor into it."""

    path: str
    axes: str  # "source axes -> our axes"


class TensorRule(NamedTuple):
    """A source tensor, and the parameters that it holds.

    Attributes:
      source: the tensor's name. With `{e}` it stands for the tensors of all experts, stacked along a new first axis E.
      targets: the parameters, one after the other along the first axis.
      unpack: axes of the tensor as it is stored, and as `targets` sees them: "E D (two F) -> (two E) D F".
      unrotated: the letter for the number of channels without position that the first axis begins with; after them come
        those with position, in neighboring pairs. Ours are the pairs' first halves, their second halves, the others.
      unless: the rule is not for a layer that has this parameter.
    """

    source: str
    targets: tuple[TargetParameter, ...]
    unpack: str = ""
    unrotated: str = ""
    unless: str = ""


Table = tuple[TensorRule, ...]


def _rule(source: str, path: str, axes: str, **how: str) -> TensorRule:
    return TensorRule(source, (TargetParameter(path, axes),), **how)


LAYER, OURS = "model.layers.{i}", "layer_{i}"
ROUTER = f"{OURS}/mlp/router/kernel"

OUTSIDE = (
    _rule("model.embed_tokens.weight", "embedding", "V D -> V D"),
    _rule("model.norm.weight", "final_norm/scale", "D -> D"),
    _rule("lm_head.weight", "head/kernel", "V D -> D V"),
)
PRE_NORMS = (
    _rule(f"{LAYER}.input_layernorm.weight", f"{OURS}/attention_norm/scale", "D -> D"),
    _rule(f"{LAYER}.post_attention_layernorm.weight", f"{OURS}/mlp_norm/scale", "D -> D"),
)
POST_NORMS = (
    _rule(f"{LAYER}.post_attention_layernorm.weight", f"{OURS}/attention_post_norm/scale", "D -> D"),
    _rule(f"{LAYER}.post_feedforward_layernorm.weight", f"{OURS}/mlp_post_norm/scale", "D -> D"),
)
OUTPUT = (
    _rule(f"{LAYER}.self_attn.o_proj.weight", f"{OURS}/attention/o/kernel", "D (K G W) -> K G W D"),
    _rule(f"{LAYER}.self_attn.o_proj.bias", f"{OURS}/attention/o/bias", "D -> D"),
)
ATTENTION = (
    _rule(f"{LAYER}.self_attn.q_proj.weight", f"{OURS}/attention/q/kernel", "(K G H) D -> D K G H"),
    _rule(f"{LAYER}.self_attn.k_proj.weight", f"{OURS}/attention/k/kernel", "(K H) D -> D K H"),
    _rule(f"{LAYER}.self_attn.v_proj.weight", f"{OURS}/attention/v/kernel", "(K W) D -> D K W"),
    _rule(f"{LAYER}.self_attn.q_proj.bias", f"{OURS}/attention/q/bias", "(K G H) -> K G H"),
    _rule(f"{LAYER}.self_attn.k_proj.bias", f"{OURS}/attention/k/bias", "(K H) -> K H"),
    _rule(f"{LAYER}.self_attn.v_proj.bias", f"{OURS}/attention/v/bias", "(K W) -> K W"),
    *OUTPUT,
)
HEAD_NORMS = (
    _rule(f"{LAYER}.self_attn.q_norm.weight", f"{OURS}/attention/q_norm/scale", "H -> H"),
    _rule(f"{LAYER}.self_attn.k_norm.weight", f"{OURS}/attention/k_norm/scale", "H -> H"),
)
ALL_HEADS_NORMS = (
    _rule(f"{LAYER}.self_attn.q_norm.weight", f"{OURS}/attention/q_norm/scale", "(K G H) -> K G H"),
    _rule(f"{LAYER}.self_attn.k_norm.weight", f"{OURS}/attention/k_norm/scale", "(K H) -> K H"),
)
SINKS = _rule(f"{LAYER}.self_attn.sinks", f"{OURS}/attention/sinks", "(K G) -> K G")

LATENT = (
    _rule(
        f"{LAYER}.self_attn.q_proj.weight",
        f"{OURS}/attention/q/kernel",
        "X G D -> D G X",
        unpack="(G X) D -> X G D",
        unrotated="U",
        unless=f"{OURS}/attention/q_down/kernel",
    ),
    _rule(f"{LAYER}.self_attn.q_a_proj.weight", f"{OURS}/attention/q_down/kernel", "Q D -> D Q"),
    _rule(f"{LAYER}.self_attn.q_a_proj.bias", f"{OURS}/attention/q_down/bias", "Q -> Q"),
    _rule(f"{LAYER}.self_attn.q_a_layernorm.weight", f"{OURS}/attention/q_down_norm/scale", "Q -> Q"),
    _rule(
        f"{LAYER}.self_attn.q_b_proj.weight",
        f"{OURS}/attention/q/kernel",
        "X G Q -> Q G X",
        unpack="(G X) Q -> X G Q",
        unrotated="U",
    ),
    _rule(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
        f"{OURS}/attention/kv_down/kernel",
        "Y D -> D Y",
        unrotated="R",
    ),
    _rule(f"{LAYER}.self_attn.kv_a_proj_with_mqa.bias", f"{OURS}/attention/kv_down/bias", "Y -> Y", unrotated="R"),
    _rule(f"{LAYER}.self_attn.kv_a_layernorm.weight", f"{OURS}/attention/kv_down_norm/scale", "R -> R"),
    TensorRule(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        (
            TargetParameter(f"{OURS}/attention/key_up", "U G R -> G U R"),
            TargetParameter(f"{OURS}/attention/value_up", "W G R -> G W R"),
        ),
        unpack="(G Z) R -> Z G R",
    ),
    *OUTPUT,
)

MLP = (
    _rule(f"{LAYER}.mlp.gate_proj.weight", f"{OURS}/mlp/gate/kernel", "F D -> D F", unless=ROUTER),
    _rule(f"{LAYER}.mlp.up_proj.weight", f"{OURS}/mlp/up/kernel", "F D -> D F", unless=ROUTER),
    _rule(f"{LAYER}.mlp.down_proj.weight", f"{OURS}/mlp/down/kernel", "D F -> F D", unless=ROUTER),
    _rule(f"{LAYER}.mlp.gate_proj.bias", f"{OURS}/mlp/gate/bias", "F -> F", unless=ROUTER),
    _rule(f"{LAYER}.mlp.up_proj.bias", f"{OURS}/mlp/up/bias", "F -> F", unless=ROUTER),
    _rule(f"{LAYER}.mlp.down_proj.bias", f"{OURS}/mlp/down/bias", "D -> D", unless=ROUTER),
)
GATE_AND_UP = (f"{OURS}/mlp/gate/kernel", f"{OURS}/mlp/up/kernel")
SPLIT_EXPERTS = (
    _rule(f"{LAYER}.mlp.gate.weight", ROUTER, "E D -> D E"),
    _rule(f"{LAYER}.mlp.experts.{{e}}.gate_proj.weight", f"{OURS}/mlp/gate/kernel", "E F D -> E D F"),
    _rule(f"{LAYER}.mlp.experts.{{e}}.up_proj.weight", f"{OURS}/mlp/up/kernel", "E F D -> E D F"),
    _rule(f"{LAYER}.mlp.experts.{{e}}.down_proj.weight", f"{OURS}/mlp/down/kernel", "E D F -> E F D"),
)
"""Experts as they are published, and as transformers saves them by default."""
TRANSPOSED_EXPERTS = (
    _rule(f"{LAYER}.mlp.gate.weight", ROUTER, "E D -> D E"),
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj",
        tuple(TargetParameter(path, "E D F -> E D F") for path in GATE_AND_UP),
        unpack="E D (two F) -> (two E) D F",
    ),
    _rule(f"{LAYER}.mlp.experts.down_proj", f"{OURS}/mlp/down/kernel", "E F D -> E F D"),
)
"""Experts as Qwen3-VL's are published; transformers saves them as `JOINED_EXPERTS`, under the same names."""
JOINED_EXPERTS = (
    _rule(f"{LAYER}.mlp.gate.weight", ROUTER, "E D -> D E"),
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj",
        tuple(TargetParameter(path, "E F D -> E D F") for path in GATE_AND_UP),
        unpack="E (two F) D -> (two E) F D",
    ),
    _rule(f"{LAYER}.mlp.experts.down_proj", f"{OURS}/mlp/down/kernel", "E D F -> E F D"),
)
"""Experts as transformers 5 has them in memory, and saves them with save_original_format=False."""
CHOICE_BIAS = _rule(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{OURS}/mlp/choice_bias", "E -> E")
SHARED_EXPERTS = tuple(
    _rule(f"{LAYER}.mlp.shared_experts.{theirs}", f"{OURS}/mlp/shared/{ours}", axes)
    for theirs, ours, axes in (
        ("gate_proj.weight", "gate/kernel", "S D -> D S"),
        ("up_proj.weight", "up/kernel", "S D -> D S"),
        ("down_proj.weight", "down/kernel", "D S -> S D"),
        ("gate_proj.bias", "gate/bias", "S -> S"),
        ("up_proj.bias", "up/bias", "S -> S"),
        ("down_proj.bias", "down/bias", "D -> D"),
    )
)
SHARED_EXPERT = (
    _rule(f"{LAYER}.mlp.shared_expert.gate_proj.weight", f"{OURS}/mlp/shared/gate/kernel", "S D -> D S"),
    _rule(f"{LAYER}.mlp.shared_expert.up_proj.weight", f"{OURS}/mlp/shared/up/kernel", "S D -> D S"),
    _rule(f"{LAYER}.mlp.shared_expert.down_proj.weight", f"{OURS}/mlp/shared/down/kernel", "D S -> S D"),
    _rule(f"{LAYER}.mlp.shared_expert_gate.weight", f"{OURS}/mlp/shared_gate/kernel", "one D -> D one"),
)
GATED_ATTENTION = (
    # Each head's rows are those of its queries and then those of the gate of its output.
    TensorRule(
        f"{LAYER}.self_attn.q_proj.weight",
        tuple(TargetParameter(f"{OURS}/attention/{name}/kernel", "K G H D -> D K G H") for name in ("q", "gate")),
        unpack="(K G two H) D -> (two K) G H D",
    ),
    TensorRule(
        f"{LAYER}.self_attn.q_proj.bias",
        tuple(TargetParameter(f"{OURS}/attention/{name}/bias", "K G H -> K G H") for name in ("q", "gate")),
        unpack="(K G two H) -> (two K) G H",
    ),
    *(rule for rule in ATTENTION if ".q_proj." not in rule.source),
)
"""Attention with a gate of its output (Qwen3-Next)."""
RECURRENCE = (
    TensorRule(
        f"{LAYER}.linear_attn.conv1d.weight",
        (
            TargetParameter(f"{OURS}/recurrence/q_convolution", "(K H) N -> K H N"),
            TargetParameter(f"{OURS}/recurrence/k_convolution", "(K H) N -> K H N"),
            TargetParameter(f"{OURS}/recurrence/v_convolution", "(K G W) N -> K G W N"),
        ),
        unpack="C one N -> C (one N)",
    ),
    _rule(f"{LAYER}.linear_attn.A_log", f"{OURS}/recurrence/{LOG_RATE}", "(K G) -> K G"),
    _rule(f"{LAYER}.linear_attn.dt_bias", f"{OURS}/recurrence/{DECAY_BIAS}", "(K G) -> K G"),
    _rule(f"{LAYER}.linear_attn.norm.weight", f"{OURS}/recurrence/norm/scale", "W -> W"),
    _rule(f"{LAYER}.linear_attn.out_proj.weight", f"{OURS}/recurrence/o/kernel", "D (K G W) -> K G W D"),
)
"""A gated delta rule, without the projections of its input, in which the two families differ."""
RECURRENCE_BY_HEAD = (
    # Qwen3-Next: the rows of a key head after those of the other.
    TensorRule(
        f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        (
            TargetParameter(f"{OURS}/recurrence/q/kernel", "H K D -> D K H"),
            TargetParameter(f"{OURS}/recurrence/k/kernel", "H K D -> D K H"),
            TargetParameter(f"{OURS}/recurrence/v/kernel", "(G W) K D -> D K G W"),
            TargetParameter(f"{OURS}/recurrence/gate/kernel", "(G W) K D -> D K G W"),
        ),
        unpack="(K X) D -> X K D",
    ),
    TensorRule(
        f"{LAYER}.linear_attn.in_proj_ba.weight",
        tuple(TargetParameter(f"{OURS}/recurrence/{name}/kernel", "G K D -> D K G") for name in ("write", "decay")),
        unpack="(K two G) D -> (two G) K D",
    ),
    *RECURRENCE,
)
RECURRENCE_BY_PART = (
    # Qwen3.5: the rows of all heads' queries, then those of all keys.
    TensorRule(
        f"{LAYER}.linear_attn.in_proj_qkv.weight",
        (
            TargetParameter(f"{OURS}/recurrence/q/kernel", "(K H) D -> D K H"),
            TargetParameter(f"{OURS}/recurrence/k/kernel", "(K H) D -> D K H"),
            TargetParameter(f"{OURS}/recurrence/v/kernel", "(K G W) D -> D K G W"),
        ),
        unpack="C D -> C D",
    ),
    _rule(f"{LAYER}.linear_attn.in_proj_z.weight", f"{OURS}/recurrence/gate/kernel", "(K G W) D -> D K G W"),
    _rule(f"{LAYER}.linear_attn.in_proj_b.weight", f"{OURS}/recurrence/write/kernel", "(K G) D -> D K G"),
    _rule(f"{LAYER}.linear_attn.in_proj_a.weight", f"{OURS}/recurrence/decay/kernel", "(K G) D -> D K G"),
    *RECURRENCE,
)
GEMMA_4 = (
    _rule("model.embed_tokens_per_layer.weight", "per_layer_table", "V (L J) -> V L J"),
    _rule("model.per_layer_model_projection.weight", "per_layer_map", "(L J) D -> D L J"),
    _rule("model.per_layer_projection_norm.weight", "per_layer_norm/scale", "J -> J"),
    _rule(f"{LAYER}.per_layer_input_gate.weight", f"{OURS}/token_gate/kernel", "J D -> D J"),
    _rule(f"{LAYER}.per_layer_projection.weight", f"{OURS}/token_up/kernel", "D J -> J D"),
    _rule(f"{LAYER}.post_per_layer_input_norm.weight", f"{OURS}/token_norm/scale", "D -> D"),
    _rule(f"{LAYER}.layer_scalar", f"{OURS}/output_scale", "one -> one"),
    _rule(f"{LAYER}.router.proj.weight", ROUTER, "E D -> D E"),
    _rule(f"{LAYER}.router.scale", f"{OURS}/mlp/router_norm/scale", "D -> D"),
    _rule(f"{LAYER}.router.per_expert_scale", f"{OURS}/mlp/expert_factors", "E -> E"),
    _rule(f"{LAYER}.pre_feedforward_layernorm_2.weight", f"{OURS}/mlp/experts_norm/scale", "D -> D"),
    _rule(f"{LAYER}.post_feedforward_layernorm_2.weight", f"{OURS}/mlp/experts_post_norm/scale", "D -> D"),
    _rule(f"{LAYER}.post_feedforward_layernorm_1.weight", f"{OURS}/mlp/shared_post_norm/scale", "D -> D"),
    _rule(f"{LAYER}.mlp.gate_proj.weight", f"{OURS}/mlp/shared/gate/kernel", "S D -> D S"),
    _rule(f"{LAYER}.mlp.up_proj.weight", f"{OURS}/mlp/shared/up/kernel", "S D -> D S"),
    _rule(f"{LAYER}.mlp.down_proj.weight", f"{OURS}/mlp/shared/down/kernel", "D S -> S D"),
    TensorRule(
        f"{LAYER}.experts.gate_up_proj",
        tuple(TargetParameter(path, "E F D -> E D F") for path in GATE_AND_UP),
        unpack="E (two F) D -> (two E) F D",
    ),
    _rule(f"{LAYER}.experts.down_proj", f"{OURS}/mlp/down/kernel", "E D F -> E F D"),
)
"""What Gemma 4 has beyond Gemma 3."""
GPT_OSS_EXPERTS = (
    _rule(f"{LAYER}.mlp.router.weight", ROUTER, "E D -> D E"),
    _rule(f"{LAYER}.mlp.router.bias", f"{OURS}/mlp/router/bias", "E -> E"),
    # Columns 0, 2, .. are the gate's, 1, 3, .. are those of the other half.
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj",
        tuple(TargetParameter(path, "E D F -> E D F") for path in GATE_AND_UP),
        unpack="E D (F two) -> (two E) D F",
    ),
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj_bias",
        tuple(TargetParameter(f"{OURS}/mlp/{name}/bias", "E F -> E F") for name in ("gate", "up")),
        unpack="E (F two) -> (two E) F",
    ),
    _rule(f"{LAYER}.mlp.experts.down_proj", f"{OURS}/mlp/down/kernel", "E F D -> E F D"),
    _rule(f"{LAYER}.mlp.experts.down_proj_bias", f"{OURS}/mlp/down/bias", "E D -> E D"),
)

LLAMA = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *HEAD_NORMS, *MLP)
"""All tensors that a Llama-like decoder can have; a rule whose parameter the config lacks does not apply."""

BUFFERS: dict[re.Pattern[str], Callable[[tuple[int, ...]], bool]] = {
    re.compile(r"(^|\.)rotary_(pos_)?emb(_local)?\.(\w*inv_freq|cos_cached|sin_cached)$"): lambda shape: True,
    re.compile(r"(^|\.)position_ids$"): lambda shape: True,
    # The causal mask, and the number that it puts in the place of a masked logit.
    re.compile(r"(^|\.)(((self_)?attn|attention)\.bias|causal_mask)$"): lambda shape: (
        len(shape) > 1 and shape[-1] == shape[-2] and math.prod(shape) == shape[-1] ** 2
    ),
    re.compile(r"(^|\.)masked_bias$"): lambda shape: math.prod(shape) == 1,
}
"""Buffers, which the config determines: a pattern of their names -> whether a tensor of this shape is one."""

PREFIXES = {
    "model.": "lm_head.",
    "": "lm_head.",  # a decoder that was saved without its head
    "language_model.model.": "language_model.lm_head.",  # one that reads images too, of transformers 4
    "model.language_model.": "lm_head.",  # the same, of transformers 5
    "language_model.": "lm_head.",
}
"""What the names of a decoder's tensors begin with, in all families -> what those of its head begin with."""

WRAPPERS = re.compile(r"^((module|_orig_mod|base_model\.model|pretrained_model)\.)*")
"""What names begin with where a model was saved inside of `DataParallel`, `torch.compile`, PEFT or TRL."""


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is no parameter but follows from the config, and is left aside."""
    return any(pattern.search(name) and is_one(shape) for pattern, is_one in BUFFERS.items())


def is_unread_projection(name: str, config: Config) -> bool:
    """Whether a tensor would make keys or values of a layer that reads another layer's, and so has none."""
    match = re.search(r"(?<![^.])layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.", name)
    layer = int(match[1]) if match else config.layers
    return layer < config.layers and config.kind(layer).attention.reads_layer is not None


def is_later_layer(name: str, config: Mapping[str, Any], family: Family) -> bool:
    """Whether a tensor is of a layer after the decoder's, which predicts tokens after the next one."""
    layers, later = (config.get(x, family.defaults.get(x)) for x in ("num_hidden_layers", "num_nextn_predict_layers"))
    match = re.search(r"(?<![^.])(layers|blk)\.(\d+)\.", name)
    return bool(match and later and layers <= int(match[2]) < layers + later)


def find_prefixes(names: Iterable[str]) -> tuple[str, str]:
    """Returns what the names of most layers begin with, one of PREFIXES in any WRAPPERS, and likewise for the head."""
    found = Counter(name[: match.start()] for name in names if (match := re.search(r"(?<![^.])layers\.\d", name)))
    for prefix, _ in found.most_common():
        wrapper = cast(re.Match[str], WRAPPERS.match(prefix))[0]
        if (own := prefix.removeprefix(wrapper)) in PREFIXES:
            return prefix, wrapper + PREFIXES[own]
    return "model.", PREFIXES["model."]


def fuse(table: Table, joins: Mapping[str, tuple[str, ...]]) -> Table:
    """Returns the rules where modules are stored as one: {"qkv_proj": ("q_proj", ...)} stacks rows in table order."""
    names = {member: name for name, members in joins.items() for member in members}
    joined: dict[str, TensorRule] = {}
    for rule in table:
        source = ".".join(names.get(word, word) for word in rule.source.split("."))
        before = joined[source].targets if source in joined else ()
        joined[source] = rule._replace(source=source, targets=before + rule.targets)
    return tuple(joined.values())


def rename(table: Table, *names: tuple[str, str]) -> Table:
    """Returns the rules with other names of source tensors: each pair is (regular expression, its replacement)."""
    renamed = []
    for rule in table:
        source = rule.source
        for pattern, replacement in names:
            source = re.sub(pattern, replacement, source)
        renamed.append(rule._replace(source=source))
    return tuple(renamed)


# What values must be, in words; `hf_config.KINDS` says whether one is.
COUNT, NUMBER, SWITCH = "be a positive integer", "be a positive number", "be true or false"
COUNT_OR_ZERO = "be 0 or a positive integer"
COUNT_OR_NULL, NUMBER_OR_NULL = "be null or a positive integer", "be null or a positive number"
FACTOR = "be null, 0 or a positive number"
INDICES, SWITCHES = "be null or a list of layers' numbers", "be null or a list of 0 and 1"
COUNT_OR_ZERO_OR_NULL = "be null, 0 or a positive integer"
BIDIRECTIONAL = 'be null, "vision" or "all"'
OVERRIDES = "be null or say head_dim and num_key_value_heads of single layers, by their numbers"


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`, as transformers reads it: its tensors, its defaults, and the config keys that it obeys.

    Attributes:
      architecture: the class of transformers.
      decoders: of a model that reads images too, the families of its decoder by the model_type of text_config, the
        first for one that has none. Their fields hold, and none of those below.
      defaults: of its config class, for keys that config.json leaves out.
      tables: of its tensors; with several, the one holds that names the most of a checkpoint's tensors.
      left_out: tensors that are no part of the decoder.
      layer: fields of every layer's `LayerKind`.
      attention: fields of every layer's `AttentionKind`.
      switches: config.json key -> fields of the layer's `AttentionKind` and "mlp_bias" that it turns on.
      keys: config.json key -> what its value must be, for further keys that are obeyed.
      rope_keys: the same for keys of the parameters of RoPE.
      aliases: config.json key -> the key that transformers reads it as.
      activation: the key of the MLP's activation.
      activation_names: names of activations that mean another one in this family -> that one.
      head_dim: the key of the width of a head.
      sliding: "never" | "every layer" | "by layer": which layers `sliding_window` is for.
      window_switch: whether `use_sliding_window` turns windows on.
      types: of layers that `layer_types` may name.
      layer_types: makes the types of layers, where sliding is "by layer" or `types` are others, and config.json has
        none.
      partial_rotary: whether `partial_rotary_factor` is obeyed.
      rope_by_type: where layers of each type have RoPE parameters of their own, the key of the base of layers with a
        window; else empty.
      rope_types: of scaling of RoPE.
      longrope_names: types of RoPE scaling that mean longrope.
      refine: adds to the kind of layer i what only this family has.
      outside: makes the fields of `Config` that are not those of layers.
      find_unsupported: yields what only this family has and kvjax does not support.
    """

    architecture: str
    defaults: Values = dataclasses.field(default_factory=dict)
    decoders: Mapping[str, Family] = dataclasses.field(default_factory=dict)
    tables: tuple[Table, ...] = (LLAMA,)
    left_out: re.Pattern[str] | None = None
    layer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    activation_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_dim: str = "head_dim"
    sliding: str = "never"
    window_switch: bool = False
    types: tuple[str, ...] = ("full_attention", "sliding_attention")
    layer_types: Callable[[Values], list[str]] | None = None
    partial_rotary: bool = False
    rope_by_type: str = ""
    rope_types: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    longrope_names: tuple[str, ...] = ("longrope",)
    refine: Callable[[LayerKind, Values, int], LayerKind] = lambda kind, values, i: kind
    outside: Callable[[Values], dict[str, Any]] = lambda values: {}
    find_unsupported: Callable[[Values], Iterable[str]] = lambda values: ()


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ROPE, ORIGINAL = "RoPE parameters", "original_max_position_embeddings"
TEMPERATURE = "llama_4_scaling_beta"
IN_GROUPS = "group_limited_greedy"
"""DeepSeek's choice of experts from the best groups of them, a value of `topk_method`."""

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
GEMMA = COMMON | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": None,
}

BIASES = {"attention_bias": ("qkv_bias", "out_bias")}
MLP_BIAS = {"mlp_bias": ("mlp_bias",)}
GEMMA_KEYS = {
    "query_pre_attn_scalar": NUMBER,
    "final_logit_softcapping": NUMBER_OR_NULL,
    "attn_logit_softcapping": NUMBER_OR_NULL,
    "use_bidirectional_attention": SWITCH,
}
GEMMA_LAYER = {"norms": "both", "unit_offset": True}
GEMMA_3_KEYS = GEMMA_KEYS | {"sliding_window_pattern": COUNT, "rope_local_base_freq": NUMBER}
EXPERT_KEYS = {"num_experts_per_tok": COUNT}
SIGMOID_KEYS = EXPERT_KEYS | {
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group", "topk_group"), COUNT),
    **{"first_k_dense_replace": COUNT_OR_ZERO, "routed_scaling_factor": NUMBER, "norm_topk_prob": SWITCH},
    "num_nextn_predict_layers": COUNT_OR_ZERO,
}
SIGMOID_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}


def qwen_types(values: Values) -> list[str]:
    """Qwen2 and Qwen3: the layers from `max_window_layers` on have the window."""
    layers, has_window = values["num_hidden_layers"], values["use_sliding_window"] and values["sliding_window"]
    return [SLIDING if has_window and i >= values["max_window_layers"] else FULL for i in range(layers)]


def alternating_types(values: Values) -> list[str]:
    """Gemma 2 and gpt-oss: every other layer from the first on has the window."""
    return [FULL if i % 2 else SLIDING for i in range(values["num_hidden_layers"])]


def olmo3_types(values: Values) -> list[str]:
    """OLMo 3: all layers but every fourth have the window."""
    return [SLIDING if (i + 1) % 4 else FULL for i in range(values["num_hidden_layers"])]


def gemma3_types(values: Values) -> list[str]:
    """Gemma 3: all layers but every sixth have the window, or all but every `sliding_window_pattern`-th."""
    pattern = values["sliding_window_pattern"]
    return [SLIDING if (i + 1) % pattern else FULL for i in range(values["num_hidden_layers"])]


def smollm3_types(values: Values) -> list[str]:
    """SmolLM3: the layers without RoPE have the window, if there is one."""
    has_window = values["use_sliding_window"] and values["sliding_window"]
    return [FULL if has_rope or not has_window else SLIDING for has_rope in _read_rope_layers(values)]


def _read_rope_layers(values: Values) -> list[bool]:
    layers, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    if values["no_rope_layers"] is not None:
        return [bool(has_rope) for has_rope in values["no_rope_layers"]]
    return [(i + 1) % interval != 0 for i in range(layers)]


def refine_ministral3(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Ministral 3: queries grow with their position."""
    rope = values[ROPE][""]
    if not rope.get(TEMPERATURE):
        return kind
    temperature = QueryTemperature(float(rope[TEMPERATURE]), rope[ORIGINAL])
    return replace(kind, attention=replace(kind.attention, query_temperature=temperature))


def refine_granite(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Granite: a scale of the dot products, and a factor of what each part adds to the residual stream."""
    attention = replace(kind.attention, scale=float(values["attention_multiplier"]))
    return replace(kind, attention=attention, residual=float(values["residual_multiplier"]))


def refine_smollm3(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """SmolLM3: some layers have no RoPE."""
    return kind if _read_rope_layers(values)[i] else replace(kind, attention=replace(kind.attention, rope=None))


def refine_gemma2(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Gemma 2: a scale and a soft cap of the dot products."""
    rule = replace(kind.attention.rule, soft_cap=_float_or_none(values["attn_logit_softcapping"]))
    return refine_gemma3(replace(kind, attention=replace(kind.attention, rule=rule)), values, i)


def refine_gemma3(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Gemma 3: a scale of the dot products.

    A soft cap in config.json is not obeyed: transformers' class of the model does not read it.
    """
    return replace(kind, attention=replace(kind.attention, scale=values["query_pre_attn_scalar"] ** -0.5))


def gemma4_types(values: Values) -> list[str]:
    """Gemma 4: all layers but every sixth and the last have the window."""
    layers = values["num_hidden_layers"]
    return [SLIDING if (i + 1) % 6 and i + 1 < layers else FULL for i in range(layers)]


def _read_gemma4_heads(values: Values, i: int, has_window: bool) -> tuple[int, int]:
    """Reads the width and the number of key/value heads of a layer of Gemma 4.

    Published files say what layers without a window have; transformers saves what each layer has that others do not.
    """
    heads = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    if values["per_layer_config"] is not None:
        heads |= next((own for key, own in values["per_layer_config"].items() if int(key) == i), {})
    elif not has_window:
        heads["head_dim"] = values["global_head_dim"]
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            heads["num_key_value_heads"] = values["num_global_key_value_heads"]
    return heads["head_dim"], heads["num_key_value_heads"]


def refine_gemma4(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Gemma 4: two widths of heads, keys and values of earlier layers, or keys as values; experts beside an MLP."""
    types, layers = values.get("layer_types") or gemma4_types(values), values["num_hidden_layers"]
    has_window, num_own = types[i] == SLIDING, layers - values["num_kv_shared_layers"]
    head_dim, kv_heads = _read_gemma4_heads(values, i, has_window)
    reads_layer = None if i < num_own else max(j for j in range(num_own) if types[j] == types[i])
    rope = kind.attention.rope
    assert rope is not None
    attention = replace(
        kind.attention,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        rope=replace(rope, dim=head_dim),
        scale=1.0,
        reads_layer=reads_layer,
        value_norm=reads_layer is None,
        keys_as_values=reads_layer is None and bool(values["attention_k_eq_v"]) and not has_window,
    )
    mlp = kind.mlp
    if values["use_double_wide_mlp"] and reads_layer is not None:
        mlp = replace(mlp, width=2 * mlp.width)
    if values["enable_moe_block"]:
        experts = Experts(values["num_experts"], values["top_k_experts"], shared_width=mlp.width, own_norms=True)
        mlp = replace(mlp, width=values["moe_intermediate_size"], experts=experts)
    return replace(kind, attention=attention, mlp=mlp)


def refine_mixtral(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Mixtral: experts in all layers."""
    experts = Experts(values["num_local_experts"], values["num_experts_per_tok"])
    return replace(kind, mlp=replace(kind.mlp, experts=experts))


def refine_qwen3_moe(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Qwen3-MoE: experts of a width of their own, in all layers or in some."""
    is_dense = i in (values["mlp_only_layers"] or ()) or (i + 1) % values["decoder_sparse_step"] != 0
    if is_dense or not values["num_experts"]:
        return kind
    experts = Experts(values["num_experts"], values["num_experts_per_tok"], bool(values["norm_topk_prob"]))
    return replace(kind, mlp=replace(kind.mlp, width=values["moe_intermediate_size"], experts=experts))


def qwen3_next_types(values: Values) -> list[str]:
    """Qwen3-Next and Qwen3.5: every fourth layer attends, or every `full_attention_interval`-th."""
    interval = values["full_attention_interval"]
    return [LINEAR if (i + 1) % interval else FULL for i in range(values["num_hidden_layers"])]


def refine_qwen3_5(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Qwen3.5: a gated delta rule in place of attention in most layers."""
    if (values.get("layer_types") or qwen3_next_types(values))[i] == FULL:
        return kind
    attention = AttentionKind(
        values["linear_num_value_heads"],
        values["linear_num_key_heads"],
        values["linear_key_head_dim"],
        None,
        value_dim=values["linear_value_head_dim"],
        recurrence=GatedDelta(values["linear_conv_kernel_dim"]),
    )
    return replace(kind, attention=attention)


def refine_qwen3_next(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """Qwen3-Next, and Qwen3.5 with experts: also an expert of all tokens, with a gate."""
    kind = refine_qwen3_5(refine_qwen3_moe(kind, values, i), values, i)
    if kind.mlp.experts is None:
        return kind
    shared = {"shared_width": values["shared_expert_intermediate_size"], "shared_gate": True}
    return replace(kind, mlp=replace(kind.mlp, experts=replace(kind.mlp.experts, **shared)))


def refine_gpt_oss(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """gpt-oss: sinks, and experts with biases and a clamped gate."""
    experts = Experts(values["num_local_experts"], values["num_experts_per_tok"], router_bias=True)
    bounds = {"limit": float(values["swiglu_limit"]), "slope": float(values["swiglu_alpha"])}
    mlp = MlpKind(values["intermediate_size"], "clamped_swiglu", bias=True, experts=experts, **bounds)
    return replace(kind, attention=replace(kind.attention, sinks=True), mlp=mlp)


def _make_latent(kind: LayerKind, values: Values) -> AttentionKind:
    """Latent attention in its absorbed form."""
    rank, unrotated = values["kv_lora_rank"], values["qk_nope_head_dim"]
    rope = kind.attention.rope
    assert rope is not None
    scale = (unrotated + rope.dim) ** -0.5
    mscale = values[ROPE][""].get("mscale_all_dim")
    if rope.scaling is not None and mscale:
        scale *= yarn_length_factor(rope.scaling.factor, mscale) ** 2
    return replace(
        kind.attention,
        kv_heads=1,
        head_dim=rope.dim + rank,
        value_dim=rank,
        scale=scale,
        latent=Latent(rank, unrotated, values["v_head_dim"], values["q_lora_rank"]),
    )


def _add_experts(mlp: MlpKind, values: Values, i: int, **how: Any) -> MlpKind:
    """Experts in the layers after the first ones, and an MLP that all tokens pass."""
    if i < values["first_k_dense_replace"]:
        return mlp
    experts = Experts(
        values["n_routed_experts"],
        values["num_experts_per_tok"],
        factor=float(values["routed_scaling_factor"]),
        shared_width=values["moe_intermediate_size"] * values["n_shared_experts"],
        shared_bias=mlp.bias,
        **how,
    )
    return replace(mlp, width=values["moe_intermediate_size"], bias=False, experts=experts)


def refine_deepseek_v2(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """DeepSeek-V2: latent attention, and experts that are chosen by their logits."""
    groups = (values["n_group"], values["topk_group"]) if values["topk_method"] == IN_GROUPS else (1, 1)
    mlp = _add_experts(kind.mlp, values, i, normalize=False, groups=groups[0], top_groups=groups[1])
    return replace(kind, attention=_make_latent(kind, values), mlp=mlp)


def _add_sigmoid_experts(mlp: MlpKind, values: Values, i: int) -> MlpKind:
    groups = {"groups": values["n_group"], "top_groups": values["topk_group"]}
    return _add_experts(mlp, values, i, normalize=bool(values["norm_topk_prob"]), scoring="sigmoid", **groups)


def refine_deepseek_v3(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """DeepSeek-V3: latent attention, and experts that are chosen by sigmoids and a bias."""
    return replace(kind, attention=_make_latent(kind, values), mlp=_add_sigmoid_experts(kind.mlp, values, i))


def refine_glm4_moe_lite(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """GLM-4.7-Flash: DeepSeek-V3 with a list of the layers that have experts, by default all but the first."""
    types = values["mlp_layer_types"]
    has_experts = i > 0 if types is None else types[i] == "sparse"
    return refine_deepseek_v3(kind, {**values, "first_k_dense_replace": 0 if has_experts else i + 1}, i)


def refine_glm4_moe(kind: LayerKind, values: Values, i: int) -> LayerKind:
    """GLM-4.5: norms of queries and keys in its larger model, and the experts of DeepSeek-V3."""
    attention = replace(kind.attention, qk_norm="head" if values["use_qk_norm"] else "")
    return replace(kind, attention=attention, mlp=_add_sigmoid_experts(kind.mlp, values, i))


def _float_or_none(x: Any) -> float | None:
    return None if x is None else float(x)


def _read_gemma_outside(values: Values) -> dict[str, Any]:
    return {"embed_scale": values["hidden_size"] ** 0.5, "final_cap": _float_or_none(values["final_logit_softcapping"])}


def _read_gemma4_outside(values: Values) -> dict[str, Any]:
    width, layers = values["hidden_size_per_layer_input"], values["num_hidden_layers"]
    own = PerLayerEmbedding(width, layers) if width else None
    return _read_gemma_outside(values) | {"per_layer_embedding": own}


def _find_gemma4_problems(values: Values) -> Iterator[str]:
    if values["use_bidirectional_attention"] == "all":
        yield "use_bidirectional_attention ('all') is not supported; a cache needs tokens that see only earlier ones"
    if values["hidden_size_per_layer_input"] and values["vocab_size_per_layer_input"] != values["vocab_size"]:
        yield (
            f"vocab_size_per_layer_input {values['vocab_size_per_layer_input']} is not vocab_size "
            f"{values['vocab_size']}, and each token has a row in both tables; give both tables equal rows"
        )
    if values["enable_moe_block"]:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if values[key] is None:
                yield f"enable_moe_block needs {key} beside it; copy config.json again"
    types, layers = values.get("layer_types") or gemma4_types(values), values["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != layers:
        return  # which is refused in all families
    if types[-1] != FULL:
        yield (
            f"layer_types ends with {types[-1]!r:.80}, in whose place transformers takes {FULL!r}; write {FULL!r} there"
        )
    own = types[: max(layers - values["num_kv_shared_layers"], 0)]
    if without := [x for x in dict.fromkeys(types) if x not in own]:
        yield (
            f"num_kv_shared_layers {values['num_kv_shared_layers']} of {layers} leaves no layer with keys and values "
            f"that those of type {without[0]!r:.80} could read; lower it"
        )
    if values["per_layer_config"] is not None:
        wrong = [key for key in values["per_layer_config"] if int(key) >= layers]
        if wrong:
            yield f"per_layer_config names layer {wrong[0]!r:.80} of {layers}; copy config.json again"


def _find_bidirectional(values: Values) -> Iterator[str]:
    if values["use_bidirectional_attention"]:
        yield "use_bidirectional_attention (true) is not supported; a cache needs tokens that see only earlier ones"


def _find_ministral3_problems(values: Values) -> Iterator[str]:
    rope = values[ROPE][""]
    if rope.get(TEMPERATURE) and rope.get(ORIGINAL) is None:
        yield f"{TEMPERATURE} needs {ORIGINAL} beside it; copy config.json again"


def _find_smollm3_problems(values: Values) -> Iterator[str]:
    listed, layers = values["no_rope_layers"], values["num_hidden_layers"]
    if listed is not None and len(listed) < layers:
        yield f"no_rope_layers names {len(listed)} of {layers} layers; give 1 or 0 for each"


def _find_deepseek_problems(values: Values) -> Iterator[str]:
    method, methods = values["topk_method"], ("greedy", IN_GROUPS)
    if method not in methods:
        yield f"topk_method {method!r:.80} is not supported; supported: {', '.join(map(repr, methods))}"
    elif method == IN_GROUPS and None in (values["n_group"], values["topk_group"]):
        yield f"topk_method {method!r} needs n_group and topk_group; copy config.json again"
    if values["scoring_func"] != "softmax":
        yield f"scoring_func {values['scoring_func']!r:.80} is not supported; supported: 'softmax'"
    if values["moe_layer_freq"] != 1:
        yield f"moe_layer_freq {values['moe_layer_freq']!r:.80} is not supported; supported: 1"
    yield from _find_heads_of_latent(values)


def _find_heads_of_latent(values: Values) -> Iterator[str]:
    if values["num_key_value_heads"] not in (None, values["num_attention_heads"]):
        yield (
            f"num_key_value_heads {values['num_key_value_heads']} is not num_attention_heads; all heads of latent "
            "attention read one latent vector, so leave it out"
        )


def _find_sigmoid_problems(values: Values) -> Iterator[str]:
    # These classes of transformers read neither key, and compute what they say here.
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if values.get(key) not in (None, supported):
            yield f"{key} {values[key]!r:.80} is not supported; supported: {supported!r}"
    if values.get("moe_layer_freq") not in (None, 1):
        yield f"moe_layer_freq {values['moe_layer_freq']!r:.80} is not supported; supported: 1"
    if values.get("rope_interleave") is False:
        yield (
            "rope_interleave (false) is not supported; use a checkpoint whose rotated channels are in neighboring "
            "pairs, as published"
        )


def _find_recurrence_problems(values: Values) -> Iterator[str]:
    if values["hidden_act"] not in ("silu", "swish"):
        yield f"hidden_act {values['hidden_act']!r:.80} is not supported beside linear attention; supported: 'silu'"
    heads, kv_heads = values["linear_num_value_heads"], values["linear_num_key_heads"]
    if heads % kv_heads:
        yield (
            f"linear_num_value_heads {heads} is no multiple of linear_num_key_heads {kv_heads}; copy config.json again"
        )


def _find_mlp_types(values: Values) -> Iterator[str]:
    types, layers, names = values["mlp_layer_types"], values["num_hidden_layers"], ["dense", "sparse"]
    if types is not None and (
        not isinstance(types, list) or len(types) != layers or any(x not in names for x in types)
    ):
        yield f"mlp_layer_types must name {layers} layers, each one of {names}; got {types!r:.200}"


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False},
        switches=BIASES | MLP_BIAS,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072}
        | {"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        sliding="every layer",
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        COMMON
        | {"vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8}
        | {"head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
        | {"bos_token_id": 1, "eos_token_id": 2}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        rope_keys={TEMPERATURE: FACTOR, ORIGINAL: COUNT_OR_NULL},
        sliding="every layer",
        refine=refine_ministral3,
        find_unsupported=_find_ministral3_problems,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        QWEN,
        attention={"qkv_bias": True},
        sliding="by layer",
        window_switch=True,
        layer_types=qwen_types,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        QWEN | {"head_dim": 128, "attention_bias": False},
        attention={"qk_norm": "head"},
        switches=BIASES,
        sliding="by layer",
        window_switch=True,
        layer_types=qwen_types,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        COMMON
        | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096}
        | {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000, "original_max_position_embeddings": 4096},
        tables=(fuse(LLAMA, {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}),),
        sliding="every layer",
        partial_rotary=True,
        longrope_names=("longrope", "su", "yarn"),
    ),
    "granite": Family(
        "GraniteForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False}
        | {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
        switches=BIASES | MLP_BIAS,
        keys=dict.fromkeys(
            ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), NUMBER
        ),
        refine=refine_granite,
        outside=lambda values: {
            "embed_scale": float(values["embedding_multiplier"]),
            "logit_scale": 1 / values["logits_scaling"],
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        COMMON
        | {"vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "attention_bias": False},
        tables=((*OUTSIDE, *POST_NORMS, *ATTENTION, *ALL_HEADS_NORMS, *MLP),),
        layer={"norms": "after"},
        attention={"qk_norm": "all"},
        switches=BIASES,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        COMMON
        | {"vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "eos_token_id": 50279, "attention_bias": False}
        | {"sliding_window": 4096},
        tables=((*OUTSIDE, *POST_NORMS, *ATTENTION, *ALL_HEADS_NORMS, *MLP),),
        layer={"norms": "after"},
        attention={"qk_norm": "all"},
        switches=BIASES,
        sliding="by layer",
        layer_types=olmo3_types,
        rope_by_type="rope_theta",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        COMMON
        | {"vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80}
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
        | {"bos_token_id": 0, "eos_token_id": 2}
        | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        switches={"attention_bias": ("qkv_bias",), "attention_out_bias": ("out_bias",)} | MLP_BIAS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        COMMON
        | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768}
        | {"bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "no_rope_layers": None, "no_rope_layer_interval": 4}
        | {"attention_bias": False, "mlp_bias": False},
        switches=BIASES | MLP_BIAS,
        keys={"no_rope_layers": SWITCHES, "no_rope_layer_interval": COUNT},
        sliding="by layer",
        window_switch=True,
        layer_types=smollm3_types,
        refine=refine_smollm3,
        find_unsupported=_find_smollm3_problems,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        COMMON
        | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
        | {"bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
        tables=(
            rename(
                (*OUTSIDE, *PRE_NORMS, *ATTENTION, *SPLIT_EXPERTS),
                (r"\.mlp\.", ".block_sparse_moe."),
                (r"}\.gate_proj\.", "}.w1."),
                (r"}\.up_proj\.", "}.w3."),
                (r"}\.down_proj\.", "}.w2."),
            ),
            (*OUTSIDE, *PRE_NORMS, *ATTENTION, *JOINED_EXPERTS),
        ),
        keys=EXPERT_KEYS | {"num_local_experts": COUNT},
        aliases={"num_experts": "num_local_experts"},
        sliding="every layer",
        refine=refine_mixtral,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        COMMON
        | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24}
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": None}
        | {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False},
        tables=tuple(
            (*OUTSIDE, *PRE_NORMS, *ATTENTION, *HEAD_NORMS, *MLP, *experts)
            for experts in (SPLIT_EXPERTS, JOINED_EXPERTS)
        ),
        attention={"qk_norm": "head"},
        switches=BIASES,
        keys=EXPERT_KEYS
        | {"num_experts": COUNT_OR_ZERO, "moe_intermediate_size": COUNT, "decoder_sparse_step": COUNT}
        | {"mlp_only_layers": INDICES, "norm_topk_prob": SWITCH},
        aliases={"num_local_experts": "num_experts"},
        sliding="every layer",
        window_switch=True,
        refine=refine_qwen3_moe,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        COMMON
        | {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192}
        | {"hidden_act": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": True}
        | {"attention_bias": False, "use_bidirectional_attention": None},
        layer={"unit_offset": True},
        switches=BIASES,
        keys={"use_bidirectional_attention": SWITCH},
        # The makers' config.json names the exact GELU, and the models were trained with its tanh form.
        activation_names={"gelu": "gelu_pytorch_tanh"},
        outside=lambda values: {"embed_scale": values["hidden_size"] ** 0.5},
        find_unsupported=_find_bidirectional,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA
        | {"vocab_size": 256000, "max_position_embeddings": 8192}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        tables=(
            (
                *OUTSIDE,
                PRE_NORMS[0],
                *POST_NORMS,
                _rule(f"{LAYER}.pre_feedforward_layernorm.weight", f"{OURS}/mlp_norm/scale", "D -> D"),
                *ATTENTION,
                *HEAD_NORMS,
                *MLP,
            ),
        ),
        layer=GEMMA_LAYER,
        switches=BIASES,
        keys=GEMMA_KEYS,
        activation="hidden_activation",
        sliding="by layer",
        layer_types=alternating_types,
        refine=refine_gemma2,
        outside=_read_gemma_outside,
        find_unsupported=_find_bidirectional,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        COMMON
        | {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}
        | {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        },
        tables=((*OUTSIDE, *PRE_NORMS, *ATTENTION, SINKS, *GPT_OSS_EXPERTS),),
        switches=BIASES,
        keys=EXPERT_KEYS | {"num_local_experts": COUNT, "swiglu_alpha": NUMBER, "swiglu_limit": NUMBER},
        aliases={"num_experts": "num_local_experts"},
        sliding="by layer",
        layer_types=alternating_types,
        refine=refine_gpt_oss,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        COMMON
        | {"vocab_size": 102400, "intermediate_size": 11008, "max_position_embeddings": 2048}
        | {"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False}
        | {"first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": None, "topk_group": None}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 1.0}
        | {"topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1},
        tables=tuple(
            (*OUTSIDE, *PRE_NORMS, *LATENT, *MLP, *experts, *SHARED_EXPERTS)
            for experts in (SPLIT_EXPERTS, JOINED_EXPERTS)
        ),
        switches=BIASES | MLP_BIAS,
        keys=EXPERT_KEYS
        | dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), COUNT)
        | dict.fromkeys(("n_routed_experts", "n_shared_experts", "moe_intermediate_size"), COUNT)
        | {"q_lora_rank": COUNT_OR_NULL, "first_k_dense_replace": COUNT_OR_ZERO, "routed_scaling_factor": NUMBER}
        | {"n_group": COUNT_OR_NULL, "topk_group": COUNT_OR_NULL},
        aliases={"num_experts": "n_routed_experts"},
        head_dim="qk_rope_head_dim",
        refine=refine_deepseek_v2,
        find_unsupported=_find_deepseek_problems,
    ),
}
FAMILIES["deepseek_v3"] = Family(
    "DeepseekV3ForCausalLM",
    COMMON
    | {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
    | {"num_attention_heads": 128, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
    | {"attention_bias": False, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True}
    | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    | {"num_nextn_predict_layers": 1},
    tables=tuple(
        (*OUTSIDE, *PRE_NORMS, *LATENT, *MLP, *experts, CHOICE_BIAS, *SHARED_EXPERTS)
        for experts in (SPLIT_EXPERTS, JOINED_EXPERTS)
    ),
    switches=BIASES,
    keys=SIGMOID_KEYS
    | dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), COUNT)
    | {"q_lora_rank": COUNT_OR_NULL, "rope_interleave": SWITCH},
    aliases=SIGMOID_ALIASES,
    head_dim="qk_rope_head_dim",
    refine=refine_deepseek_v3,
    find_unsupported=lambda values: (*_find_sigmoid_problems(values), *_find_heads_of_latent(values)),
)
# Its own config.json names the class of DeepSeek-V3.
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
FAMILIES["glm4_moe"] = Family(
    "Glm4MoeForCausalLM",
    COMMON
    | {"vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96}
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
    | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    | {"num_nextn_predict_layers": 1},
    tables=tuple(
        (*OUTSIDE, *PRE_NORMS, *ATTENTION, *HEAD_NORMS, *MLP, *experts, CHOICE_BIAS, *SHARED_EXPERTS)
        for experts in (SPLIT_EXPERTS, JOINED_EXPERTS)
    ),
    switches={"attention_bias": ("qkv_bias",)},
    keys=SIGMOID_KEYS | {"use_qk_norm": SWITCH},
    aliases=SIGMOID_ALIASES,
    partial_rotary=True,
    refine=refine_glm4_moe,
    find_unsupported=_find_sigmoid_problems,
)
FAMILIES["glm4_moe_lite"] = replace(
    FAMILIES["deepseek_v3"],
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **FAMILIES["deepseek_v3"].defaults,
        **{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47},
        **{"num_attention_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "mlp_layer_types": None},
        **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    },
    refine=refine_glm4_moe_lite,
    find_unsupported=lambda values: (
        *_find_sigmoid_problems(values),
        *_find_heads_of_latent(values),
        *_find_mlp_types(values),
    ),
)
FAMILIES["gemma3_text"] = replace(
    FAMILIES["gemma2"],
    architecture="Gemma3ForCausalLM",
    defaults=GEMMA
    | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1_000_000.0}
    | {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
    attention={"qk_norm": "head"},
    keys=GEMMA_3_KEYS,
    layer_types=gemma3_types,
    rope_by_type="rope_local_base_freq",
    refine=refine_gemma3,
)
# Models that read images too: their decoder alone is converted.
TOWER = re.compile(r"^(\w+\.)*(vision_tower|multi_modal_projector)\.")
FAMILIES["gemma3"] = Family(
    "Gemma3ForConditionalGeneration",
    decoders={
        # That class of transformers does not bound its logits.
        "gemma3_text": replace(
            FAMILIES["gemma3_text"],
            left_out=TOWER,
            outside=lambda values: _read_gemma_outside(values) | {"final_cap": None},
        )
    },
)
FAMILIES["gemma4_text"] = Family(
    "Gemma4ForCausalLM",
    {key: x for key, x in GEMMA.items() if key not in ("query_pre_attn_scalar", "attn_logit_softcapping")}
    | {"vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072, "sliding_window": 512}
    | {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None}
    | {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": False}
    | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    | {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    tables=((*FAMILIES["gemma2"].tables[0], *GEMMA_4),),
    layer={"norms": "both", "output_scale": True},
    attention={"qk_norm": "head"},
    switches=BIASES,
    keys={
        **{"final_logit_softcapping": NUMBER_OR_NULL, "use_bidirectional_attention": BIDIRECTIONAL},
        **{"global_head_dim": COUNT, "num_global_key_value_heads": COUNT_OR_NULL, "per_layer_config": OVERRIDES},
        **{"num_kv_shared_layers": COUNT_OR_ZERO, "hidden_size_per_layer_input": COUNT_OR_ZERO_OR_NULL},
        **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"), SWITCH),
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), COUNT_OR_NULL),
    },
    activation="hidden_activation",
    sliding="by layer",
    layer_types=gemma4_types,
    rope_by_type="rope_theta",
    rope_types=("linear", "llama3", "yarn", "proportional"),
    refine=refine_gemma4,
    outside=_read_gemma4_outside,
    find_unsupported=_find_gemma4_problems,
)
FAMILIES["gemma4"] = Family(
    "Gemma4ForConditionalGeneration",
    decoders={
        "gemma4_text": replace(
            FAMILIES["gemma4_text"],
            left_out=re.compile(r"^(\w+\.)*(vision_tower|audio_tower|embed_vision|embed_audio)\."),
        )
    },
)
FAMILIES["mistral3"] = Family(
    "Mistral3ForConditionalGeneration",
    decoders={name: replace(FAMILIES[name], left_out=TOWER) for name in ("mistral", "ministral3")},
)
QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 500_000.0}
FAMILIES["qwen3_vl"] = Family(
    "Qwen3VLForConditionalGeneration",
    decoders={
        "qwen3_vl_text": replace(
            FAMILIES["qwen3"],
            defaults={**FAMILIES["qwen3"].defaults, **QWEN3_VL},
            left_out=re.compile(r"^(\w+\.)*visual\."),
            sliding="never",
            window_switch=False,
            layer_types=None,
        )
    },
)
FAMILIES["qwen3_vl_moe"] = Family(
    "Qwen3VLMoeForConditionalGeneration",
    decoders={
        "qwen3_vl_moe_text": replace(
            FAMILIES["qwen3_moe"],
            defaults={
                **FAMILIES["qwen3_moe"].defaults,
                **QWEN3_VL,
                **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16},
                **{"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60},
            },
            tables=tuple(
                (*OUTSIDE, *PRE_NORMS, *ATTENTION, *HEAD_NORMS, *MLP, *experts)
                for experts in (JOINED_EXPERTS, TRANSPOSED_EXPERTS)
            ),
            left_out=re.compile(r"^(\w+\.)*visual\."),
            sliding="never",
            window_switch=False,
            # That class of transformers does not read `norm_topk_prob`.
            refine=lambda kind, values, i: refine_qwen3_moe(kind, {**values, "norm_topk_prob": True}, i),
        )
    },
)

QWEN3_NEXT = COMMON | {
    **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768},
    **{"partial_rotary_factor": 0.25, "attention_bias": False, "full_attention_interval": 4},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512},
}
RECURRENCE_KEYS = dict.fromkeys(
    ("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"), COUNT
) | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), COUNT)
FAMILIES["qwen3_next"] = Family(
    "Qwen3NextForCausalLM",
    QWEN3_NEXT,
    tables=tuple(
        (*OUTSIDE, *PRE_NORMS, *GATED_ATTENTION, *HEAD_NORMS, *RECURRENCE_BY_HEAD, *MLP, *experts, *SHARED_EXPERT)
        for experts in (SPLIT_EXPERTS, JOINED_EXPERTS)
    ),
    left_out=re.compile(r"^mtp\."),
    layer={"unit_offset": True},
    attention={"qk_norm": "head", "output_gate": True},
    switches=BIASES,
    keys={**FAMILIES["qwen3_moe"].keys, **RECURRENCE_KEYS, "shared_expert_intermediate_size": COUNT},
    aliases={"num_local_experts": "num_experts"},
    types=(FULL, LINEAR),
    layer_types=qwen3_next_types,
    partial_rotary=True,
    refine=refine_qwen3_next,
    find_unsupported=_find_recurrence_problems,
)
ROUTED_ALIKE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}
QWEN3_5_OTHERS = re.compile(r"^mtp\.|^(\w+\.)*visual\.")
FAMILIES["qwen3_5_text"] = replace(
    FAMILIES["qwen3_next"],
    architecture="Qwen3_5ForCausalLM",
    defaults={
        **{key: x for key, x in QWEN3_NEXT.items() if "expert" not in key},
        **{"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
        "num_key_value_heads": 4,
    },
    tables=((*OUTSIDE, *PRE_NORMS, *GATED_ATTENTION, *HEAD_NORMS, *RECURRENCE_BY_PART, *MLP),),
    left_out=QWEN3_5_OTHERS,
    keys=RECURRENCE_KEYS,
    aliases={},
    refine=refine_qwen3_5,
)
FAMILIES["qwen3_5_moe_text"] = replace(
    FAMILIES["qwen3_next"],
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **QWEN3_NEXT,
        **{"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
    },
    tables=tuple(
        (*OUTSIDE, *PRE_NORMS, *GATED_ATTENTION, *HEAD_NORMS, *RECURRENCE_BY_PART, *experts, *SHARED_EXPERT)
        for experts in (JOINED_EXPERTS, SPLIT_EXPERTS)
    ),
    left_out=QWEN3_5_OTHERS,
    keys={key: x for key, x in FAMILIES["qwen3_next"].keys.items() if key not in ROUTED_ALIKE},
    # Experts in all layers, with weights that sum to one: that class of transformers reads no key that says otherwise.
    refine=lambda kind, values, i: refine_qwen3_next(kind, {**values, **ROUTED_ALIKE}, i),
)
FAMILIES["qwen3_5"] = Family("Qwen3_5ForConditionalGeneration", decoders={"qwen3_5_text": FAMILIES["qwen3_5_text"]})
FAMILIES["qwen3_5_moe"] = Family(
    "Qwen3_5MoeForConditionalGeneration", decoders={"qwen3_5_moe_text": FAMILIES["qwen3_5_moe_text"]}
)


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Finds how the decoder of a config.json is read, by its own fields; None for a family that is not known."""
    kind, text = config.get("model_type"), config.get("text_config")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not family.decoders:
        return family
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if kind is None:
        return next(iter(family.decoders.values()))
    return family.decoders.get(kind) if isinstance(kind, str) else None
