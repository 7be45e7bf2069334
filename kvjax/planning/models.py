"""The models that can be planned for: written-down configurations, config.json files and kvjax checkpoints.

A model needs no weights here, and need not be one that kvjax can convert: a note says what the plan assumes then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints_convert import hf_config
from checkpoints_convert.families import find_family
from checkpoints_convert.hf_config import is_integer, is_number
from checkpoints_convert.source import Directory
from kvjax.core.attention import Rule
from kvjax.core.quantized_kernel import GROUP_INPUTS
from kvjax.core.rope import Rope, RopeScaling, yarn_scaling
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.checkpoint import parameter_axes, parameter_shapes
from kvjax.models.config import Config
from kvjax.models.kinds import AttentionKind, Experts, LayerKind, MlpKind
from kvjax.models.model import find_checkpoint
from kvjax.models.quantized_params import is_codes
from kvjax.planning import cached_layers
from kvjax.utils import arguments
from kvjax.utils.files import expand_user, parse_json_object, read_text_file

HOLDS_WINDOWS = "layers with a sliding window hold the tokens of their window alone"
QUANTIZED = "weights in the dtype of the plan; the file holds them quantized"
NOT_CONVERTED = "kvjax has no converter for this family yet: the plan is of the shapes"
WITHOUT_STATES = (
    "the states of recurrent layers and convolutions, whose size does not depend on the context, are not counted"
)
ESTIMATED = "weights are an estimate from the sizes in config.json; in a folder with all safetensors they are counted"
NUMBERS = ("architectures", "quantization_config", "rope_scaling", "rope_parameters", "hidden_act")
"""Keys that a converter may refuse, and that change no layer's shapes."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_DRAWN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
UNGATED = re.compile(
    "gpt.*|code_?gen|bloom|falcon|RefinedWeb.*|mpt|opt|xglm|biogpt|ctrl|openai-gpt|phi|phi-msft|starcoder2|persimmon"
    "|fuyu|nemotron|nemotron_h|arcee|apertus.*|jais2|git"
)
"""model_types, but gpt_oss, whose MLPs have two matrices and no gate."""


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """The shapes of a model.

    Attributes:
      name: as it was asked for.
      config: of the decoder.
      source: where the sizes are from.
      notes: what the plan assumes.
      other_layers: layers that hold no keys and values, and that `config` does not have.
      other_parameters: parameters that `config` does not have; below 0 for those that only it has.
      has_exact_weights: whether the parameters are counted, and not estimated.
      other_idle: of `other_parameters`, those of experts that one token does not run through.
    """

    name: str
    config: Config
    source: str
    notes: tuple[str, ...] = ()
    other_layers: int = 0
    other_parameters: int = 0
    has_exact_weights: bool = True
    other_idle: int = 0

    @functools.cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self.other_parameters + sum(math.prod(shape) for shape in parameter_shapes(self.config).values())

    @property
    def has_experts(self) -> bool:
        """Whether a token runs through some of a layer's MLPs alone."""
        return any(kind.mlp.experts is not None for kind in self.config.kinds)

    @functools.cached_property
    def active_parameters(self) -> int:
        """The parameters that one token's forward pass reads, but for the rows of the embedding that it does not."""
        return sum(self._active_sizes().values()) + self.other_parameters - self.other_idle

    def active_bytes(self, dtype: str, weights: str | None = None) -> float:
        """Their bytes in a dtype, with kernels in codes of the kind `weights`."""
        itemsize, of_codes = arguments.float_type(dtype).itemsize, 0 if weights is None else CODE_BYTES[weights]
        own = (n * (of_codes if is_codes(path) else itemsize) for path, n in self._active_sizes(weights).items())
        return sum(own) + (self.other_parameters - self.other_idle) * bytes_per_weight(dtype, weights)

    def _active_sizes(self, weights: str | None = None) -> dict[str, int]:
        """Returns how many numbers of each parameter one token's forward pass reads."""
        c, axes, sizes = self.config, parameter_axes(self.config, weights), {}
        for path, shape in parameter_shapes(c, weights).items():
            count = shape[0] if shape else 1
            if path == "per_layer_table" or (path == "embedding" and not c.tie_embeddings):
                count = 1
            elif axes[path][0] == "E":
                experts = c.kind(int(path.split("/")[0].removeprefix("layer_"))).mlp.experts
                assert experts is not None
                count = experts.top_k
            sizes[path] = count * math.prod(shape[1:])
        return sizes


CODE_BYTES = {"int8": 1.0, "int4": 0.5}


def bytes_per_weight(dtype: str, weights: str | None) -> float:
    """Returns the bytes of a weight of which no more is known: a code with its share of a scale, or a number."""
    itemsize = arguments.float_type(dtype).itemsize
    if weights is None:
        return itemsize
    return CODE_BYTES[weights] + (itemsize / GROUP_INPUTS if weights == "int4" else 0)


def _llama(layers: int, width: int, heads: int, mlp_width: int) -> Config:
    return Config.llama(
        *(128_256, width, layers, heads, 8, 128, mlp_width),
        max_positions=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling("llama3", 8.0),
    )


def _qwen3(layers: int, width: int, heads: int, mlp_width: int) -> Config:
    sizes = (151_936, width, layers, heads, 8, 128, mlp_width)
    return Config.llama(*sizes, max_positions=40_960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True)


def _smollm2(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, theta: float) -> Config:
    sizes = (49_152, width, layers, heads, kv_heads, 64, mlp_width)
    return Config.llama(*sizes, max_positions=8192, rope_theta=theta, tie_embeddings=True)


def _qwen25_coder(layers: int, width: int, heads: int, head_dim: int, mlp_width: int) -> Config:
    return Config.llama(
        *(151_936, width, layers, heads, 2, head_dim, mlp_width),
        max_positions=32_768,
        norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        qkv_bias=True,
    )


def _gemma3(window: int | None) -> LayerKind:
    rope = Rope(128, 1e6, RopeScaling("linear", 8.0)) if window is None else Rope(128, 1e4)
    attention = AttentionKind(32, 16, 128, rope, Rule(window), scale=168**-0.5, qk_norm="head")
    return LayerKind(attention, MlpKind(21_504, "gelu_tanh"), norms="both", unit_offset=True)


_GEMMA_3_27B = Config(
    *(262_208, 5376, (_gemma3(1024), _gemma3(None)), tuple(int((i + 1) % 6 == 0) for i in range(62))),
    max_positions=131_072,
    norm_eps=1e-6,
    tie_embeddings=True,
    embed_scale=5376**0.5,
)


def _gpt_oss(window: int | None) -> LayerKind:
    rope = Rope(64, 150_000.0, yarn_scaling(32.0, 4096, truncate=False))
    attention = AttentionKind(64, 8, 64, rope, Rule(window), qkv_bias=True, out_bias=True, sinks=True)
    return LayerKind(attention, MlpKind(2880, "clamped_swiglu", True, Experts(32, 4, router_bias=True)))


_GPT_OSS_20B = Config(
    *(201_088, 2880, (_gpt_oss(128), _gpt_oss(None)), (0, 1) * 12),
    max_positions=131_072,
)
_GEMMA_3_270M_KINDS = tuple(
    LayerKind(
        AttentionKind(4, 1, 256, Rope(256, theta), Rule(window), qk_norm="head"),
        MlpKind(2048, "gelu_tanh"),
        norms="both",
        unit_offset=True,
    )
    for theta, window in ((1e4, 512), (1e6, None))
)
_GEMMA_3_270M = Config(
    262_144,
    640,
    _GEMMA_3_270M_KINDS,
    (0, 0, 0, 0, 0, 1) * 3,
    max_positions=32_768,
    norm_eps=1e-6,
    tie_embeddings=True,
    eos_ids=(1,),
    bos_id=2,
    embed_scale=640**0.5,
)
_SMOLLM2_135M = _smollm2(30, 576, 9, 3, 1536, 1e5)
_HUB = "config.json of huggingface.co/{}"
_ENTRIES = (
    PlannedModel("llama-3.1-8b", _llama(32, 4096, 32, 14_336), _HUB.format("meta-llama/Llama-3.1-8B")),
    PlannedModel("llama-3.1-70b", _llama(80, 8192, 64, 28_672), _HUB.format("meta-llama/Llama-3.1-70B")),
    PlannedModel("qwen3-8b", _qwen3(36, 4096, 32, 12_288), _HUB.format("Qwen/Qwen3-8B")),
    PlannedModel("qwen3-32b", _qwen3(64, 5120, 64, 25_600), _HUB.format("Qwen/Qwen3-32B")),
    PlannedModel(
        "gemma-3-27b",
        _GEMMA_3_27B,
        _HUB.format("google/gemma-3-27b-it") + " (text_config)",
        notes=("without the vision tower (0.4B parameters)", HOLDS_WINDOWS),
    ),
    PlannedModel(
        "gpt-oss-20b",
        _GPT_OSS_20B,
        _HUB.format("openai/gpt-oss-20b"),
        notes=(
            "weights in the dtype of the plan; the published file holds its experts in MXFP4, about 13 GB in all",
            HOLDS_WINDOWS,
        ),
    ),
    PlannedModel("smollm2-135m", _SMOLLM2_135M, _HUB.format("HuggingFaceTB/SmolLM2-135M")),
    PlannedModel("smollm2", _SMOLLM2_135M, _HUB.format("HuggingFaceTB/SmolLM2-135M")),
    PlannedModel(
        "qwen2.5-coder-0.5b",
        _qwen25_coder(24, 896, 14, 64, 4864),
        _HUB.format("Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    ),
    PlannedModel(
        "qwen2.5-coder-1.5b",
        _qwen25_coder(28, 1536, 12, 128, 8960),
        _HUB.format("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    ),
    PlannedModel("gemma3-270m", _GEMMA_3_270M, _HUB.format("google/gemma-3-270m"), notes=(HOLDS_WINDOWS,)),
    PlannedModel("smollm2-360m", _smollm2(32, 960, 15, 5, 2560, 1e5), _HUB.format("HuggingFaceTB/SmolLM2-360M")),
    PlannedModel("smollm2-1.7b", _smollm2(24, 2048, 32, 32, 8192, 1.3e5), _HUB.format("HuggingFaceTB/SmolLM2-1.7B")),
)
CONFIGURATIONS: dict[str, PlannedModel] = {entry.name: entry for entry in _ENTRIES}
"""Name -> model, written down here so that nothing has to be downloaded."""


def find_model(name: str) -> PlannedModel:
    """Finds a model: a path first, then a written-down configuration, then the shipped model.

    Args:
      name: a checkpoint directory of kvjax or Hugging Face, a config.json, or a name; an organization before a name,
        as in "meta-llama/Llama-3.1-8B", is left out.

    Raises:
      KvjaxError: for an unknown name, with the known ones, and for a file that is no model's configuration.
    """
    path, short = expand_user(name), name.lower().rpartition("/")[2]
    if checkpoint.is_checkpoint(path):
        return PlannedModel(name, checkpoint.read_manifest(path).config, f"{path / checkpoint.MANIFEST}")
    if os.path.isfile(path / "config.json"):  # unlike a Path's, this takes a name that is too long
        path = path / "config.json"
    if os.path.isfile(path):
        if path.suffix.lower() == ".gguf":
            raise KvjaxError(
                f"{path} is a GGUF file, and a plan reads a configuration; plan the checkpoint that is made of it: "
                f"python -m checkpoints_convert convert {path} DST"
            )
        raw = parse_json_object(read_text_file(path, "MODEL"), path, "give the config.json of a model")
        return read_config_json(raw, name, str(path), count_stored(path.parent))
    if short in CONFIGURATIONS:
        return dataclasses.replace(CONFIGURATIONS[short], name=name)
    if name == "testbed":
        return PlannedModel(name, checkpoint.read_manifest(find_checkpoint(name)).config, "shipped with kvjax")
    raise KvjaxError(
        f"there is no model {name!r:.80}{arguments.suggest_name(short, CONFIGURATIONS)}; give a checkpoint directory, "
        f"a config.json of Hugging Face, or one of {', '.join(CONFIGURATIONS)}, testbed"
    )


def count_stored(folder: Path) -> int | None:
    """Counts the numbers in the safetensors of a folder; None where they are not all there."""
    try:
        return sum(math.prod(tensor.shape) for tensor in Directory(folder).tensors.values())
    except KvjaxError:
        return None


def read_config_json(raw: Mapping[str, Any], name: str, source: str, num_stored: int | None = None) -> PlannedModel:
    """Reads a config.json; a family that kvjax cannot convert is read by the keys that most families share.

    Args:
      raw: config.json, as parsed.
      name: the model as it was asked for.
      source: the file.
      num_stored: parameters of the checkpoint; None to estimate those of a family that kvjax cannot convert.

    Raises:
      KvjaxError: a size is missing, the model's cache is not one of keys and values of heads, or a key may change what
        it holds and is not understood.
    """
    if _is_convertible(raw):
        notes = []
        try:
            config = hf_config.translate(raw)
        except KvjaxError as e:
            config = hf_config.translate(_leave_shapes(raw))
            notes.append(
                f"kvjax converts no checkpoint of it, and the plan is of the shapes: {str(e).partition(';')[0]}"
            )
        notes += [HOLDS_WINDOWS] * any(kind.attention.rule.window is not None for kind in config.kinds)
        notes += [QUANTIZED] * bool(raw.get("quantization_config"))
        return PlannedModel(name, config, source, notes=tuple(notes))
    inner = cached_layers.find_decoder(raw)
    if _is_convertible(inner):
        found = read_config_json(inner, name, source)
        notes = (f"{NOT_CONVERTED} (model_type {raw.get('model_type')!r:.40}), and of its decoder alone", *found.notes)
        return dataclasses.replace(found, notes=notes)
    raw = cached_layers.unwrap(raw)
    for key in ("intermediate_size", "moe_intermediate_size", *EXPERTS_DRAWN):  # lists by layer: of estimates alone
        if isinstance(sizes := raw.get(key), list) and sizes and all(map(is_integer, sizes)):
            raw[key] = sum(sizes) // len(sizes)
    layers = cached_layers.read_layers(raw, source)
    read = functools.partial(cached_layers.read_size, raw, source=source)
    width, holding = read("width"), [i for i, layer in enumerate(layers) if layer.heads]
    experts = next((x for key in EXPERT_COUNTS if is_integer(x := raw.get(key)) and x > 1), 1)
    if False in (raw.get("is_moe"), raw.get("enable_moe_block")):
        experts = 1
    has_bias = bool(raw.get("attention_bias"))
    is_gemma, is_gpt_oss = (str(raw.get("model_type")).startswith(family) for family in ("gemma", "gpt_oss"))
    has_qk_norm = "qwen3" in str(raw.get("model_type")) or str(raw.get("model_type")).startswith("gemma3")
    # An expert's width has a key of its own in families that also have layers without experts.
    mlp_width = read("moe_intermediate_size", default=0) if experts > 1 else 0
    mlp_width = mlp_width or read("mlp_width", default=4 * width)
    if raw.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds, as its MLP has three matrices in place of two
        factor: Any = raw.get("block_ffn_dim_multiplier")
        multiple = read("block_multiple_of", default=1)
        mlp_width = int((factor if is_number(factor) else 1) * int(2 * mlp_width / 3))
        mlp_width = max(math.ceil(mlp_width / multiple), 1) * multiple
    mixture = None
    if experts > 1:
        drawn: Any = next((x for key in EXPERTS_DRAWN if is_integer(x := raw.get(key))), 1)
        mixture = Experts(experts, min(drawn, experts), router_bias=is_gpt_oss)
    mlps = [MlpKind(mlp_width, bias=is_gpt_oss, experts=mixture)] * len(layers)
    period = read("expert_layer_period", default=0) or read("interleave_moe_layer_step", default=1)
    # Other layers have one MLP. Jamba says which layer of a period has experts; in Llama 4 it is the last.
    if experts > 1 and period > 1:
        offset = raw.get("expert_layer_offset", period - 1)
        dense = MlpKind(read("intermediate_size_mlp", default=read("mlp_width", default=4 * width)))
        mlps = [mlp if i % period == offset else dense for i, mlp in enumerate(mlps)]
    kinds = []
    for layer, i in ((layers[i], i) for i in holding):
        attention = AttentionKind(
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            Rope(layer.head_dim // 2 * 2) if layer.head_dim > 1 else None,
            Rule(layer.window),
            layer.value_dim,
            qk_norm="head" if has_qk_norm else "",
            qkv_bias=has_bias,
            out_bias=has_bias,
            sinks=is_gpt_oss,
            reads_layer=None if layer.reads is None else holding.index(layer.reads),
        )
        kinds.append(LayerKind(attention, mlps[i], norms="both" if is_gemma else "before"))
    different = tuple(dict.fromkeys(kinds))
    config = Config(
        read("vocab_size"),
        width,
        different,
        tuple(map(different.index, kinds)),
        max_positions=read("max_positions", default=131_072),
        tie_embeddings=bool(raw.get("tie_word_embeddings", raw.get("tie_embedding", is_gemma))),
    )
    others = [layer.kind for layer in layers if not layer.heads]
    if raw.get("quantization_config"):  # several numbers are stored as one
        num_stored = None
    is_counted = num_stored is not None
    notes = [f"{NOT_CONVERTED} (model_type {raw.get('model_type')!r:.40}), read by the keys that most families share"]
    if others:
        notes.append(f"{len(others)} of {len(layers)} layers hold no keys and values")
    has_states = cached_layers.MIXER in others or any(cached_layers.STATES.fullmatch(key) and raw[key] for key in raw)
    notes += [WITHOUT_STATES] * has_states + [HOLDS_WINDOWS] * any(layer.window for layer in layers)
    notes.append(f"weights are those of the safetensors beside {source}" if is_counted else ESTIMATED)
    notes += [QUANTIZED] * bool(raw.get("quantization_config"))
    if not any(raw.get(key) for key in cached_layers.SIZES["max_positions"]):
        notes.append(f"it does not say how many positions it was trained for; {config.max_positions:,} are taken")
    found = PlannedModel(name, config, source, tuple(notes), len(others), has_exact_weights=is_counted)
    others_have, others_idle = estimate_others(raw, config, others, mlps)
    if num_stored is not None:
        others_have = num_stored - found.parameters
    return dataclasses.replace(found, other_parameters=others_have, other_idle=others_idle)


def _is_convertible(raw: Mapping[str, Any]) -> bool:
    return find_family(raw) is not None and raw.get("use_mla") is not False


def _leave_shapes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without the keys that change a model's numbers, and neither its layers nor what they hold."""
    left = {key: x for key, x in raw.items() if key not in NUMBERS}
    return left | {key: _leave_shapes(x) for key in cached_layers.DECODERS if isinstance(x := raw.get(key), Mapping)}


def estimate_others(
    raw: Mapping[str, Any], config: Config, others: Sequence[str], mlps: Sequence[MlpKind]
) -> tuple[int, int]:
    """Estimates the parameters that `config` lacks: of layers without keys and values, whose kinds `others` has.

    Args:
      raw: the config of the decoder.
      config: its layers with keys and values.
      others: kinds of the others.
      mlps: of all layers.

    Returns:
      Their number, and how many of them are in experts that a token does not run through.
    """
    is_ungated = UNGATED.fullmatch(str(raw.get("model_type"))) and raw.get("model_type") != "gpt_oss"
    matrices, layers = 2 if is_ungated else 3, len(mlps)
    num_mixers = others.count(cached_layers.MIXER)
    # Nemotron-H has one part in each layer; everywhere else an MLP follows.
    num_mlps = others.count(cached_layers.MLP) if num_mixers < len(others) and not raw.get("block_configs") else layers
    if str(raw.get("model_type")).startswith("zamba"):  # all layers that attend share a few
        num_mlps = x if is_integer(x := raw.get("num_mem_blocks")) else 1
    # A state-space layer projects to twice the width and back with a gate, a convolution or linear attention to once.
    is_mamba = any("mamba" in key or key == "ssm_state_size" for key in raw)
    # `config` counts three matrices for each MLP of its own layers.
    own = [config.kind(i).mlp for i in range(config.layers)]

    def count(is_idle: bool) -> int:
        def size(mlp: MlpKind) -> int:
            experts = mlp.experts or Experts(1, 1)
            return config.width * mlp.width * (experts.count - is_idle * experts.top_k)

        return num_mlps * matrices * sum(map(size, mlps)) // layers - 3 * sum(map(size, own))

    return num_mixers * (6 if is_mamba else 4) * config.width**2 + count(False), count(True)
