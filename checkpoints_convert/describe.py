"""What a directory holds, Hugging Face's or ours, read from its headers alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np

from checkpoints_convert.conversion_plan import plan
from checkpoints_convert.convert import size
from checkpoints_convert.source import FLOATS, Tensor, opened
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config, checkpoint

Lines = dict[str, str]


def describe(directory: str | Path) -> Lines:
    """Label -> value, fit for a terminal; a Hugging Face checkpoint that cannot be converted says why."""
    path = Path(directory)
    lines = _ours(path) if (path / checkpoint.MANIFEST).is_file() else _theirs(path)
    return {label: escape_unprintable(value, keep="\n") for label, value in lines.items()}


def _ours(path: Path) -> Lines:
    record = checkpoint.read_manifest(path)
    shapes = [tuple(x["shape"]) for x in record.parameters.values()]
    stored = [(shape, record.dtype, size(shape, np.dtype(record.dtype))) for shape in shapes]
    lines = {"format": "kvjax", "source": record.source} | _weights(stored)
    tokenizer = "tokenizer.json" if (path / "tokenizer.json").is_file() else "none"
    return lines | {"tokenizer": tokenizer} | _config(record.config)


def _theirs(path: Path) -> Lines:
    source = opened(path)
    lines = {"format": source.format, "model_type": str(source.config.get("model_type"))}
    tensors = source.tensors.values()
    lines["files"] = str(len({t.file for t in tensors}))
    lines |= _weights([(t.shape, t.stored or FLOATS.get(t.dtype, t.dtype), _bytes(t)) for t in tensors])
    try:
        lines["tokenizer"] = ", ".join(source.tokenizer_files()) or "none"
        return lines | {"convertible": "yes"} | _config(plan(source).config)
    except KvjaxError as e:
        return lines | {"convertible": f"no: {e}"}


def _bytes(tensor: Tensor) -> int:
    """Of a tensor's weights in its file; 0 for what is no weight."""
    if tensor.bytes is not None:
        return tensor.bytes
    return size(tensor.shape, np.dtype(FLOATS[tensor.dtype])) if tensor.dtype in FLOATS else 0


def _weights(stored: list[tuple[tuple[int, ...], str, int]]) -> Lines:
    """Of tensors as (shape, type, bytes), the bytes 0 for what is no weight."""
    total = sum(n for _, _, n in stored)
    count = sum(size(shape, np.dtype("int8")) for shape, _, n in stored if n)
    kinds = ", ".join(f"{kind} ({n})" for kind, n in Counter(kind for _, kind, _ in stored).items())
    return {
        "tensors": str(len(stored)),
        "types": kinds,
        "parameters": f"{count:,}",
        "weights": f"{total / 1e6:,.1f} MB",
    }


def _config(config: Config) -> Lines:
    """The fields of a config, and the bytes that one token's keys and values take in bfloat16."""
    per_token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    if config.windows is not None:
        fields["windows"] = ", ".join(f"{w or 'all'} (x{n})" for w, n in Counter(config.windows).items())
    return {name: str(x) for name, x in fields.items()} | {"KV per token": f"{per_token:,} bytes in bfloat16"}
