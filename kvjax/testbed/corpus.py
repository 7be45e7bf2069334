"""Text that every Python installation has: the source of its standard library, split by a hash of each path."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from kvjax.testbed.vocab import END

# Folders that some distributions lack, and files that are tables rather than code.
EXCLUDED_FOLDERS = frozenset(
    "test tests idlelib lib2to3 turtledemo tkinter site-packages dist-packages encodings pydoc_data __pycache__".split()
)
HELD_OUT_FRACTION = 0.08


def is_held_out(name: str) -> bool:
    """Whether the file with this path relative to the library is never trained on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < HELD_OUT_FRACTION * 2**64


def files() -> list[Path]:
    """Returns all source files that are used, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (p.relative_to(root) for p in root.rglob("*.py"))
    kept = (n for n in names if not EXCLUDED_FOLDERS.intersection(n.parts) and not n.name.startswith("_sysconfigdata"))
    return sorted(kept, key=lambda n: n.as_posix())


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Files one after the other: `tokens` u16[n], each file followed by END; `names` relative to the library."""

    names: tuple[str, ...]
    tokens: np.ndarray

    def window(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Returns `length` consecutive tokens from a random place."""
        start = rng.integers(0, len(self.tokens) - length + 1)
        return self.tokens[start : start + length].astype(np.int32)

    def windows(self, length: int) -> np.ndarray:
        """Returns all whole windows, one after the other: i32[n length]."""
        n = len(self.tokens) // length
        return self.tokens[: n * length].reshape(n, length).astype(np.int32)


@functools.cache
def load(split: str) -> Corpus:
    """Loads the "train" or "held_out" files of this Python's standard library."""
    if split not in ("train", "held_out"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'held_out'")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = tuple(n.as_posix() for n in files() if is_held_out(n.as_posix()) == (split == "held_out"))
    end = np.array([END], np.uint16)
    parts = [x for n in names for x in (np.frombuffer((root / n).read_bytes(), np.uint8).astype(np.uint16), end)]
    return Corpus(names, np.concatenate(parts))
