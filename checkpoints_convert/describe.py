"""Description of a checkpoint, Hugging Face's, GGUF or ours, from its headers alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np

from checkpoints_convert.conversion_plan import plan_conversion
from checkpoints_convert.convert import open_source
from checkpoints_convert.source import FLOATS
from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.models import Config, checkpoint

Lines = dict[str, str]


def describe(directory: str | Path) -> Lines:
    """Returns label -> value, fit for a terminal; for a checkpoint that cannot be converted, also the reason."""
    path = Path(directory)
    if (path / checkpoint.MANIFEST).is_file():
        record = checkpoint.read_manifest(path)
        shapes = [tuple(x["shape"]) for x in record.parameters.values()]
        item_bytes = np.dtype(record.dtype).itemsize
        stored = [(shape, record.dtype, math.prod(shape) * item_bytes) for shape in shapes]
        lines = {"format": "kvjax", "source": record.source} | _describe_weights(stored)
        lines["tokenizer"] = "tokenizer.json" if (path / "tokenizer.json").is_file() else "none"
        lines |= _describe_config(record.config)
    else:
        source = open_source(path)
        lines = {"format": source.format, "model_type": str(source.config.get("model_type"))}
        lines["files"] = str(len({t.file for t in source.tensors.values()}))
        stored = []
        for t in source.tensors.values():
            size = math.prod(t.shape) * np.dtype(FLOATS[t.dtype]).itemsize if t.dtype in FLOATS else 0
            stored.append((t.shape, t.stored or FLOATS.get(t.dtype, t.dtype), size if t.bytes is None else t.bytes))
        lines |= _describe_weights(stored)
        try:
            lines["tokenizer"] = ", ".join(source.tokenizer_files()) or "none"
            plan = plan_conversion(source)
            lines["convertible"] = "yes"
            if count := plan.num_left_out:
                lines["convertible"] += f", as a model of texts: {count} tensors that read images are left out"
            lines |= _describe_config(plan.config)
        except KvjaxError as e:
            lines["convertible"] = f"no: {e}"
    return {label: escape_unprintable(value, keep="\n") for label, value in lines.items()}


def _describe_weights(stored: list[tuple[tuple[int, ...], str, int]]) -> Lines:
    """Describes tensors given as (shape, type, bytes), where bytes are 0 for a buffer."""
    total = sum(n for _, _, n in stored)
    num_parameters = sum(math.prod(shape) for shape, _, n in stored if n)
    types = ", ".join(f"{name} ({n})" for name, n in Counter(name for _, name, _ in stored).items())
    return {
        "tensors": str(len(stored)),
        "types": types,
        "parameters": f"{num_parameters:,}",
        "weights": f"{total / 1e6:,.1f} MB",
    }


def _describe_config(config: Config) -> Lines:
    """Lists the fields of a config, and the bytes of one token's keys and values in bfloat16."""
    per_token = sum(config.kind(i).attention.stored_numbers for i in range(config.layers)) * 2
    fields = config.llama_arguments()
    if fields is None:
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
        del fields["kinds"], fields["pattern"]
        counts = Counter(config.pattern)
        fields["layers"] = ", ".join(f"kind {i} (x{n})" for i, n in counts.items())
        fields |= {f"kind {i}": config.kinds[i] for i in counts}
    elif fields["windows"] is not None:
        fields["windows"] = ", ".join(f"{w or 'all'} (x{n})" for w, n in Counter(fields["windows"]).items())
    return {name: str(x) for name, x in fields.items()} | {"KV per token": f"{per_token:,} bytes in bfloat16"}
