"""Stand-ins for packages that google-tunix and gemma import, and that inference does not need.

Loggers, data loaders and TensorFlow are over 2 GB. `make adapters` installs the two packages alone, and what is named
here is imported as an empty shell: every attribute of it is a class that does nothing. Whoever uses the packages has
the real ones.
"""

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

ABSENT = (
    "tensorflow",
    "tensorflow_datasets",
    "metrax",
    "perfetto",
    "tensorboard",
    "tensorboardX",
)


class _Shell(abc.ABCMeta):
    def __getattr__(cls, name):
        if name.startswith("__") and name != "__internal__":  # which etils asks for
            raise AttributeError(name)
        return _Shell(name, (), {})

    def __getitem__(cls, key):
        return cls

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls


class _AbsentModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") and name != "__internal__":  # which etils asks for
            raise AttributeError(name)
        shell = _Shell(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, shell)
        return shell


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Makes the absent packages importable, at the end of the search: installed ones are found before."""
    sys.meta_path.append(_Finder(ABSENT))
