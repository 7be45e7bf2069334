"""Description of a checkpoint, Hugging Face's, GGUF or ours, from its headers alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import open_source
from checkpoints_convert.source import FLOATS
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.core.rope import Rope
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config, checkpoint
from kvjax.models.kinds import LayerKind, MlpKind
from kvjax.models.quantized_params import count_bits, count_parameters
from kvjax.utils.display import count
from kvjax.utils.files import expand_user

Lines = dict[str, str]


def describe(directory: str | Path) -> Lines:
    """Returns label -> value, fit for a terminal; for a checkpoint that cannot be converted, also the reason."""
    path = expand_user(directory)
    if checkpoint.is_checkpoint(path):
        record = checkpoint.read_manifest(path)
        shapes = {name: tuple(x["shape"]) for name, x in record.parameters.items()}
        types = {name: x["dtype"] for name, x in record.parameters.items()}
        stored = [
            (shape, types[name], math.prod(shape) * count_bits(jnp.dtype(types[name])) // 8)
            for name, shape in shapes.items()
        ]
        lines = {"format": "kvjax", "source": record.source} | _describe_weights(stored)
        lines["parameters"] = f"{count_parameters(shapes):,}"
        lines["tokenizer"] = "tokenizer.json" if (path / "tokenizer.json").is_file() else "none"
        lines |= _describe_config(record.config)
    else:
        source = open_source(path)
        lines = {"format": source.format, "model_type": str(source.config.get("model_type"))}
        lines["files"] = str(len({t.file for t in source.tensors.values()}))
        stored = []
        for t in source.tensors.values():
            size = math.prod(t.shape) * np.dtype(FLOATS[t.dtype]).itemsize if t.dtype in FLOATS else 0
            stored.append((t.shape, t.stored or FLOATS.get(t.dtype, t.dtype), size if t.bytes is None else t.bytes))
        lines |= _describe_weights(stored)
        try:
            lines["tokenizer"] = ", ".join(source.tokenizer_files()) or "none"
            plan = plan_conversion(source)
            lines["convertible"] = "yes"
            if count := plan.num_left_out:
                lines["convertible"] += f", as a decoder of texts: {count} tensors of other parts are left out"
            lines |= _describe_config(plan.config)
        except KvjaxError as e:
            lines["convertible"] = f"no: {e}"
    return {label: escape_unprintable(value, keep="\n") for label, value in lines.items()}


def _describe_weights(stored: list[tuple[tuple[int, ...], str, int]]) -> Lines:
    """Describes tensors given as (shape, type, bytes), where bytes are 0 for a buffer."""
    total = sum(n for _, _, n in stored)
    num_parameters = sum(math.prod(shape) for shape, _, n in stored if n)
    types = ", ".join(f"{name} ({n})" for name, n in Counter(name for _, name, _ in stored).items())
    return {
        "tensors": str(len(stored)),
        "types": types,
        "parameters": f"{num_parameters:,}",
        "weights": f"{total / 1e6:,.1f} MB",
    }


def _describe_config(config: Config) -> Lines:
    """Describes the layers in words, one line for each kind, and lists the other fields."""
    per_token = sum(config.kind(i).attention.stored_numbers for i in range(config.layers)) * 2
    counts = Counter(config.pattern)
    lines = {
        "layers" if len(counts) == 1 else f"layers, kind {i}": _describe_kind(config.kinds[i], number)
        for i, number in counts.items()
    }
    for field in dataclasses.fields(Config):
        if field.name not in ("kinds", "pattern"):
            value = getattr(config, field.name)
            lines[field.name] = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if (own := config.per_layer_embedding) is not None:
        lines["per_layer_embedding"] = f"{own.width} numbers of a token for each of {own.layers} layers"
    lines["KV per token"] = f"{per_token:,} bytes in bfloat16"
    if len(config.attention_layers) < config.layers:
        kinds = (config.kind(i).attention for i in range(config.layers))
        size = sum(RecurrentLayer.of(a).count_bytes(a.kv_heads, 2) for a in kinds if a.recurrence is not None)
        lines["recurrent state"] = f"{size:,} bytes a sequence of any length, in bfloat16"
    return lines


def _describe_kind(kind: LayerKind, number: int) -> str:
    """Describes `number` layers of a kind: "3 layers, 4 heads on 2 of 16, 4 experts of which 2"."""
    a, mlp = kind.attention, kind.mlp
    words = [count(number, "layer"), f"{a.heads} heads on {a.kv_heads} of {a.head_dim}", _describe_mlp(mlp)]
    if a.recurrence is not None:
        words.append(f"a gated delta rule after a convolution over {a.recurrence.kernel_tokens} tokens")
    if a.latent is not None:
        words.append(f"latent attention of rank {a.latent.rank}")
    elif a.value_dim != a.head_dim:
        words.append(f"values of {a.value_dim}")
    biases = (("queries, keys and values", a.qkv_bias), ("outputs", a.out_bias), ("the MLP", mlp.bias))
    biased = " and ".join(name for name, has in biases if has)
    facts = (
        (a.reads_layer is not None, f"keys and values of layer {a.reads_layer}"),
        (a.rule.window is not None, f"a window of {a.rule.window or 0:,} tokens"),
        (a.rule.soft_cap is not None, f"a soft cap of {a.rule.soft_cap or 0:g}"),
        (a.recurrence is None, _describe_rope(a.rope)),
        (a.output_gate, "a gate of the output"),
        (a.scale is not None, f"dot products times {a.scale or 0:.4g}"),
        (
            a.query_temperature is not None,
            f"queries that grow every {a.query_temperature.positions if a.query_temperature else 0:,} positions",
        ),
        (bool(a.qk_norm), f"norms of queries and keys by {'head' if a.qk_norm == 'head' else 'all heads'}"),
        (a.value_norm, "values over their root mean square"),
        (a.keys_as_values, "one projection for keys and values"),
        (bool(biased), f"biases of {biased}"),
        (a.sinks, "learned sinks"),
        (kind.norms != "before", f"norms {'after' if kind.norms == 'after' else 'before and after'} each part"),
        (kind.unit_offset, "norms times 1 + scale"),
        (kind.residual != 1, f"a residual factor of {kind.residual:g}"),
        (kind.output_scale, "a learned factor of the layer's output"),
    )
    return ", ".join(words + [fact for holds, fact in facts if holds])


def _describe_mlp(mlp: MlpKind) -> str:
    experts, width = mlp.experts, f"{mlp.width:,} wide ({mlp.activation})"
    if experts is None:
        return f"an MLP {width}"
    groups = f" from {experts.top_groups} of {experts.groups} groups" if experts.groups > 1 else ""
    shared = f" and a shared one {experts.shared_width:,} wide" if experts.shared_width else ""
    shared += " with a gate" if experts.shared_gate else ""
    shared += ", each with its own norms" if experts.own_norms else ""
    groups += ", chosen by sigmoids and a bias" if experts.scoring == "sigmoid" else ""
    return f"{experts.count} experts of which {experts.top_k}{groups}, each {width}{shared}"


def _describe_rope(rope: Rope | None) -> str:
    if rope is None:
        return "no RoPE"
    scaling = ""
    if rope.scaling is not None:
        scaling = f", {rope.scaling.kind} by {rope.scaling.factor:g}"
        if rope.scaling.kind == "proportional":
            scaling += f", {rope.scaling.rotated_fraction:g} of the pairs"
        elif rope.scaling.kind != "linear":  # neither has an original length
            scaling += f" from {rope.scaling.original_max_positions:,} positions"
    return f"RoPE of {rope.dim} channels (theta {rope.theta:,.10g}{scaling})"
