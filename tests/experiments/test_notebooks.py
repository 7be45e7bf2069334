"""The notebooks run from top to bottom, each in a kernel of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from safetensors.numpy import save_file

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


def test_there_are_notebooks_for_a_tour_a_method_and_a_checkpoint():
    assert [p.stem for p in NOTEBOOKS] == ["checkpoint_to_curve", "tour", "your_own_method"]
    for path in NOTEBOOKS:
        first = next(c for c in nbformat.read(path, 4).cells if c.cell_type == "code")
        assert "%pip install" in first.source  # ready for Colab


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
