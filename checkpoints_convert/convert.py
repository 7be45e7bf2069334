"""Conversion: `convert` works one part of the model at a time, so that its peak memory is near the largest part."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from checkpoints_convert.conversion_plan import EMBEDDING, Binding, ConversionPlan, plan_conversion
from checkpoints_convert.source import Directory, Source
from kvjax.core.quantized_kernel import check_weights
from kvjax.errors import KvjaxError
from kvjax.models import Config, checkpoint, tokenizer
from kvjax.models.quantized_params import find_dtype, quantize_params
from kvjax.utils.arguments import float_type
from kvjax.utils.files import expand_user

Progress = Callable[[str, int, int], None]
"""(part that was just written, its bytes and those before it, bytes of all); called first with the name ""."""


def open_source(path: str | Path) -> Source:
    """Opens a Hugging Face directory or a GGUF file; raises KvjaxError with the remedy for anything else."""
    path = expand_user(path)
    if path.suffix != ".gguf" or os.path.isdir(path):
        return Directory(path)
    is_installed = importlib.util.find_spec("gguf") is not None
    if not is_installed or not os.path.isfile(path):
        problem = f"there is no file {path}; give a GGUF file, or a Hugging Face directory"
        if not is_installed:
            problem = 'GGUF files are read with the package `gguf`; install it: pip install "kvjax[gguf]"'
        raise KvjaxError(problem)
    from checkpoints_convert.gguf.gguf_source import GgufSource

    return GgufSource(path)


def convert(
    src,
    dst,
    dtype: str | None = None,
    *,
    weights: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Config:
    """Writes a checkpoint as a kvjax directory, which appears when it is complete.

    Args:
      src: a Hugging Face directory or a GGUF file.
      dst: the directory to write.
      dtype: of the weights, as "bfloat16" or "bf16"; None as stored, float32 for quantized, mixed and 64-bit types.
      weights: "int8" or "int4" writes kernels in codes, see `kvjax.Model.with_weights`; None in the dtype.
      replace: whether an existing checkpoint at `dst` is replaced.
      progress: called after each part.

    Returns:
      The configuration.

    Raises:
      KvjaxError: before `dst` is touched, for a checkpoint that cannot be converted faithfully: unsupported config;
        tensors missing, left over, misshapen, truncated, not finite or beyond `dtype`; a tokenizer that does not work.
    """
    check_weights(weights)
    checkpoint.refuse_existing(dst, replace)
    weight_dtype = None if dtype is None else float_type(dtype)
    source = open_source(src)
    plan = plan_conversion(source)
    weight_dtype = plan.dtype if weight_dtype is None else weight_dtype
    label = f"{source.config['model_type']} checkpoint {Path(src).resolve().name}"
    files = source.tokenizer_files()
    if tokenizer.FILE in files:
        tokenizer.Tokenizer.from_files(files, src).check_works()
    with checkpoint.Writer(dst, plan.config, weight_dtype, label, extra_files=files, replace=replace) as writer:
        done, total = 0, sum(b.num_values for b in plan.bindings) * weight_dtype.itemsize
        if progress:
            progress("", done, total)
        for name, part in read_parts(source, plan, weight_dtype):
            writer.put(name, part if weights is None else quantize_params({name: part}, weights)[name])
            del part  # otherwise it stays in memory while the next part is read
            done += sum(b.num_values for b in plan.parts[name]) * weight_dtype.itemsize
            if progress:
                progress(name, done, total)
    return plan.config


def read(src: str | Path, dtype: str = "float32") -> tuple[Config, dict[str, Any]]:
    """Converts a checkpoint in memory: (config, parameter tree of NumPy arrays)."""
    source = open_source(src)
    plan = plan_conversion(source)
    return plan.config, dict(read_parts(source, plan, float_type(dtype)))


def read_parts(source: Source, plan: ConversionPlan, dtype: np.dtype) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a model, its top-level entries: (name, parameter tree), each read when it is asked for."""
    for name, bindings in plan.parts.items():
        flat = {}
        for binding in bindings:
            flat |= convert_tensors(source, binding, dtype, plan.tied_head)
        yield name, unflatten_dict(flat, sep="/")[name]


def convert_tensors(
    source: Source, binding: Binding, dtype: np.dtype, tied_head: str | None = None
) -> dict[str, np.ndarray]:
    """Reads the source tensors of a binding as parameters by path.

    Args:
      source: of the tensors.
      binding: their names and their parameters.
      dtype: of the parameters.
      tied_head: the head's tensor, if the model ties its embeddings and the checkpoint has a head, which must repeat
        them.

    Raises:
      KvjaxError: with the tensor's name, if a weight is not finite, or if tied embeddings differ.
    """
    cast, dtype = [], find_dtype(binding.targets[0].path, dtype, dtype)
    for name in binding.sources:
        tensor, problem = source.read(name), None
        with np.errstate(over="ignore", invalid="ignore"):
            weights = tensor.astype(dtype, copy=False)
        cast.append(weights)
        is_embedding = binding.targets[0].path == EMBEDDING
        if is_embedding and tied_head is not None and not np.array_equal(source.read(tied_head), tensor):
            problem = (
                f"{tied_head} differs, but config.json says that they are tied; set tie_word_embeddings to false in "
                "config.json to use both, or remove the tensor to tie them"
            )
        elif not np.isfinite(weights).all():
            finite = np.isfinite(tensor)
            if finite.all():
                problem = f"weights up to {np.abs(tensor).max():.3g} do not fit {dtype}; use --dtype f32"
            else:
                where = [int(i) for i in np.argwhere(~finite)[0]]
                count = f"{np.count_nonzero(~finite)} of {tensor.size}"
                problem = f"{count} weights are not finite, first at {where}; copy it again"
        if problem is not None:
            raise KvjaxError(f"{name}: {problem}")
    return {path: np.ascontiguousarray(x) for path, x in binding.split(cast).items()}
