"""`ggml` in a whole model against llama.cpp, which ran the same weights and tokens (fixtures/make_llama_cpp.py)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from checkpoints_convert.convert import read
from kvjax import functional
from kvjax.cache.readers.full import Full
from kvjax.methods.ggml import GgmlBlock, RotatedAsInLlamaCpp
from tests.fixtures import make_llama_cpp


@dataclasses.dataclass(frozen=True)
class RoundedQueries(Full):
    """Reads with queries in q8_0, which llama.cpp multiplies quantized keys with on a CPU."""

    def read(self, storage, state, q, q_pos, other_partial=None, cross_layer=None):
        codec = RotatedAsInLlamaCpp(GgmlBlock("q8_0"), "hadamard", largest=True)
        heads = q.reshape(q.shape[0], -1, *q.shape[3:])
        pos = jnp.broadcast_to(q_pos[:, None], heads.shape[:3])
        rounded = codec.decode(codec.encode(heads, pos)).reshape(q.shape)
        return super().read(storage, state, rounded, q_pos, other_partial, cross_layer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return read(make_llama_cpp.write_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected():
    with np.load(make_llama_cpp.FILE) as arrays:
        return dict(arrays)


@pytest.mark.parametrize(("k", "v"), make_llama_cpp.CASES)
def test_logits_are_those_of_llama_cpp(k, v, model, expected):
    config, params = model
    method = kvjax.methods.ggml(k.replace("f32", "f16"), v.replace("f32", "f16"))
    if k != "f32":
        method = dataclasses.replace(method, read=RoundedQueries())
    plan = functional.bind(method, config)
    # In an empty cache the tokens read each other's codes, as in llama.cpp; `prefill` would attend to them exactly.
    cache = functional.empty(plan, config, batch=1, capacity=make_llama_cpp.TOKENS)
    run = jax.jit(lambda params, tokens: functional.extend(params, tokens, cache)[0][0])
    logits, theirs = np.asarray(run(params, expected["tokens"][None])), expected[f"logits_{k}_{v}"]
    difference = np.abs(logits[:, :: make_llama_cpp.EVERY] - theirs)
    if (k, v) == ("f32", "f32"):  # which llama.cpp reads in float16
        assert difference.max() < 0.01
    # A number at a tie may take the other code, which moves some logits: hence medians.
    else:
        assert np.median(difference) < 0.1 * np.median(np.abs(expected["logits_f32_f32"] - theirs))
    assert np.mean(logits.argmax(-1) == expected[f"top_{k}_{v}"]) > 0.95
