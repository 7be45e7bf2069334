"""Checkpoint directories: one Orbax checkpoint per top-level entry, and a manifest that says what must be there.

    DIR/kvjax.json       config, dtype, source; shape and dtype of every parameter; a digest of every part and file, and
                         of what it says itself
    DIR/params/<part>/   one Orbax checkpoint per top-level entry: embedding, layer_0, ..., final_norm, head
    DIR/tokenizer.json   and other files that the writer was given

The manifest is written last and the directory renamed into place after it, so a killed write leaves nothing that loads.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.core import documents
from kvjax.core.lock import is_same, locked
from kvjax.core.types import KvjaxError, printable
from kvjax.models import Config
from kvjax.models.sharding import abstract_params

FORMAT, VERSION, MANIFEST, PARTS = "kvjax", 2, "kvjax.json", "params"

Shardings = Callable[[str], jax.sharding.Sharding] | Mapping[str, Any] | jax.sharding.Sharding | None
"""Where parameters go: a function of the path, one sharding for all, or a tree like the parameters."""


@functools.lru_cache
def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Path -> shape of every parameter of `Decoder(config)`; paths look like "layer_0/attention/q/kernel"."""
    one = dataclasses.replace(config, layers=1, windows=None)  # all layers are alike, and tracing many takes minutes
    flat = {path: x.shape for path, x in flatten_dict(nn.unbox(abstract_params(one, jnp.float32))).items()}
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
        return json.dumps(raw | {"digest": _of_json(raw)}, indent=1) + "\n"


def _of_json(raw: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, whatever its layout."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _digest(folder: Path, parameters: Mapping[str, Any]) -> str:
    """SHA-256 over what the manifest says of a part, and the names and contents of the part's files."""
    total = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb") as f:
            content = hashlib.file_digest(f, "sha256").hexdigest()
        total.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()


def _check_shapes(config: Config, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises KvjaxError listing every parameter that `config` does not expect so."""
    if config.layers > len(found):  # at once, before any layer is looked at
        raise KvjaxError(
            f"{where} has {len(found)} parameters for {config.layers:,} layers; convert the checkpoint again"
        )
    expected = parameter_shapes(config)
    problems = [f"{p}: missing" for p in expected if p not in found]
    problems += [f"{printable(p)}: not a parameter of this config" for p in found if p not in expected]
    problems += [
        f"{p}: shape {list(found[p])}, the config says {list(s)}"
        for p, s in expected.items()
        if p in found and tuple(found[p]) != s
    ]
    if problems:
        raise KvjaxError(f"{where} does not fit its config; convert the checkpoint again:\n  " + "\n  ".join(problems))


class Writer:
    """Writes a checkpoint part by part; the directory appears, complete, when the `with` block ends.

        with Writer("out", config, "bfloat16", source="...") as w:
            w.put("embedding", embedding)
            w.put("layer_0", {...})

    Leaves are cast to `dtype`. `extra_files`, contents by name, are written beside them. An existing directory is
    refused unless `replace`, and then stays until the new one is complete. Raises KvjaxError on a wrong shape or a part
    that was never put, and Busy while another process writes the same directory.
    """

    def __init__(self, directory, config: Config, dtype, source: str = "", *, extra_files=None, replace: bool = False):
        self.directory = Path(directory).absolute()
        self.partial = self.directory.with_name(self.directory.name + ".partial")
        self.config, self.dtype, self.source = config, np.dtype(dtype), source
        self.extra_files, self.replace = dict(extra_files or {}), replace
        self.parameters: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}
        refuse_existing(self.directory, replace)

    def __enter__(self) -> Writer:
        self._lock = locked(self.partial)
        try:
            self._clear()
            (self.partial / PARTS).mkdir()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _clear(self) -> None:
        """Removes what a write that was killed has left."""
        for left in self.partial.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()

    def put(self, name: str, subtree: Any) -> None:
        """Writes one top-level entry, a tree of arrays (or the array itself, for `embedding`)."""
        if name in self.digests:
            raise KvjaxError(f"part {name!r} was put twice; put each top-level entry once")
        arrays = flatten_dict({name: subtree}, sep="/")
        flat = {path: np.asarray(x).astype(self.dtype, copy=False) for path, x in arrays.items()}
        described = {path: {"shape": list(x.shape), "dtype": x.dtype.name} for path, x in flat.items()}
        folder = self.partial / PARTS / name
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(folder, args=ocp.args.PyTreeSave(unflatten_dict(flat, sep="/")))
        except ValueError as e:  # so Orbax says that a disk is full
            raise OSError(f"{folder} cannot be written ({e}); make room, or choose another destination") from e
        (folder / "commit_success.txt").unlink(missing_ok=True)  # Orbax's note of where it wrote
        self.parameters |= described
        self.digests[name] = _digest(folder, described)

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if is_same(self.partial, self._lock):  # not when it has become the directory
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)

    def _finish(self) -> None:
        _check_shapes(self.config, {p: tuple(x["shape"]) for p, x in self.parameters.items()}, "what was written")
        for name, content in self.extra_files.items():
            (self.partial / name).write_bytes(content)
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.extra_files.items()}
        record = Manifest(self.config, self.dtype.name, self.source, self.parameters, self.digests, files)
        (self.partial / MANIFEST).write_text(record.to_json())
        refuse_existing(self.directory, self.replace)
        old = self.directory.with_name(self.directory.name + ".old")
        if self.directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.directory.rename(old)
        try:
            self.partial.rename(self.directory)
        except OSError:
            if old.exists():
                old.rename(self.directory)
            raise
        shutil.rmtree(old, ignore_errors=True)


def refuse_existing(directory: str | Path, replace: bool = False) -> None:
    """Raises KvjaxError if writing to `directory` would destroy something that the caller did not give up."""
    path = Path(directory)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not replace:
        raise KvjaxError(f"{path} exists; choose another directory, or ask for it to be replaced (--force)")
    if not (path / MANIFEST).is_file():
        raise KvjaxError(f"{path} is not a kvjax checkpoint, so it is not replaced; choose another directory")


def save(directory, config: Config, params: Mapping[str, Any], *, source="", extra_files=None, replace=False) -> None:
    """Writes `params`, the tree of `Decoder(config)`, as a directory, in their dtype (float32 if they differ)."""
    flat = flatten_dict(nn.unbox(params), sep="/")
    _check_shapes(config, {p: jnp.shape(x) for p, x in flat.items()}, "the parameter tree")
    dtypes = {np.dtype(x.dtype) for x in flat.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype("float32")
    with Writer(directory, config, dtype, source, extra_files=extra_files, replace=replace) as writer:
        for name in part_names(flat):
            writer.put(name, jax.device_get(nn.unbox(params)[name]))


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


def manifest(directory: str | Path) -> Manifest:
    """Reads and checks what a checkpoint directory says of itself; raises KvjaxError, with the remedy, if it cannot."""
    path = Path(directory)
    if not (path / MANIFEST).is_file():
        raise _foreign(path)
    try:
        raw = documents.loads((path / MANIFEST).read_bytes())
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
    _check_shapes(config, shapes, str(path))
    if digest != _of_json(said):
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


def _sharding_of(shardings: Shardings) -> Callable[[str], jax.sharding.Sharding]:
    """Any accepted form of `shardings` as a function of the path."""
    if shardings is None:
        shardings = jnp.zeros(()).sharding  # honours jax.default_device
    if isinstance(shardings, jax.sharding.Sharding):
        return lambda path: shardings
    if callable(shardings):
        return shardings
    flat = flatten_dict(nn.unbox(shardings), sep="/")

    def find(path: str) -> jax.sharding.Sharding:
        if path not in flat:
            raise KvjaxError(
                f"shardings have no entry for {path}; give a tree like the parameters, or a function of the path"
            )
        return flat[path]

    return find


def part(
    directory: str | Path, name: str, record: Manifest | None = None, dtype=None, shardings: Shardings = None
) -> Any:
    """Restores one top-level entry, checked against its digest, to `dtype` (default: as stored) and `shardings`."""
    record = record or manifest(directory)
    folder = Path(directory).absolute() / PARTS / name
    if not folder.is_dir():
        raise KvjaxError(f"{directory} lacks its part {name!r}; copy it again or convert the checkpoint again")
    flat = {path: x for path, x in record.parameters.items() if path.split("/")[0] == name}
    if _digest(folder, flat) != record.digests.get(name):
        raise KvjaxError(f"part {name!r} of {directory} is damaged (its digest differs); copy or convert it again")
    place = _sharding_of(shardings)
    places = {path: place(path) for path in flat}
    try:
        return _restore_part(folder, flat, places, dtype)[name]
    except (ValueError, TypeError, KeyError) as e:
        raise KvjaxError(
            f"part {name!r} of {directory} does not restore so; choose another dtype or sharding: {e}"
        ) from e


def _restore_part(folder: Path, flat: dict[str, dict], places: dict[str, jax.sharding.Sharding], dtype) -> Any:
    shapes = {p: jax.ShapeDtypeStruct(tuple(x["shape"]), dtype or x["dtype"]) for p, x in flat.items()}
    args = {p: ocp.ArrayRestoreArgs(sharding=places[p], global_shape=s.shape, dtype=s.dtype) for p, s in shapes.items()}
    tree = functools.partial(unflatten_dict, sep="/")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=tree(shapes), restore_args=tree(args)))


def restore(directory: str | Path, dtype=None, shardings: Shardings = None) -> tuple[Config, dict[str, Any]]:
    """A checkpoint directory -> (config, parameter tree), read straight into `dtype` (default: as stored) and place.

    Raises KvjaxError for a foreign, damaged, incomplete or newer directory.
    """
    record = manifest(directory)
    names = part_names(record.parameters)
    return record.config, {n: part(directory, n, record, dtype, shardings) for n in names}
