"""The header of a GGUF file: metadata, and the place of each tensor, as the `gguf` package reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from kvjax.errors import KvjaxError


class StoredTensor(NamedTuple):
    """The place and type of a tensor in its file."""

    file: Path
    shape: tuple[int, ...]  # as NumPy has it: rows first
    kind: gguf.GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    bytes: int


class Header(NamedTuple):
    """The part of a file before its data."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class BoundedReader(gguf.GGUFReader):
    """A reader that believes no length which the file is too short for: the package's own would loop over it."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if self.byte_order == "S" or end > len(self.data):
            is_short = f"it has {len(self.data):,} bytes, and what it says needs {end:,}"
            raise ValueError("it is big-endian" if self.byte_order == "S" else is_short)
        # A slice of the memory map itself is a memory map again, which takes three times as long for each token.
        return self.data.view(np.ndarray)[offset:end].view(dtype)


def read_header(file: Path) -> Header:
    """Reads a header; raises KvjaxError for a file that is not GGUF, damaged, cut short or of an unknown version."""
    try:
        with np.errstate(over="raise"):
            reader = BoundedReader(file)
        # Only places are kept: the reader maps the whole file, and what was read of it would stay in memory.
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {
            t.name: StoredTensor(file, tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset, t.n_bytes)
            for t in reader.tensors
        }
    except Exception as e:  # damage makes the reader raise errors of any kind
        raise KvjaxError(
            f"{file} is not read as GGUF ({e}); if it is little-endian and of version 2 or 3, copy it again, or "
            "upgrade the package that reads it (pip install --upgrade gguf)"
        ) from e
    return Header(fields, tensors)
