"""`StepBytes`: the bytes of a cache that one decode step moves, by the path that they take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax.core import memory


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads and writes of a cache.

    A step reads each array of the cache at most once from device memory; what it makes for itself, such as logits or
    dequantized tiles, does not count. Bytes of host memory take one of two paths: they are copied to the device, or the
    host's own processors read them. Records add up, and are multiplied by a number of layers.

    Attributes:
      device: read from device memory.
      link: copied from host memory to the device, each copy of a token as often as it is made.
      host: read by the host's processors, in host memory.
      device_written: written to device memory.
      host_written: copied from the device to host memory.
    """

    device: int = 0
    link: int = 0
    host: int = 0
    device_written: int = 0
    host_written: int = 0

    @classmethod
    def of_all(cls, tree: Any) -> StepBytes:
        """Reads all arrays of a pytree; those in host memory are copied to the device.

        Args:
          tree: arrays or abstract values, such as a codec's stored form or a reader's state; None for nothing.
        """
        size = memory.array_bytes(tree)
        return cls(device=size["device"], link=size["pinned_host"])

    @classmethod
    def of_tokens(cls, tree: Any, count: int) -> StepBytes:
        """Reads `count` entries of each head along axis 2 of every `memory.Buffer`, and all other arrays whole.

        From device memory no buffer is read more than once. The host copies every entry that it is asked for, also one
        that two query heads ask for.
        """
        leaves = jax.tree.leaves(memory.without_guards(tree), is_leaf=lambda x: isinstance(x, memory.Buffer))
        total = cls.of_all([x for x in leaves if not isinstance(x, memory.Buffer)])
        for x in leaves:
            if isinstance(x, memory.Buffer) and x.data.shape[2]:
                entry = x.data.size * x.data.dtype.itemsize // x.data.shape[2]
                on_device = cls(device=entry * min(count, x.data.shape[2]))
                total += cls(link=entry * count) if x.host else on_device
        return total

    @classmethod
    def of_append(cls, tree: Any, slots: int) -> StepBytes:
        """Writes a token into every `memory.Buffer`, whose size is that of `slots` tokens."""
        total = cls()
        for x in jax.tree.leaves(memory.without_guards(tree), is_leaf=lambda x: isinstance(x, memory.Buffer)):
            if isinstance(x, memory.Buffer) and slots:
                size = x.data.size * x.data.dtype.itemsize // slots
                total += cls(host_written=size) if x.host else cls(device_written=size)
        return total

    def __add__(self, other: StepBytes) -> StepBytes:
        fields = dataclasses.fields(self)
        return StepBytes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields))

    def __mul__(self, count: int) -> StepBytes:
        return StepBytes(*(count * size for size in dataclasses.astuple(self)))

    def to_json(self) -> dict[str, int]:
        """All fields."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        paths = ("read from device memory", self.device), ("copied from the host", self.link), ("read by it", self.host)
        read = ", ".join(f"{size:,} bytes {path}" for path, size in paths if size or path == paths[0][0])
        return f"{read}; {self.device_written + self.host_written:,} written"
