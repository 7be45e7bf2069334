"""Buffers of token vectors, on the device or in pinned host memory; no other module knows JAX's memory spaces.

Rules found by measurement, kept here so that no method can get them wrong:
 - append with `dynamic_update_slice` on the host array itself: any other form copies the whole buffer;
 - append first, then gather from the returned buffer: the other order copies the whole buffer at every step;
 - 16-bit floats are stored as raw bits, because their updates are slow on some backends. On the host everything is
   raw bits: donation may otherwise pair a host input with a device output of the same shape and type, which aborts the
   process;
 - on the host two 16-bit values are one 32-bit word: TPUs pack two 16-bit rows together, and their compiler aborts
   where one row alone is written there (libtpu 0.0.43).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.experimental import compute_on as _compute_on_module
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from kvjax.core.gradients import refuse_gradient
from kvjax.core.kernels import use_kernels
from kvjax.core.kernels.fetch import fetch, fits, gather
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RAW, WORDS = "raw bits of 16-bit floats in device memory", "words in host memory"
CODES = "codes of keys and values in a cache"
"""Names of the stored forms of floats, for errors."""

NARROW_ROW, MAX_SLICES = 64, 8
"""On a TPU, rows of fewer numbers are written as slices, unless one write had to be divided into more slices."""

LOOP_LAYOUT = Layout((0, 2, 1, 3))
"""The layout of host buffers in a loop on a TPU: [B S K W], where the heads of a slot are a tile."""

_UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of a number

as_floats = jax.make_user_context(default_value=False)
"""`with as_floats(True)`: `pack` stores floats on the device as they are, so that gradients pass.

Buffers take the same bytes. JAX traces a program anew for either value.
"""


def _compute_on(fun: Callable[..., Array], where: str) -> Callable[..., Array]:
    """Runs `fun` on host operands by the "device_host", or by a GPU parallel to its other work ("gpu_stream:1")."""
    # JAX 0.11.1 gave the function form, compute_on2 until then, the name of the context manager.
    compute_on: Any = getattr(_compute_on_module, "compute_on2", _compute_on_module.compute_on)
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        raise KvjaxError(
            f"JAX {jax.__version__} has no function form of compute_on; install 0.10.2, or 0.11.2 and later"
        )
    # Results lie on the device: outside this module nothing would know how to compute with an array on the host.
    return compute_on(fun, compute_type=where, out_memory_spaces=DEVICE)


@pytree
class Buffer:
    """Token vectors [B K S W] of some dtype, stored as raw bits or words where the rules above ask for it.

    JAX passes integers by when it differentiates a function of a cache, so that a rule at `data` would never be asked.
    `guard` is a small float array, which is differentiated together with the buffer, and refuses. It has one number for
    each sequence and head, since orbax writes no empty arrays; counts of bytes leave it out.
    """

    data: Shaped[Array, "B K S _"]  # words in host memory have half as many channels
    dtype: str = dataclasses.field(metadata={"static": True})
    guard: Float32[Array, "B K 1"] | None = None  # zeros, where `data` has no gradient, as bits and codes; else None

    @property
    def host(self) -> bool:
        """Whether the vectors live in pinned host memory; works on tracers too."""
        return is_host(self.data)


def map_buffers(fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `fun` to each buffer of a tree, with its counterparts in `others`; other leaves stay as they are."""
    return jax.tree.map(
        lambda x, *counterparts: fun(x, *counterparts) if isinstance(x, Buffer) else x,
        tree,
        *others,
        is_leaf=lambda x: isinstance(x, Buffer),
    )


def is_host(x) -> bool:
    """Whether an array, tracer or abstract value lives in host memory."""
    return memory_kind(x) == "pinned_host"


def is_on_cpu(x: Array | np.ndarray) -> bool:
    """Whether NumPy reads an array without a transfer; small reductions then need no compiled program."""
    return isinstance(x, np.ndarray) or (
        x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
    )


def memory_kind(x) -> str:
    """The memory kind of an array, tracer or abstract value: "pinned_host" or "device"."""
    abstract: Any = x if isinstance(x, AbstractValue) else jax.typeof(x)
    return "pinned_host" if abstract.memory_space == HOST else "device"


def move(tree: Any, kind: str) -> Any:
    """Copies the concrete arrays of a tree to a memory of their devices, one of `MEMORY_KINDS`."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)


def pack(x: Shaped[Array, "B K S W"], host: bool = False) -> Buffer:
    """Makes a buffer of token vectors, on the device or, by a copy, in pinned host memory."""
    # Under `as_floats` gradients are to pass, which a cast to bits would end.
    is_raw = x.dtype.itemsize == 2 and not as_floats.value
    buf = with_guard(Buffer(_to_bits(x, RAW) if is_raw else x, x.dtype.name))
    return to_host(buf) if host else buf


def _require_buffer(buf: Buffer, function: str) -> None:
    """Raises KvjaxError for an array that was not packed."""
    if not isinstance(buf, Buffer):
        what = f"the array {jax.typeof(buf)}" if isinstance(buf, Array) else f"a {type(buf).__name__}"
        raise KvjaxError(
            f"`memory.{function}` takes what `memory.pack` returned, got {what}: let `encode` return memory.pack(x) of "
            "each array [B K S W] (jax.tree.map(memory.pack, arrays) for several), and use one array at a time here"
        )


def with_guard(buf: Buffer) -> Buffer:
    """Adds the guard to a buffer whose array is of integers or of 8-bit floats, which round any gradient away."""
    data = buf.data
    if buf.guard is not None or (jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize > 1):
        return buf
    if is_host(data):
        guard = jnp.zeros((*data.shape[:2], 1), jnp.float32)
    else:  # an empty sum over the data, so that it varies between devices as they do inside a caller's `jax.shard_map`
        guard = data[:, :, :0, :0].astype(jnp.float32).sum((2, 3))[:, :, None]
    return dataclasses.replace(buf, guard=lax.stop_gradient(guard))


def without_guard(buf: Buffer) -> Buffer:
    """Removes the guard, as for a file."""
    return dataclasses.replace(buf, guard=None)


def without_guards(tree: Any) -> Any:
    """Removes the guards of all buffers of a tree: they say nothing that the buffers do not."""
    return map_buffers(without_guard, tree)


def read_data(buf: Buffer) -> Array:
    """Returns the stored array for numbers that are computed of it; raises GradientThroughBits as `guard` says."""
    if buf.guard is not None:
        dtype = jnp.dtype(buf.dtype)
        is_coded = not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1
        # On the device, floats of 32 bits are never stored as bits.
        is_word = buf.host or dtype.itemsize > 2
        refuse_gradient(buf.guard, CODES if is_coded else WORDS if is_word else RAW)
    return buf.data


def to_device(buf: Buffer) -> Buffer:
    """Copies the whole buffer to device memory."""
    if not buf.host:
        return buf
    # Words become the bits that `pack` makes on the device: what reads the buffer next sees no difference.
    data = jax.device_put(read_data(buf), DEVICE)
    if jax.default_backend() == "tpu":  # what reads it may want the slots in the lanes, where no row can be written
        data = with_layout_constraint(data, LOOP_LAYOUT)
    bits = _from_bits(data, _UINT[jnp.dtype(buf.dtype).itemsize])
    return dataclasses.replace(buf, data=bits)


def load(tree: Any) -> Any:
    """Copies all buffers of a tree to device memory."""
    return map_buffers(to_device, tree)


def to_host(buf: Buffer) -> Buffer:
    """Copies the whole buffer to pinned host memory; under `as_floats` it stays on the device."""
    if buf.host or as_floats.value:
        return buf
    bits = with_guard(dataclasses.replace(buf, data=_to_bits(buf.data, WORDS)))
    return dataclasses.replace(bits, data=jax.device_put(_pair_words(bits.data), HOST))


def unpack(buf: Buffer) -> Shaped[Array, "B K S W"]:
    """Returns the vectors in their own dtype, in device memory."""
    _require_buffer(buf, "unpack")
    return _from_bits(read_data(to_device(buf)), buf.dtype)


def append(
    buf: Buffer, x: Shaped[Array, "B K T W"], at: Int32[Array, "B #K"], is_due: Bool[Array, " B"] | None = None
) -> Buffer:
    """Writes token vectors into consecutive slots, in place inside a jitted loop.

    Args:
      buf: vectors of S slots.
      x: new vectors in the buffer's dtype.
      at: slot of the first of them; at + T <= S where they are written.
      is_due: the sequences to write; None for all.

    Returns:
      The buffer with the new vectors. Gather from this one, not from `buf`.

    Raises:
      KvjaxError: `buf` was not packed, or `x` has other axes or another dtype.
    """
    _require_buffer(buf, "append")
    if x.dtype not in (jnp.dtype(buf.dtype), buf.data.dtype):
        raise KvjaxError(
            f"`append` takes new token vectors in the buffer's dtype {buf.dtype}, got {x.dtype}: let one function "
            "make what `encode` packs and what `append` writes"
        )
    x = _to_bits(x, WORDS if buf.host else RAW) if buf.data.dtype != x.dtype else x
    x = _pair_words(x) if buf.data.dtype != x.dtype else x
    B, K, _, W = buf.data.shape
    if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (B, K, W):
        raise KvjaxError(f"`append` takes new token vectors [B K T W] = ({B}, {K}, T, {W}), got {x.shape}")
    if not x.shape[2]:
        return buf
    if not buf.host:
        at = at if is_due is None else jnp.where(is_due[:, None], at, buf.data.shape[2])  # out of bounds: dropped
        return dataclasses.replace(buf, data=put(buf.data, x, at))
    # One update for each sequence and head, never a scatter: on the host a scatter copies the buffer.
    data, num_starts = buf.data, at.shape[1]
    heads_per_write = x.shape[1] // num_starts
    for b in range(x.shape[0]):
        for k in range(num_starts):
            new = x[b : b + 1, k * heads_per_write : (k + 1) * heads_per_write]
            if jax.default_backend() == "tpu":  # the layout of the update decides that of the buffer in a loop
                new = with_layout_constraint(new, LOOP_LAYOUT)
            new = jax.device_put(new, HOST)
            start = (jnp.int32(b), jnp.int32(k * heads_per_write), at[b, k], jnp.int32(0))
            # A sequence that is not due skips its write by `cond`: writing back what it has would first be a read.
            write = functools.partial(lax.dynamic_update_slice, update=new, start_indices=start)
            data = write(data) if is_due is None else lax.cond(is_due[b], write, lambda d: d, data)
    return dataclasses.replace(buf, data=data)


def put(
    data: Shaped[Array, "B K S *rest"], x: Shaped[Array, "B K T *rest"], at: Int32[Array, "B #K"]
) -> Shaped[Array, "B K S *rest"]:
    """Writes x into an array on the device, from slot `at` >= 0 on; the excess is dropped."""
    B, K, T = x.shape[:3]
    S, num_starts = data.shape[2], at.shape[1]
    is_narrow = data.ndim == 3 or data.shape[3] < NARROW_ROW
    if jax.default_backend() == "tpu" and is_narrow and 0 < T <= S and B * num_starts <= MAX_SLICES:
        # TPUs keep the slots of narrow rows in their 128 lanes. A scatter wants the rows there: the loop then copies
        # the buffer to another layout, padded to whole lanes. A slice is written into any layout, in place. Not so for
        # wider rows: where they are gathered, too, the gather would copy the buffer back, in each step.
        heads = K // num_starts
        for b in range(B):
            for k in range(num_starts):
                rows = x[b : b + 1, k * heads : (k + 1) * heads].astype(data.dtype)
                first = jnp.clip(at[b, k], 0, S - T)
                start = (jnp.int32(b), jnp.int32(k * heads), first, *(jnp.int32(0),) * (x.ndim - 3))
                # A slice that would reach beyond the last slot lies at the end instead, and keeps what is there.
                beyond = at[b, k] - first
                is_new = (jnp.arange(T, dtype=jnp.int32) >= beyond).reshape(T, *(1,) * (x.ndim - 3))
                moved = rows if T == 1 else jnp.roll(rows, beyond, 2)
                kept = lax.dynamic_slice(data, start, rows.shape)
                data = lax.dynamic_update_slice(data, jnp.where(is_new, moved, kept), start)
        return data
    if jax.default_backend() == "gpu" and data.ndim == 3 and T == 1:
        # XLA makes three launches of a scatter of one number there, and one of this, which several layers may share.
        is_new = jnp.arange(S, dtype=jnp.int32)[None, None] == at[:, :, None]
        return jnp.where(is_new, x.astype(data.dtype), data)
    # A scatter: in a decode loop on a CPU `dynamic_update_slice`, vmapped or not, copies the buffer when B = 1.
    slot = at[:, :, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
    # Without these promises a scatter sorts its indices on some backends, and on GPUs writes by atomic operations.
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot)
    return data.at[index].set(x, mode="drop", unique_indices=True, indices_are_sorted=True)


def add(
    data: Shaped[Array, "B K S *rest"], x: Shaped[Array, "B K T *rest"], slot: Int32[Array, "B T"]
) -> Shaped[Array, "B K S *rest"]:
    """Adds x to an array on the device, at each token's slot; slots out of bounds are dropped."""
    B, K = x.shape[:2]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot[:, None])
    return data.at[index].add(x, mode="drop")


def take(x: Shaped[Array, "B K S W"], idx: Int32[Array, "B #K n"]) -> Shaped[Array, "B K n W"]:
    """Gathers from an array on the device at indices in bounds."""
    return gather(x, jnp.broadcast_to(idx, (*x.shape[:2], idx.shape[2])))


def slice_tokens(
    buf: Buffer, first_head: Int32[Array, ""], num_heads: int, start: Int32[Array, ""] | int, num_tokens: int
) -> Shaped[Array, "heads tokens W"]:
    """Slices a device buffer, seen as [B * K, S, W], along its first two axes; the result is in the buffer's dtype."""
    # Heads of all sequences lie along one axis, so that a tile of heads may begin in one sequence and end in the next.
    _require_buffer(buf, "slice_tokens")
    data = read_data(buf).reshape(-1, *buf.data.shape[2:])
    sliced = lax.dynamic_slice(data, (first_head, start, 0), (num_heads, num_tokens, data.shape[2]))
    return _from_bits(sliced, buf.dtype)


def gather_tokens(buf: Buffer, idx: Int32[Array, "B K n"]) -> Shaped[Array, "B K n W"]:
    """Gathers token vectors into device memory; from a host buffer only these vectors are transferred.

    Args:
      buf: vectors, as `append` returned them.
      idx: slots; those out of bounds are clipped.

    Returns:
      Vectors in the buffer's dtype.
    """
    _require_buffer(buf, "gather_tokens")
    idx, data = jnp.clip(idx, 0, buf.data.shape[2] - 1), read_data(buf)
    if not buf.host:
        vectors = gather(data, idx)
    elif use_kernels() and fits(data, idx):
        # A GPU reads pinned host memory itself; elsewhere the host gathers, which needs the indices first.
        vectors = _compute_on(fetch, "gpu_stream:1")(data, idx)
    else:
        vectors = _compute_on(gather, "device_host")(data, jax.device_put(idx, HOST))
    return _from_bits(vectors, buf.dtype)


def dot_products(buf: Buffer, q: Float[Array, "B K G T H"]) -> Float32[Array, "B K G T S"]:
    """Multiplies queries with all keys of a buffer; the result lies in device memory.

    The host itself multiplies with the keys of a host buffer: no key is transferred.
    """
    _require_buffer(buf, "dot_products")
    B, K, G, T, H = q.shape
    q = q.reshape(B, K, G * T, H)

    def multiply(data: Array, q: Array) -> Array:  # no array is closed over: all operands of host code lie on the host
        dims = (((3,), (3,)), ((0, 1), (0, 1)))
        return lax.dot_general(_from_bits(data, buf.dtype), q, dims, preferred_element_type=jnp.float32)

    if buf.host:
        products = _compute_on(multiply, "device_host")(read_data(buf), jax.device_put(q, HOST))
    else:
        products = multiply(read_data(buf), q)
    return products.swapaxes(2, 3).reshape(B, K, G, T, -1)


def _to_bits(x: Array, holder: str) -> Array:
    # Unsigned integers are codes already: the guard of their buffer refuses gradients, and bits need no second cast.
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(refuse_gradient(x, holder), _UINT[x.dtype.itemsize])


def _pair_words(x: Array) -> Array:
    """uint16[... W] -> uint32[... W/2]; other types, and an odd W, stay as they are."""
    if x.dtype != jnp.uint16 or x.shape[-1] % 2:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint32)


def _from_bits(x: Array, dtype: Any) -> Array:
    """Bits [... W] or words [... W/2] -> values [... W]."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    values = lax.bitcast_convert_type(x, dtype)  # [... W/2 2] of words
    return values.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize // dtype.itemsize)


def loop_formats(tree: Any) -> tuple[Format | None, ...]:
    """For each leaf of a tree the format in which a loop keeps it, None for the default one; empty if all are None.

    A loop on a TPU writes rows into host memory, one of each head at a time. Where a row is narrower than 128 lanes,
    an argument's default layout has the slots in the lanes, and before and behind each loop every host buffer would
    pass through device memory to be turned round.
    """
    if jax.default_backend() != "tpu":
        return ()

    def choose(x: Array) -> Format | None:
        sharding = x.sharding
        if sharding.memory_kind != "pinned_host":
            return None
        if isinstance(sharding, SingleDeviceSharding):  # with a format, JAX 0.10.2 would forget its kind of memory
            mesh = Mesh(list(sharding.device_set), ("device",))
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
        return Format(LOOP_LAYOUT, sharding)

    formats = tuple(map(choose, jax.tree.leaves(tree)))
    return formats if any(formats) else ()


def to_loop_formats(tree: Any) -> Any:
    """Moves the arrays of a tree into their formats in a loop; gives up what moves, as the loop's donation would."""
    if not (formats := loop_formats(tree)):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    moved = [x if f is None else jax.device_put(x, f, donate=True) for x, f in zip(leaves, formats, strict=True)]
    return jax.tree.unflatten(structure, moved)


def apply_on_device(fun: Callable[..., Array], *arrays: Array) -> Array:
    """Computes `fun` of concrete arrays on the device and places the result where the first of them lies."""
    # For operations on whole caches between steps: host code admits no closed-over indices, and time matters less.
    return jax.device_put(fun(*(jax.device_put(x, DEVICE) for x in arrays)), arrays[0].sharding)


class InstalledMemory(NamedTuple):
    """Bytes of memory, used or not; None where unknown."""

    device: int | None  # of all devices together
    host: int | None
    shared: bool  # whether device and host are the same memory


def installed_memory(devices: Iterable[Any]) -> InstalledMemory:
    """The memory of these devices and of this machine."""
    host, devices = None, list(devices)
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system has sysconf and these names
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A CPU's "device memory" is the machine's own, so a cache that is offloaded there competes with one that is not.
    if all(d.platform == "cpu" for d in devices):
        return InstalledMemory(host, host, True)
    # A device without statistics makes the sum unknown: one of the others alone would be too small a number.
    # Devices of other processes tell nothing here; they count like the mean of this process's own.
    own = [d for d in devices if d.process_index == jax.process_index()]
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in own]
    known = [n for n in limits if n is not None]
    is_known = bool(own) and len(known) == len(own)
    return InstalledMemory(sum(known) * len(devices) // len(own) if is_known else None, host, False)


def require_host_memory() -> None:
    """Raises KvjaxError unless the default device has pinned host memory that this JAX version uses correctly."""
    device = jax.devices()[0]
    if "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        raise KvjaxError(f"{device.platform} has no pinned_host memory; use a method without host placement")
    version = tuple(int(x) for x in jax.__version__.split(".")[:3])
    if device.platform == "gpu" and version < (0, 11, 2):
        raise KvjaxError(
            f"JAX {jax.__version__} reads wrong addresses of pinned host buffers on CUDA (openxla/xla#46231); "
            "install jax >= 0.11.2 (Python >= 3.12)"
        )


MEMORY_KINDS: tuple[str, str] = "device", "pinned_host"


def array_bytes(tree: Any) -> dict[str, int]:
    """Bytes of a pytree of arrays or typed abstract values, by memory kind; without the guards of buffers."""
    total: dict[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
    for x in jax.tree.leaves(without_guards(tree)):
        total[memory_kind(x)] += x.size * x.dtype.itemsize
    return total


def bytes_beyond(store: Any, slots: int, used: Sequence[float]) -> dict[str, int]:
    """Bytes that a store keeps beyond the used slots of each sequence, by memory kind.

    Args:
      store: a pytree; its arrays with an entry for each slot have the slots as axis 2, and others count as used.
      slots: of each sequence and head.
      used: for each sequence of the batch, the slots that tokens fill: of each head, or their mean over the heads.
    """
    total = array_bytes(())
    for x in jax.tree.leaves(without_guards(store)):
        if x.shape[2:3] == (slots,):
            per_slot = x.size * x.dtype.itemsize / (len(used) * slots)
            total[memory_kind(x)] += sum(int(per_slot * (slots - count)) for count in used)
    return total
