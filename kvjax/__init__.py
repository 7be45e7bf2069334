"""kvjax: the JAX/Flax home of KV-cache methods.

Most programs need only the names here. The rest is in modules that are imported when they are used: `kvjax.methods`
(every published method), `kvjax.method_api` (to write a method of your own), `kvjax.custom_decoder` (any method in a
decoder of your own), `kvjax.functional` (pure functions for jit, grad, vmap and scan), `kvjax.eval`, `kvjax.testing`,
`kvjax.errors`, `kvjax.cache_ops`, `kvjax.speculative`, `kvjax.reuse` and `kvjax.cachegen`.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

MODULES = "cache_ops cachegen custom_decoder errors eval functional method_api reuse speculative testing".split()
"""Modules that are attributes from the start; `from kvjax import *` leaves them out, for it would load them all."""

_MOVED = "LayerCache Rope RopeScaling attach attend check_rope finish specs_of".split()
"""Names that the top level had before `kvjax.custom_decoder`."""

# The names and their modules stand in __init__.pyi, for editors and for this. A module is imported at the first use of
# its name, since Flax takes a while.
_import_name, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _names if name not in MODULES]


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(f"kvjax.{name} has moved to kvjax.custom_decoder.{name}")
    if name != "__version__":
        return _import_name(name)
    from importlib import metadata  # which takes longer to import than kvjax, and few ask

    try:
        return metadata.version("kvjax")
    except metadata.PackageNotFoundError:  # a folder on the path, not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__.copy()
