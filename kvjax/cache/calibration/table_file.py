"""Arrays that a method is given in a file: learned weights, calibrated matrices, shares of heads.

The file is a safetensors file. Its arrays are named by layer, as in `3.bases`; its metadata say which `kind` of table
it is and for which model it was made: `layers`, `kv_heads`, `groups` and `head_dim`. `write` makes one.

Some tables ship with kvjax, below `kvjax/tables/`: of every kind one for the shipped model and a small example.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvjax.cache.protocol import LayerSpec
from kvjax.errors import KvjaxError
from kvjax.utils.files import replace_atomically

FORMAT = "kvjax-table-1"
SHAPE = {"layers": "num_layers", "kv_heads": "num_kv_heads", "groups": "num_groups", "head_dim": "head_dim"}
"""What the file's metadata say of the model, and the field of `LayerSpec` that each is."""

SHIPPED = "shipped"
"""The path that stands for the tables that ship with kvjax: the one that fits the model."""

FOLDER = Path(__file__).parents[2] / "tables"
"""Where these lie, in a folder for each kind."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A file of arrays for every layer. Two are equal if they are of one kind and their files have the same content.

    path: "shipped" stands for the tables of this kind that ship with kvjax, of which a layer takes the one that fits.
    """

    path: str = dataclasses.field(compare=False)
    kind: str
    digest: str = dataclasses.field(default="", repr=False)
    index: int | None = None  # of the layer, from `at`

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
            return [Path(self.path)]
        return sorted((FOLDER / self.kind).glob("*.safetensors"))

    def at(self, spec: LayerSpec) -> Given:
        """The arrays of one layer alone; it has compiled programs of its own, of which they are constants."""
        return dataclasses.replace(self, index=spec.index)

    def of(self, spec: LayerSpec, **shapes: tuple[int | None, ...]) -> dict[str, np.ndarray]:
        """The arrays of one layer, each of the shape that is asked for, None for any size.

        Raises KvjaxError for another kind of table, one of another model, a missing array or one of another shape.
        """
        arrays, index = self._arrays(spec), spec.index if self.index is None else self.index
        found = {}
        for name, shape in shapes.items():
            array = arrays.get(f"{index}.{name}")
            if array is None:
                raise KvjaxError(f"{self.path} has no array `{index}.{name}`; make the table anew")
            if not _fits(array.shape, shape):
                wanted = ", ".join("any" if n is None else str(n) for n in shape)
                raise KvjaxError(
                    f"`{index}.{name}` of {self.path} has shape {array.shape}, expected ({wanted}); make the "
                    "table anew for this model"
                )
            if not np.isfinite(array).all():
                raise KvjaxError(f"`{index}.{name}` of {self.path} holds a number that is not finite")
            found[name] = array
        return found

    def _arrays(self, spec: LayerSpec) -> Mapping[str, np.ndarray]:
        """All arrays of the file that fits the model."""
        if self.path != SHIPPED:
            metadata, arrays = _content(self.path, self.digest)
            self._check(metadata, spec)
            return arrays
        for file in self._files():
            metadata, arrays = _content(str(file), self.digest)
            if all(metadata.get(name) == str(getattr(spec, SHAPE[name])) for name in SHAPE):
                return arrays
        shape = ", ".join(f"{name}={getattr(spec, SHAPE[name])}" for name in SHAPE)
        raise KvjaxError(
            f"kvjax ships no table of {self.kind} for a model of {shape}; make one, as with `kvjax calibrate "
            f"{self.kind}`, and give its path as table=..."
        )

    def _check(self, metadata: Mapping[str, str], spec: LayerSpec) -> None:
        if metadata.get("format") != FORMAT or metadata.get("kind") != self.kind:
            is_kind = metadata.get("kind", "none that kvjax knows")
            raise KvjaxError(f"{self.path} is a table of {is_kind}, and one of {self.kind} is needed")
        for name in SHAPE:
            if metadata.get(name) != str(getattr(spec, SHAPE[name])):
                raise KvjaxError(
                    f"{self.path} was made for a model of {name}={metadata.get(name)}, and this one has "
                    f"{name}={getattr(spec, SHAPE[name])}; make a table for this model, as with `kvjax calibrate`"
                )


def write(
    path: str | Path, kind: str, spec: LayerSpec, layers: Sequence[Mapping[str, np.ndarray]], source: str = ""
) -> Path:
    """Writes a table, whole or not at all: one set of arrays for each layer of the model that any of its specs tells.

    source: where the arrays come from, for those who look into the file. Raises KvjaxError for a wrong number of sets.
    """
    if len(layers) != spec.num_layers:
        raise KvjaxError(f"{len(layers)} sets of arrays for {spec.num_layers} layers; give one per layer")
    path = Path(path)
    arrays = {
        f"{i}.{name}": np.ascontiguousarray(array) for i, layer in enumerate(layers) for name, array in layer.items()
    }
    metadata = {"format": FORMAT, "kind": kind, "source": source}
    metadata |= {name: str(getattr(spec, SHAPE[name])) for name in SHAPE}
    with replace_atomically(path) as file:
        file.write(save(arrays, metadata))
    return path


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether an array has a wanted shape, None standing for any size."""
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


@functools.lru_cache(maxsize=16)
def _content(path: str, digest: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """(metadata, arrays) of a file whose content has this digest."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise KvjaxError(f"{path} is no safetensors file that can be read: {e}") from None
