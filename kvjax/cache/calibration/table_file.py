"""Tables: arrays that a method reads from a file, such as learned weights, calibrated matrices, budgets of heads.

The file is a safetensors file. Its arrays are named by layer, as in `3.bases`; its metadata say which `kind` of table
it is and for which model it was made: `layers`, `kv_heads`, `groups`, `head_dim` and, where values are of another width
than keys, `value_dim`. `write` makes one.

Some tables ship with kvjax, below `kvjax/tables/`: each kind has one for the shipped model, and small examples. The
environment variable KVJAX_TABLES names a folder of one's own tables, which is laid out alike (`KIND/NAME.safetensors`)
and comes first.

Some kinds are also read from the files that a method's authors publish, which have names of their own for the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvjax.cache.protocol import LayerSpec
from kvjax.errors import KvjaxError
from kvjax.utils.files import expand_user, replace_atomically

FORMAT = "kvjax-table-1"
SPEC_FIELDS = {"layers": "num_layers", "kv_heads": "num_kv_heads", "groups": "num_groups", "head_dim": "head_dim"}
"""The file's metadata about the model -> the field of `LayerSpec`."""

SHIPPED = "shipped"
"""The path that stands for the tables of KVJAX_TABLES and those that ship with kvjax; a layer takes one that fits."""

SHIPPED_TABLES = Path(__file__).parents[2] / "tables"
"""Their folder, with a folder for each kind."""


PICKLES = (".bin", ".pt", ".pth", ".pkl")
"""Ends of the names of files that torch writes as pickles."""


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """The arrays of a file that is no table of kvjax, by the names that its authors gave them.

    Args:
      path: of the file.
      arrays: of a NumPy file one array, by the name "".
    """

    path: str
    arrays: Mapping[str, np.ndarray]

    def take(self, name: str, *shape: int | None) -> np.ndarray:
        """Returns an array f32 of a shape, in which None stands for any size; raises KvjaxError for any other."""
        called = f"`{name}`" if name else "its array"
        if name not in self.arrays:
            names = ", ".join(sorted(self.arrays)[:4]) or "none"
            raise KvjaxError(
                f"{self.path} has no array {called}, and begins with {names}; give what `kvjax calibrate` made, or the "
                "file that the method's authors published"
            )
        array = self.arrays[name]
        if _differs(array.shape, shape):
            raise KvjaxError(
                f"{called} of {self.path} has shape {array.shape}, and this model needs ({_describe_shape(shape)}); "
                "give the file that was published for this model"
            )
        return array.astype(np.float32)


PublishedReader: TypeAlias = Callable[[PublishedFile, LayerSpec], Sequence[Mapping[str, np.ndarray]]]
"""Makes the arrays of all layers from a published file and the spec of any layer."""

PUBLISHED_READERS: dict[str, PublishedReader] = {}
"""Kind of table -> its reader; `register_table_kind` fills it. A `TableFile` is exported, and could not hold one."""


def _differs(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) != len(expected) or any(n not in (None, m) for m, n in zip(shape, expected, strict=True))


def _describe_shape(shape: tuple[int | None, ...]) -> str:
    return ", ".join("any" if n is None else str(n) for n in shape)


def _describe_model(spec: LayerSpec) -> dict[str, str]:
    """Returns the metadata of a model; `value_dim` only where it is not `head_dim`, so that older files fit."""
    model = {name: str(getattr(spec, field)) for name, field in SPEC_FIELDS.items()}
    return model if spec.value_dim == spec.head_dim else model | {"value_dim": str(spec.value_dim)}


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file of arrays for every layer; two are equal if they are of one kind and their files have the same content.

    Args:
      path: the file, or "shipped".
      kind: the name of a `TableKind`.
      digest: hash of the content, computed from the file where it is not given.
      index: of the layer, from `at`.

    Raises:
      KvjaxError: for a file that cannot be read.
    """

    # Compiled programs are found by the method's value. They hold the arrays as constants, so the content takes part in
    # the comparison, and the path does not.
    path: str = dataclasses.field(compare=False)
    kind: str
    digest: str = dataclasses.field(default="", repr=False)
    index: int | None = None

    def __post_init__(self):
        if self.digest:
            return
        try:
            contents = [file.read_bytes() for file in self._files()]
        except OSError as e:
            raise KvjaxError(
                f"no table of {self.kind} can be read from {self.path!r} ({e.strerror}); give the file that "
                f"`kvjax calibrate {self.kind}` or kvjax.cache.calibration.table_file.write made"
            ) from None
        object.__setattr__(self, "digest", hashlib.sha256(b"".join(contents)).hexdigest())

    def _files(self) -> list[Path]:
        if self.path != SHIPPED:
            return [expand_user(self.path)]
        return _list_tables(_find_own_tables(), self.kind) + _list_tables(SHIPPED_TABLES, self.kind)

    def at(self, spec: LayerSpec) -> TableFile:
        """Returns the table bound to one layer, which therefore has a compiled program of its own."""
        return dataclasses.replace(self, index=spec.index)

    def layer_arrays(self, spec: LayerSpec, **shapes: tuple[int | None, ...]) -> dict[str, np.ndarray]:
        """Reads arrays of one layer.

        Args:
          spec: the layer; its index is used where the table is not bound to a layer.
          **shapes: the expected shape of each array, by name; None for an axis of any size.

        Raises:
          KvjaxError: for another kind of table, one of another model, or an array that is missing, of another shape, or
            not finite.
        """
        arrays = self._read_fitting(spec)
        index = spec.index if self.index is None else self.index
        found = {}
        for name, expected in shapes.items():
            array, problem = arrays.get(f"{index}.{name}"), None
            if array is None:
                problem = f"{self.path} has no array `{index}.{name}`; make the table anew"
            elif _differs(array.shape, expected):
                problem = (
                    f"`{index}.{name}` of {self.path} has shape {array.shape}, expected ({_describe_shape(expected)}); "
                    "make the table anew for this model"
                )
            elif not np.isfinite(array).all():
                problem = f"`{index}.{name}` of {self.path} holds a number that is not finite"
            if array is None or problem:
                raise KvjaxError(problem)
            found[name] = array
        return found

    def check_hidden_size(self, read: int, given: int) -> None:
        """Raises KvjaxError if the table is for hidden states of `read` channels, and the model's have `given`."""
        if read != given:
            raise KvjaxError(
                f"the weights in {self.path} read hidden states of {read} channels, and the model has {given}; make a "
                f"table for this model, as with `kvjax calibrate {self.kind}`"
            )

    def _read_fitting(self, spec: LayerSpec) -> Mapping[str, np.ndarray]:
        """Reads all arrays of the file, or of the shipped file that fits the model."""
        model = _describe_model(spec)
        if self.path == SHIPPED:
            wanted = {"value_dim": None, "kind": self.kind} | model
            for folder in (_find_own_tables(), SHIPPED_TABLES):
                fitting = {}
                for file in _list_tables(folder, self.kind):
                    metadata, arrays = _read(str(file), self.digest)
                    if all(metadata.get(name) == value for name, value in wanted.items()):
                        fitting[file] = arrays
                if len(fitting) > 1:
                    first, second, *_ = fitting
                    raise KvjaxError(
                        f"{first} and {second.name} fit a model of this shape both; give the path of one as table=..., "
                        "or move the other out of KVJAX_TABLES"
                    )
                if fitting:
                    (arrays,) = fitting.values()
                    return arrays
            shape = ", ".join(f"{name}={value}" for name, value in model.items())
            raise KvjaxError(
                f"kvjax ships no table of {self.kind} for a model of {shape}; make one, as with `kvjax calibrate "
                f"{self.kind}`, and give its path as table=..., or put it into the folder {self.kind} of KVJAX_TABLES"
            )
        metadata, arrays = _read(str(expand_user(self.path)), self.digest)
        if metadata.get("format") != FORMAT and self.kind in PUBLISHED_READERS:
            return _convert(dataclasses.replace(self, index=None), spec.without_index)
        if metadata.get("format") != FORMAT or metadata.get("kind") != self.kind:
            kind = metadata.get("kind", "none that kvjax knows")
            raise KvjaxError(f"{self.path} is a table of {kind}, and one of {self.kind} is needed")
        # A file that names no width of values is of a model whose values are as wide as its keys.
        made_for = {"value_dim": metadata.get("head_dim")} | dict(metadata)
        for name, value in (model | {"value_dim": str(spec.value_dim)}).items():
            if made_for.get(name) != value:
                raise KvjaxError(
                    f"{self.path} was made for a model of {name}={made_for.get(name)}, and this one has "
                    f"{name}={value}; make a table for this model, as with `kvjax calibrate`"
                )
        return arrays


def _find_own_tables() -> Path | None:
    """Returns the folder that KVJAX_TABLES names, if it names one."""
    if not (name := os.environ.get("KVJAX_TABLES")):
        return None
    if not (folder := expand_user(name)).is_dir():
        raise KvjaxError(f"KVJAX_TABLES names {name}, and there is no such folder; make it, or unset the variable")
    return folder


def _list_tables(folder: Path | None, kind: str) -> list[Path]:
    return [] if folder is None else sorted((folder / kind).glob("*.safetensors"))


@functools.lru_cache(maxsize=16)
def _read(path: str, digest: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Reads (metadata, arrays); the digest is part of the cache's key, so that a file made anew is read again."""
    if path.lower().endswith(PICKLES):
        raise KvjaxError(
            f"{path} is a pickle, which can run any code when it is opened, and is not read; load it in torch, if you "
            "trust it, and write its arrays with safetensors.torch.save_file"
        )
    try:
        if path.endswith(".npy"):
            return {}, {"": np.load(path, allow_pickle=False)}
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as e:
        problem = f"{path} is no safetensors file that can be read ({e})"
        raise KvjaxError(f"{problem}; give what `kvjax calibrate` made") from None


@functools.lru_cache(maxsize=16)
def _convert(table: TableFile, spec: LayerSpec) -> dict[str, np.ndarray]:
    """Reads a published file, and names its arrays as in a table."""
    _, arrays = _read(str(expand_user(table.path)), table.digest)
    layers = PUBLISHED_READERS[table.kind](PublishedFile(table.path, arrays), spec)
    return {f"{i}.{name}": array for i, layer in enumerate(layers) for name, array in layer.items()}


def write(
    path: str | Path, kind: str, spec: LayerSpec, layers: Sequence[Mapping[str, np.ndarray]], source: str = ""
) -> Path:
    """Writes a table, whole or not at all.

    Args:
      path: of the file.
      kind: the name of a `TableKind`.
      spec: any layer of the model.
      layers: the arrays of each layer, by name.
      source: a note on where the arrays come from, kept in the metadata.

    Raises:
      KvjaxError: for a wrong number of layers.
    """
    if len(layers) != spec.num_layers:
        raise KvjaxError(f"{len(layers)} sets of arrays for {spec.num_layers} layers; give one per layer")
    path = expand_user(path)
    arrays = {
        f"{i}.{name}": np.ascontiguousarray(array) for i, layer in enumerate(layers) for name, array in layer.items()
    }
    metadata = {"format": FORMAT, "kind": kind, "source": source}
    metadata |= _describe_model(spec)
    with replace_atomically(path) as file:
        file.write(save(arrays, metadata))
    return path
