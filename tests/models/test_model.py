"""The shipped model opens, in any dtype and on a mesh, and can do its training tasks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from experiments.testbed.measure import answers
from kvjax.testbed import corpus, tasks


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("testbed")


def test_it_is_small_and_grouped(model):
    assert sum(x.nbytes for x in jax.tree.leaves(model.params)) <= 8 * 2**20
    a = model.config.kind(0).attention
    assert 1 < a.kv_heads < a.heads


def test_it_loads_to_a_wanted_dtype_and_mesh(model):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    half = kvjax.load("testbed", dtype="bfloat16", mesh=mesh)
    assert half.dtype == jnp.bfloat16
    kernel = half.params["layer_0"]["attention"]["k"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    out = kvjax.generate(half, ["import sys\n"], kvjax.methods.full(), max_new_tokens=4)
    assert len(out.tokens[0]) == 4 and out.text


def test_text_round_trips(model):
    text = "naïve — 例\n\t<s3> end"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


@pytest.mark.parametrize("method", ["full", "kcache:n=64"])
def test_it_recalls_what_a_context_says(model, method):
    rng = np.random.default_rng(0)
    instances = [tasks.recall(rng, 512, corpus.load("held_out").window, questions=4) for _ in range(4)]
    right, size = answers(model, kvjax.parse(method), instances)
    assert np.mean(right) >= 0.8
    c = model.config
    a = c.kind(0).attention
    token = 2 * c.layers * a.kv_heads * a.head_dim * model.dtype.itemsize
    assert sum(size.held.values()) >= 4 * 512 * token  # neither loses any of 512 tokens


def test_it_predicts_code_better_than_chance(model):
    code = corpus.load("held_out").window(np.random.default_rng(1), 256)[None]
    ((logp, likeliest),) = kvjax.read(model, code[:, :128], "full", headroom=128).score(code[:, 128:])
    assert logp.shape == likeliest.shape == (128,)
    assert -logp.mean() / np.log(2) < 4  # bits per byte; 8 is chance
