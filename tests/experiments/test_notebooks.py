"""The notebooks run from top to bottom, each in a kernel of its own."""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from safetensors.numpy import save_file

import kvjax  # noqa: F401  so that the cell finds it imported
from experiments import run_notebooks
from kvjax.testbed import vocab
from tests.fixtures import ROOT

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "experiments" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A Hugging Face directory of random weights with the shipped model's tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, content in vocab.tokenizer_files().items():
        (folder / name).write_bytes(content)
    config = json.loads((ROOT / "llama2" / "config.json").read_text())
    sizes = {
        "vocab_size": vocab.SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config | sizes | heads))
    shapes = {"model.embed_tokens": (vocab.SIZE, 64), "lm_head": (vocab.SIZE, 64), "model.norm": (64,)}
    for i in range(2):
        own = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)}
        own |= dict.fromkeys(("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (64, 64))
        own |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (64,))
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    rng = np.random.default_rng(0)
    weights = {f"{k}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for k, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def first_cell() -> str:
    return next(c.source for c in nbformat.read(NOTEBOOKS[0], 4).cells if c.cell_type == "code")


def test_the_address_stands_in_one_variable_and_none_is_invented():
    assert run_notebooks.REPOSITORY == "" and run_notebooks.address() == 'KVJAX = ""'
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, 4)
        assert run_notebooks.badge(path.stem) in notebook.cells[0].source.splitlines()
        run_notebooks.write_address(notebook, path.stem, "owner/name")
        texts = [cell.source for cell in notebook.cells]
        assert sum("owner/name" in text for text in texts) == 2
        badge, first = (next(t for t in texts if word in t) for word in ("colab-badge.svg", "KVJAX = "))
        assert (
            f"(https://colab.research.google.com/github/owner/name/blob/main/experiments/notebooks/{path.name})"
            in badge
        )
        assert first.startswith('KVJAX = "https://github.com/owner/name"  # outside of')
        run_notebooks.write_address(notebook, path.stem)
        assert notebook == nbformat.read(path, 4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_carries_the_outputs_of_the_code_that_stands_there(path):
    """They are made by `python -m experiments.run_notebooks`, which notes the code that it ran."""
    notebook = nbformat.read(path, 4)
    assert notebook.metadata[run_notebooks.RAN] == run_notebooks.digest(notebook), "run it again"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) >= len(cells) / 2 and not any(o.output_type == "error" for o in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_first_cell_knows_the_oldest_jax():
    dependencies = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = next(d for d in dependencies if d.startswith("jax>=")).removeprefix("jax>=")
    assert f'OLDEST_JAX = "{oldest}"' in first_cell()


@pytest.fixture
def run_first(tmp_path, monkeypatch):
    """A function that runs the first cell with a stand-in for pip, and returns the words of its calls."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    jax.devices()  # finds its plugins among the true packages
    folder = tmp_path / "somewhere" / "else"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    def run(address: str = "", installed: bool = False, packages: dict[str, str] | None = None) -> list[list[str]]:
        pip_calls, names = [], {}

        def magic(name: str, line: str) -> None:
            assert name == "pip"
            pip_calls.append(shlex.split(line.format(**names)))  # IPython fills in what stands in braces

        names["get_ipython"] = lambda: types.SimpleNamespace(run_line_magic=magic)
        find_spec = importlib.util.find_spec
        installed_packages = [
            types.SimpleNamespace(name=n, version=v) for n, v in (packages or {"jax": "99.0"}).items()
        ]
        source = TransformerManager().transform_cell(first_cell()).replace('KVJAX = ""', f"KVJAX = {address!r}", 1)
        with monkeypatch.context() as patch:
            if not installed:
                patch.setattr(importlib.util, "find_spec", lambda name: None if name == "kvjax" else find_spec(name))
            patch.setattr(importlib.metadata, "distributions", lambda: installed_packages)
            exec(compile(source, "the first cell", "exec"), names)
        return pip_calls

    return run


def test_the_first_cell_installs_nothing_where_kvjax_is_and_names_the_accelerator(run_first, capsys):
    assert run_first("ignored.whl", installed=True) == []
    device = jax.devices()[0].device_kind
    assert capsys.readouterr().out.endswith(f"JAX {jax.__version__} on {len(jax.devices())} x {device}\n")


@pytest.mark.parametrize(
    ("address", "requirement"),
    [
        ("https://a.host/kvjax", "kvjax[eval] @ git+https://a.host/kvjax"),
        ("git+https://a.host/kvjax@main", "kvjax[eval] @ git+https://a.host/kvjax@main"),
        ("https://a.host/kvjax-0.1.0-py3-none-any.whl", "kvjax[eval] @ https://a.host/kvjax-0.1.0-py3-none-any.whl"),
        ("a wheel.whl", "kvjax[eval] @ file://{here}/a%20wheel.whl"),
    ],
)
def test_the_first_cell_takes_a_repository_or_a_wheel(run_first, address, requirement):
    Path("a wheel.whl").touch()
    assert run_first(address) == [["install", "-q", requirement.format(here=Path.cwd())]]


def test_the_first_cell_keeps_a_jax_that_is_new_enough_and_its_accelerator(run_first, capsys):
    wheel = "https://a.host/kvjax.whl"
    [words] = run_first(wheel, packages={"jax": "0.10.2", "jax-cuda12-plugin": "0.10.2"})
    assert words == ["install", "-q", f"kvjax[eval] @ {wheel}"]
    assert "upgraded" not in capsys.readouterr().out
    [words] = run_first(wheel, packages={"jax": "0.7.2", "jax-cuda12-plugin": "0.7.2"})
    assert words[3:] == ["jax[cuda12]>=0.10.2"]
    assert "JAX 0.7.2 is older than 0.10.2, which kvjax needs, and is upgraded" in capsys.readouterr().out
    [words] = run_first(wheel, packages={"jax": "0.7.2"})
    assert words[3:] == ["jax>=0.10.2"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, checkpoint, request):
    small = {"KVJAX_CHECKPOINT": str(checkpoint), "KVJAX_LENGTH": "128", "KVJAX_CONTEXTS": "1"}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(request.config.cache.mkdir("jax")),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    copy = shutil.copy(path, tmp_path)
    command = [str(Path(sys.executable).parent / "jupyter-execute"), "--inplace", "--timeout=600", str(copy)]
    env = {**os.environ, **small, **cache, "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [c for c in nbformat.read(copy, 4).cells if c.cell_type == "code"]
    assert all(c.execution_count for c in cells) and any(c.outputs for c in cells)
