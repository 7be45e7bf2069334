"""A registry of kernels that read keys and values together with their codecs, by codecs and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.cache.storage import KVStorage
from kvjax.core.kernels import use_kernels
from kvjax.errors import KvjaxError


class FusedKernel(NamedTuple):
    """One kernel."""

    fits: Callable[[KVStorage], bool]  # whether it reads keys and values that are stored so
    read: Callable[..., Any]  # (storage, state, q, q_pos) -> Partial
    max_queries: int  # of each head that it takes at a time
    reads_more: bool = True  # whether several calls of it read more queries; else XLA's products read them


_KERNELS: dict[str, list[FusedKernel]] = {}


def register_kernel(backend: str, kernel: FusedKernel) -> None:
    """Adds a kernel for a backend, such as "gpu"; the first one that fits is taken."""
    _KERNELS.setdefault(backend, []).append(kernel)


def find_kernel(choice: str, storage: KVStorage, num_queries: int = 1) -> FusedKernel | None:
    """Returns the kernel for a layer's codecs and heads, or None; raises KvjaxError for "pallas" without one.

    `num_queries` are those of each head; a kernel for few of them is not found for more.
    """
    if choice == "xla":
        return None
    # "pallas" takes a kernel of any backend: elsewhere it is interpreted, slowly.
    backends = list(_KERNELS) if choice == "pallas" else ["gpu"] if use_kernels() else []
    kernels = [kernel for backend in backends for kernel in _KERNELS.get(backend, [])]
    found = next((kernel for kernel in kernels if kernel.fits(storage)), None)
    if choice == "pallas" and found is None:
        raise KvjaxError(
            "kernel='pallas' reads KIVI codes of equal bits on the device, in heads of 16, 32, .. 256 channels, and "
            "codes of single tokens in heads of a power of two, without a soft cap, not "
            f"{storage.k} and {storage.v} in {storage.spec}; use kernel='auto'"
        )
    return found if found and (found.reads_more or num_queries <= found.max_queries) else None
