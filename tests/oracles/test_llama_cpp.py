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

    pairs: bool = False

    def read(self, storage, state, q, q_pos, other_partial=None, cross_layer=None):
        codec = RotatedAsInLlamaCpp(GgmlBlock("q8_0", pairs=self.pairs), "hadamard", largest=True)
        heads = q.reshape(q.shape[0], -1, *q.shape[3:])
        pos = jnp.broadcast_to(q_pos[:, None], heads.shape[:3])
        rounded = codec.decode(codec.encode(heads, pos)).reshape(q.shape)
        return super().read(storage, state, rounded, q_pos, other_partial, cross_layer)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    families = ("qwen3", "llama")
    return {x: read(make_llama_cpp.write_directory(tmp_path_factory.mktemp(x), x)) for x in families}


@pytest.fixture(scope="module")
def expected():
    with np.load(make_llama_cpp.FILE) as arrays:
        return dict(arrays)


def run_like_llama_cpp(model, tokens, k: str, v: str, pairs: bool = False) -> np.ndarray:
    config, params = model
    method = kvjax.methods.ggml(k.replace("f32", "f16"), v.replace("f32", "f16"), pairs=pairs)
    if k != "f32":
        method = dataclasses.replace(method, read=RoundedQueries(pairs=pairs))
    plan = functional.bind(method, config)
    # In an empty cache the tokens read each other's codes, as in llama.cpp; `prefill` would attend to them exactly.
    cache = functional.empty(plan, config, batch=1, capacity=make_llama_cpp.TOKENS)
    run = jax.jit(lambda params, tokens: functional.extend(params, tokens, cache)[0][0])
    return np.asarray(run(params, tokens[None]))


CASES = [("qwen3", *case) for case in make_llama_cpp.CASES] + [("llama", *case) for case in make_llama_cpp.LLAMA_CASES]


@pytest.mark.parametrize(("family", "k", "v"), CASES)
def test_logits_are_those_of_llama_cpp(family, k, v, models, expected):
    """Files of `llama` have the two channels that RoPE rotates together as neighbors, which `pairs` restores."""
    logits = run_like_llama_cpp(models[family], expected["tokens"], k, v, pairs=family == "llama")
    theirs = expected[f"logits_{family}_{k}_{v}"]
    difference = np.abs(logits[:, :: make_llama_cpp.EVERY] - theirs)
    if (k, v) == ("f32", "f32"):  # which llama.cpp reads in float16
        assert difference.max() < 0.01
    # A number at a tie may take the other code, which moves some logits: hence medians.
    else:
        assert np.median(difference) < 0.1 * np.median(np.abs(expected[f"logits_{family}_f32_f32"] - theirs))
    assert np.mean(logits.argmax(-1) == expected[f"top_{family}_{k}_{v}"]) > 0.95


def test_keys_of_llama_files_need_their_order_of_channels(models, expected):
    logits = run_like_llama_cpp(models["llama"], expected["tokens"], "q4_0", "f32")
    exact, theirs = (expected[f"logits_llama_{k}_f32"] for k in ("f32", "q4_0"))
    assert np.median(np.abs(logits[:, :: make_llama_cpp.EVERY] - theirs)) > 0.5 * np.median(np.abs(exact - theirs))
