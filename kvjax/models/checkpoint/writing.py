"""Writing checkpoint directories, part by part; a killed write leaves nothing that loads."""

from __future__ import annotations

import contextlib
import dataclasses
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
from flax.traverse_util import flatten_dict

from kvjax.core.mesh import to_numpy
from kvjax.errors import KvjaxError
from kvjax.models import Config
from kvjax.models.checkpoint.chunks import choose_chunk_shape, plain_path, write_arrays
from kvjax.models.checkpoint.manifest import (
    MANIFEST,
    PARTS,
    Manifest,
    check_shapes,
    json_digest,
    parameter_axes,
    part_names,
)
from kvjax.models.quantized_params import IN_FLOAT32, find_dtype, is_codes, weights_of
from kvjax.utils.arguments import float_type
from kvjax.utils.files import Unwritable, expand_user, lock, make_folder

NEW, OLD = "new", "old"  # in the working folder: the new directory, and the one that it replaces


class Writer:
    """Writes a checkpoint part by part; the directory appears, complete, when the `with` block ends.

        with Writer("out", config, "bfloat16", source="...") as w:
            w.put("embedding", embedding)
            w.put("layer_0", {...})

    Until then all of it lies in a working folder next to the directory. A link stays, and its target is written.

    Args:
      directory: destination.
      config: of the model.
      dtype: leaves are cast to it, but for codes and biases of the choice of experts.
      source: description of the origin.
      extra_files: contents by file name, as those of a tokenizer.
      replace: whether an existing checkpoint may be replaced; it stays until the new one is complete.

    Raises:
      KvjaxError: for a wrong shape, a part that was never put, or an existing directory without `replace`.
      Busy: while another process writes the same directory.
    """

    def __init__(self, directory, config: Config, dtype, source: str = "", *, extra_files=None, replace: bool = False):
        self.directory = Path(os.path.realpath(expand_user(directory)))
        # The lock and the working folder are named by a digest, so that they meet no file of the user.
        self.prefix = f".kvjax-{hashlib.sha256(os.fsencode(self.directory.name)).hexdigest()[:16]}"
        self.config, self.dtype, self.source = config, float_type(dtype), source
        self.extra_files, self.replace = dict(extra_files or {}), replace
        self.parameters: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}
        refuse_existing(directory, replace)

    def __enter__(self) -> Writer:
        parent = make_folder(self.directory.parent)
        self._lock = lock(parent / f"{self.prefix}.lock", self.directory)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.callback(self._remove_leftovers)
            self._remove_leftovers()
            refuse_existing(self.directory, self.replace)
            work = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-", dir=parent))
            self.partial, self._old = work / NEW, work / OLD
            (self.partial / PARTS).mkdir(parents=True)
            self._at_exit = stack.pop_all()  # from here on, `__exit__` removes the folder and gives up the lock
        return self

    def _remove_leftovers(self) -> None:
        """Removes this write's working folder and those of killed ones; the lock says that no other is in use."""
        for leftover in self.directory.parent.glob(f"{self.prefix}-*"):
            status = leftover.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():  # not what another user put there
                # A directory that was set aside there and not replaced goes back first.
                if (leftover / OLD).exists() and not self.directory.exists():
                    (leftover / OLD).rename(self.directory)
                shutil.rmtree(leftover, ignore_errors=True)

    def put(self, name: str, subtree: Any) -> None:
        """Writes one top-level entry of the parameters: a tree of arrays, or an array for `embedding`."""
        arrays = flatten_dict({name: subtree}, sep="/")
        flat = {path: np.asarray(x) for path, x in arrays.items()}
        flat = {path: x.astype(find_dtype(path, self.dtype, x.dtype), copy=False) for path, x in flat.items()}
        axes = parameter_axes(self.config, weights_of({path: x.dtype for path, x in flat.items()}))
        chunks = {
            path: choose_chunk_shape(x.shape, axes.get(path, ()), x.dtype.itemsize, self.config)
            for path, x in flat.items()
        }
        folder = self.partial / PARTS / name
        try:
            folder.mkdir()
            with plain_path(folder) as plain:
                entries = write_arrays(plain, flat, chunks)
        except ValueError as e:  # raised by tensorstore when the disk is full
            raise OSError(f"{folder} cannot be written ({e}); make room, or choose another destination") from e
        self.parameters |= entries
        self.digests[name] = json_digest(entries)

    def __exit__(self, kind, *_) -> None:
        with self._at_exit:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        record = Manifest(self.config, self.dtype.name, self.source, self.parameters, self.digests, {})
        shapes = {p: tuple(x["shape"]) for p, x in self.parameters.items()}
        check_shapes(self.config, shapes, "what was written", record.weights)
        for name, content in self.extra_files.items():
            (self.partial / name).parent.mkdir(exist_ok=True)  # of further chat templates
            (self.partial / name).write_bytes(content)
        files = {name: hashlib.sha256(content).hexdigest() for name, content in self.extra_files.items()}
        (self.partial / MANIFEST).write_text(dataclasses.replace(record, files=files).to_json())
        refuse_existing(self.directory, self.replace)
        if self.directory.exists():
            self.directory.rename(self._old)
        self.partial.rename(self.directory)  # if this fails, `_remove_leftovers` puts the old one back


def refuse_existing(directory: str | Path, replace: bool = False) -> None:
    """Raises KvjaxError if writing to `directory` would destroy anything but a checkpoint that may be replaced."""
    path, problem = Path(os.path.realpath(expand_user(directory))), None
    try:
        is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    except OSError as e:  # as for a name that is too long, which the renaming at the end would be the first to meet
        raise Unwritable(f"cannot write {path} ({e.strerror}); choose another directory") from e
    if path.is_symlink():  # `realpath` resolves all links but circular ones
        problem = f"{directory} is a link that leads back to itself; choose another directory"
    elif not is_empty and not replace:
        problem = f"{path} exists; choose another directory, or ask for it to be replaced (--force)"
    elif not is_empty and not (path / MANIFEST).is_file():
        problem = f"{path} is not a kvjax checkpoint, so it is not replaced; choose another directory"
    if problem is not None:
        raise KvjaxError(problem)


def save(directory, config: Config, params: Mapping[str, Any], *, source="", extra_files=None, replace=False) -> None:
    """Writes the parameter tree of `Decoder(config)` in its dtype, float32 if leaves differ; see `Writer`."""
    flat: dict[str, Any] = flatten_dict(nn.unbox(params), sep="/")
    weights = weights_of({p: x.dtype for p, x in flat.items()})
    check_shapes(config, {p: jnp.shape(x) for p, x in flat.items()}, "the parameter tree", weights)
    dtypes = {np.dtype(x.dtype) for p, x in flat.items() if not is_codes(p) and not p.endswith(IN_FLOAT32)}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype("float32")
    with Writer(directory, config, dtype, source, extra_files=extra_files, replace=replace) as writer:
        for name in part_names(flat):
            writer.put(name, jax.tree.map(to_numpy, nn.unbox(params)[name]))
