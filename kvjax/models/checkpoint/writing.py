"""Checkpoint directories written part by part: a killed write leaves nothing that loads."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.core.lock import is_same, locked
from kvjax.core.types import KvjaxError
from kvjax.models import Config
from kvjax.models.checkpoint.manifest import MANIFEST, PARTS, Manifest, check_shapes, digest_of, part_names


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
        self.digests[name] = digest_of(folder, described)

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if is_same(self.partial, self._lock):  # not when it has become the directory
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)

    def _finish(self) -> None:
        check_shapes(self.config, {p: tuple(x["shape"]) for p, x in self.parameters.items()}, "what was written")
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
    check_shapes(config, {p: jnp.shape(x) for p, x in flat.items()}, "the parameter tree")
    dtypes = {np.dtype(x.dtype) for x in flat.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype("float32")
    with Writer(directory, config, dtype, source, extra_files=extra_files, replace=replace) as writer:
        for name in part_names(flat):
            writer.put(name, jax.device_get(nn.unbox(params)[name]))
