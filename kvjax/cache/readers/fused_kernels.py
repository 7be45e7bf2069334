"""A registry of kernels that read keys and values together with their codecs, by codecs and backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvjax.core.kernels import use_kernels
from kvjax.errors import KvjaxError


class FusedKernel(NamedTuple):
    """One kernel."""

    fits: Callable[[Any, Any, int], bool]  # (key codec, value codec, head dim) -> whether it reads them
    read: Callable[..., Any]  # (storage, state, q, q_pos) -> Partial
    max_queries: int  # of each head that it takes at a time


_KERNELS: dict[str, list[FusedKernel]] = {}


def register_kernel(backend: str, kernel: FusedKernel) -> None:
    """Adds a kernel for a backend, such as "gpu"; the first one that fits is taken."""
    _KERNELS.setdefault(backend, []).append(kernel)


def find_kernel(choice: str, k: Any, v: Any, head_dim: int) -> FusedKernel | None:
    """Returns the kernel for two codecs and a size of heads, or None; raises KvjaxError for "pallas" without one."""
    if choice == "xla":
        return None
    # "pallas" takes a kernel of any backend: elsewhere it is interpreted, slowly.
    backends = list(_KERNELS) if choice == "pallas" else ["gpu"] if use_kernels() else []
    kernels = [kernel for backend in backends for kernel in _KERNELS.get(backend, [])]
    found = next((kernel for kernel in kernels if kernel.fits(k, v, head_dim)), None)
    if choice == "pallas" and found is None:
        raise KvjaxError(
            "kernel='pallas' reads KIVI codes of equal bits on the device, in heads of 16, 32, .. 256 channels, not "
            f"{k} and {v} in heads of {head_dim}; use kernel='auto'"
        )
    return found
