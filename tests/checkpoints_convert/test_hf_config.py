"""config.json in both spellings, as transformers reads it."""

from __future__ import annotations

import importlib.util
import math

import pytest

from checkpoints_convert.families import FAMILIES
from checkpoints_convert.hf_config import translate
from kvjax.core.rope import Rope
from kvjax.errors import KvjaxError
from kvjax.models import Config, RopeScaling
from kvjax.models.checkpoint import parameter_shapes
from kvjax.models.kinds import Experts, PerLayerEmbedding, QueryTemperature

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_3_1_8b():
    config = translate(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "torch_dtype": "bfloat16",
        },
        {"eos_token_id": [128001, 128008, 128009]},
    )
    flat = config.llama_arguments()
    assert [flat[x] for x in ("layers", "heads", "kv_heads", "head_dim")] == [32, 32, 8, 128]
    assert (config.width, flat["mlp_width"], config.vocab_size, config.max_positions) == (4096, 14336, 128256, 131072)
    assert (config.norm_eps, flat["rope_theta"], flat["windows"]) == (1e-5, 500000.0, None)
    assert flat["rope_scaling"] == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert (config.bos_id, config.eos_ids) == (128000, (128001, 128008, 128009))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        ),
    ],
)
def test_both_spellings_of_rope(old, new):
    kind = {"model_type": "llama"}
    assert translate(kind | old) == translate(kind | {"rope_parameters": new})


def test_where_the_original_context_is_found():
    llama3 = {"rope_type": "llama3", **LLAMA3}
    del llama3["original_max_position_embeddings"]
    base = {"model_type": "llama", "max_position_embeddings": 77, "rope_scaling": llama3}

    def original(raw):
        return translate(raw).kind(0).attention.rope.scaling.original_max_positions

    assert original(base) == 77
    llama3["original_max_position_embeddings"] = 55
    assert original(base) == 55
    assert original(base | {"original_max_position_embeddings": 33}) == 33


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("said", [{"factor": 8.0}, {"factor": "8"}, {"low_freq_factor": 1.0, "rope_theta": 1e4}])
def test_rope_scaling_without_a_type_is_refused(key, said):
    with pytest.raises(KvjaxError, match="RoPE scaling {.*factor.*names no rope_type; add the one"):
        translate({"model_type": "llama", key: said})


@pytest.mark.parametrize("said", [{"factor": 1.0}, {"rope_theta": 5e5}, {"type": "default", "factor": 1.0}, {}])
def test_rope_parameters_that_scale_nothing_need_no_type(said):
    assert translate({"model_type": "llama", "rope_parameters": said}).kind(0).attention.rope.scaling is None


ONES = {"short_factor": [1.0, 1.0], "long_factor": [1, 1]}


@pytest.mark.parametrize(
    "said",
    [
        {"type": "linear", "factor": 1.0},
        {"rope_type": "linear", "factor": 1},
        {"rope_type": "llama3", **LLAMA3, "factor": 1.0},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048, "beta_fast": 32},
        {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.0},
        {"rope_type": "longrope", **ONES, "original_max_position_embeddings": 2048},
        {"rope_type": "longrope", **ONES, "factor": 1.0, "original_max_position_embeddings": 1024},
        {"rope_type": None, "type": None},
        {"rope_type": None, "type": "default"},
        {"factor": 1.0, "original_max_position_embeddings": 2048},
        {"factor": None, "type": None, "rope_theta": 10_000.0},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scalings_by_one_scale_nothing(key, said):
    assert translate({"model_type": "llama", key: said}) == translate({"model_type": "llama"})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def read_scaling(raw: dict) -> RopeScaling:
    scaling = translate({"model_type": "llama"} | raw).kind(0).attention.rope.scaling
    assert scaling is not None
    return scaling


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"attention_factor": 0.1 * math.log(4) + 1}),
        ({"attention_factor": 1.2, "mscale": 3.0, "mscale_all_dim": 2.0}, {"attention_factor": 1.2}),
        ({"factor": None}, {"factor": 4.0, "attention_factor": 0.1 * math.log(4) + 1}),  # 2048 / 512
        ({"factor": 1.0, "attention_factor": 1.2}, {"factor": 1.0, "attention_factor": 1.2}),
        ({"beta_fast": 8, "beta_slow": 2, "truncate": False}, {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}),
        ({"beta_fast": None, "beta_slow": 0.5}, {"beta_fast": 32.0, "beta_slow": 0.5}),
        ({"mscale": 1.0}, {"attention_factor": 0.1 * math.log(4) + 1}),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)},
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn(key, said, expected):
    scaling = read_scaling({key: YARN | said})
    assert (scaling.kind, scaling.original_max_positions) == ("yarn", 512)
    for name, x in expected.items():
        assert getattr(scaling, name) == pytest.approx(x)


LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3, 4.0]}
SMALL_HEADS = {"head_dim": 4, "max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("raw", "said", "is_long", "attention_factor"),
    [
        ({}, {"original_max_position_embeddings": 256}, True, (1 + math.log(4) / math.log(256)) ** 0.5),
        ({}, {"original_max_position_embeddings": 256, "attention_factor": 1.3}, True, 1.3),
        ({}, {"original_max_position_embeddings": 256, "factor": 16}, True, 1.5**0.5),
        ({}, {}, False, 1.0),
        ({"original_max_position_embeddings": 256}, {"original_max_position_embeddings": 1024}, True, None),
        ({"model_type": "phi3"}, {"type": "su"}, False, 1.0),  # its class says 4096 positions
        ({"model_type": "phi3"}, {"type": "yarn"}, False, 1.0),
    ],
)
def test_longrope_takes_the_factors_for_the_positions_of_the_model(raw, said, is_long, attention_factor):
    scaling = read_scaling(SMALL_HEADS | raw | {"rope_scaling": LONGROPE | said})
    assert (scaling.kind, scaling.is_long) == ("longrope", is_long)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0, 2.0), (3.0, 4.0))
    if attention_factor is not None:
        assert scaling.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope_type": "yarn"}, "'yarn': factor must be a positive number, got None"),
        ({"rope_type": "yarn", "factor": True}, "factor must be a positive number, got True"),
        (YARN | {"beta_fast": "32"}, "beta_fast must be null or a positive number, got '32'"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast .1. .* must be at least beta_slow"),
        ({"rope_type": "longrope", "factor": 1.0}, "short_factor must be a list of positive numbers, got None"),
        (LONGROPE, "short_factor has 2 numbers for 64 pairs of channels"),
        (LONGROPE | {"long_factor": [1.0, 0.0]}, "long_factor must be a list of positive numbers"),
        ({"rope_type": "dynamic", "factor": 1.0}, "'dynamic' is not supported"),  # beyond the context it scales
        ({"rope_type": "proportional"}, "'proportional' is not supported"),
    ],
)
def test_scalings_that_say_too_little_are_refused(said, message):
    with pytest.raises(KvjaxError, match=message):
        translate({"model_type": "llama", "rope_scaling": said})


@pytest.mark.parametrize("kind", ["su", "dynamic", "mrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_scalings_are_refused_by_name(kind, key):
    with pytest.raises(KvjaxError, match=f"'{kind}' is not supported.*use a checkpoint without it"):
        translate({"model_type": "llama", "rope_scaling": {key: kind, "factor": 4.0}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not supported; supported: llama \(LlamaForCausalLM\)"),
        ({"model_type": "llama4_text"}, r"'llama4_text' is not .*deepseek_v3 .*\n.*has parts that llama lacks"),
        ({"model_type": "gemma3n_text"}, "has parts that gemma3 lacks"),
        ({"model_type": "deepseek_v32"}, "has parts that deepseek_v3 lacks"),
        ({"model_type": "qwen3_5_text", "hidden_act": "gelu"}, "hidden_act 'gelu' is not .*linear attention"),
        ({"model_type": "qwen3_next", "linear_num_value_heads": 24}, "24 is no multiple of linear_num_key_heads 16"),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a positive"),
        ({"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 48}, "layer_types must name 48 layers"),
        ({}, "model_type None"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq.*dequantized"),
        ({"model_type": "llama", "per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "llama", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer type"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "'linear': factor must be a positive number"),
        ({"model_type": "llama", "num_hidden_layers": "32"}, "num_hidden_layers must be a positive integer, got '32'"),
        ({"model_type": "llama", "hidden_size": 4095}, "set head_dim"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32}, "does not obey layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "sliding_window is unset or switched off"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 32}, "layer_types must name 32 layers"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 31}, "layer_types must name 32 layers"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(raw, message):
    with pytest.raises(KvjaxError, match=message):
        translate(raw)


FOUR = {"num_hidden_layers": 4}
SLIDING = FOUR | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        ("llama", FOUR | {"sliding_window": 8}, None),
        ("mistral", FOUR | {"sliding_window": 8}, (8, 8, 8, 8)),
        ("mistral", FOUR | {"sliding_window": None}, None),
        ("mistral", FOUR | {"sliding_window": 0}, None),
        ("mistral", FOUR | {"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
        ("llama", FOUR | {"layer_types": ["full_attention"] * 4}, None),
        ("qwen2", SLIDING | {"sliding_window": 0}, None),
        ("qwen2", SLIDING | {"layer_types": ["full_attention"] * 4}, None),
        ("mistral", FOUR, (4096,) * 4),
        ("phi3", FOUR, None),
        ("phi3", FOUR | {"sliding_window": 2047}, (2047,) * 4),
        ("qwen2", SLIDING, (None, None, None, 8)),
        ("qwen2", SLIDING | {"max_window_layers": 4}, None),
        ("qwen2", SLIDING | {"use_sliding_window": False}, None),
        ("qwen2", SLIDING | {"sliding_window": None}, None),
        ("qwen3", SLIDING | {"layer_types": ["sliding_attention", "full_attention"] * 2}, (8, None, 8, None)),
    ],
)
def test_which_layers_slide(kind, raw, expected):
    assert translate({"model_type": kind} | raw).llama_arguments()["windows"] == expected


@pytest.mark.parametrize(
    ("raw", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6, 5]}, None, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 5]}, (7, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, (5,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {}, (2,)),
        ({"eos_token_id": 99999}, {}, ()),  # cannot be generated
    ],
)
def test_end_of_sequence_ids(raw, generation, expected):
    assert translate({"model_type": "llama"} | raw, generation).eos_ids == expected


@pytest.mark.parametrize(("own", "expected"), [(3, (7, 5, 3)), (5, (7, 5)), (99999, (7, 5)), (None, (7, 5))])
def test_the_tokenizers_own_end_ends_too(own, expected):
    assert translate({"model_type": "llama"}, {"eos_token_id": [7, 5]}, own).eos_ids == expected


TEMPERATURE, MINISTRAL = "llama_4_scaling_beta", {"model_type": "ministral3"}
V3 = {"model_type": "deepseek_v3"}
GEMMA_4 = {"model_type": "gemma4_text"}
LATENT = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention .true. is not"),
        ({"model_type": "olmo3", "sliding_window": None}, "sliding_window is unset, and layers of this family have"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention .true. is not"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is unset, and layers of this family have"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping must be null or a positive"),
        ({"model_type": "qwen3_vl"}, "text_config must be the config of the decoder, got None"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            "'mistral4' is not supported; supported: m",
        ),
        ({"model_type": "mistral3", "text_config": {"model_type": 3}}, "text_config's model_type 3 is not supported"),
        (
            MINISTRAL | {"rope_parameters": {TEMPERATURE: "1"}},
            "llama_4_scaling_beta must be null, 0 or a positive number",
        ),
        (MINISTRAL | {"rope_parameters": {TEMPERATURE: 1.0}}, "beta needs original_max_position_embeddings beside it"),
        ({"model_type": "gemma3"}, "text_config must be the config of the decoder, got None"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "one set for each of full_attention"),
        (GEMMA_4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention .'all'. is not supported"),
        (GEMMA_4 | {"use_bidirectional_attention": True}, 'must be null, "vision" or "all", got True'),
        (GEMMA_4 | {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input 9 is not vocab_size 262144"),
        (
            GEMMA_4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 1},
            "needs moe_intermediate_size beside",
        ),
        (
            GEMMA_4 | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types ends w",
        ),
        (
            GEMMA_4 | {"num_kv_shared_layers": 25},
            "25 of 30 leaves no layer .* those of type 'full_attention' could read",
        ),
        (GEMMA_4 | {"num_kv_shared_layers": 31}, "31 of 30 leaves no layer .* those of type 'sliding_attention'"),
        (GEMMA_4 | {"per_layer_config": {"30": {"head_dim": 8}}}, "per_layer_config names layer '30' of 30"),
        (
            GEMMA_4 | {"per_layer_config": {"1": {"heads": 8}}},
            "per_layer_config must be null or say head_dim and num_key",
        ),
        (GEMMA_4 | {"rope_parameters": {"full_attention": LONGROPE}}, "'longrope' is not supported; supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers names 2 of 36 layers"),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "num_experts is 4 and num_local_experts"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "top_k is 9, and a token chooses from 8 experts"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok must be a positive integer, got None"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        (V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: 'noaux_tc'"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (V3 | {"rope_interleave": False}, "rope_interleave .false. is not supported; use a checkpoint whose"),
        (V3 | {"num_key_value_heads": 8}, "num_key_value_heads 8 is not num_attention_heads"),
        (V3 | {"n_group": None}, "n_group must be a positive integer, got None"),
        (
            V3 | {"n_group": 256},
            "256 groups of 256 experts are ranked by their two best, and need two each; lower groups",
        ),
        (V3 | {"num_mtp_layers": 2, "num_nextn_predict_layers": 1}, "num_mtp_layers is 2 and num_nextn_predict_layers"),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]},
            "mlp_layer_types must name 47 layers, each one of",
        ),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["moe"] * 47}, "mlp_layer_types must name 47 layers"),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (LATENT | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (LATENT | {"topk_method": "group_limited_greedy"}, "needs n_group and topk_group"),
        (LATENT | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (LATENT | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (LATENT | {"num_key_value_heads": 8}, "num_key_value_heads 8 is not num_attention_heads"),
    ],
)
def test_what_a_family_cannot_obey_is_refused(raw, message):
    with pytest.raises(KvjaxError, match=message):
        translate(raw)


def test_a_family_has_one_kind_for_each_different_layer():
    gemma3 = translate({"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9})
    sliding, full = gemma3.kinds
    assert gemma3.pattern == (0, 0, 0, 0, 0, 1, 0)
    assert (sliding.attention.rule.window, full.attention.rule.window) == (9, None)
    assert (sliding.attention.rope.theta, full.attention.rope.theta) == (10_000.0, 1_000_000.0)
    assert sliding.attention.scale == 256**-0.5 and gemma3.embed_scale == 2304**0.5
    deepseek = translate(LATENT | {"num_hidden_layers": 3, "first_k_dense_replace": 1})
    dense, sparse = deepseek.kinds
    assert deepseek.pattern == (0, 1, 1) and dense.mlp.experts is None and dense.attention == sparse.attention
    assert (sparse.attention.head_dim, sparse.attention.value_dim, sparse.attention.kv_heads) == (64 + 512, 512, 1)
    qwen = translate(
        {"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert [qwen.kind(i).mlp.experts is not None for i in range(4)] == [False, True, False, False]
    smollm3 = translate({"model_type": "smollm3", "num_hidden_layers": 6, "no_rope_layer_interval": 3})
    assert [smollm3.kind(i).attention.rope is None for i in range(6)] == [False, False, True] * 2


YARN_OF_DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN_OF_DEEPSEEK |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN_OF_OLMO_3 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN_OF_OLMO_3 |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
PUBLISHED = {
    "OLMo 3 7B": {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "vocab_size": 100278,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000,
        "rope_scaling": YARN_OF_OLMO_3,
        "sliding_window": 4096,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    },
    "Seed-OSS 36B": {
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "rope_theta": 10000000.0,
        "rope_scaling": {"rope_type": "default"},
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    "Gemma 2B": {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "rope_theta": 10000.0,
    },
    "Mistral Small 3.1 24B": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
        },
        "vision_config": {"model_type": "pixtral"},
    },
    "Ministral 3 8B": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "tie_word_embeddings": False,
        },
        "vision_config": {"model_type": "pixtral"},
    },
    "Qwen3-VL 8B": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
        },
        "tie_word_embeddings": False,
    },
    "Qwen3-VL 30B-A3B": {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
            "rope_theta": 5000000,
        },
        "tie_word_embeddings": False,
    },
    "Gemma 4 E2B": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": None,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        },
    },
    "Gemma 4 E4B": {
        "model_type": "gemma4",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "final_logit_softcapping": 30.0,
        },
    },
    "Gemma 4 26B-A4B": {
        "model_type": "gemma4",
        "text_config": {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "moe_intermediate_size": 704,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": None,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
        },
    },
    "Gemma 4 31B": {
        "model_type": "gemma4",
        "text_config": {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
        },
    },
    "Qwen3-Next 80B-A3B": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "intermediate_size": 5120,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "rope_scaling": None,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
    },
    "Qwen3.5 27B": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "num_key_value_heads": 128,
        "rope_scaling": YARN_OF_DEEPSEEK,
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "Kimi-K2": {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN_OF_DEEPSEEK | {"beta_fast": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rope_theta": 1000000,
        "use_qk_norm": True,
    },
}
"""What distinguishes them in their makers' config.json."""


@pytest.mark.parametrize(
    ("name", "parameters", "bytes_per_token"),
    [
        ("OLMo 3 7B", 7_298_011_136, 2 * 32 * 2 * 32 * 128),
        ("Seed-OSS 36B", 36_151_104_512, 2 * 64 * 2 * 8 * 128),
        ("Gemma 2B", 2_506_172_416, 2 * 18 * 2 * 256),
        # As transformers counts them, and the biases by which experts are chosen, which it does not count.
        ("DeepSeek-V3", 671_026_404_352 + 14_848, 2 * 61 * (512 + 64)),
        ("Kimi-K2", 1_026_408_209_408 + 60 * 384, 2 * 61 * (512 + 64)),
        ("GLM-4.5-Air", 106_852_245_504 + 45 * 128, 2 * 46 * 2 * 8 * 128),
        ("GLM-4.5", 352_797_814_784 + 89 * 160, 2 * 92 * 2 * 8 * 128),
        ("Mistral Small 3.1 24B", 23_572_403_200, 2 * 40 * 2 * 8 * 128),
        ("Ministral 3 8B", 8_489_553_920, 2 * 34 * 2 * 8 * 128),
        ("Qwen3-VL 8B", 8_190_735_360, 2 * 36 * 2 * 8 * 128),  # as many as Qwen3 8B
        ("Qwen3-VL 30B-A3B", 30_532_122_624, 2 * 48 * 2 * 4 * 128),  # as many as Qwen3 30B-A3B
        # As transformers counts them, and a factor of each layer's output, which is a buffer there.
        ("Gemma 4 E2B", 4_628_569_344 + 35, 2 * 2 * (12 * 256 + 3 * 512)),
        ("Gemma 4 E4B", 7_463_013_376 + 42, 2 * 2 * 2 * (20 * 256 + 4 * 512)),
        ("Gemma 4 26B-A4B", 25_233_141_760 + 30, 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)),
        ("Gemma 4 31B", 30_697_345_280 + 60, 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)),
        # As transformers' classes count: without the layer that predicts later tokens, and without what reads images.
        ("Qwen3-Next 80B-A3B", 79_674_391_296, 2 * 12 * 2 * 2 * 256),
        ("Qwen3.5 27B", 26_895_998_464, 2 * 16 * 2 * 4 * 256),
    ],
)
def test_published_configs_make_models_of_the_published_sizes(name, parameters, bytes_per_token):
    config = translate(PUBLISHED[name])
    assert sum(map(math.prod, parameter_shapes(config).values())) == parameters
    assert 2 * sum(config.kind(i).attention.stored_numbers for i in range(config.layers)) == bytes_per_token


def test_only_layers_without_a_window_scale_rope_in_olmo_3():
    sliding, full = translate(PUBLISHED["OLMo 3 7B"]).kinds
    assert (sliding.attention.rope.scaling, full.attention.rope.scaling.kind) == (None, "yarn")
    assert sliding.attention.rope.theta == full.attention.rope.theta == 500_000.0
    by_type = {"full_attention": {"rope_theta": 5.0, **YARN_OF_OLMO_3}, "sliding_attention": {"rope_theta": 7.0}}
    raw = {"model_type": "olmo3", "rope_parameters": by_type, "num_hidden_layers": 5}
    config = translate(raw)
    assert config.pattern == (0, 0, 0, 1, 0) and [rope.theta for rope in config.ropes] == [7.0, 5.0]
    with pytest.raises(KvjaxError, match="rope_parameters must have one set for each of full_attention, sliding"):
        translate(raw | {"rope_parameters": YARN_OF_OLMO_3})


def test_queries_of_ministral_3_grow_with_their_position():
    ministral = translate(PUBLISHED["Ministral 3 8B"])
    assert ministral.query_temperatures == (QueryTemperature(0.1, 16384),)
    assert ministral.ropes[0].scaling.attention_factor == 1.0
    assert translate(PUBLISHED["Mistral Small 3.1 24B"]).query_temperatures == ()
    assert Config.from_json(ministral.to_json()) == ministral and ministral.llama_arguments() is None


def test_layers_of_gemma_4_read_the_last_own_layer_of_their_type():
    e2b = translate(PUBLISHED["Gemma 4 E2B"])
    assert Config.from_json(e2b.to_json()) == e2b and e2b.per_layer_embedding == PerLayerEmbedding(256, 35)
    reads = [e2b.kind(i).attention.reads_layer for i in range(35)]
    assert reads == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [e2b.kind(i).mlp.width for i in (14, 15)] == [6144, 12288]
    sliding, full = (e2b.kind(i).attention.rope for i in (0, 4))
    assert sliding == Rope(256) and full == Rope(512, 1e6, RopeScaling("proportional", 1.0, rotated_fraction=0.25))
    # transformers 5.24 saves the sizes of single layers, and no key for those of layers without a window.
    own = {f"{i:02}": {"head_dim": 512} for i in range(4, 35, 5)}
    text = PUBLISHED["Gemma 4 E2B"]["text_config"] | {"per_layer_config": own, "global_head_dim": 8}
    assert translate(PUBLISHED["Gemma 4 E2B"] | {"text_config": text}) == e2b
    assert translate(PUBLISHED["Gemma 4 31B"]).kind(5).attention.keys_as_values
    assert translate(GEMMA_4 | {"num_hidden_layers": 8}).pattern == (0, 0, 0, 0, 0, 1, 0, 1)


def test_positions_of_images_change_nothing_in_a_config():
    assert translate(PUBLISHED["Qwen3-VL 8B"]).ropes == (Rope(128, 5e6),)
    assert translate(PUBLISHED["Qwen3-VL 30B-A3B"]).kind(0).mlp.experts == Experts(128, 8)


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_a_model_that_reads_images_ties_its_embeddings_where_either_config_says_so_first_the_outer(outer, inner):
    text = PUBLISHED["Ministral 3 8B"]["text_config"] | {"tie_word_embeddings": inner}
    config = translate(PUBLISHED["Ministral 3 8B"] | {"text_config": text, "tie_word_embeddings": outer})
    assert config.tie_embeddings == bool(inner if outer is None else outer)


def test_gelu_means_its_tanh_form_in_gemma_1_alone():
    gemma = translate(PUBLISHED["Gemma 2B"])
    assert gemma.kind(0).mlp.activation == "gelu_tanh" and gemma.embed_scale == 2048**0.5
    with pytest.raises(KvjaxError, match="hidden_act 'relu' is not supported"):
        translate(PUBLISHED["Gemma 2B"] | {"hidden_act": "relu"})


def test_switches_and_derived_sizes():
    llama = translate({"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": None})
    assert llama.kind(0).mlp.bias
    llama = llama.kind(0).attention
    assert llama.qkv_bias and llama.out_bias and llama.kv_heads == 32 and llama.head_dim == 128
    qwen2 = translate({"model_type": "qwen2", "attention_bias": True}).kind(0).attention  # o_proj never has a bias
    assert qwen2.qkv_bias and not qwen2.out_bias and not qwen2.qk_norm
    qwen3 = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    qwen3 = translate(qwen3).kind(0).attention
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    phi3 = translate({"model_type": "phi3", "partial_rotary_factor": 0.75}).kind(0).attention
    assert (phi3.rope.dim, phi3.head_dim) == (72, 96)


NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma3": {"text_config": {}},
    "gemma4": {"text_config": {}},
    "glm4_moe": {"head_dim": 128},  # its class divides 4096 by 96
    # transformers ties the two where a checkpoint has no head, and kvjax where a config says so.
    "mistral3": {"text_config": {"model_type": "ministral3"}, "tie_word_embeddings": False},
    "qwen3_5": {"text_config": {}},
    "qwen3_5_moe": {"text_config": {}},
    "qwen3_vl": {"text_config": {}},
    "qwen3_vl_moe": {"text_config": {}, "tie_word_embeddings": True},
}
"""Keys that have no default."""

if importlib.util.find_spec("transformers"):

    @pytest.mark.parametrize("kind", FAMILIES.keys() - {"kimi_k2"})  # which transformers does not have by this name
    @pytest.mark.filterwarnings("default")  # what the peer's import warns of is not ours to fix
    def test_defaults_are_those_of_transformers(kind):
        from transformers import AutoConfig

        needed = NEEDED.get(kind, {})
        assert translate({"model_type": kind} | needed) == translate(AutoConfig.for_model(kind, **needed).to_dict())
