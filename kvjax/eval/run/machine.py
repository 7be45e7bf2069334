"""The machine and the versions that numbers were measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import jax


def cores() -> int:
    """Returns the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Returns the processor, device, load (the average of the last minute), and the versions that affect numbers."""
    try:
        with open("/proc/cpuinfo") as f:
            processor = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return {
        "processor": processor,
        "cores": cores(),
        "device": jax.devices()[0].device_kind,
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{p: version(p) for p in ("jax", "jaxlib", "flax", "numpy", "tokenizers", "torch", "transformers")},
    }
