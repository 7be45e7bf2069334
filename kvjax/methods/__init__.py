"""Every published method by its name: `kvjax.methods.snapkv(budget=256)`. Each has a file, imported on first use."""

from __future__ import annotations

import pkgutil

import lazy_loader

# A method and the module that defines it have the same name, and the method wins. Editors read __init__.pyi.
_names = {module.name: [module.name] for module in pkgutil.iter_modules(__path__)}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_names)
