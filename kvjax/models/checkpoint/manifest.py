"""What a checkpoint directory says of itself, and whether that can be."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config
from kvjax.models.sharding import abstract_params
from kvjax.utils import json_documents

FORMAT, VERSION, MANIFEST, PARTS = "kvjax", 2, "kvjax.json", "params"


@functools.lru_cache
def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter of `Decoder(config)`; paths look like "layer_0/attention/q/kernel"."""
    one = dataclasses.replace(config, layers=1, windows=None)  # all layers are alike, and tracing many takes minutes
    found: dict[Any, Any] = flatten_dict(nn.unbox(abstract_params(one, jnp.float32)))
    flat = {path: x.shape for path, x in found.items()}
    layer = {path[1:]: shape for path, shape in flat.items() if path[0] == "layer_0"}
    every = {path: shape for path, shape in flat.items() if path[0] != "layer_0"}
    every |= {(f"layer_{i}", *path): shape for i in range(config.layers) for path, shape in layer.items()}
    return {"/".join(path): every[path] for path in sorted(every)}


def part_names(paths: Iterable[str]) -> tuple[str, ...]:
    """The top-level entries of parameter paths, each once, in order."""
    return tuple(dict.fromkeys(path.split("/")[0] for path in paths))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory holds."""

    config: Config
    dtype: str
    source: str
    parameters: dict[str, dict[str, Any]]  # path -> {"shape": [...], "dtype": "..."}
    digests: dict[str, str]  # part -> SHA-256 of its files
    files: dict[str, str]  # name of a file beside the parts -> SHA-256

    def to_json(self) -> str:
        """As text, with the format's name and version, and a digest of it all."""
        raw = {"format": FORMAT, "version": VERSION} | dataclasses.asdict(self)
        raw["config"] = json.loads(self.config.to_json())
        return json.dumps(raw | {"digest": json_digest(raw)}, indent=1) + "\n"


def json_digest(raw: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, whatever its layout."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def part_digest(folder: Path, parameters: Mapping[str, Any]) -> str:
    """SHA-256 over what the manifest says of a part, and the names and contents of the part's files."""
    total = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb") as f:
            content = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()


def check_shapes(config: Config, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises KvjaxError listing every parameter that `config` does not expect so."""
    if config.layers > len(found):  # at once, before any layer is looked at
        raise KvjaxError(
            f"{where} has {len(found)} parameters for {config.layers:,} layers; convert the checkpoint again"
        )
    expected = parameter_shapes(config)
    problems = [f"{p}: missing" for p in expected if p not in found]
    problems += [f"{escape_unprintable(p)}: not a parameter of this config" for p in found if p not in expected]
    problems += [
        f"{p}: shape {list(found[p])}, the config says {list(s)}"
        for p, s in expected.items()
        if p in found and tuple(found[p]) != s
    ]
    if problems:
        raise KvjaxError(f"{where} does not fit its config; convert the checkpoint again:\n  " + "\n  ".join(problems))


def _foreign(path: Path) -> KvjaxError:
    if not path.is_dir():
        return KvjaxError(
            f"there is no checkpoint directory {path}; make one: python -m checkpoints_convert convert SRC {path}"
        )
    if (path / "config.json").is_file():
        return KvjaxError(
            f"{path} is a Hugging Face checkpoint; convert it: python -m checkpoints_convert convert {path} DST"
        )
    return KvjaxError(
        f"{path} has no {MANIFEST}: not a kvjax checkpoint, or one whose writing was cut short; convert again"
    )


def read_manifest(directory: str | Path) -> Manifest:
    """Reads and checks what a checkpoint directory says of itself; raises KvjaxError, with the remedy, if it cannot."""
    path = Path(directory)
    if not (path / MANIFEST).is_file():
        raise _foreign(path)
    try:
        raw = json_documents.loads((path / MANIFEST).read_bytes())
        said = {key: x for key, x in raw.items() if key != "digest"}
        form, version, digest = raw.pop("format"), raw.pop("version"), raw.pop("digest", None)
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise KvjaxError(f"{path / MANIFEST} is damaged ({e!r:.200}); convert the checkpoint again") from e
    if form != FORMAT:
        raise KvjaxError(f"{path / MANIFEST} has format {form!r:.80}, not {FORMAT!r}; convert the checkpoint again")
    if not isinstance(version, int) or version > VERSION:
        raise KvjaxError(f"{path} has format version {version!r:.80}; this kvjax reads up to {VERSION}: upgrade kvjax")
    if version < VERSION:
        raise KvjaxError(f"{path} has format version {version}, which lacks digests; convert the checkpoint again")
    try:
        config = Config.from_json(json.dumps(raw.pop("config")))
        record = Manifest(config=config, **raw)
        shapes = {p: tuple(x["shape"]) for p, x in record.parameters.items()}
        _check_texts(record)
    except (KeyError, TypeError, AttributeError) as e:
        raise KvjaxError(f"{path / MANIFEST} is damaged ({e!r:.200}); convert the checkpoint again") from e
    check_shapes(config, shapes, str(path))
    if digest != json_digest(said):
        raise KvjaxError(f"{path / MANIFEST} is not what was written (its digest differs); convert it again")
    _check_files(path, record.files)
    return record


def _check_texts(record: Manifest) -> None:
    """Raises TypeError where a manifest has anything but text in the place of text, or a path in that of a name."""
    texts = [record.dtype, record.source, *record.digests.items(), *record.files.items()]
    if not all(isinstance(x, str) for item in texts for x in (item if isinstance(item, tuple) else (item,))):
        raise TypeError("dtype, source, digests and files are texts")
    np.dtype(record.dtype)
    if paths := [name for name in record.files if Path(name).name != name]:
        raise TypeError(f"{paths[0]!r:.80} is no name of a file")


def _check_files(path: Path, files: Mapping[str, str]) -> None:
    """Raises KvjaxError for a file beside the parts that is missing or another one."""
    for name, digest in files.items():
        file = path / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise KvjaxError(f"{file} is missing or not what was written (its digest differs); convert it again")
