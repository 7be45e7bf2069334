"""Values that are channels of the keys are stored once, and every method reads them there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.codecs.shared_values import SharedValues
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import Rule
from kvjax.core.memory import array_bytes
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.models.kinds import AttentionKind, Latent, LayerKind, MlpKind
from kvjax.models.model import random_model
from kvjax.registry.strings import parse
from kvjax.testing import toy_model
from tests.contract import layer, toy
from tests.contract.cases import FIRST_CASES
from tests.contract.table import REGISTRY

DEEPSEEK = LayerSpec(0, 1, 1, 16, 576, Rope(64), value_dim=512, values_from=64)
"""A layer of DeepSeek-V2-Lite."""

LATENT = dataclasses.replace(toy.spec(), rope=Rope(layer.H - toy.VALUE_DIM), values_from=layer.H - toy.VALUE_DIM)
"""The toy layer, its values the last channels of its keys."""


@pytest.fixture(scope="module")
def model():
    """A model of latent attention: 16 rotated channels, and a latent vector of 32."""
    kind = LayerKind(AttentionKind(4, 1, 48, Rope(16), value_dim=32, latent=Latent(32, 8, 8)), MlpKind(48))
    return random_model(dataclasses.replace(toy_model().config, kinds=(kind,), pattern=(0, 0)))


@pytest.mark.parametrize(
    ("method", "bytes_per_token"),
    [
        ("full", 576 * 2),
        ("offload", 576 * 2),
        ("kcache:n=8", 576 * 2),
        ("snapkv:budget=100", 576 * 2),
        ("int8", 576 + 4),
        ("int4:rotate=false", 576 // 2 + 4),
        # Codes of keys per channel and of values per token: keys and values are stored apart.
        ("bfp:block=32", (576 + 512) // 2 + (576 + 512) // 32),
        ("accumulated:budget=100 + cam", (576 + 512) * 2),
    ],
)
def test_a_token_takes_the_bytes_counted_by_hand(method, bytes_per_token):
    bound, S = parse(method).bind(DEEPSEEK), (64, 128)

    def size(slots: int) -> int:
        block = KVBlock(
            jax.ShapeDtypeStruct((1, 1, slots, 576), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, 1, slots, 512), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, 1, slots), jnp.int32),
        )
        state = layer.trace(lambda block: jax.tree.map(jax.typeof, bound.storage.encode(block)), block)
        return sum(array_bytes(state).values())

    assert (size(S[1]) - size(S[0])) / (S[1] - S[0]) == bytes_per_token
    assert isinstance(bound.v, SharedValues) == (bytes_per_token <= 576 * 2 and not method.startswith("bfp"))


def test_reports_and_plans_count_the_keys_alone(model):
    prompts, config = [[3, 1, 4, 1, 5], [9, 2]], model.config
    _, cache = kvjax.prefill(model, prompts, "full", capacity=64)
    held = kvjax.state_bytes(cache)
    numbers_of_a_token, counts = 4 * 48, 4  # float32, and one integer per sequence and layer
    assert sum(held.total.values()) == 2 * 2 * (64 * (numbers_of_a_token + 4) + counts) + 2 * 4
    assert held.full == 2 * (7 * (numbers_of_a_token + 4) + 2 * counts) + 2 * 4
    planned = kvjax.planned_bytes("full", config, 5, capacity=64, batch=2, dtype="float32")
    assert planned.total == held.total
    # A step reads each key once, for scores and for values, the positions, and the number of slots in use.
    step = kvjax.step_bytes("full", config, 5, capacity=64, batch=2, dtype="float32")
    assert step.device == 2 * 2 * (64 * (numbers_of_a_token + 4) + counts)
    assert step.device_written == 2 * 2 * numbers_of_a_token
    quest = "quest:budget=8,page=4,device_layers=0 + offload"
    retrieved = kvjax.step_bytes(quest, config, 32, batch=2, dtype="float32")
    tokens = 8 + 4  # of the pages, and of the query's own, for each of four query heads
    assert retrieved.link == 2 * 2 * 4 * tokens * numbers_of_a_token


def test_generation_is_that_of_a_cache_that_stores_values(model):
    prompts = [list(range(1, 30)), [8], [40, 41, 42]]
    specs = [dataclasses.replace(bound.spec, index=i) for i, bound in enumerate(bind("full", model.config))]
    assert [spec.values_from for spec in specs] == [16, 16]
    expected = kvjax.logits(model, prompts)
    for method in ("full", "minicache:share=1,start=0", "kcache:n=64"):
        last, _ = kvjax.prefill(model, prompts, method)
        for row, prompt in zip(np.asarray(last), range(len(prompts)), strict=True):
            np.testing.assert_allclose(row, expected[prompt][len(prompts[prompt]) - 1], atol=1e-5)


def test_every_way_to_read_a_cache_is_dense_attention(monkeypatch):
    """Methods of the registry with programs of their own for decoding; those that only select share that of `full`."""
    monkeypatch.setattr(table_file, "SHIPPED_TABLES", toy.tables())
    batch = toy.batch()
    batch = dataclasses.replace(batch, v=batch.k[..., LATENT.values_from :])
    expected, programs = toy.dense_outputs(batch), {}
    for name in REGISTRY:
        if text := FIRST_CASES[name].lossless:
            bound = parse(text).bind(dataclasses.replace(LATENT, index=0))
            if isinstance(bound.v, SharedValues):
                programs.setdefault(bound.after_prompt, (name, bound))
    assert len(programs) > 15
    for name, bound in programs.values():
        out, exact_from = toy.decode(bound, batch)[0], FIRST_CASES[name].exact_from
        difference = np.abs(out - expected)[:, :, :, exact_from:].max()
        assert difference < 5e-6, f"{name}: {difference}"


def test_values_that_cannot_be_channels_of_the_keys_are_refused():
    with pytest.raises(KvjaxError, match="values of 16 channels cannot be those of the keys from channel 8 on: keys"):
        LayerSpec(0, 1, 1, 2, 32, Rope(16), Rule(), 16, 8)
    with pytest.raises(KvjaxError, match="RoPE turns the first 16; put the channels with positions first"):
        LayerSpec(0, 1, 1, 2, 32, Rope(16), Rule(), 16, 20)
