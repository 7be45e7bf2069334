"""Reads from a config.json which layers of a decoder hold keys and values, and of which shape.

The keys that say so are rows of tables, whose meaning is that of transformers' classes. A key whose name speaks of
layers, heads or states and that no table has may change what a cache holds: a config with one is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoints_convert.hf_config import is_integer
from kvjax.errors import KvjaxError
from kvjax.models.config import MOST_LAYERS
from kvjax.utils.parameter_types import MAX_SIZE

Raw = Mapping[str, Any]

DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a model that also reads images or sounds has the config of its decoder."""

SIZES: dict[str, tuple[str, ...]] = {
    "width": ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "dim_head"),
    "value_dim": ("v_head_dim",),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "window_size"),
    "mlp_width": ("block_ff_dim", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
    + ("max_sequence_length", "model_max_length", "max_context_length", "context_length"),
}
"""Size -> the keys that may say it, the first of them first."""
OF_LAYERS = {
    "heads": ("num_attention_heads_per_layer",),
    "kv_heads": ("num_key_value_heads_per_layer",),
}
"""Size -> keys with a list of it, one for each layer; the keys of `SIZES` may be such lists, too."""
OF_WINDOWED = {
    "heads": ("swa_num_attention_heads",),
    "kv_heads": ("swa_num_key_value_heads",),
    "head_dim": ("swa_head_dim",),
    "value_dim": ("swa_v_head_dim",),
}
OF_UNWINDOWED = {"kv_heads": ("num_global_key_value_heads",), "head_dim": ("global_head_dim",)}
"""Size -> keys that say it of layers with a window alone, or of those without."""

FULL, WINDOWED, MIXER, MLP = "full", "windowed", "mixer", "mlp"
TYPES = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "hybrid", "*", 0), FULL),
    **dict.fromkeys(("sliding_attention", "chunked_attention", "local", "local_attention", "hybrid_sliding"), WINDOWED),
    **dict.fromkeys(("linear_attention", "conv", "mamba", "mamba2", "recurrent", "M", "cross"), MIXER),
    **dict.fromkeys(("moe", "mlp", "-", "E"), MLP),
}
"""What a config calls a layer -> one of the four kinds; a "mixer" holds a state of a fixed size, an "mlp" nothing."""


def _name_some(inside: str, outside: str) -> Callable[[Any, int, Raw], list[Any]]:
    """Makes a reader of the indices of some layers."""
    return lambda value, layers, raw: [inside if i in value else outside for i in range(layers)]


def _read_pattern(value: Any, layers: int, raw: Raw) -> list[Any] | None:
    """Reads the period of full layers among windowed ones, or a pattern of L(ocal) and G(lobal) that is repeated."""
    if isinstance(value, str):
        return [{"L": "local", "G": "global"}.get(value[i % len(value)], value) for i in range(layers)]
    return ["global" if (i + 1) % value == 0 else "local" for i in range(layers)]


def _read_period(value: Any, layers: int, raw: Raw) -> list[str]:
    """Jamba: one layer of each period attends; Zamba counts from the fourth layer, and its third attends."""
    offset, begin = raw.get("attn_layer_offset") or 0, []
    if raw.get("model_type") == "zamba":
        begin = ["mamba", "mamba", "hybrid"]
    return begin + ["attention" if i % value == offset else "mamba" for i in range(layers - len(begin))]


def _read_chunks(value: Any, layers: int, raw: Raw) -> list[str]:
    """Llama 4: layers with RoPE attend within chunks, by default all but every fourth."""
    interval = raw.get("no_rope_layer_interval") or 4
    rotated = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return ["chunked_attention" if x else "full_attention" for x in rotated]


LAYERS: dict[str, Callable[[Any, int, Raw], Sequence[Any] | None]] = {
    "layer_types": lambda value, layers, raw: value,
    "layers_block_type": lambda value, layers, raw: value,
    "attention_layers": lambda value, layers, raw: value,
    "attention_types": lambda value, layers, raw: [
        x for names, times in value for x in list(names) * min(times, MOST_LAYERS)
    ],
    "hybrid_override_pattern": lambda value, layers, raw: list(value.replace("|", "")),
    "hybrid_layer_pattern": lambda value, layers, raw: ["local" if x else "global" for x in value],
    "attn_type_list": lambda value, layers, raw: ["attention" if x else "linear_attention" for x in value],
    "block_types": lambda value, layers, raw: [value[i % len(value)] for i in range(layers)],
    "_block_types": lambda value, layers, raw: [value[i % len(value)] for i in range(layers)],
    "full_attn_idxs": _name_some("attention", "conv"),
    "attn_layer_indices": _name_some("attention", "mamba"),
    "hybrid_layer_ids": _name_some("hybrid", "mamba"),
    "attn_layer_period": _read_period,
    "full_attention_interval": lambda value, layers, raw: [
        "attention" if (i + 1) % value == 0 else "linear_attention" for i in range(layers)
    ],
    "cross_attention_layers": _name_some("cross", "attention"),
    "local_layer_ids": _name_some("local", "global"),
    "sliding_window_pattern": _read_pattern,
    "_sliding_window_pattern": _read_pattern,
    "attention_chunk_size": _read_chunks,
    "max_window_layers": lambda value, layers, raw: (
        ["global" if i < value else "local" for i in range(layers)] if "use_sliding_window" in raw else None
    ),
}
"""Key -> what each layer is called, from its value, the number of layers and the config; the first of them decides."""

DEFAULTS: dict[str, Callable[[Raw], Raw]] = {
    "falcon": lambda raw: {"multi_query": True, "max_position_embeddings": 2048},
    "gpt_bigcode": lambda raw: {"multi_query": True},
    "mimo_v2_flash": lambda raw: {"swa_num_key_value_heads": 2 * (raw.get("num_key_value_heads") or 4)},
}
"""model_type -> values of transformers' class that change what a cache holds, for keys that a config leaves out."""
SWITCHED = {
    "use_cla": ("cla_share_factor",),
    "use_mla": ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
"""Key that switches a part off if it is false -> the part's keys, which then say nothing."""
REQUIRED: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (
        re.compile(
            "bamba|beam|bitnet|cwm|ernie4_5(_moe)?|exaone|falcon_h1|flint|gemma3n.*|gemma4.*|glm4?|glm4_moe|granite_swa"
            "|hy_v3|inkling_text|internlm3|iquestcoder|kolibri1|laguna|lara_mini|lfm.*|llama4.*|mellum|mimo_v2_flash"
            "|minimax.*|ministral3|mllama.*|moss_transcribe_diarize|nemotron_h|phi4_multimodal|phimoe"
            "|sarvam_moe|seed_oss|solar_open|starcoder2|vaultgemma|zaya"
        ),
        (*SIZES["kv_heads"], *OF_LAYERS["kv_heads"]),
    ),
    (
        re.compile(
            "beam|ernie4_5|flint|gemma|gemma4.*|hy_v3|inkling_text|kolibri1|laguna|lara_mini|mellum|mimo_v2_flash"
            "|minimax_m2|moss_transcribe_diarize|seed_oss|solar_open|vaultgemma|zaya"
        ),
        SIZES["head_dim"],
    ),
    (
        re.compile(
            "afmoe|bamba|beam|cohere2.*|cwm|exaone4|exaone_moe|flint|gemma3n.*|gemma4.*|gpt_neo|granite_swa|granitemoe_swa"
            "|granitemoehybrid|inkling_text|jamba|kolibri1|laguna|lara_mini|lfm.*|llama4.*|mellum|mimo_v2_flash"
            "|minimax|mllama.*|modernbert-decoder|nemotron_h|olmo3|olmo_hybrid|recurrent_gemma"
            "|vaultgemma|zamba2?"
        ),
        tuple(LAYERS),
    ),
    (re.compile("mimo_v2_flash"), SIZES["value_dim"]),
    (re.compile("inkling_text"), OF_WINDOWED["kv_heads"]),
    (re.compile("recurrent_gemma"), SIZES["window"]),
    (re.compile("zamba2?"), ("attention_head_dim",)),
    (re.compile("gemma3n.*"), ("num_kv_shared_layers",)),
    (re.compile("gemma4.*"), ("per_layer_config", *OF_UNWINDOWED["head_dim"])),
    (re.compile("mllama.*"), ("cross_attention_layers",)),
)
"""model_types, and keys of which a config must have one, since the defaults of their classes are not written here."""
DERIVED = re.compile("global_attn_every_n_layers|local_attention|block_size|prefix_dense_sliding_window_pattern")
"""Keys from which a class makes `layer_types`, and that say nothing more where these are given."""
STATES = re.compile(
    r"(mamba|linear|ssm|conv|lru|rwkv|short_conv)_\w+|state_size|conv_L_cache|number_of_conv_states|cca_time0"
)
"""Keys of layers that hold states of a fixed size."""
ENCODERS = re.compile(r".*bert.*|electra|ernie|camembert|data2vec-text|big_bird|xlm.*|xlnet|xmod|roformer|reformer|git")
"""model_types, but modernbert-decoder, whose tokens attend to later ones unless `is_decoder` is set."""

UNDERSTOOD = re.compile(
    # Read here, by the caller, or beside a key that is.
    r"num_kv_shared_layers|attn_type|multi_query(_attention|_group_num)?|new_decoder_architecture|attn_config"
    r"|block_configs|per_layer_config|use_sliding_window|no_rope_layers|no_rope_layer_interval|attn_layer_offset"
    r"|attention_k_eq_v|use_(mamba|conv)\w*|n_mamba_heads|num_mem_blocks|conv1d_width"
    r"|hidden_mamba_act|cca_time1|use_bidirectional_attention"
    # Which parts of a layer have biases, norms, scales or experts, and of what size these are.
    r"|\w*(bias|norm|norm_eps|init_scale|epsilon|dropout|pdrop|multipliers?|softcapping|scale|scaling|act|act_fn)"
    r"|(\w*_)?(layer_?norm|dropout|moe|mlp|experts?|sparse_step|ffn|ff)(_\w*)?|layerdrop|layer_rope_theta"
    r"|\w*softmax_in_fp32|attn_temperature_tuning|query_pre_attn_scalar|activation_sparsity_pattern|use_attention_gate"
    r"|num_dense_layers|(\w*_)?dense_intermediate_size|first_k_dense_replace|normalization_layer_name"
    r"|\w*attn_(alpha|beta)_factor|clip_qkv|share_input_output_layers|apply_query_key_layer_scaling"
    r"|block_(dim|multiple_of|auto_\w+|use_\w+)|use_parallel_block|select_layer|order_of_interleaved_layers|max_attn_\w+"
    r"|rope_local_base_freq|\w*rope_theta|attn_rotary_emb|compression_ratio|use_embedding_sharing|gated_linear_unit"
    r"|use_shared_\w+|use_mem_(rope|eff_path)|add_bias_linear|(use_)?(\w+_)?(flash|logn|sdpa)_(attn|attention|rotary)\w*"
    r"|shared_intermediate_size|offset_alibi|layer_switch|full_attn_mod|norm_head|fused_qkv|attn_output_gate|embd_layer"
    r"|block_(type|group_size)|blocksparse_\w+|dense_attention_every_n_layers"
    r"|parallel_attn|attn_impl|attn_uses_sequence_id|scale_attn_\w+|reorder_and_upcast_attn|num_ln_in_parallel_attn"
    r"|attention_hidden_size|hidden_size_per_layer_input|vocab_size_per_layer_input|keep_window_size|[lr]m_head\w*"
    # More than one token at a time, training, and what a program does around the decoder.
    r"|num_nextn_predict_layers|num_mtp_layers|mtp_\w+|chunk_size|mamba_chunk_size|chunk_size_feed_forward|time_step\w*"
    r"|use_cache|cache_implementation|calc_logits_for_entire_prompt|output_(attentions|hidden_states)|tie_\w+"
    r"|_?attn_implementation\w*"
    r"|\w*(image|vision|audio|video|speech)\w*|seconds_per_chunk|global_view_pos|num_logits_to_keep"
    r"|label2id|id2label|pruned_heads|prefix"
)
"""Keys that `SUSPECT` finds and that do not change what a cache holds, or are read."""
SUSPECT = re.compile(
    r"attn|attention|layer|block|window|sliding|swa|local|global|kv|key_value|heads?(_|$)|latent|lora_rank|mamba|ssm"
    r"|state|conv|recurr|rwkv|lru|linear|chunk|index_|indexer|sparse|cache|shar|loop|cycle|hybrid|pattern|period|interval"
    r"|offset|stack|prompt|prefix|mem_|memory|compress|cca|retention|evict|span|kernel|_decoder|cross|assist|centroid",
    re.IGNORECASE,
)
"""Names of keys that may change what a cache holds."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a decoder.

    Attributes:
      kind: FULL or WINDOWED for layers that hold keys and values, MIXER or MLP for others.
      heads: query heads; this and the following are 0 or None for layers that hold nothing.
      kv_heads: key/value heads.
      head_dim: width of keys.
      value_dim: width of values.
      window: latest positions that a query sees; None for all.
      reads: index of the earlier layer whose keys and values it reads; None where it has its own.
    """

    kind: str
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    reads: int | None = None


def find_decoder(raw: Raw) -> Raw:
    """Returns the config of the decoder, which may be inside that of a model that reads images or sounds, too."""
    return next((find_decoder(raw[name]) for name in DECODERS if isinstance(raw.get(name), Mapping)), raw)


def unwrap(raw: Raw) -> dict[str, Any]:
    """Returns the config of a decoder, with the keys outside of it that it does not have and its class' defaults."""
    for name in DECODERS:
        if isinstance(raw.get(name), Mapping):
            return unwrap({key: x for key, x in raw.items() if key != name} | dict(raw[name]))
    values = dict(DEFAULTS.get(str(raw.get("model_type")), lambda raw: {})(raw))
    if isinstance(attention := raw.get("attn_config"), Mapping):  # MPT and DBRX
        values |= attention
    if isinstance(experts := raw.get("ffn_config"), Mapping):
        values |= {key: x for key, x in experts.items() if key != "hidden_size"}
    values |= raw
    for switch, keys in SWITCHED.items():
        if values.get(switch) is False:
            values = {key: x for key, x in values.items() if key not in keys}
    return values


def read_size(raw: Raw, name: str, source: str, default: int | None = None) -> int:
    """Reads a size by the first of its keys that has one; raises KvjaxError for none, and for what is no size."""
    keys = SIZES.get(name, (name,))
    for key in keys:
        if (x := raw.get(key)) is not None:
            most = MOST_LAYERS if name == "layers" else MAX_SIZE
            if not is_integer(x) or not 0 < x <= most:
                raise KvjaxError(f"{key} of {source} must be an integer from 1 to {most}, got {x!r:.80}")
            return x
    if default is None:
        raise KvjaxError(f"{source} has no {keys[0]}; give the config.json of a decoder, as its makers published it")
    return default


def read_layers(raw: Raw, source: str) -> list[Layer]:
    """Reads the layers of a decoder from `unwrap`'s config.

    Raises:
      KvjaxError: with the key and its value, for what is not understood or does not fit together.
    """

    def refuse(key: str, why: str) -> KvjaxError:
        return KvjaxError(
            f"{source} has {key} {raw.get(key)!r:.80}: {why}; plan for another model, or give sizes in Python, as "
            "kvjax.planning.models.PlannedModel with a kvjax.Config of the layers that hold keys and values"
        )

    if raw.get("kv_lora_rank"):
        raise refuse("kv_lora_rank", "its cache does not hold keys and values of heads in each layer")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if raw.get(key):
            raise refuse(key, "it attends to another model's output, and a decoder alone can be planned for")
    names = next((raw[key] for key in LAYERS if isinstance(raw.get(key), list | str)), None)
    num_layers = read_size(raw, "layers", source, default=None if names is None else len(names))
    read = {name for keys in (SIZES, OF_LAYERS, OF_WINDOWED, OF_UNWINDOWED) for x in keys.values() for name in x}
    if not isinstance(raw.get("attn_config"), Mapping | None):
        raise refuse("attn_config", "it must have keys of its own")
    if raw.get("use_bidirectional_attention") is True:
        raise refuse("use_bidirectional_attention", "its tokens attend to later ones, and it does not decode")
    if raw.get("attn_type") not in (None, "multihead_attention", "multiquery_attention", "grouped_query_attention"):
        raise refuse("attn_type", "kvjax does not know it")
    model_type = str(raw.get("model_type"))
    if ENCODERS.fullmatch(model_type) and model_type != "modernbert-decoder" and not raw.get("is_decoder"):
        raise refuse("model_type", "its tokens attend to later ones, and it does not decode")
    for types, keys in REQUIRED:
        if types.fullmatch(model_type) and not any(key in raw for key in keys):
            raise KvjaxError(
                f"{source} has no {keys[0]}, which model_type {model_type!r:.40} needs; give the config.json as its "
                "makers published it, or as transformers' save_pretrained writes it"
            )
    has_names = any(isinstance(raw.get(key), list) for key in ("layer_types", "layers_block_type"))
    for key, x in raw.items():
        understood = key in read or key in LAYERS or UNDERSTOOD.fullmatch(key) or STATES.fullmatch(key)
        understood = understood or (has_names and DERIVED.fullmatch(key))
        if not understood and SUSPECT.search(key) and x not in (None, False, 0, "", -1, [], {}):
            raise refuse(key, "it may change what the cache holds, and kvjax does not know how")
    kinds = read_kinds(raw, num_layers, refuse)
    blocks, overrides = raw.get("block_configs"), raw.get("per_layer_config") or {}
    parts = [block.get("attention") or {} for block in blocks or [] if isinstance(block, Mapping)] if blocks else []
    if blocks and (len(parts) != num_layers or not all(isinstance(part, Mapping) for part in parts)):
        raise refuse("block_configs", f"it must describe each of {num_layers} layers")
    if not isinstance(overrides, Mapping) or not all(
        str(i).isdecimal() and isinstance(x, Mapping) for i, x in overrides.items()
    ):
        raise refuse("per_layer_config", "it must have the keys of layers by their indices")
    if unknown := [key for x in overrides.values() for key in x if key not in read and SUSPECT.search(key)]:
        raise refuse("per_layer_config", f"kvjax does not know {unknown[0]} for single layers")
    overrides = {int(i): x for i, x in overrides.items()}
    layers = []
    for i in range(num_layers):
        own = {**raw, **overrides.get(i, {})}
        attention = parts[i] if parts else {}
        if attention.get("no_op") or attention.get("replace_with_linear"):
            kinds[i] = MIXER if attention.get("replace_with_linear") else MLP
        if attention.get("num_sink_tokens"):
            raise refuse("block_configs", f"layer {i} has sinks beside its window, which kvjax does not know")
        if attention.get("window_length"):
            kinds[i], own["sliding_window"] = WINDOWED, attention["window_length"]
        layers.append(_read_layer(own, attention, kinds[i], i, source, refuse))
    _share(raw, layers, refuse)
    if not any(layer.heads for layer in layers):
        raise KvjaxError(
            f"{source} has no layer that holds keys and values (model_type {raw.get('model_type')!r:.40}), and no "
            "method of kvjax applies; plan for another model"
        )
    return layers


def read_kinds(raw: Raw, num_layers: int, refuse: Callable[[str, str], KvjaxError]) -> list[str]:
    """Reads the kind of each layer from the keys of `LAYERS`, which must agree about which layers hold anything."""
    is_on = raw.get("use_sliding_window") is not False
    window_key = next((key for key in SIZES["window"] if raw.get(key) not in (None, -1)), None)
    found: dict[str, list[str]] = {}
    for key, read in LAYERS.items():
        value = raw.get(key)
        if value is None or value is False or (value == [] and key == "cross_attention_layers"):
            continue
        try:
            names = read(value, num_layers, raw)
            kinds = None if names is None else [TYPES[name] for name in names]
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, ZeroDivisionError) as e:
            why = f"{e} is no layer that kvjax knows" if isinstance(e, KeyError) else "it cannot be read"
            raise refuse(key, why) from e
        if kinds is None or (window_key is None and "pattern" in key and WINDOWED in kinds and MIXER not in kinds):
            continue  # a pattern of windows, in a model that has none
        if not is_on:
            kinds = [FULL if kind == WINDOWED else kind for kind in kinds]
        if len(kinds) != num_layers:
            raise refuse(key, f"it names {len(kinds)} layers, and the model has {num_layers}")
        found[key] = kinds
    has_window = is_on and window_key is not None
    if not found:
        states = [key for key in raw if STATES.fullmatch(key) and raw[key]]
        if states and not raw.get("mamba_d_ssm"):  # in Falcon-H1, all layers have both
            raise refuse(
                states[0], "some of its layers hold a state in place of keys and values, and no key says which"
            )
        return [WINDOWED if has_window else FULL] * num_layers
    first, kinds = next(iter(found.items()))
    for key, others in found.items():
        if any((a in (FULL, WINDOWED)) != (b in (FULL, WINDOWED)) for a, b in zip(kinds, others, strict=True)):
            raise refuse(key, f"it differs from {first} about which layers hold keys and values")
    if has_window and first not in ("layer_types", "attention_layers") and MIXER in kinds:
        kinds = [WINDOWED if kind == FULL else kind for kind in kinds]
    return kinds


def _read_layer(
    raw: Raw, block: Raw, kind: str, i: int, source: str, refuse: Callable[[str, str], KvjaxError]
) -> Layer:
    """Reads the sizes of layer i, whose kind is known; `block` is its own part of `block_configs`."""
    if kind in (MIXER, MLP):
        return Layer(kind)
    special = OF_WINDOWED if kind == WINDOWED else OF_UNWINDOWED

    def read(name: str, default: int | None = None) -> int:
        keys = (*special.get(name, ()), *OF_LAYERS.get(name, ()), *SIZES[name])
        if kind == FULL and raw.get("attention_k_eq_v") is False:  # Gemma 4: their number differs with this alone
            keys = tuple(key for key in keys if key != "num_global_key_value_heads")
        for key in keys:
            x = raw.get(key)
            if isinstance(x, list):
                if i >= len(x):
                    raise refuse(key, f"it has {len(x)} entries, and there is a layer {i}")
                return read_size({key: x[i]}, key, source)
            if x is not None:
                return read_size({key: x}, key, source)
        return read_size({}, name, source, default)

    heads = read("heads", 0)
    if not heads:
        raise KvjaxError(f"{source} has no num_attention_heads; give the config.json of a decoder that attends")
    default = heads
    if raw.get("multi_query_attention"):
        default = read_size(raw, "multi_query_group_num", source)
    is_multi_query = raw.get("multi_query") is True and not raw.get("new_decoder_architecture")
    if raw.get("attn_type") == "multiquery_attention" or is_multi_query:
        kv_heads = 1
    elif block.get("n_heads_in_group"):
        kv_heads = heads // read_size(block, "n_heads_in_group", source)
    elif raw.get("model_type") == "falcon" and not raw.get("new_decoder_architecture"):
        kv_heads = heads  # that class reads `num_kv_heads` in the new architecture alone
    else:
        kv_heads = read("kv_heads", default)
    if heads % kv_heads:
        raise KvjaxError(
            f"{source} has {heads} heads and {kv_heads} key/value heads in layer {i}, which must divide them"
        )
    head_dim = read("head_dim", max(read("width") // heads, 1))
    window = read("window") if kind == WINDOWED else None
    return Layer(kind, heads, kv_heads, head_dim, read("value_dim", head_dim), window)


def _share(raw: Raw, layers: list[Layer], refuse: Callable[[str, str], KvjaxError]) -> None:
    """Gemma 3n: the last layers read the keys and values of the last layer of their kind before them."""
    num_shared = raw.get("num_kv_shared_layers") or 0
    if not is_integer(num_shared) or not 0 <= num_shared < len(layers):
        raise refuse("num_kv_shared_layers", f"it must be an integer below the number of layers, {len(layers)}")
    first = len(layers) - num_shared
    for i in range(first, len(layers)):
        source = max((j for j in range(first) if layers[j].kind == layers[i].kind), default=None)
        if source is None:
            raise refuse("num_kv_shared_layers", f"no layer before is {layers[i].kind} as layer {i} is")
        layers[i] = dataclasses.replace(layers[source], heads=layers[i].heads, reads=source)
