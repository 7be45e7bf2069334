"""Named arrays in one file: written whole or not at all, with a version, and refused by another model."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.errors import KvjaxError, OtherWeights
from kvjax.models.model import Model
from kvjax.utils import json_documents
from kvjax.utils.files import replace_atomically

HEADER, SEAL = "header", "seal"
"""The entries that are no arrays: what is said of these, and a digest of it."""


class Format(NamedTuple):
    """What a kind of file is called in its header, the version of it that is written and read, and what it says."""

    name: str
    version: int
    fields: Mapping[str, type]


def write(
    path: str | Path,
    form: Format,
    model: Model,
    header: Mapping[str, Any],
    arrays: Mapping[str, Array],
    deflate: bool = False,
) -> Path:
    """Writes the file; it takes its place only when all of it is on disk. deflate: the arrays are compressed."""
    path = Path(path)
    header = {
        "format": form.name,
        "version": form.version,
        "model": _digest(model),
        "weights": model.fingerprint,
        "arrays": {name: _described(x) for name, x in arrays.items()},
        **header,
    }
    said = json.dumps(header).encode()
    save: Callable[..., None] = np.savez_compressed if deflate else np.savez
    entries = {HEADER: said, SEAL: hashlib.sha256(said).digest(), **arrays}
    with replace_atomically(path) as file:
        save(file, **{name: _bytes(x) for name, x in entries.items()})
    return path


def read(path: str | Path, form: Format, model: Model) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(the header, the arrays); raises KvjaxError for a damaged file, one of another kind and one of another model."""
    with _opened(Path(path)) as raw:
        if not zipfile.is_zipfile(raw):  # NumPy would take it for a pickle, and advise to load it unsafely
            raise _damaged(path, "not an archive of arrays")
        raw.seek(0)
        try:
            with np.load(raw, allow_pickle=False) as file:
                said = file[HEADER].tobytes()
                header = json_documents.loads(said)
                _check(header, path, form, model)
                if file[SEAL].tobytes() != hashlib.sha256(said).digest():
                    raise ValueError("its header is not what was written")
                for name, kind in form.fields.items():
                    if not isinstance(header[name], kind):
                        raise TypeError(f"{name} is {header[name]!r:.80}")
                return header, {name: _array(file[name], said) for name, said in header["arrays"].items()}
        except KvjaxError:
            raise
        except Exception as e:  # what the readers of archives raise at changed bits is of any kind
            raise _damaged(path, str(e)) from e


def _opened(path: Path) -> BinaryIO:
    """The file, to be read; raises KvjaxError where there is none."""
    try:
        return path.open("rb")
    except OSError as e:
        raise KvjaxError(f"cannot read {path} ({e.strerror}); give the path of a file that was saved") from e


def _damaged(path: str | Path, why: str) -> KvjaxError:
    return KvjaxError(f"{path} is no saved context, or a damaged one ({why}); save it again")


def _described(x: Array) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": x.dtype.name, "host": memory.is_host(x)}


def _bytes(x: Any) -> np.ndarray:
    """Any array, or bytes, as u8[n]: NumPy's files know no bfloat16."""
    if isinstance(x, bytes):
        return np.frombuffer(x, np.uint8)
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def _array(held: np.ndarray, said: Mapping[str, Any]) -> np.ndarray:
    if not isinstance(said["host"], bool):
        raise TypeError(f"host is {said['host']!r:.80}")
    return held.view(jnp.dtype(said["dtype"])).reshape(said["shape"])


def _digest(model: Model) -> str:
    text = json.dumps([model.config.to_json(), model.dtype.name], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check(header: Mapping[str, Any], path: str | Path, form: Format, model: Model) -> None:
    """Raises KvjaxError unless the file is of this kind and version, and of a model like this one."""
    if (header["format"], header["version"]) != (form.name, form.version):
        raise KvjaxError(
            f"{path} has format {header['format']!r:.80}, version {header['version']!r:.80}, and this kvjax reads "
            f"version {form.version} of {form.name!r}; read the documents again"
        )
    if header["model"] != _digest(model):
        raise OtherWeights(
            f"{path} was saved with a model of another configuration or dtype than {model.name or 'this one'}; load "
            "that model, or read the documents again with this one"
        )
    if header.get("weights", "") not in ("", model.fingerprint):
        raise OtherWeights(
            f"{path} was saved with a model of other weights than {model.name or 'this one'}; load that model, or read "
            "the documents again with this one"
        )
