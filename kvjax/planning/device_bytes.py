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
from kvjax.core.gated_delta import CHUNK_TOKENS
from kvjax.core.mesh import RULES
from kvjax.engine.modes import QUERY_BLOCK_TOKENS
from kvjax.engine.prefill import require_whole_tiles
from kvjax.engine.replay import PROMPTS_OF_ALL_LAYERS
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import round_up
from kvjax.models.decoder import BLOCK_TOKENS
from kvjax.models.kinds import LayerKind
from kvjax.models.quantized_params import count_bits
from kvjax.models.sharding import abstract_params
from kvjax.planning.hardware import Hardware
from kvjax.planning.models import PlannedModel, bytes_per_weight
from kvjax.planning.traced_layers import TracedLayer, trace_layers
from kvjax.utils import arguments

ATTENTION_BLOCK = 512  # queries and keys of a block of `kvjax.core.attention.causal_attention`
MARGIN = 1.08
"""Times the bytes of a compiled program that are counted by formula: compilers add copies in other layouts."""
RESERVED = 0.08
"""Fraction of a device's memory that is left for the runtime, compiled programs and fragments."""


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device, and of the host for it.

    Attributes:
      weights: parameters.
      cache: the arrays of the cache, all slots.
      workspace: of a decode step: one layer's scores and weights, activations, logits.
      prefill: besides the weights, at the peak of reading the prompts: hidden vectors of all tokens, exact keys and
        values of one layer, activations, the states made so far. Methods that compress no layer before others have read
        the prompt hold the exact keys and values of all layers, on the device or on the host.
      host: of the cache in host memory, or of the exact keys and values that wait there.
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
      prompt_memory: as `kvjax.prefill` takes it.
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
    prompt_memory: str = "device"
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
    require_whole_tiles((x.needs for x in layers), share.chunk, share.tokens)
    cache = 4 * share.sequences + _count_caches(layers, "device")  # the cache's own lengths, i32[B]
    prefill, waiting = count_prefill(layers, share, cache, setting.prompt_memory)
    return DeviceBytes(
        weights=count_weights(setting.model, setting.dtype, along_heads, setting.weights),
        cache=cache,
        workspace=count_workspace(layers, share, context + setting.room, setting.model.config.vocab_size),
        prefill=prefill,
        host=max(_count_caches(layers, "pinned_host"), waiting),  # a host serves the parts of its own devices
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
    heads = max(x.kind.attention.heads for x in layers if x.kind.attention.recurrence is None)
    scores = 2 * 4 * heads // share.num_devices * capacity
    mlp_width = max(_active_mlp_width(x.kind) for x in layers)
    activations = share.itemsize * (4 * share.width + 2 * mlp_width // share.num_devices)
    return tokens * (scores + activations + 4 * vocab_size)


def count_prefill(layers: Sequence[TracedLayer], share: Share, cache: int, prompt_memory: str) -> tuple[int, int]:
    """Counts the bytes besides the weights at the peak of reading the prompts, and those that wait on the host.

    A layer at a time: the cache, hidden vectors of all tokens, and what a layer makes. A prompt that is read in chunks
    stands in buffers of its length. Where layers wait for others, the exact prompts of all are held, beside what a
    layer makes, or its state; if they wait on the host, one is, beside the hidden vectors of the prompts and of their
    copies while layers run, and beside the cache when the layers are compressed.

    Args:
      layers: all different layers.
      share: what the device reads.
      cache: bytes of the finished cache.
      prompt_memory: as in `Setting`.
    """

    def peak(held: int, made: int) -> int:
        return held + int(MARGIN * made)

    exact = [_count_exact_prompt(x, share) if x.has_cache else 0 for x in layers]
    attention, mlp = (max(f(x, share) for x in layers) for f in (_count_attention, _count_mlp))
    run = max(attention, mlp)
    making = max(x.making + x.device_bytes()["device"] if x.has_cache else 0 for x in layers)
    hidden, chunk_hidden = _count_hidden(layers, share, share.tokens), _count_hidden(layers, share, share.chunk)
    is_replayed = any(x.needs.replay for x in layers)
    if is_replayed or any(x.needs.global_budget or x.needs.paired_layer for x in layers):
        all_exact, copies = sum(x.count * size for x, size in zip(layers, exact, strict=True)), hidden * is_replayed
        replay, measuring = (max(f(x, share) for x in layers) for f in (_count_replay, _count_measuring))
        copies += sum(x.count * _count_gradients(x, share) for x in layers)
        making = max(making, measuring)
        if prompt_memory == "host" and any(x.needs.differentiates_replay for x in layers):
            raise KvjaxError(PROMPTS_OF_ALL_LAYERS)
        if prompt_memory == "device":
            reading = max(peak(all_exact + chunk_hidden, run), peak(all_exact + copies, replay))
            return max(reading, peak(all_exact, making), cache), 0
        reading = peak(hidden + copies + max(exact), max(run, replay, measuring))
        return max(reading, peak(cache + max(exact), making)), all_exact
    if any(x.needs.prompt_chunk for x in layers):
        # Compiled programs hold more of a chunk than the trace of attention knows: up to what the MLP makes of it.
        fed = max(x.making + _count_token_vectors(x, share) for x in layers if x.needs.prompt_chunk)
        return peak(cache + chunk_hidden, max(fed + mlp, run)), 0
    if share.chunk < share.tokens:
        return peak(cache + hidden + max(exact), max(run, making)), 0
    # What is copied to the host stands until the layer's program ends; a second time, in another layout, where keys are
    # normed, and a third time where something is made of it on the device, too (by what XLA reports for an H200).
    copied = [x.device_bytes()["pinned_host"] if x.has_cache else 0 for x in layers]

    def count_copies(layer: TracedLayer) -> int:
        has_vectors = any(kind == "device" and axes > 3 for kind, _, _, axes in layer.arrays)
        return 2 if has_vectors else int(bool(layer.kind.attention.qk_norm))

    whole = max(
        _count_attention(x, share) + x.making + size * count_copies(x) + _count_observed(x, share)
        for x, size in zip(layers, copied, strict=True)
    )
    return peak(cache + hidden, max(whole, mlp + max(copied))), 0


def _count_hidden(layers: Sequence[TracedLayer], share: Share, num_tokens: int) -> int:
    """Counts the hidden vectors, B T D numbers, and the angles of RoPE, B T R float32 for each of its widths R."""
    widths = {x.kind.attention.rope.dim for x in layers if x.kind.attention.rope is not None}
    return share.sequences * num_tokens * (share.width * share.itemsize + 4 * sum(widths))


def _count_exact_prompt(layer: TracedLayer, share: Share) -> int:
    """Counts what a layer holds of its prompt: keys, values, and what its method observes.

    B K T (H + V) numbers, B N Q H for the Q observed queries, B K T float32 for scores of a repeated prompt, and B T D
    for hidden states, which all heads share. A method that reads the prompt in chunks of its own holds none, and
    neither does a layer with a recurrence.
    """
    needs, a = layer.needs, layer.kind.attention
    if needs.prompt_chunk or a.recurrence is not None:
        return 0
    queries = share.tokens if needs.observed_queries is None else needs.observed_queries
    numbers = a.kv_heads * share.tokens * (a.head_dim + a.value_dim) + a.heads * queries * a.head_dim
    replay_scores = 4 * share.sequences * a.kv_heads * share.tokens // share.num_devices if needs.replay else 0
    hidden = share.sequences * share.tokens * share.width * share.itemsize if needs.hidden_states else 0
    return share.sequences * numbers * share.itemsize // share.num_devices + replay_scores + hidden


def _count_attention(layer: TracedLayer, share: Share) -> int:
    """Counts what the attention of a layer makes of the tokens that are read at once.

    That is `_count_token_vectors`, and for a block of Q queries and S keys B N Q (2 S + H + 2 V) and B K S (H + V)
    float32: its scores and weights, its queries, its result before and after it, keys and values.
    """
    a = layer.kind.attention
    if a.recurrence is not None:
        return _count_recurrence(layer, share)
    queries, keys = min(ATTENTION_BLOCK, share.chunk), min(ATTENTION_BLOCK, share.tokens)
    block = a.heads * queries * (2 * keys + a.head_dim + 2 * a.value_dim) + a.kv_heads * keys * (
        a.head_dim + a.value_dim
    )
    return _count_token_vectors(layer, share) + share.sequences * (4 * block // share.num_devices)


def _count_token_vectors(layer: TracedLayer, share: Share) -> int:
    """Counts what a layer makes of each token that is read at once, before and after attention.

    First the normed input and queries, B T (D + N H) numbers, then queries and results, B T N (H + V). Keys and values
    of a chunk stand beside those of the prompt, and in a layer with a window those of its blocks. Where the output has
    a gate, the normed input stands until that is made.
    """
    a = layer.kind.attention
    own_heads = a.heads * a.head_dim // share.num_devices
    widest = own_heads + max(share.width, a.heads * a.value_dim // share.num_devices)
    if a.output_gate:
        widest += share.width
    if share.chunk < share.tokens or a.rule.window is not None:
        widest += a.kv_heads * (a.head_dim + a.value_dim) // share.num_devices
    return share.sequences * share.chunk * widest * share.itemsize


def _count_recurrence(layer: TracedLayer, share: Share) -> int:
    """Counts what a layer with a recurrence makes of the tokens that are read at once.

    The normed input, B T D numbers; queries, keys and values before their convolution, B T (2 K H + N V) numbers, and
    after it in float32, each twice, since they are joined and cut into chunks; where the model's numbers are smaller,
    the former in float32, too; results, B T N V float32; for a chunk of C tokens B N C (4 C + 4 V) float32.
    """
    a = layer.kind.attention
    mixed = (2 * a.kv_heads * a.head_dim + a.heads * a.value_dim) // share.num_devices
    values, heads = a.heads * a.value_dim // share.num_devices, a.heads // share.num_devices
    for_token = share.itemsize * (share.width + 2 * mixed) + 4 * (2 * mixed + values)
    for_token += 4 * mixed if share.itemsize < 4 else 0
    chunk = min(CHUNK_TOKENS, share.chunk)
    return share.sequences * (share.chunk * for_token + 4 * heads * chunk * 4 * (chunk + a.value_dim))


def _count_replay(layer: TracedLayer, share: Share) -> int:
    """Counts what a layer makes of a copy of a part of the prompt, which the model repeats (KVzip).

    A block of Q queries makes B N Q T float32 scores to the T tokens of the prompt, and as many weights of the cache's
    dtype, beside the activations of the copy.
    """
    if (replay := layer.needs.replay) is None:
        return 0
    copy = share._replace(chunk=min(replay.chunk_tokens + replay.lead_tokens, share.tokens))
    numbers = share.sequences * layer.kind.attention.heads * min(QUERY_BLOCK_TOKENS, copy.chunk) * share.tokens
    scores = numbers * (4 + share.itemsize) // share.num_devices
    work = max(_count_attention(layer, copy) + scores, _count_mlp(layer, copy))
    return 2 * work if replay.needs_gradients else work  # gradients beside what they are of


def _count_gradients(layer: TracedLayer, share: Share) -> int:
    """Counts the hidden vectors of a copy before a layer, B T D numbers, which stay until it is differentiated."""
    replay = layer.needs.replay
    if replay is None or not replay.needs_gradients:
        return 0
    return share.sequences * min(replay.chunk_tokens + replay.lead_tokens, share.tokens) * share.width * share.itemsize


def _count_observed(layer: TracedLayer, share: Share) -> int:
    """Counts the copy of all queries of a prompt in the layout in which a method observes them, B N T H numbers."""
    a = layer.kind.attention
    if layer.needs.observed_queries is not None:
        return 0
    return share.sequences * share.tokens * a.heads * a.head_dim * share.itemsize // share.num_devices


def _count_measuring(layer: TracedLayer, share: Share) -> int:
    """Counts what a method makes that observes all queries of a prompt: B N T H float32, beside B K T H numbers."""
    a = layer.kind.attention
    if layer.needs.observed_queries is not None:
        return 0
    numbers = share.sequences * share.tokens * a.head_dim // share.num_devices
    return numbers * (4 * a.heads + share.itemsize * a.kv_heads)


def _count_mlp(layer: TracedLayer, share: Share) -> int:
    """Counts what the MLP of a layer makes of a block of tokens.

    For each token its normed input, D numbers, and gate, values and their product, F each. Experts take a row for each
    token and chosen expert and pad those of each expert, to twice as many at most: D and 8 F for each row, since gate
    and values are loops whose results stand twice. A shared expert makes what an MLP does beside 6 F for each row.
    """
    kind, experts, width = layer.kind.mlp, layer.kind.mlp.experts, share.width
    if experts is None:
        numbers = width + 3 * kind.width // share.num_devices
    else:
        inner, shared = (n // share.num_devices for n in (experts.top_k * kind.width, experts.shared_width))
        numbers = width + experts.top_k * width + max(8 * inner, 6 * inner + 3 * shared)
    tokens = share.chunk if share.chunk < 2 * BLOCK_TOKENS else BLOCK_TOKENS
    return share.sequences * tokens * numbers * share.itemsize


def _active_mlp_width(kind: LayerKind) -> int:
    """Returns the width of all MLPs of a layer that a token passes."""
    experts = kind.mlp.experts
    return kind.mlp.width if experts is None else kind.mlp.width * experts.top_k + experts.shared_width
