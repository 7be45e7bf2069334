"""`plan`: what a model under methods needs on a device, and the most tokens a second that it allows; nothing is run."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from kvjax.cache.protocol import KVMethod
from kvjax.core.mesh import RULES, check_divides
from kvjax.core.quantized_kernel import check_weights
from kvjax.errors import KvjaxError
from kvjax.models.sharding import divided_sizes
from kvjax.planning.device_bytes import RESERVED, DeviceBytes, Setting, count_device_bytes
from kvjax.planning.hardware import Hardware, find_hardware
from kvjax.planning.models import PlannedModel, find_model
from kvjax.registry.strings import method_of, name_of
from kvjax.utils import arguments

MAX_SEQUENCES = 2**16  # largest batch that is looked for


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A model under one method at one context.

    Attributes:
      method: its string.
      context: tokens of each sequence.
      batch: sequences, on all devices together.
      refusal: why the method cannot serve the model, or cannot be divided over the mesh; the other fields are then
        None.
      device_bytes: what one device needs, and the host for it.
      spare: bytes of one device that are left; below 0, how much is missing.
      host_spare: the same of the host, for each device.
      max_tokens_per_second: of all sequences of the batch together, see `bound_tokens_per_second`.
      largest_batches: sequences that fit at this context by each limit: "device memory", "reading the prompt" and "host
        memory".
      largest_context: tokens that fit in this batch, at most the model's positions.
    """

    method: str
    context: int
    batch: int
    refusal: str | None = None
    device_bytes: DeviceBytes | None = None
    spare: int | None = None
    host_spare: int | None = None
    max_tokens_per_second: float | None = None
    largest_batches: Mapping[str, int] | None = None
    largest_context: int | None = None

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

    def to_json(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
        peak = {} if self.device_bytes is None else {"device_peak": self.device_bytes.peak}
        properties = {name: getattr(self, name) for name in ("fits", "largest_batch", "batch_limit")}
        return dataclasses.asdict(self) | peak | properties


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
    prompt_memory: str = "device",
    limits: bool = True,
    weights: str | None = None,
) -> list[PlanRow]:
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
      prompt_memory: as `kvjax.prefill` takes it.
      limits: whether to look for the largest batch and context; without, their fields are None.
      weights: "int8" or "int4" for kernels in codes, as `kvjax.load` holds them; None for kernels in `dtype`.

    Returns:
      A row for each method and context, the contexts of one method together. A method that cannot serve the model has
      a refusal for a plan.

    Raises:
      KvjaxError: an unknown model or device, a context beyond the model's positions, a number out of range, and a mesh
        over which the model's heads, MLP or vocabulary, or the sequences, do not divide.
    """
    model = find_model(model) if isinstance(model, str) else model
    hardware = find_hardware(hardware) if isinstance(hardware, str) else hardware
    for name, value in (("batch", batch), ("mesh", mesh[0]), ("mesh", mesh[1])):
        arguments.integer(name, value, 1, MAX_SEQUENCES)
    arguments.integer("room", room, 0, model.config.max_positions)
    arguments.number("reserved", reserved, 0.0, 0.99)
    check_weights(weights)
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
    if prompt_memory not in ("device", "host"):
        raise KvjaxError(f'prompt_memory must be "device" or "host", got {prompt_memory!r:.80}')
    dtype = arguments.float_type(dtype).name
    setting = Setting(model, hardware, mesh, dtype, room, chunk, reserved, prompt_memory, weights)
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


def plan_method(setting: Setting, method: str | KVMethod, context: int, batch: int, limits: bool = True) -> PlanRow:
    """Plans one method at one context."""
    name = method if isinstance(method, str) else name_of(method)
    method = method_of(method)
    try:
        needed = count_device_bytes(setting, method, context, batch)
    except KvjaxError as e:
        return PlanRow(name, context, batch, refusal=str(e))
    return PlanRow(
        name,
        context,
        batch,
        device_bytes=needed,
        spare=setting.usable_bytes - needed.peak,
        host_spare=setting.hardware.host_bytes - needed.host,
        max_tokens_per_second=bound_tokens_per_second(setting, method, context, batch),
        largest_batches=find_largest_batches(setting, method, context) if limits else None,
        largest_context=find_largest_context(setting, method, context, batch) if limits else None,
    )


def bound_tokens_per_second(setting: Setting, method: KVMethod, context: int, batch: int) -> float:
    """Bounds the tokens of all sequences that are decoded in a second after prompts of `context` tokens.

    A step takes no less than the slower of two paths: the bytes that it must read from a device's memory over its
    bandwidth, and those that it must copy from the host over the link. The first are the weights that one token uses
    (several tokens may draw further experts) and the cache. Writing, computing and starting programs come on top.
    """
    cache = copied = 0.0
    for layer in setting.trace_layers(method, context, batch):
        device, link = layer.read_bytes()
        cache += layer.count * device
        copied += layer.count * link
    weights = setting.model.active_bytes(setting.dtype, setting.weights) / setting.mesh[1]
    hardware = setting.hardware
    return batch / max((weights + cache) / hardware.memory_bandwidth, copied / hardware.host_link)


def find_largest_batches(setting: Setting, method: KVMethod, context: int) -> dict[str, int]:
    """Finds the sequences that fit by each limit, as `PlanRow.largest_batches` has them."""
    usable, host, along_sequences = setting.usable_bytes, setting.hardware.host_bytes, setting.mesh[0]
    # Bytes grow linearly with the batch, from an offset that all sequences share.
    one, two = (count_device_bytes(setting, method, context, n * along_sequences) for n in (1, 2))

    def count_fitting(read: Callable[[DeviceBytes], int], available: int) -> int:
        growth = read(two) - read(one)
        if read(one) > available:
            return 0
        fitting = MAX_SEQUENCES if growth <= 0 else min(MAX_SEQUENCES, 1 + (available - read(one)) // growth)
        return along_sequences * fitting

    return {
        "device memory": count_fitting(lambda n: n.weights + n.cache + n.workspace, usable),
        "reading the prompt": count_fitting(lambda n: n.weights + n.prefill, usable),
        "host memory": count_fitting(lambda n: n.host, host),
    }


def find_largest_context(setting: Setting, method: KVMethod, context: int, batch: int) -> int:
    """Finds the largest number of tokens that fits; 0 where none does.

    Steps are 1,024 tokens for models of many positions, else 64; finer where not even the first step fits.

    Args:
      setting: what all rows share.
      method: the method.
      context: tokens that the method does not refuse.
      batch: sequences.
    """

    def is_too_long(tokens: int) -> bool:
        try:
            return setting.excess(count_device_bytes(setting, method, tokens, batch)) > 0
        except KvjaxError:  # a method may refuse prompts that are shorter than what it keeps, or too long for its table
            return tokens >= context

    longest = setting.model.config.max_positions - setting.room
    for step in (1024, 64, 1) if longest >= 32_768 else (64, 1):
        grid = [*range(step, longest, step), longest]
        if fitting := bisect.bisect(grid, False, key=is_too_long):
            try:
                count_device_bytes(setting, method, grid[fitting - 1], batch)
            except KvjaxError:
                return 0
            return grid[fitting - 1]
        longest = grid[0]
    return 0
