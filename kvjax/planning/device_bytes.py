"""The bytes that a model under a method needs on one device: weights, cache, the work of a step and of a prefill.

Bytes of caches are those of the arrays that the engine makes, divided over a mesh as it divides them: they are exact.
Weights are, too. Activations and scores, which a program needs besides, follow from the formulas at each function. In
them B, T and D stand for a device's sequences, tokens of a prompt and the model's width; N and K are query and
key/value heads of a device, H and V the widths of keys and values, F the width of its MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from kvjax.cache.protocol import KVMethod
from kvjax.core.mesh import RULES
from kvjax.generation.inputs import round_up
from kvjax.models.kinds import AttentionKind, LayerKind
from kvjax.models.quantized_params import count_bits
from kvjax.models.sharding import abstract_params
from kvjax.planning.hardware import Hardware
from kvjax.planning.models import PlannedModel, bytes_per_weight
from kvjax.planning.traced_layers import TracedLayer, trace_layers
from kvjax.utils import arguments

ATTENTION_BLOCK = 512  # queries and keys of a block of `kvjax.core.attention.causal_attention`
RESERVED = 0.08
"""Fraction of a device's memory that is left for the runtime, compiled programs and fragments."""


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device, and of the host for it.

    Attributes:
      weights: parameters.
      cache: the arrays of the cache, all slots.
      workspace: of a decode step: one layer's scores and weights, activations, logits.
      prefill: besides the weights, at the peak of reading the prompts: exact keys and values, the states that are made
        of them, activations. Methods whose layers share one budget, and prompts read in chunks, hold the exact keys and
        values of all layers; others those of one layer at a time.
      host: of the cache in host memory.
    """

    weights: int
    cache: int
    workspace: int
    prefill: int
    host: int

    @property
    def peak(self) -> int:
        """Bytes of the device at the peak of prefill and decoding."""
        return self.weights + max(self.cache + self.workspace, self.prefill)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rows of a plan share.

    Attributes:
      model: the model.
      hardware: each device of the mesh.
      mesh: devices along the sequences, and along the heads.
      dtype: of weights, and of what a method stores exactly.
      room: tokens that each sequence may get after its prompt.
      chunk: tokens of a prompt that are read at a time; None for all at once, or as the method asks.
      reserved: fraction of a device's memory that programs cannot use.
      weights: "int8" or "int4" for kernels in codes, None for kernels in `dtype`.
    """

    model: PlannedModel
    hardware: Hardware
    mesh: tuple[int, int] = (1, 1)
    dtype: str = "bfloat16"
    room: int = 0
    chunk: int | None = None
    reserved: float = RESERVED
    weights: str | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that programs can use."""
        return int(self.hardware.memory_bytes * (1 - self.reserved))

    @property
    def itemsize(self) -> int:
        """Bytes of a number in `dtype`."""
        return arguments.float_type(self.dtype).itemsize

    def trace_layers(self, method: KVMethod, context: int, batch: int) -> tuple[TracedLayer, ...]:
        """Traces the different layers; raises KvjaxError where the method cannot serve the model or the mesh."""
        return trace_layers(method, self.model.config, context, self.room, batch, self.dtype, self.mesh)

    def excess(self, needed: DeviceBytes) -> float:
        """Returns by which fraction the memory is exceeded that lacks most; at most 0 where both hold it."""
        device, host = max(self.usable_bytes, 1), max(self.hardware.host_bytes, 1)
        return max(needed.peak / device, needed.host / host) - 1


class Share(NamedTuple):
    """One device's share of a batch of prompts."""

    sequences: int
    num_devices: int  # along the heads: each has that fraction of the heads and of the MLP
    itemsize: int  # bytes of a number of an activation
    width: int  # of the model
    tokens: int  # of a padded prompt
    chunk: int  # tokens of it that are read at once


def count_device_bytes(setting: Setting, method: KVMethod, context: int, batch: int) -> DeviceBytes:
    """Counts the bytes of one device; raises KvjaxError where the method cannot serve the model or the mesh."""
    along_sequences, along_heads = setting.mesh
    layers = setting.trace_layers(method, context, batch)
    own_chunk = min((x.needs.prompt_chunk for x in layers if x.needs.prompt_chunk), default=None)
    tokens = round_up(context)
    share = Share(
        sequences=batch // along_sequences,
        num_devices=along_heads,
        itemsize=setting.itemsize,
        width=setting.model.config.width,
        tokens=tokens,
        chunk=min(setting.chunk or own_chunk or tokens, tokens),
    )
    cache = 4 * share.sequences + _count_caches(layers, "device")  # the cache's own lengths, i32[B]
    return DeviceBytes(
        weights=count_weights(setting.model, setting.dtype, along_heads, setting.weights),
        cache=cache,
        workspace=count_workspace(layers, share, context + setting.room, setting.model.config.vocab_size),
        prefill=count_prefill(layers, share, cache, setting.chunk is not None),
        host=_count_caches(layers, "pinned_host"),  # a host serves the parts of its own devices
    )


@functools.lru_cache(maxsize=64)
def count_weights(model: PlannedModel, dtype: str, num_devices: int, weights: str | None = None) -> int:
    """Counts the bytes of the parameters on one of the devices along the heads."""
    c = model.config
    # Layers of a kind have equal parameters, and tracing all of a large model takes seconds.
    params = abstract_params(c.with_layers(range(len(c.kinds))), dtype, weights)
    total = 0

    def add(path: Any, x: Any, letters: PartitionSpec) -> None:
        nonlocal total
        is_divided = any(RULES.get(letter) == RULES["K"] for letter in " ".join(letters).split())
        name = path[0].key
        times = c.pattern.count(int(name.removeprefix("layer_"))) if name.startswith("layer_") else 1
        total += times * x.size * count_bits(x.dtype) // 8 // (num_devices if is_divided else 1)

    jax.tree_util.tree_map_with_path(add, nn.unbox(params), nn.get_partition_spec(params))
    # How a program would divide what kvjax does not run is not known: evenly, as most matrices are.
    return total + int(model.other_parameters * bytes_per_weight(dtype, weights)) // num_devices


def _count_caches(layers: Sequence[TracedLayer], memory_kind: str) -> int:
    """Counts the bytes that one device holds of all layers' caches."""
    return sum(x.count * x.device_bytes()[memory_kind] for x in layers if x.has_cache)


def count_workspace(layers: Sequence[TracedLayer], share: Share, capacity: int, vocab_size: int) -> int:
    """Counts the bytes that a decode step needs besides weights and cache.

    For each token of the step, one layer's scores and weights, its activations, and the logits of all devices:
    2 N S float32, 4 D + 2 F numbers, and vocab_size float32. A step has a token and its drafts for each sequence.
    """
    tokens = share.sequences * (1 + max(x.needs.draft_tokens for x in layers))
    scores = 2 * 4 * max(x.kind.attention.heads for x in layers) // share.num_devices * capacity
    mlp_width = max(_active_mlp_width(x.kind) for x in layers)
    activations = share.itemsize * (4 * share.width + 2 * mlp_width // share.num_devices)
    return tokens * (scores + activations + 4 * vocab_size)


def count_prefill(layers: Sequence[TracedLayer], share: Share, cache: int, in_chunks: bool) -> int:
    """Counts the bytes besides the weights at the peak of reading the prompts.

    A layer at a time: cache + stream + max(exact prompt + attention, MLP) of the layers that need most. Where the exact
    prompts of all layers stay until the last is read: their sum, and the most of the activations and of the state that
    is made of one, whose prompt is dropped then.

    Args:
      layers: all different layers.
      share: what the device reads.
      cache: bytes of the finished cache.
      in_chunks: whether prompts are read in chunks, although the method does not ask for it.
    """
    # XLA's program of a layer holds its input, the residual stream and its output, 3 B T D, and then what attention or
    # the MLP makes: the temporary bytes that the compiler reports for a layer of an 8B model, to 4%.
    stream = 3 * share.sequences * share.chunk * share.width * share.itemsize
    attention = max(_count_attention(x.kind.attention, share) for x in layers)
    mlp = max(_count_mlp(x.kind, share) for x in layers)
    exact = [_count_exact_prompt(x, share) if x.has_cache else 0 for x in layers]
    if in_chunks or any(x.needs.global_budget or x.needs.replay or x.needs.paired_layer for x in layers):
        largest_state = max(x.device_bytes()["device"] if x.has_cache else 0 for x in layers)
        all_prompts = sum(x.count * size for x, size in zip(layers, exact, strict=True))
        return max(all_prompts + max(stream + max(attention, mlp), largest_state), cache)
    return cache + stream + max(max(exact) + attention, mlp)


def _count_exact_prompt(layer: TracedLayer, share: Share) -> int:
    """Counts what a layer holds of its prompt: keys, values, and what its method observes.

    B K T (H + V) numbers, B N Q H for the Q observed queries, B K T float32 for scores of a repeated prompt, and B T D
    for hidden states, which all heads share. A method that reads the prompt in chunks of its own holds none.
    """
    needs, a = layer.needs, layer.kind.attention
    if needs.prompt_chunk:
        return 0
    queries = share.tokens if needs.observed_queries is None else needs.observed_queries
    numbers = a.kv_heads * share.tokens * (a.head_dim + a.value_dim) + a.heads * queries * a.head_dim
    replay_scores = 4 * share.sequences * a.kv_heads * share.tokens // share.num_devices if needs.replay else 0
    hidden = share.sequences * share.tokens * share.width * share.itemsize if needs.hidden_states else 0
    return share.sequences * numbers * share.itemsize // share.num_devices + replay_scores + hidden


def _count_attention(a: AttentionKind, share: Share) -> int:
    """Counts what attention makes: queries, keys and the result of all N heads, and one block in float32.

    B T N (2 H + V) numbers, and B N Q (2 S + H + V) float32 for a block of Q queries and S keys: its scores and
    weights, its queries and its result.
    """
    queries, keys = min(ATTENTION_BLOCK, share.chunk), min(ATTENTION_BLOCK, share.tokens)
    block = 4 * a.heads // share.num_devices * queries * (2 * keys + a.head_dim + a.value_dim)
    numbers = share.chunk * a.heads * (2 * a.head_dim + a.value_dim)
    return share.sequences * (numbers * share.itemsize // share.num_devices + block)


def _count_mlp(kind: LayerKind, share: Share) -> int:
    """Counts what an MLP makes: gate, values and their product, 3 B T F numbers."""
    return share.sequences * 3 * share.chunk * _active_mlp_width(kind) * share.itemsize // share.num_devices


def _active_mlp_width(kind: LayerKind) -> int:
    """Returns the width of all MLPs of a layer that a token passes."""
    experts = kind.mlp.experts
    return kind.mlp.width if experts is None else kind.mlp.width * experts.top_k + experts.shared_width
