"""The manifest of a checkpoint directory: what must be there, and the checks of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config, chat_template
from kvjax.models.checkpoint.chunks import has_all_digests
from kvjax.models.quantized_params import is_codes, weights_of
from kvjax.models.sharding import abstract_params
from kvjax.utils.files import expand_user, parse_json_object

FORMAT, VERSION, MANIFEST, PARTS = "kvjax", 3, "kvjax.json", "params"
WHOLE_PARTS = 2
"""The version before, which is read too: parts of Orbax, each with one digest of all its files."""


@functools.lru_cache
def _parameters(config: Config, weights: str | None = None) -> dict[str, Any]:
    # One layer of each kind is traced: tracing many takes minutes.
    traced = abstract_params(config.with_layers(range(len(config.kinds))), jnp.float32, weights)
    params: dict[Any, Any] = flatten_dict(traced)
    found: dict[tuple[str, ...], Any] = {}
    for path, x in params.items():
        if path[0].startswith("layer_"):
            kind = int(path[0].removeprefix("layer_"))
            found |= {(f"layer_{i}", *path[1:]): x for i, j in enumerate(config.pattern) if j == kind}
        else:
            found[path] = x
    return {"/".join(path): found[path] for path in sorted(found)}


def parameter_shapes(config: Config, weights: str | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of `Decoder(config)` by path, as "layer_0/attention/q/kernel".

    With `weights`, "int8" or "int4", kernels are codes and scales: "layer_0/attention/q/kernel/codes" and ".../scale".
    """
    return {path: x.value.shape for path, x in _parameters(config, weights).items()}


def parameter_axes(config: Config, weights: str | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the axis letters of every parameter by path, as `parameter_shapes` has them."""
    return {path: x.names for path, x in _parameters(config, weights).items()}


def part_names(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the top-level entries of parameter paths, each once, in order."""
    return tuple(dict.fromkeys(path.split("/")[0] for path in paths))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint directory."""

    config: Config
    dtype: str
    source: str
    parameters: dict[str, dict[str, Any]]  # path -> {"shape": [...], "dtype": "...", "chunk": [...], "digests": [...]}
    digests: dict[str, str]  # part -> SHA-256 of its parameters' entries; in version 2 of its files
    files: dict[str, str]  # name of another file of the directory -> SHA-256
    version: int = VERSION

    @property
    def weights(self) -> str | None:
        """The kind of codes that kernels are stored in; None where they are numbers of `dtype`."""
        # Other entries need no dtype here: one that is no parameter is told by its name.
        return weights_of({path: x["dtype"] for path, x in self.parameters.items() if is_codes(path)})

    def to_json(self) -> str:
        """Writes the manifest with the format's name and version, and a digest of it all."""
        raw = {"format": FORMAT, "version": self.version} | dataclasses.asdict(self)
        raw["config"] = json.loads(self.config.to_json())
        return json.dumps(raw | {"digest": json_digest(raw)}, indent=1) + "\n"


def json_digest(raw: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON object, whatever its layout."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def part_digest(folder: Path, parameters: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a part of version 2: its entries in the manifest, its files' names and contents."""
    total = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb") as f:
            content = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()


def check_shapes(config: Config, shapes: Mapping[str, tuple[int, ...]], name: str, weights: str | None = None) -> None:
    """Raises KvjaxError, which lists every difference, unless these are the shapes of the parameters of `config`."""
    if config.layers > len(shapes):  # a damaged number of layers would list millions of missing parameters
        problems = [f"{len(shapes)} parameters for {config.layers:,} layers"]
    else:
        expected = parameter_shapes(config, weights)
        problems = [f"{p}: missing" for p in expected if p not in shapes]
        problems += [f"{escape_unprintable(p)}: not a parameter of this config" for p in shapes if p not in expected]
        problems += [
            f"{p}: shape {list(shapes[p])}, the config says {list(s)}"
            for p, s in expected.items()
            if p in shapes and tuple(shapes[p]) != s
        ]
    if problems:
        raise KvjaxError(f"{name} does not fit its config; convert the checkpoint again:\n  " + "\n  ".join(problems))


def is_checkpoint(directory: Path) -> bool:
    """Whether a path leads to a checkpoint directory; any path is taken, also one that is no path of the system."""
    return os.path.isfile(directory / MANIFEST)  # a Path's method raises for names that are too long


def read_manifest(directory: str | Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint directory; raises KvjaxError, with the remedy, if it cannot."""
    path = expand_user(directory)
    file, convert = path / MANIFEST, "python -m checkpoints_convert convert"
    if not is_checkpoint(path):
        problem = f"{path} has no {MANIFEST}: not a kvjax checkpoint, or one whose writing was cut short; convert again"
        if os.path.isfile(path):
            problem = f"{path} is a file, and a kvjax checkpoint is a directory; make one: {convert} {path} DST"
            if path.name == MANIFEST:
                problem = f"{path} is a file of a kvjax checkpoint; give its directory, {path.parent}"
        elif not os.path.isdir(path):
            problem = f"there is no checkpoint directory {path}; make one: {convert} SRC {path}"
        elif (path / "config.json").is_file():
            problem = f"{path} is a Hugging Face checkpoint; convert it: {convert} {path} DST"
        raise KvjaxError(problem)
    raw, damage = parse_json_object(file.read_bytes(), file, "convert the checkpoint again"), None
    record, shapes, weights, is_intact = None, {}, None, False
    found: tuple[Any, Any] = FORMAT, VERSION
    try:
        is_intact = raw.pop("digest", None) == json_digest(raw)
        found = raw.pop("format"), raw["version"]
        if found in ((FORMAT, VERSION), (FORMAT, WHOLE_PARTS)):
            record = Manifest(config=Config.from_json(json.dumps(raw.pop("config"))), **raw)
            shapes = {p: tuple(x["shape"]) for p, x in record.parameters.items()}
            np.dtype(record.dtype)
            weights = record.weights
            texts = [record.source, *record.digests.values(), *record.files.values()]
            # A path in the place of a file's name would have files outside of the directory read.
            paths = [name for name in record.files if Path(name).name != name.removeprefix(f"{chat_template.FOLDER}/")]
            if paths or not all(isinstance(x, str) for x in texts):
                damage = f"{paths[0]!r:.80} is no name of a file" if paths else "a digest is no text"
    except (KeyError, TypeError, AttributeError, RecursionError) as e:
        damage = f"{e!r:.200}"
    problem = None
    if damage is not None:
        problem = f"{file} is damaged ({damage}); convert the checkpoint again"
    elif record is None:
        problem = (
            f"{file} has format {found[0]!r:.80}, version {found[1]!r:.80}, and this kvjax reads versions "
            f"{WHOLE_PARTS} and {VERSION} of {FORMAT!r}; upgrade kvjax if it is newer, or convert the checkpoint again"
        )
    else:
        check_shapes(record.config, shapes, str(path), weights)
        lacking = [p for p, x in record.parameters.items() if record.version == VERSION and not has_all_digests(x)]
        others = {path / name: digest for name, digest in record.files.items()}
        changed = [] if is_intact else [file]
        changed += [
            other
            for other, digest in others.items()
            if not other.is_file() or hashlib.sha256(other.read_bytes()).hexdigest() != digest
        ]
        if lacking:
            problem = f"{file} is damaged ({lacking[0]} lacks a digest of each chunk); convert the checkpoint again"
        elif changed:
            problem = (
                f"{changed[0]} is missing or not what was written (its digest differs); convert the checkpoint again"
            )
    if record is None or problem is not None:
        raise KvjaxError(problem)
    return record
