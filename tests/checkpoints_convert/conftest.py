"""A Hugging Face directory that a test may damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.fixtures import ROOT


class Editable:
    """A copy of a fixture; `config` and `tensors` change its files."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.file = directory / "model.safetensors"

    def config(self, **changes) -> Path:
        """Sets keys of config.json; None removes one."""
        file = self.directory / "config.json"
        raw = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
        return self.directory

    def tensors(self, **changes) -> Path:
        """Sets tensors by name, with "__" for "."; None removes one."""
        tensors = load_file(self.file) | {name.replace("__", "."): x for name, x in changes.items()}
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items() if x is not None}, self.file)
        return self.directory

    def tensor(self, name: str) -> np.ndarray:
        return load_file(self.file)[name]


@pytest.fixture
def hf(tmp_path):
    """A function from the name of a fixture to an Editable copy of it."""

    def make(name: str) -> Editable:
        return Editable(Path(shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)))

    return make
