"""`plan`: what a model under methods needs on a device, and how fast a roofline lets it be; nothing is run.

Bytes of caches are those of the arrays that the engine makes, divided over a mesh as it divides them: they are exact.
Weights are, too. Activations and scores, which a program needs besides, follow from formulas, and speed from the peaks
of `kvjax.planning.hardware`: a real program is slower. `Plan` and `Speed` say what is in each number.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from kvjax.cache.protocol import KVMethod, LayerState, Needs
from kvjax.core import memory
from kvjax.core.mesh import RULES, axes_of_layer_array, check_divides
from kvjax.core.step_bytes import StepBytes
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import round_up
from kvjax.generation.memory_plan import count_layers, count_step_bytes, trace_state_read
from kvjax.models.config import Config
from kvjax.models.kinds import AttentionKind, LayerKind
from kvjax.models.sharding import abstract_params, divided_sizes
from kvjax.planning.hardware import Hardware, find_hardware
from kvjax.planning.models import PlannedModel, find_model
from kvjax.planning.ranking import count_ranked
from kvjax.registry.strings import method_of, name_of
from kvjax.utils import arguments

ATTENTION_BLOCK = 512  # queries and keys of a block of `kvjax.core.attention.causal_attention`
RESERVED = 0.08
"""Fraction of a device's memory that is left for the runtime, compiled programs and fragments."""
COLLECTIVE_SECONDS = 10e-6
"""Estimated seconds of an all-reduce of few bytes among the devices of one host; no vendor states it."""
MOST_KINDS = 6  # of layers that are all traced, see `trace_layers`
MOST_SEQUENCES = 2**16  # largest batch that is looked for


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of one device, and of the host for it.

    Attributes:
      weights: parameters.
      cache: the arrays of the cache, all slots.
      workspace: of a decode step: one layer's scores and weights, activations, logits.
      reading: besides the weights, at the peak of reading the prompts: exact keys and values, the states that are made
        of them, activations. Methods whose layers share one budget, and prompts read in chunks, hold the exact keys and
        values of all layers; others those of one layer at a time.
      host: of the cache in host memory.
    """

    weights: int
    cache: int
    workspace: int
    reading: int
    host: int

    @property
    def device(self) -> int:
        """Bytes of the device at the peak."""
        return self.weights + max(self.cache + self.workspace, self.reading)

    def excess(self, device_bytes: int, host_bytes: int) -> float:
        """Returns by which fraction the memory is exceeded that lacks most; at most 0 where both hold it."""
        return max(self.device / max(device_bytes, 1), self.host / max(host_bytes, 1)) - 1


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of one decode step on one device, by what they are spent on.

    Reading of memory and multiplying overlap, so that the slower of the two counts. Copies over the host's link and
    sums over devices are taken to wait for them and to be waited for: a method that overlaps its copies is faster.

    Attributes:
      weights: reading parameters.
      cache: reading and writing the cache in device memory, or decoding it, where that was measured and takes longer.
      compute: multiplications and additions.
      host_link: copies between host and device.
      host_memory: reads of the cache by the host's own processors.
      collectives: sums over the devices of the mesh.
      launches: each layer's starting of programs and small operations; 0 for devices that were not measured.
      search: ranking of scores to choose what is read; 0 for devices that were not measured.
    """

    weights: float
    cache: float
    compute: float
    host_link: float
    host_memory: float
    collectives: float
    launches: float
    search: float

    @property
    def step(self) -> float:
        """Seconds of the step."""
        waiting = self.host_link + self.host_memory + self.collectives + self.launches + self.search
        return max(self.weights + self.cache, self.compute) + waiting

    @property
    def binds(self) -> str:
        """The part of the step that takes most of its seconds."""
        parts = dataclasses.asdict(self)
        if self.compute < self.weights + self.cache:
            del parts["compute"]
        else:
            del parts["weights"], parts["cache"]
        names = {"cache": "cache reads", "host_link": "host link", "host_memory": "host memory"}
        name = max(parts, key=parts.__getitem__)
        return names.get(name, name)


PROPERTIES = ("fits", "largest_batch", "batch_limit", "tokens_per_second", "largest_tokens_per_second")
"""Names of the properties that follow from a plan's fields."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model under one method at one context.

    Attributes:
      method: its string.
      context: tokens of each sequence.
      batch: sequences, on all devices together.
      refusal: why the method cannot serve the model, or cannot be divided over the mesh; the other fields are then
        None.
      need: bytes of one device.
      spare: bytes of one device that are left; below 0, how much is missing.
      host_spare: the same of the host, for each device.
      largest_batches: sequences that fit at this context by each limit: "device memory", "reading the prompt" and "host
        memory".
      largest_context: tokens that fit in this batch, at most the model's positions.
      prefill_seconds: until the prompts are read.
      speed: of a step of this batch.
      speed_at_largest: of a step of the largest batch; None where not even one sequence fits.
    """

    method: str
    context: int
    batch: int
    refusal: str | None = None
    need: Need | None = None
    spare: int | None = None
    host_spare: int | None = None
    largest_batches: Mapping[str, int] | None = None
    largest_context: int | None = None
    prefill_seconds: float | None = None
    speed: Speed | None = None
    speed_at_largest: Speed | None = None

    @property
    def fits(self) -> bool:
        """Whether device and host hold it."""
        return self.refusal is None and min(self.spare or 0, self.host_spare or 0) >= 0

    @property
    def largest_batch(self) -> int | None:
        """Sequences that fit at this context."""
        return None if self.largest_batches is None else min(self.largest_batches.values())

    @property
    def batch_limit(self) -> str | None:
        """The limit that the largest batch reaches."""
        return None if not self.largest_batches else min(self.largest_batches, key=self.largest_batches.__getitem__)

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of all sequences of the batch together."""
        return None if self.speed is None else self.batch / self.speed.step

    @property
    def largest_tokens_per_second(self) -> float | None:
        """Rate of all sequences of the largest batch together."""
        return None if self.speed_at_largest is None else (self.largest_batch or 0) / self.speed_at_largest.step

    def to_json(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
        speeds = {
            name: None if speed is None else dataclasses.asdict(speed) | {"step": speed.step, "binds": speed.binds}
            for name, speed in (("speed", self.speed), ("speed_at_largest", self.speed_at_largest))
        }
        need = None if self.need is None else dataclasses.asdict(self.need) | {"device": self.need.device}
        rates = {name: getattr(self, name) for name in PROPERTIES}
        return dataclasses.asdict(self) | {"need": need} | speeds | rates


class TracedLayer(NamedTuple):
    """Equal layers of a model under a method, of all devices together."""

    needs: Needs
    kind: LayerKind
    count: int  # layers that are like this
    slots: int
    # (memory kind, parts, dtype, axes) -> bytes; of a layer that reads another layer's cache, those of that cache
    arrays: Mapping[tuple[str, tuple[int, int], str, int], int]
    step: StepBytes
    coded_values: int  # numbers that a step decodes

    def device_bytes(self) -> dict[str, int]:
        """Bytes on one device of the mesh, by memory kind."""
        total = dict.fromkeys(memory.MEMORY_KINDS, 0)
        for (kind, (along_data, along_heads), *_), size in self.arrays.items():
            total[kind] += size // (along_data * along_heads)
        return total

    def all_bytes(self) -> dict[str, int]:
        """Bytes on a single device that holds all, by memory kind."""
        total = dict.fromkeys(memory.MEMORY_KINDS, 0)
        for (kind, *_), size in self.arrays.items():
            total[kind] += size
        return total


@dataclasses.dataclass(frozen=True)
class Setting:
    """The choices that all plans of one call share: the model, the devices and how prompts are read."""

    model: PlannedModel
    hardware: Hardware
    mesh: tuple[int, int]  # devices along the sequences, and along the heads
    dtype: str
    room: int
    chunk: int | None
    reserved: float

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that programs can use."""
        return int(self.hardware.memory_bytes * (1 - self.reserved))


def plan(
    model: str | PlannedModel,
    methods: Sequence[str | KVMethod],
    contexts: Sequence[int],
    *,
    batch: int = 1,
    mesh: tuple[int, int] = (1, 1),
    hardware: str | Hardware = "h100",
    dtype: Any = "bfloat16",
    room: int = 0,
    chunk: int | None = None,
    reserved: float = RESERVED,
    limits: bool = True,
) -> list[Plan]:
    """Plans a model under each method at each context.

    Args:
      model: as `kvjax.planning.models.find_model` finds it.
      methods: methods, or their strings.
      contexts: tokens of a prompt.
      batch: sequences, on all devices together.
      mesh: devices along the sequences, and along the key/value heads.
      hardware: a name of `kvjax.planning.hardware.CATALOGUE`, or a device.
      dtype: of weights, and of what a method stores exactly.
      room: tokens that each sequence may get after its prompt.
      chunk: tokens of a prompt that are read at a time; None for all at once, or as the method asks.
      reserved: fraction of a device's memory that programs cannot use.
      limits: whether to look for the largest batch and context; without, their fields are None.

    Returns:
      A plan for each method and context, the contexts of one method together. A method that cannot serve the model has
      a refusal for a plan.

    Raises:
      KvjaxError: an unknown model or device, a context beyond the model's positions, a number out of range, and a mesh
        over which the model's heads, MLP or vocabulary, or the sequences, do not divide.
    """
    model = find_model(model) if isinstance(model, str) else model
    hardware = find_hardware(hardware) if isinstance(hardware, str) else hardware
    for name, value in (("batch", batch), ("mesh", mesh[0]), ("mesh", mesh[1])):
        arguments.integer(name, value, 1, MOST_SEQUENCES)
    arguments.integer("room", room, 0, model.config.max_positions)
    arguments.number("reserved", reserved, 0.0, 0.99)
    if chunk is not None:
        arguments.integer("chunk", chunk)
    for context in contexts:
        arguments.integer("context", context)
        if context + room > model.config.max_positions:
            raise KvjaxError(
                f"context {context:,}{f' with room for {room:,} more' if room else ''} exceeds the "
                f"{model.config.max_positions:,} positions of {model.name}; plan for fewer tokens, or for a checkpoint "
                "with RoPE scaling: a config.json whose max_position_embeddings says how far it was extended"
            )
    setting = Setting(model, hardware, mesh, arguments.float_type(dtype).name, room, chunk, reserved)
    check_mesh(setting, batch)
    return [plan_method(setting, method, context, batch, limits) for method in methods for context in contexts]


def check_mesh(setting: Setting, batch: int) -> None:
    """Raises KvjaxError, with the size that does not divide, for a mesh that the engine would refuse."""
    mesh: Any = AbstractMesh(setting.mesh, (RULES["B"], RULES["K"]))  # sizes alone: no device of it is here
    names = {"K": "kv_heads", "F": "mlp_width", "V": "vocab_size"}
    for letter, size in divided_sizes(setting.model.config):
        name = names[letter]
        remedy = f"it is {name} of {setting.model.name}: take a mesh BATCHxHEADS whose second number divides all three"
        check_divides(letter, size, mesh, f"{remedy} of kv_heads, mlp_width and vocab_size")
    check_divides("B", batch, mesh, f"plan for a batch that is a multiple of {setting.mesh[0]}, or another mesh")


def plan_method(setting: Setting, method: str | KVMethod, context: int, batch: int, limits: bool = True) -> Plan:
    """Plans one method at one context."""
    name = method if isinstance(method, str) else name_of(method)
    method = method_of(method)
    try:
        need = count_need(setting, method, context, batch)
    except KvjaxError as e:
        return Plan(name, context, batch, refusal=str(e))
    usable, host = setting.usable_bytes, setting.hardware.host_bytes
    found = Plan(
        name,
        context,
        batch,
        need=need,
        spare=usable - need.device,
        host_spare=host - need.host,
        prefill_seconds=estimate_prefill(setting, method, context, batch),
        speed=estimate_step(setting, method, context, batch),
    )
    if not limits:
        return found
    batches = find_largest_batches(setting, method, context)
    largest = min(batches.values())
    return dataclasses.replace(
        found,
        largest_batches=batches,
        largest_context=find_largest_context(setting, method, context, batch),
        speed_at_largest=estimate_step(setting, method, context, largest) if largest else None,
    )


def find_largest_batches(setting: Setting, method: KVMethod, context: int) -> dict[str, int]:
    """Finds the sequences that fit by each limit, as `Plan.largest_batches` has them."""
    usable, host, data = setting.usable_bytes, setting.hardware.host_bytes, setting.mesh[0]
    # Bytes grow linearly with the batch, from an offset that all sequences share.
    one, two = (count_need(setting, method, context, n * data) for n in (1, 2))

    def count_fitting(read: Callable[[Need], int], most: int) -> int:
        growth = read(two) - read(one)
        if read(one) > most:
            return 0
        return data * (MOST_SEQUENCES if growth <= 0 else min(MOST_SEQUENCES, 1 + (most - read(one)) // growth))

    return {
        "device memory": count_fitting(lambda n: n.weights + n.cache + n.workspace, usable),
        "reading the prompt": count_fitting(lambda n: n.weights + n.reading, usable),
        "host memory": count_fitting(lambda n: n.host, host),
    }


def find_largest_context(setting: Setting, method: KVMethod, context: int, batch: int) -> int:
    """Finds the largest number of tokens that fits; 0 where none does.

    Steps are 1,024 tokens for models of many positions, else 64; finer where not even the first step fits.

    Args:
      setting: what all plans share.
      method: the method.
      context: tokens that the method does not refuse.
      batch: sequences.
    """
    most = setting.model.config.max_positions - setting.room

    def excess(tokens: int) -> float:  # above 0 where it does not fit; in fractions of each memory
        try:
            return count_need(setting, method, tokens, batch).excess(setting.usable_bytes, setting.hardware.host_bytes)
        except KvjaxError:  # a method may refuse prompts that are shorter than what it keeps, or too long for its table
            return -1.0 if tokens < context else 1.0

    step = 1024 if most >= 32_768 else 64
    low, high = min(step, most), most
    at_low, at_high = excess(low), excess(high)
    while at_low > 0 and step > 1:
        step = 64 if step > 64 else 1
        low, high, at_high = min(step, low), low, at_low
        at_low = excess(low)
    if at_high <= 0 or at_low > 0:
        return high if at_high <= 0 else 0
    rounds = 0
    while high - low > step:
        # Bytes are almost linear in the tokens: the straight line's end, and then the step beyond it, decide. Halves,
        # every third time, end what is not linear.
        rounds += 1
        guess = (low + high) / 2 if rounds % 3 == 0 else low + (high - low) * -at_low / (at_high - at_low)
        middle = min(max(int(guess // step) * step, low + step), (high - 1) // step * step)
        at = excess(middle)
        if at <= 0:
            low, at_low = middle, at
        else:
            high, at_high = middle, at
    try:
        count_need(setting, method, low, batch)
    except KvjaxError:
        return 0
    return low


bind_once = functools.lru_cache(maxsize=64)(bind)  # the same layers at every context and batch; 80 of them take a while


@functools.lru_cache(maxsize=512)
def trace_layers(
    method: KVMethod, config: Config, context: int, room: int, batch: int, dtype: str, mesh: tuple[int, int]
) -> tuple[TracedLayer, ...]:
    """Traces the states of all different layers after prompts of `context` tokens."""
    capacity, width = context + room, round_up(context)
    counts = count_layers(bind_once(method, config), config, context, capacity)

    @functools.cache
    def trace(call: LayerCall) -> TracedLayer:
        assert call.kind is not None
        layer, a = call.layer, call.kind.attention
        state = trace_state_read(call, config, min(width, capacity), batch, arguments.float_type(dtype))
        arrays = collections.Counter()
        for x in jax.tree.leaves(state):
            axes = axes_of_layer_array(x.shape, batch, a.kv_heads).split() if mesh != (1, 1) else ()
            parts = (mesh[0] if "B" in axes else 1, mesh[1] if "K" in axes else 1)
            arrays[memory.memory_kind(x), parts, x.dtype.name, len(x.shape)] += x.size * x.dtype.itemsize
        step = count_step_bytes(layer, state)
        coded = count_coded(state, batch * a.kv_heads * a.head_dim, batch * a.kv_heads * a.value_dim)
        return TracedLayer(layer.needs, call.kind, counts[call], call.num_slots, arrays, step, coded)

    found = {}
    for kind in dict.fromkeys(call.kind for call in counts):
        ordered = sorted((call for call in counts if call.kind == kind), key=lambda call: call.num_slots)
        low, high, last = trace(ordered[0]), trace(ordered[-1]), len(ordered) - 1
        # PyramidKV gives each layer slots of its own, and tracing all takes seconds: where four layers lie on one line
        # in every number, the others do.
        are_on_line = last >= MOST_KINDS and all(
            between(low, high, x.slots, x.count) == x for x in (trace(ordered[i]) for i in (last // 3, 2 * last // 3))
        )
        for call in ordered:
            on_line = between(low, high, call.num_slots, counts[call]) if are_on_line else None
            found[call] = on_line or trace(call)
    return tuple(found[call] for call in counts)


def between(low: TracedLayer, high: TracedLayer, slots: int, count: int) -> TracedLayer | None:
    """The layer with `slots` slots on the line through two others; None where a number of it would be no integer."""

    def interpolate(a: int, b: int) -> int:
        value, rest = divmod((b - a) * (slots - low.slots), high.slots - low.slots)
        if rest:
            raise ValueError
        return a + value

    if low.slots == high.slots or low.needs != high.needs or low.arrays.keys() != high.arrays.keys():
        return None
    try:
        arrays = collections.Counter({key: interpolate(low.arrays[key], high.arrays[key]) for key in low.arrays})
        step = StepBytes(*map(interpolate, dataclasses.astuple(low.step), dataclasses.astuple(high.step)))
        coded = interpolate(low.coded_values, high.coded_values)
    except ValueError:
        return None
    return TracedLayer(low.needs, low.kind, count, slots, arrays, step, coded)


def count_coded(state: Any, *numbers_per_slot: int) -> int:
    """Counts the numbers of keys and values that a layer's state holds as codes."""
    if not isinstance(state, LayerState):
        return 0

    def is_coded(store: Any) -> bool:
        leaves = jax.tree.leaves(store, is_leaf=lambda x: isinstance(x, memory.Buffer))
        dtypes = [jnp.dtype(x.dtype) for x in leaves if isinstance(x, memory.Buffer) and x.data.size]
        return any(dtype.itemsize == 1 or jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)

    coded = (n for store, n in zip((state.k, state.v), numbers_per_slot, strict=True) if is_coded(store))
    return sum(coded) * state.pos.shape[2]


@functools.lru_cache(maxsize=64)
def count_weights(model: PlannedModel, dtype: str, num_devices: int, num_tokens: int | None = None) -> float:
    """Bytes of the parameters on one device along the heads; with `num_tokens`, of the experts that these use alone."""
    c = model.config
    # Layers of a kind have equal parameters, and tracing all of a large model takes seconds.
    params = abstract_params(c.with_layers(range(len(c.kinds))), dtype)
    axes, total = nn.get_partition_spec(params), 0.0

    def add(path: Any, x: Any, letters: PartitionSpec) -> None:
        nonlocal total
        parts = num_devices if any(RULES.get(letter) == RULES["K"] for letter in " ".join(letters).split()) else 1
        name, times = path[0].key, 1.0
        if name.startswith("layer_"):
            kind = int(name.removeprefix("layer_"))
            times, experts = c.pattern.count(kind), c.kinds[kind].mlp.experts
            if experts is not None and num_tokens is not None and letters and letters[0] == "E":
                # Each token draws its experts by itself; several share some of them.
                times *= 1 - (1 - experts.top_k / experts.count) ** num_tokens
        total += times * x.size * x.dtype.itemsize / parts

    jax.tree_util.tree_map_with_path(add, nn.unbox(params), axes)
    # How a program would divide what kvjax does not run is not known: evenly, as most matrices are.
    return total + model.other_parameters * arguments.float_type(dtype).itemsize / num_devices


def active_mlp_width(kind: LayerKind) -> int:
    """Returns the width of all MLPs of a layer that a token passes."""
    experts = kind.mlp.experts
    return kind.mlp.width if experts is None else kind.mlp.width * experts.top_k + experts.shared_width


def count_need(setting: Setting, method: KVMethod, context: int, batch: int) -> Need:
    """Counts the bytes of one device; raises KvjaxError where the method cannot serve the model or the mesh."""
    model, (data, heads), dtype = setting.model, setting.mesh, arguments.float_type(setting.dtype)
    c, local, itemsize = model.config, batch // data, dtype.itemsize
    layers = trace_layers(method, c, context, setting.room, batch, dtype.name, setting.mesh)
    # Layers that read another layer's cache hold none, and the bytes that they read are those of that layer.
    nothing = dict.fromkeys(memory.MEMORY_KINDS, 0)
    has_cache = [layer.kind.attention.reads_layer is None for layer in layers]
    divided = [layer.device_bytes() if own else nothing for layer, own in zip(layers, has_cache, strict=True)]
    counts, needs = [layer.count for layer in layers], [layer.needs for layer in layers]
    kinds = [layer.kind for layer in layers]
    cache = 4 * local + sum(n * size["device"] for n, size in zip(counts, divided, strict=True))
    fed = min((n.prompt_chunk for n in needs if n.prompt_chunk), default=None)
    width = round_up(context)
    at_once = min(setting.chunk or fed or width, width)

    def count_exact(layer: TracedLayer) -> int:  # what a layer's prompt holds: keys, values, what its method observes
        needs, a = layer.needs, layer.kind.attention
        if needs.prompt_chunk:
            return 0
        queries = width if needs.observed_queries is None else needs.observed_queries
        per_head = a.kv_heads * width * (a.head_dim + a.value_dim) + a.heads * queries * a.head_dim
        scores = 4 * local * a.kv_heads * width // heads if needs.replay else 0
        shared = local * width * c.width * itemsize if needs.hidden_states else 0
        return local * per_head * itemsize // heads + scores + shared

    # XLA's program of a layer holds its input, the stream and its output, and then what attention or the MLP makes: the
    # temporary bytes that the compiler reports for a layer of an 8B model, to 4%.
    queries, keys = min(ATTENTION_BLOCK, at_once), min(ATTENTION_BLOCK, width)

    def count_attention(a: AttentionKind) -> int:
        blocks = 4 * a.heads // heads * queries * (2 * keys + a.head_dim + a.value_dim)
        return local * (at_once * a.heads * (2 * a.head_dim + a.value_dim) * itemsize // heads + blocks)

    attention = max(count_attention(kind.attention) for kind in kinds)
    mlp = local * 3 * at_once * max(map(active_mlp_width, kinds)) * itemsize // heads
    stream = 3 * local * at_once * c.width * itemsize
    exact = [count_exact(layer) if own else 0 for layer, own in zip(layers, has_cache, strict=True)]
    if setting.chunk or any(n.global_budget or n.replay or n.paired_layer for n in needs):
        held = sum(n * size for n, size in zip(counts, exact, strict=True))
        # Each layer's prompt is dropped once its state has been made of it.
        reading = max(held + max(stream + max(attention, mlp), *(size["device"] for size in divided)), cache)
    else:
        reading = cache + stream + max(max(exact) + attention, mlp)
    tokens = 1 + max(n.draft_tokens for n in needs)
    query_heads, mlp_width = max(kind.attention.heads for kind in kinds), max(map(active_mlp_width, kinds))
    step = 2 * 4 * query_heads // heads * (context + setting.room) + itemsize * (4 * c.width + 2 * mlp_width // heads)
    return Need(
        weights=int(count_weights(model, dtype.name, heads)),
        cache=cache,
        workspace=local * tokens * (step + 4 * c.vocab_size),
        reading=reading,
        # A host serves its devices' parts of the cache.
        host=sum(n * size["pinned_host"] for n, size in zip(counts, divided, strict=True)),
    )


def estimate_step(setting: Setting, method: KVMethod, context: int, batch: int) -> Speed:
    """Estimates the seconds of one decode step after prompts of `context` tokens."""
    model, (data, heads), hardware = setting.model, setting.mesh, setting.hardware
    c, local, itemsize = model.config, batch // data, arguments.float_type(setting.dtype).itemsize
    read = written = link = host = pairs = coded = 0.0
    draft = 0
    for layer in trace_layers(method, c, context, setting.room, batch, setting.dtype, setting.mesh):
        whole, part = layer.all_bytes(), layer.device_bytes()
        # What all heads share is read on each device; by how much that adds is known of the arrays as a whole.
        on_device, on_host = (part[kind] / max(whole[kind], 1) for kind in memory.MEMORY_KINDS)
        read += layer.count * layer.step.device * on_device
        written += layer.count * layer.step.device_written * on_device
        link += layer.count * (layer.step.link + layer.step.host_written) * on_host
        host += layer.count * layer.step.host * on_host
        a = layer.kind.attention
        pairs += layer.count * layer.slots * a.heads * (a.head_dim + a.value_dim)
        # A reader of few tokens decodes these alone.
        fraction = min(1.0, layer.step.device / max(whole["device"], 1))
        coded += layer.count * layer.coded_values * fraction / (data * heads)
        draft = max(draft, layer.needs.draft_tokens)
    tokens = local * (1 + draft)
    weights = count_weights(model, setting.dtype, heads, tokens)
    if not c.tie_embeddings:  # only the tokens' own rows are read
        weights -= max(c.vocab_size // heads - tokens, 0) * c.width * itemsize
    multiplied = 2 * tokens * model.active_parameters / heads
    attention = 2 * tokens * pairs / heads
    # Two sums over the heads' devices a layer, as rings, and the logits of all parts of the vocabulary.
    summed = 2 * c.layers * 2 * tokens * c.width * itemsize + local * c.vocab_size * 4
    collectives = 0.0
    if heads > 1:
        collectives = (heads - 1) / heads * summed / hardware.device_link + (2 * c.layers + 1) * COLLECTIVE_SECONDS
    search = 0.0
    if hardware.ranked_values is not None:
        ranked = count_ranked(method, c, context, setting.room, batch, setting.dtype)
        search = ranked / (data * heads) / hardware.ranked_values
    return Speed(
        weights=weights / hardware.memory_bandwidth,
        cache=max(
            (read + written) / (hardware.cache_bandwidth or hardware.memory_bandwidth),
            coded / (hardware.decoded_values or math.inf),
        ),
        compute=(multiplied + attention) / hardware.flops,
        host_link=link / hardware.host_link,
        host_memory=host / hardware.host_bandwidth,
        collectives=collectives,
        launches=(c.layers + model.other_layers) * hardware.layer_seconds,
        search=search,
    )


def estimate_prefill(setting: Setting, method: KVMethod, context: int, batch: int) -> float:
    """Estimates the seconds of reading prompts of `context` tokens: products, causal attention, copies to the host."""
    model, (data, heads), hardware = setting.model, setting.mesh, setting.hardware
    c, local, itemsize = model.config, batch // data, arguments.float_type(setting.dtype).itemsize
    head = c.vocab_size * c.width  # multiplied for the last token alone
    matrices = model.active_parameters - head
    products = 0.0
    for a in (c.kind(i).attention for i in range(c.layers)):
        # Half of the pairs are in the future where a layer has no window.
        seen = context / 2 if a.rule.window is None or a.rule.window >= context else a.rule.window
        products += context * seen * a.heads * (a.head_dim + a.value_dim)
    passes = 1 + any(layer.needs.replay is not None for layer in bind_once(method, c))
    operations = passes * local * (2 * matrices * context + 2 * products) + local * 2 * head
    computing = operations / heads / hardware.flops
    reading = count_weights(model, setting.dtype, heads) / hardware.memory_bandwidth
    sent = 2 * c.layers * 2 * local * context * c.width * itemsize * (heads - 1) / heads
    collectives = sent / hardware.device_link + (2 * c.layers * COLLECTIVE_SECONDS if heads > 1 else 0)
    host = count_need(setting, method, context, batch).host / hardware.host_link
    return max(computing, reading) + collectives + host
