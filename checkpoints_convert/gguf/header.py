"""The header of a GGUF file, versions 2 and 3: metadata, and the place of each tensor.

The `gguf` package reads headers too, but trusts every length that a file claims: a damaged one makes it loop or run out
of memory. Here each length is compared with what is left of the file before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvjax.errors import KvjaxError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes, of the tensors' data
MAX_DIMENSIONS = 4
NUMBER_TYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
"""NumPy's name of each value type; None: STRING and ARRAY."""
STRING, ARRAY, UINT64 = 8, 9, 10


class StoredTensor(NamedTuple):
    """The place and type of a tensor in its file."""

    file: Path
    shape: tuple[int, ...]  # as NumPy has it: rows first
    kind: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    bytes: int


class Header(NamedTuple):
    """The part of a file before its data."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Damage(Exception):
    """Raised inside this module for a damaged header."""


class _Cursor:
    """A position in a file that only moves forward, and never beyond the end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.offset = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.offset:
            end = f"the file ends at {len(self.data):,}"
            raise _Damage(f"its header needs {size:,} bytes at {self.offset:,}, and {end}")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        try:
            return self.take(self.integer("<Q")).decode()
        except UnicodeDecodeError:
            raise _Damage(f"there is no UTF-8 text before byte {self.offset:,}") from None

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = NUMBER_TYPES[kind] if kind < len(NUMBER_TYPES) else None
        if dtype is None:
            raise _Damage(f"a value has the type {kind}, which there is not")
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype).tolist()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(kind, 1)[0]
        kind, count = self.integer("<I"), self.integer("<Q")
        if kind != STRING:
            return self.numbers(kind, count)
        if 8 * count > len(self.data) - self.offset:  # each string has at least the 8 bytes of its length
            raise _Damage(f"an array claims {count:,} texts at {self.offset:,}, and the file is too short for them")
        return [self.string() for _ in range(count)]


def read_header(file: Path) -> Header:
    """Reads a header; raises KvjaxError for a file that is not GGUF, damaged, cut short or of an unknown version."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(file, _Cursor(data))
    except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
        raise KvjaxError(f"{file} cannot be read ({e}); copy it again") from e
    except _Damage as e:
        raise KvjaxError(f"{file} is cut short or damaged: {e}; copy it again") from e


def _parse(file: Path, cursor: _Cursor) -> Header:
    if cursor.data[:4] != MAGIC:
        raise KvjaxError(f"{file} is no GGUF file: it does not begin with {MAGIC.decode()!r}; give one that does")
    cursor.take(len(MAGIC))
    version = cursor.integer("<I")
    if version not in VERSIONS:
        problem = "it is big-endian" if version & 0xFFFF == 0 else f"it has version {version}"
        raise KvjaxError(f"{file} is not read: {problem}; write it little-endian in version 3 with llama.cpp")
    num_tensors, num_values = cursor.integer("<Q"), cursor.integer("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise _Damage(f"{key!r} is there twice")
        metadata[key] = cursor.value(cursor.integer("<I"))
    tensors: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        name, tensor = _parse_tensor(file, cursor)
        if name in tensors:
            raise _Damage(f"the tensor {name!r:.80} is there twice")
        tensors[name] = tensor
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damage(f"general.alignment is {alignment!r}")
    # The header gives offsets from the beginning of the data, which is known when the header has been read.
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {name: t._replace(start=data_start + t.start) for name, t in tensors.items()}
    lost = [name for name, t in tensors.items() if t.start + t.bytes > len(cursor.data)]
    if lost:
        raise _Damage(f"it ends before {len(lost)} of its {num_tensors} tensors do, the first {lost[0]!r:.80}")
    return Header(metadata, tensors)


def _parse_tensor(file: Path, cursor: _Cursor) -> tuple[str, StoredTensor]:
    """Parses one tensor's entry: (name, tensor), with `start` counted from the beginning of the data."""
    name, num_dimensions = cursor.string(), cursor.integer("<I")
    if num_dimensions > MAX_DIMENSIONS:
        raise _Damage(f"{name!r:.80} has {num_dimensions} dimensions")
    shape = tuple(reversed(cursor.numbers(UINT64, num_dimensions)))
    number, offset = cursor.integer("<I"), cursor.integer("<Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise KvjaxError(
            f"{file}: {name!r:.80} is stored as type {number}, which the installed `gguf` does not know; upgrade it "
            "(pip install --upgrade gguf), or use a file in another type"
        ) from None
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % per_block:
        raise _Damage(f"{name!r:.80} has the shape {list(shape)}, and {kind.name} has blocks of {per_block}")
    return name, StoredTensor(file, shape, kind, offset, math.prod(shape) // per_block * block_bytes)
