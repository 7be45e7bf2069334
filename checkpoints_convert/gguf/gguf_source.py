"""A GGUF file, or several parts of one, as a checkpoint: what `Source` is for a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ml_dtypes import bfloat16

from checkpoints_convert.families import family
from checkpoints_convert.gguf import config_json, tokenizer_files
from checkpoints_convert.gguf import header as gguf_header
from checkpoints_convert.gguf.header import Stored
from checkpoints_convert.hf_config import refuse_missing_layers
from checkpoints_convert.source import Tensor
from kvjax.errors import KvjaxError

PLAIN = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(bfloat16)}
"""Types that hold weights as they are; all others are blocks of codes, which become float32."""

ROPE_FACTORS = "rope_freqs.weight"
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufSource:
    """Names, shapes and types of a GGUF file's tensors, by the names that Hugging Face gives them.

    Of a file in several parts any one is given. Raises KvjaxError for what is damaged, cut short, in parts of which
    one is missing, or not supported.
    """

    def __init__(self, file: str | Path):
        self.path = Path(file)
        self.parts = _parts(self.path)
        headers = [gguf_header.read(part) for part in self.parts]
        self.metadata = headers[0].metadata
        self.stored: dict[str, Stored] = {}
        for header in headers:
            self.stored |= header.tensors
        _check_count(self.path, self.metadata, len(self.stored))
        self.format = f"GGUF, {len(self.parts)} file" + ("s" if len(self.parts) > 1 else "")
        shapes = {name: stored.shape for name, stored in self.stored.items()}
        factors = weights(self.stored[ROPE_FACTORS]) if ROPE_FACTORS in self.stored else None
        self.config = config_json.config(self.metadata, shapes, factors)
        refuse_missing_layers(self.config, len(self.stored))
        self.generation: dict[str, Any] | None = None
        self.names = _names(self.metadata["general.architecture"], self.config, self.stored)  # theirs -> the file's
        self.tensors = {theirs: _described(self.stored[own]) for theirs, own in self.names.items()}

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files, made of the metadata."""
        return tokenizer_files.files(self.metadata)

    def read(self, name: str) -> np.ndarray:
        """One tensor, of codes what they stand for in float32, as Hugging Face has it."""
        return self._as_theirs(name, weights(self.stored[self.names[name]]))

    def peer(self) -> Callable[[str], np.ndarray]:
        """`read`, with another reader of the file: the `gguf` package's own."""
        found = {t.name: t for part in self.parts for t in gguf.GGUFReader(part).tensors}

        def read(name: str) -> np.ndarray:
            tensor = found[self.names[name]]
            found_there = gguf.dequantize(tensor.data, tensor.tensor_type)
            return self._as_theirs(name, found_there.reshape(self.tensors[name].shape))

        return read

    def _as_theirs(self, name: str, x: np.ndarray) -> np.ndarray:
        """Rows of queries and keys back in Hugging Face's order: the llama format has the halves of a head in turns."""
        if self.metadata["general.architecture"] != "llama":
            return x
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None:
            return x
        in_turns = x.reshape(self.config[heads], -1, 2, *x.shape[1:])
        return in_turns.swapaxes(1, 2).reshape(x.shape)


def _parts(file: Path) -> list[Path]:
    """The files of a model in order, of which `file` is one."""
    found = PART.search(file.name)
    if found is None:
        return [file]
    count = int(found[2])
    names = [f"{file.name[: found.start()]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if absent := [name for name in names if not (file.parent / name).is_file()]:
        raise KvjaxError(f"missing parts: {', '.join(absent[:8])}; copy them to {file.parent}")
    return [file.parent / name for name in names]


def _check_count(file: Path, metadata: dict[str, Any], found: int) -> None:
    wanted = metadata.get("split.tensors.count", found)
    if wanted != found:
        raise KvjaxError(
            f"{file} is one of {metadata.get('split.count')} parts, which hold {wanted} tensors, and {found} are here; "
            "give the parts their own names again (NAME-00001-of-0000N.gguf)"
        )


def _names(architecture: str, config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, str]:
    """Hugging Face's name of each tensor -> the file's; what the family does not have keeps its own."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    theirs: dict[str, str] = {}
    for rule in family(config).rules:
        for i in range(config["num_hidden_layers"] if "{i}" in rule.source else 1):
            name = rule.source.format(i=i)
            own = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if own in stored:
                theirs[name] = own
    taken = {ROPE_FACTORS, *theirs.values()}
    return theirs | {name: name for name in stored if name not in taken}


def _described(stored: Stored) -> Tensor:
    dtype = stored.kind.name if stored.kind.name in PLAIN else "F32"
    return Tensor(stored.shape, dtype, stored.file, stored.kind.name, stored.bytes)


def weights(stored: Stored) -> np.ndarray:
    """The weights of a tensor; the file is mapped for this call only."""
    data = np.memmap(stored.file, np.uint8, "r", stored.start, (stored.bytes,))
    plain = PLAIN.get(stored.kind.name)
    if plain is not None:
        return data.view(plain).reshape(stored.shape)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[stored.kind]
    rows = data.reshape(-1, stored.shape[-1] // per_block * block_bytes)
    try:
        return gguf.dequantize(rows, stored.kind).reshape(stored.shape)
    except NotImplementedError as e:
        raise KvjaxError(
            f"{stored.file} stores weights as {stored.kind.name}, which the installed `gguf` does not read; upgrade it "
            "(pip install --upgrade gguf), or use a file in another type"
        ) from e
