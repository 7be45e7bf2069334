"""Files of named arrays: written whole or not at all, versioned, and tied to the model that wrote them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core import memory
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.errors import KvjaxError, OtherWeights
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.processes import gather, is_writer
from kvjax.utils.files import expand_user, replace_atomically

HEADER, SEAL = "header", "seal"
"""The entries that are no arrays: a JSON description of the arrays, and its digest (a zip checks the arrays itself)."""


class Format(NamedTuple):
    """A kind of file."""

    name: str
    version: int
    fields: Mapping[str, type]  # of the header, in addition to those of every kind


def write(
    path: str | Path,
    form: Format,
    model: Model,
    header: Mapping[str, Any],
    arrays: Mapping[str, Array],
    deflate: bool = False,
) -> Path:
    """Writes a file, which appears at `path` only once it is complete; returns the path.

    The first of several processes writes. `header` has the values of `form.fields`; `deflate` compresses the arrays. A
    reader must have a model of the same configuration, dtype and weights.
    """
    path = expand_user(path)
    header = {
        "format": form.name,
        "version": form.version,
        "model": _config_digest(model, model.config),
        "weights": model.fingerprint,
        "arrays": {
            name: {"shape": list(x.shape), "dtype": x.dtype.name, "host": memory.is_host(x)}
            for name, x in arrays.items()
        },
        **header,
    }
    text = json.dumps(header).encode()
    save: Callable[..., None] = np.savez_compressed if deflate else np.savez
    # All entries are bytes, u8[n]: NumPy's files have no bfloat16.
    entries = {HEADER: np.frombuffer(text, np.uint8), SEAL: np.frombuffer(hashlib.sha256(text).digest(), np.uint8)}
    entries |= {name: np.ascontiguousarray(to_numpy(x)).reshape(-1).view(np.uint8) for name, x in arrays.items()}
    if is_writer():
        with replace_atomically(path) as file:
            save(file, **entries)
    gather(str(path))  # no process goes on before the file is there
    return path


def read(path: str | Path, form: Format, model: Model) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the header and the arrays; raises KvjaxError for an absent or damaged file, another kind or model."""
    path, header, arrays = expand_user(path), {}, {}
    error = damage = None
    try:
        path.open("rb").close()
    except OSError as e:
        raise KvjaxError(f"cannot read {path} ({e.strerror}); give the path of a file that was saved") from e
    try:
        zipfile.ZipFile(path).close()  # NumPy would take another file for a pickle, and advise to load it unsafely
        # No pickles: a file must not be able to run code.
        with np.load(path, allow_pickle=False) as file:
            text = file[HEADER].tobytes()
            header = json.loads(text)
            # Checked first, so that a file of another kind or model says so, and is not called damaged.
            error = _find_mismatch(header, path, form, model)
            if error is None:
                wrong = [
                    f"{x} is {header[x]!r:.80}" for x, kind in form.fields.items() if not isinstance(header[x], kind)
                ]
                if file[SEAL].tobytes() != hashlib.sha256(text).digest():
                    wrong.append("its header is not what was written")
                damage = "; ".join(wrong) or None
                for name, x in header["arrays"].items():
                    arrays[name] = file[name].view(jnp.dtype(x["dtype"])).reshape(x["shape"])
                    header["arrays"][name]["host"] = bool(x["host"])
    except Exception as e:  # changed bits make the readers of archives raise errors of any kind
        damage = damage or e
    if damage is not None:
        error = KvjaxError(
            f"{path} is no file of the format {form.name!r}, or a damaged one ({damage}); save it again, or give the "
            "path of a file that was saved"
        )
    if error is not None:
        raise error
    return header, arrays


def writer_of(model: Model, header: Mapping[str, Any]) -> Model:
    """Returns the model under that of its `Config.variants` with which a file was written, by the file's header."""
    config = next(x for x in model.config.variants if _config_digest(model, x) == header["model"])
    return model.with_config(config)


def _config_digest(model: Model, config: Config) -> str:
    text = json.dumps([config.to_json(), model.dtype.name], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _find_mismatch(header: Mapping[str, Any], path: str | Path, form: Format, model: Model) -> KvjaxError | None:
    """Returns the error of a file that is of another kind, version or model; None for one like this."""
    if (header["format"], header["version"]) != (form.name, form.version):
        return KvjaxError(
            f"{path} has format {header['format']!r:.80}, version {header['version']!r:.80}, and this kvjax reads "
            f"version {form.version} of {form.name!r}; read the documents again"
        )
    found = {"another configuration or dtype": header["model"], "other weights": header["weights"]}
    expected = {
        "another configuration or dtype": [_config_digest(model, config) for config in model.config.variants],
        "other weights": [model.fingerprint],
    }
    for what, digest in found.items():
        if digest not in expected[what]:
            return OtherWeights(
                f"{path} was saved with a model of {what} than {model.name or 'this one'}; load that model, or "
                "read the documents again with this one"
            )
    return None
