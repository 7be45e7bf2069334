"""Conversion, one top-level entry at a time: peak memory is near the largest entry, never the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from checkpoints_convert.conversion_plan import TIED, Binding, Plan, plan
from checkpoints_convert.source import Source, opened
from kvjax.errors import KvjaxError
from kvjax.models import Config, checkpoint, tokenizer
from kvjax.utils.arguments import float_type

Progress = Callable[[str, int, int], None]
"""(what was just done, bytes of the source so far, bytes in all); first with nothing done, when all can begin."""


def convert(src, dst, dtype: str | None = None, *, replace: bool = False, progress: Progress | None = None) -> Config:
    """Writes `src`, a Hugging Face directory or a GGUF file, as the kvjax directory `dst`, in `dtype`.

    dtype: "bfloat16" or "bf16", for example; default as stored, float32 for codes of a few bits, and where several
    types are mixed.

    `dst` appears when it is complete. Raises KvjaxError, and writes nothing, for a checkpoint that cannot be converted
    faithfully: unsupported config, tensors that are missing, left over, misshapen, truncated or not finite, and for one
    with a tokenizer that does not work.
    """
    checkpoint.refuse_existing(dst, replace)
    wanted = None if dtype is None else float_type(dtype)
    source = opened(src)
    todo = plan(source)
    kind = todo.dtype if wanted is None else wanted
    refuse_untied_head(source, todo.config)
    label = f"{source.config['model_type']} checkpoint {Path(src).resolve().name}"
    files = source.tokenizer_files()
    if tokenizer.FILE in files:
        tokenizer.Tokenizer.from_bytes(files[tokenizer.FILE], Path(src) / tokenizer.FILE).try_out()
    with checkpoint.Writer(dst, todo.config, kind, label, extra_files=files, replace=replace) as writer:
        done, total = 0, sum(size(b.shape, kind) for b in todo.bindings)
        if progress:
            progress("", done, total)
        for name, subtree in parts(source, todo, kind):
            writer.put(name, subtree)
            del subtree  # or it would stay while the next part is read
            done += sum(size(b.shape, kind) for b in todo.parts[name])
            if progress:
                progress(name, done, total)
    return todo.config


def read(src: str | Path, dtype: str = "float32") -> tuple[Config, dict[str, Any]]:
    """`src` as (config, parameter tree of NumPy arrays), all in memory and nothing written."""
    source = opened(src)
    todo = plan(source)
    refuse_untied_head(source, todo.config)
    return todo.config, dict(parts(source, todo, float_type(dtype)))


def parts(source: Source, todo: Plan, dtype: np.dtype) -> Iterator[tuple[str, Any]]:
    """(top-level entry, its tree of parameters), each read when it is asked for."""
    for name, bindings in todo.parts.items():
        flat = {}
        for binding in bindings:
            flat |= parameters(source, binding, dtype)
        yield name, unflatten_dict(flat, sep="/")[name]


def parameters(source: Source, binding: Binding, dtype: np.dtype) -> dict[str, np.ndarray]:
    """One source tensor as parameters in `dtype`, by path; raises KvjaxError naming it if a weight is not finite."""
    tensor, name = source.read(binding.source), binding.source
    if not (finite := np.isfinite(tensor)).all():
        where = [int(i) for i in np.argwhere(~finite)[0]]
        count = f"{np.count_nonzero(~finite)} of {tensor.size}"
        raise KvjaxError(f"{name}: {count} weights are not finite, first at {where}; copy it again")
    with np.errstate(over="ignore"):
        cast = tensor.astype(dtype, copy=False)
    if cast is not tensor and not np.isfinite(cast).all():
        raise KvjaxError(f"{name}: weights up to {np.abs(tensor).max():.3g} do not fit {dtype}; use --dtype f32")
    return {path: np.ascontiguousarray(x) for path, x in binding.split(cast)}


def refuse_untied_head(source: Source, config: Config) -> None:
    """Tied embeddings may come with a copy under the head's name; raises KvjaxError if it is no copy."""
    head, embedding = TIED
    if (
        config.tie_embeddings
        and head in source.tensors
        and not np.array_equal(source.read(head), source.read(embedding))
    ):
        remedy = "set tie_word_embeddings to false in config.json to use both, or remove the tensor to tie them"
        raise KvjaxError(f"{head} differs from {embedding}, but config.json says that they are tied; {remedy}")


def size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
