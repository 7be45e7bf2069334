"""The header of a GGUF file, versions 2 and 3: metadata, and where each tensor lies.

The `gguf` package reads headers too, but trusts every length that a file claims: a damaged one makes it loop or run out
of memory. Here each length is held against what is left of the file before anything is made of it.
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
ALIGNMENT = 32  # of the tensors' data, unless the metadata say otherwise
DIMENSIONS = 4  # that a tensor may have
NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
"""NumPy's name of each type of a value; None: STRING and ARRAY."""
STRING, ARRAY = 8, 9


class Stored(NamedTuple):
    """A tensor of a file."""

    file: Path
    shape: tuple[int, ...]  # as NumPy has it: rows first
    kind: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    bytes: int


class Header(NamedTuple):
    """What a file says before its data."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


class _Damaged(Exception):
    """What is wrong with a header."""


class _Cursor:
    """Reads on in a file, never beyond its end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise _Damaged(f"its header needs {size:,} bytes at {self.at:,}, and the file ends at {len(self.data):,}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("<Q")).decode()
        except UnicodeDecodeError:
            raise _Damaged(f"there is no UTF-8 text before byte {self.at:,}") from None

    def numbers(self, kind: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(np.dtype(kind).itemsize * count), kind).tolist()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(self.number("<I"), self.number("<Q"))
        return self.numbers(_number_type(kind), 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            if 8 * count > len(self.data) - self.at:  # each has at least its length
                raise _Damaged(f"an array claims {count:,} texts at {self.at:,}, and the file is too short for them")
            return [self.text() for _ in range(count)]
        return self.numbers(_number_type(kind), count)


def _number_type(kind: int) -> str:
    dtype = NUMBERS[kind] if kind < len(NUMBERS) else None
    if dtype is None:
        raise _Damaged(f"a value has the type {kind}, which there is not")
    return dtype


def read(file: Path) -> Header:
    """The header; raises KvjaxError for what is no GGUF file, cut short, damaged, or of an unknown version or type."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(file, _Cursor(data))
    except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
        raise KvjaxError(f"{file} cannot be read ({e}); copy it again") from e
    except _Damaged as e:
        raise KvjaxError(f"{file} is cut short or damaged: {e}; copy it again") from e


def _header(file: Path, cursor: _Cursor) -> Header:
    if cursor.data[:4] != MAGIC:
        raise KvjaxError(f"{file} is no GGUF file: it does not begin with {MAGIC.decode()!r}; give one that does")
    cursor.take(len(MAGIC))
    version = cursor.number("<I")
    if version not in VERSIONS:
        other = "it is big-endian" if version & 0xFFFF == 0 else f"it has version {version}"
        raise KvjaxError(f"{file} is not read: {other}; write it little-endian in version 3 with llama.cpp")
    tensors, values = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.text()
        if key in metadata:
            raise _Damaged(f"{key!r} is there twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata, _placed(file, infos, start, len(cursor.data)))


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with rows first, number of the type, bytes from the beginning of the data)."""
    name, dimensions = cursor.text(), cursor.number("<I")
    if dimensions > DIMENSIONS:
        raise _Damaged(f"{name!r:.80} has {dimensions} dimensions")
    shape = tuple(reversed(cursor.numbers("<u8", dimensions)))
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _placed(file: Path, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, end: int) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    lost = []
    for name, shape, number, offset in infos:
        if name in found:
            raise _Damaged(f"the tensor {name!r:.80} is there twice")
        kind = _kind(file, name, number)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % per_block:
            raise _Damaged(f"{name!r:.80} has the shape {list(shape)}, and {kind.name} has blocks of {per_block}")
        size = math.prod(shape) // per_block * block_bytes
        found[name] = Stored(file, shape, kind, start + offset, size)
        lost += [name] if start + offset + size > end else []
    if lost:
        raise _Damaged(f"it ends before {len(lost)} of its {len(infos)} tensors do, the first {lost[0]!r:.80}")
    return found


def _kind(file: Path, name: str, number: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise KvjaxError(
            f"{file}: {name!r:.80} is stored as type {number}, which the installed `gguf` does not know; upgrade it "
            "(pip install --upgrade gguf), or use a file in another type"
        ) from None
