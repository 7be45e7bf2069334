"""Checkpoint directories written part by part: a killed write leaves nothing that loads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.checkpoint.manifest import MANIFEST, PARTS, Manifest, check_shapes, part_digest, part_names
from kvjax.utils.arguments import float_type
from kvjax.utils.lock import claim, is_same

NEW, OLD = "new", "old"  # in the folder of a write: what is written, and what was there before


class Writer:
    """Writes a checkpoint part by part; the directory appears, complete, when the `with` block ends.

        with Writer("out", config, "bfloat16", source="...") as w:
            w.put("embedding", embedding)
            w.put("layer_0", {...})

    Leaves are cast to `dtype`. `extra_files`, contents by name, are written beside them. An existing directory is
    refused unless `replace`, and then stays until the new one is complete; of a link, what it leads to is written.
    Raises KvjaxError on a wrong shape or a part that was never put, and Busy while another process writes the same
    directory.

    Until then all lies in a fresh folder beside the directory. It and the lock have names that no user gives: a digest
    of the directory's name.
    """

    def __init__(self, directory, config: Config, dtype, source: str = "", *, extra_files=None, replace: bool = False):
        self.directory = Path(os.path.realpath(directory))
        self.own = f".kvjax-{hashlib.sha256(os.fsencode(self.directory.name)).hexdigest()[:16]}"
        self.config, self.dtype, self.source = config, float_type(dtype), source
        self.extra_files, self.replace = dict(extra_files or {}), replace
        self.parameters: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}
        refuse_existing(directory, replace)

    def __enter__(self) -> Writer:
        parent = self.directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = parent / f"{self.own}.lock"
        self._lock = _locked(self._lock_file, self.directory)
        try:
            self._clear()
            refuse_existing(self.directory, self.replace)
            self._work = Path(tempfile.mkdtemp(prefix=f"{self.own}-", dir=parent))
            self.partial, self._old = self._work / NEW, self._work / OLD
            (self.partial / PARTS).mkdir(parents=True)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._clear()
            self._release()
            raise
        return self

    def _clear(self) -> None:
        """Removes what writes that were killed have left: the lock says that nobody is at it."""
        for left in self.directory.parent.glob(f"{self.own}-*"):
            found = left.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                self._remove(left)

    def _remove(self, work: Path) -> None:
        """Removes a folder of a write; what was set aside there goes back first, if nothing has taken its place."""
        if (work / OLD).exists() and not self.directory.exists():
            (work / OLD).rename(self.directory)
        shutil.rmtree(work, ignore_errors=True)

    def _release(self) -> None:
        if is_same(self._lock_file, self._lock):
            self._lock_file.unlink()
        os.close(self._lock)

    def put(self, name: str, subtree: Any) -> None:
        """Writes one top-level entry, a tree of arrays (or the array itself, for `embedding`)."""
        import orbax.checkpoint as ocp  # here, as it costs more than the rest of `import kvjax`

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
        self.digests[name] = part_digest(folder, described)

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            try:
                self._remove(self._work)
            finally:
                self._release()

    def _finish(self) -> None:
        check_shapes(self.config, {p: tuple(x["shape"]) for p, x in self.parameters.items()}, "what was written")
        for name, content in self.extra_files.items():
            (self.partial / name).write_bytes(content)
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.extra_files.items()}
        record = Manifest(self.config, self.dtype.name, self.source, self.parameters, self.digests, files)
        (self.partial / MANIFEST).write_text(record.to_json())
        refuse_existing(self.directory, self.replace)
        if self.directory.exists():
            self.directory.rename(self._old)
        self.partial.rename(self.directory)  # where this fails, the old one goes back (`_remove`)


def _locked(file: Path, directory: Path) -> int:
    """A file that stands for the directory, open under a lock that ends with this process, however it ends.

    Raises Busy while another process holds it.
    """
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            claim(opened, directory)
        except BaseException:
            os.close(opened)
            raise
        if is_same(file, opened):
            return opened
        os.close(opened)  # it was removed in between


def refuse_existing(directory: str | Path, replace: bool = False) -> None:
    """Raises KvjaxError if writing to `directory` would destroy something that the caller did not give up."""
    path = Path(os.path.realpath(directory))
    if path.is_symlink():  # which realpath leaves only of those that lead in a circle
        raise KvjaxError(f"{directory} is a link that leads back to itself; choose another directory")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not replace:
        raise KvjaxError(f"{path} exists; choose another directory, or ask for it to be replaced (--force)")
    if not (path / MANIFEST).is_file():
        raise KvjaxError(f"{path} is not a kvjax checkpoint, so it is not replaced; choose another directory")


def save(directory, config: Config, params: Mapping[str, Any], *, source="", extra_files=None, replace=False) -> None:
    """Writes `params`, the tree of `Decoder(config)`, as a directory, in their dtype (float32 if they differ)."""
    flat: dict[str, Any] = flatten_dict(nn.unbox(params), sep="/")
    check_shapes(config, {p: jnp.shape(x) for p, x in flat.items()}, "the parameter tree")
    dtypes = {np.dtype(x.dtype) for x in flat.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype("float32")
    with Writer(directory, config, dtype, source, extra_files=extra_files, replace=replace) as writer:
        for name in part_names(flat):
            writer.put(name, jax.device_get(nn.unbox(params)[name]))
