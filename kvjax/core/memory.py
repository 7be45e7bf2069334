"""The only file that knows JAX memory spaces: buffers on the device or in pinned host memory, rows in, rows out.

Rules found by measurement, kept here so that no method can get them wrong:
 - a row is appended with `dynamic_update_slice` on the host array itself: any other form copies the whole buffer;
 - append first, then recall from the returned buffer: the other order copies the whole buffer every step;
 - 16-bit floats are held as raw bits (their updates are slow on some backends), and whatever lives on the host
   is held as raw bits, so that donation cannot pair a host input with a device output of the same type, which
   aborts the process;
 - on the host two 16-bit values are held as one word of 32: TPUs keep two 16-bit rows together, and their compiler
   aborts where one row alone is to be written there (libtpu 0.0.43).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue
from jax.experimental import compute_on as _compute_on_module

from kvjax.core.gradients import refuse_gradient
from kvjax.core.kernels.fetch import fetch, fits, gather
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RAW, WORDS = "raw bits of 16-bit floats in device memory", "words in host memory"
"""Names of what floats are stored as, for errors."""

_UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

as_floats = jax.make_user_context(default_value=False)
"""`with as_floats(True)`: what is packed stays floats on the device, so that gradients pass.

Buffers take the same bytes. Programs of JAX are traced anew for either value.
"""


def _computed(fun, where: str):
    """`fun`, computed elsewhere than in the device's stream, its result in device memory (JAX renamed this in 0.11.1).

    where: "device_host", by the host on host operands; or "gpu_stream:1", by a GPU beside what it does otherwise.
    """
    compute_on: Any = getattr(_compute_on_module, "compute_on2", _compute_on_module.compute_on)
    if "out_memory_spaces" not in inspect.signature(compute_on).parameters:
        raise KvjaxError(
            f"JAX {jax.__version__} has no function form of compute_on; install 0.10.2, or 0.11.2 and later"
        )
    return compute_on(fun, compute_type=where, out_memory_spaces=DEVICE)


@pytree
class Buffer:
    """Rows [B K S W] of some dtype, held as raw bits or as words of two values where the rules above ask for it."""

    data: Array
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def host(self) -> bool:
        """Whether the rows live in pinned host memory; works on tracers too."""
        return is_host(self.data)


def map_buffers(fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`fun` of each buffer of a tree, and of what is in its place in other trees; what is no buffer stays as it is."""

    def apply(x: Any, *same_place: Any) -> Any:
        return fun(x, *same_place) if isinstance(x, Buffer) else x

    return jax.tree.map(apply, tree, *others, is_leaf=lambda x: isinstance(x, Buffer))


def is_host(x) -> bool:
    """Whether an array, tracer or abstract value lives in host memory."""
    return memory_kind(x) == "pinned_host"


def memory_kind(x) -> str:
    """Memory kind of an array, tracer or abstract value: "pinned_host" or "device"."""
    abstract: Any = x if isinstance(x, AbstractValue) else jax.typeof(x)
    return "pinned_host" if abstract.memory_space == HOST else "device"


def pack(x: Array, host: bool = False) -> Buffer:
    """x [B K S W] as a buffer, on the device or (after a copy) in pinned host memory."""
    raw = x.dtype.itemsize == 2 and not as_floats.value
    buf = Buffer(_bits(x, RAW) if raw else x, x.dtype.name)
    return to_host(buf) if host else buf


def to_device(buf: Buffer) -> Buffer:
    """The whole buffer in device memory."""
    if not buf.host:
        return buf
    bits = _value(jax.device_put(buf.data, DEVICE), _UINT[jnp.dtype(buf.dtype).itemsize])
    return dataclasses.replace(buf, data=bits)


def to_host(buf: Buffer) -> Buffer:
    """The whole buffer in pinned host memory; on the device still `as_floats`."""
    if buf.host or as_floats.value:
        return buf
    words = _words(_bits(buf.data, WORDS))
    return dataclasses.replace(buf, data=jax.device_put(words, HOST))


def unpack(buf: Buffer) -> Array:
    """The rows [B K S W] in their own dtype, in device memory."""
    return _value(to_device(buf).data, buf.dtype)


def append(buf: Buffer, x: Array, at: Array, due: Array | None = None) -> Buffer:
    """Writes x [B K T W] into the slots from at i32[B 1|K] on, of the rows with due bool[B]; at + T <= S there."""
    x = _bits(x, WORDS if buf.host else RAW) if buf.data.dtype != x.dtype else x
    x = _words(x) if buf.data.dtype != x.dtype else x  # as the buffer holds them: values, bits, or words
    if not x.shape[2]:
        return buf
    if not buf.host:
        at = at if due is None else jnp.where(due[:, None], at, buf.data.shape[2])  # what lies outside is dropped
        return dataclasses.replace(buf, data=put(buf.data, x, at))
    data, heads = buf.data, at.shape[1]
    per_write = x.shape[1] // heads
    for b in range(x.shape[0]):  # never a scatter on the host: it copies the buffer
        for k in range(heads):
            row = jax.device_put(x[b : b + 1, k * per_write : (k + 1) * per_write], HOST)
            start = (jnp.int32(b), jnp.int32(k * per_write), at[b, k], jnp.int32(0))
            write = functools.partial(lax.dynamic_update_slice, update=row, start_indices=start)
            data = write(data) if due is None else lax.cond(due[b], write, lambda d: d, data)
    return dataclasses.replace(buf, data=data)


def put(data: Array, x: Array, at: Array) -> Array:
    """Device arrays: data [B K S ...] with x [B K T ...] in the slots from at i32[B 1|K] on; the rest is dropped.

    One scatter: in a decode loop `dynamic_update_slice`, vmapped or not, copies the buffer when B = 1.
    """
    B, K, T = x.shape[:3]
    slot = at[:, :, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot)
    return data.at[index].set(x, mode="drop", unique_indices=True, indices_are_sorted=True)


def add(data: Array, x: Array, slot: Array) -> Array:
    """Device arrays: data [B K S ...] with x [B K T ...] added at slot i32[B T]; slots outside are dropped."""
    B, K = x.shape[:2]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot[:, None])
    return data.at[index].add(x, mode="drop")


def take(x: Array, idx: Array) -> Array:
    """Device arrays: rows idx i32[B 1|K n], in bounds, of x [B K S W] -> [B K n W]."""
    return gather(x, jnp.broadcast_to(idx, (*x.shape[:2], idx.shape[2])))


def slice_tokens(buf: Buffer, row: Array, rows: int, start: Array | int, count: int) -> Array:
    """Of a device buffer seen as [B * K, S, W]: some rows from `row` and slots from `start`, in their own dtype."""
    data = buf.data.reshape(-1, *buf.data.shape[2:])
    return _value(lax.dynamic_slice(data, (row, start, 0), (rows, count, data.shape[2])), buf.dtype)


def gather_tokens(buf: Buffer, idx: Array) -> Array:
    """Rows at idx i32[B K n] -> [B K n W] in device memory; of a host buffer only these rows cross.

    Indices outside [0, S) are clipped. Call it on the buffer that `append` returned.
    """
    idx = jnp.clip(idx, 0, buf.data.shape[2] - 1)
    found = _from_host(buf.data, idx) if buf.host else gather(buf.data, idx)
    return _value(found, buf.dtype)


def _from_host(data: Array, idx: Array) -> Array:
    """Rows of host data: a GPU reads them itself, beside its other work; for all else the host gathers them."""
    wanted = jax.default_backend() == "gpu" and os.environ.get("KVJAX_FETCH_KERNEL") != "0"
    if wanted and fits(data, idx):
        return _computed(fetch, "gpu_stream:1")(data, idx)
    return _computed(gather, "device_host")(data, jax.device_put(idx, HOST))


def dot_products(buf: Buffer, q: Array) -> Array:
    """q [B K G T H] with all rows of a buffer [B K S H] -> f32[B K G T S] in device memory.

    Of a host buffer no row crosses: the host computes the products.
    """
    B, K, G, T, H = q.shape
    q = q.reshape(B, K, G * T, H)
    if buf.host:
        found = _computed(functools.partial(_products, dtype=buf.dtype), "device_host")(
            buf.data, jax.device_put(q, HOST)
        )
    else:
        found = _products(buf.data, q, buf.dtype)
    return found.swapaxes(2, 3).reshape(B, K, G, T, -1)


def _products(rows: Array, q: Array, dtype: str) -> Array:
    """Rows, as bits, with q [B K M H] -> f32[B K S M]; no constants, as in `gather`."""
    dims = (((3,), (3,)), ((0, 1), (0, 1)))
    return lax.dot_general(_value(rows, dtype), q, dims, preferred_element_type=jnp.float32)


def _bits(x: Array, holder: str) -> Array:
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    return lax.bitcast_convert_type(refuse_gradient(x, holder), _UINT[x.dtype.itemsize])


def _words(x: Array) -> Array:
    """Bits [... W] of 16 as words [... W/2] of 32; as they are where they are no 16 or W is odd."""
    if x.dtype != jnp.uint16 or x.shape[-1] % 2:
        return x
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint32)


def _value(x: Array, dtype: Any) -> Array:
    """What bits or words [... W or W/2] stand for, [... W]."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    values = lax.bitcast_convert_type(x, dtype)  # [... W/2 2] of words
    return values.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize // dtype.itemsize)


def apply_on_device(fun: Callable[..., Array], *arrays: Array) -> Array:
    """Concrete arrays, wherever they lie: `fun` of them, computed on the device and placed as the first of them was."""
    return jax.device_put(fun(*(jax.device_put(x, DEVICE) for x in arrays)), arrays[0].sharding)


class InstalledMemory(NamedTuple):
    """Bytes of memory, used or not; None where unknown."""

    device: int | None  # of all devices together
    host: int | None
    shared: bool  # whether both are the same memory


def installed_memory(devices: Iterable[Any]) -> InstalledMemory:
    """What these devices and this machine have."""
    host, devices = None, list(devices)
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not every system tells
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if all(d.platform == "cpu" for d in devices):
        return InstalledMemory(host, host, True)
    each = [(d.memory_stats() or {}).get("bytes_limit") for d in devices]
    known = [n for n in each if n is not None]
    return InstalledMemory(sum(known) if len(known) == len(each) else None, host, False)


def require_host_memory() -> None:
    """Raises unless the default device has pinned host memory that this JAX version uses correctly."""
    device = jax.devices()[0]
    if "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        raise KvjaxError(f"{device.platform} has no pinned_host memory; use a method without host placement")
    version = tuple(int(x) for x in jax.__version__.split(".")[:3])
    if device.platform == "gpu" and version < (0, 11, 2):
        raise KvjaxError(
            f"JAX {jax.__version__} reads wrong addresses of pinned host buffers on CUDA (openxla/xla#46231); "
            "install jax >= 0.11.2 (Python >= 3.12)"
        )
