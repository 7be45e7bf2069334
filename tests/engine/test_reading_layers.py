"""Layers without keys and values of their own, which read those of an earlier layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import cache_ops, custom_decoder, functional
from kvjax.core.attention import Rule
from kvjax.core.rope import Rope
from kvjax.engine import prefill
from kvjax.engine.forward import exact_logits
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.explore.traced_state import TracedMethod
from kvjax.models import Config, checkpoint
from kvjax.models.checkpoint.manifest import parameter_shapes
from kvjax.models.kinds import AttentionKind, Latent, LayerKind, MlpKind
from kvjax.models.sharding import param_shardings
from tests.models import decoder_oracle

V, D, K, H, WINDOW = 50, 24, 2, 8, 6
LENGTHS, STEPS, CAPACITY = (21, 13), 9, 48

attention = functools.partial(AttentionKind, 4, K, H, Rope(H), qk_norm="head")
layer = functools.partial(LayerKind, mlp=MlpKind(32))
RING = attention(rule=Rule(WINDOW), value_dim=4)
READ = attention(rule=Rule(None, 1.0))
READS = AttentionKind(8, K, H, Rope(H), Rule(None, 1.0), qk_norm="head", sinks=True, scale=0.5, reads_layer=1)
READS_RING = dataclasses.replace(RING, reads_layer=0)


def config_of(*attentions: AttentionKind, pattern: tuple[int, ...] = (0, 1, 2, 2, 3)) -> Config:
    return Config(V, D, tuple(map(layer, attentions)), pattern)


CONFIG = config_of(RING, READ, READS, READS_RING)


@functools.cache
def model() -> Any:
    made = kvjax.random_model(CONFIG)

    for i in (2, 3):
        sinks = np.random.default_rng(i).normal(size=(K, 4))
        made.params[f"layer_{i}"]["attention"]["sinks"] = jnp.asarray(sinks, jnp.float32)
    return made


def tokens_of() -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, (2, max(LENGTHS) + STEPS)).astype(np.int32)


@functools.cache
def exact() -> np.ndarray:
    """Logits [2 STEPS+1 V] of each sequence's last prompt token and of those after it, from the definition."""
    every = [decoder_oracle.logits(CONFIG, model().params, row) for row in texts()]
    return np.stack([row[n - 1 : n + STEPS] for row, n in zip(every, LENGTHS, strict=True)])


def texts() -> list[np.ndarray]:
    return [row[: n + STEPS] for row, n in zip(tokens_of(), LENGTHS, strict=True)]


def read(method: str, chunk: int | None = None) -> tuple[np.ndarray, Any]:
    """Reads the padded prompts, and returns their last logits and the cache."""
    prompts = np.zeros((2, max(LENGTHS)), np.int32)
    for row, text, n in zip(prompts, texts(), LENGTHS, strict=True):
        row[:n] = text[:n]
    run = functools.partial(
        functional.prefill, plan=functional.bind(method, CONFIG), config=CONFIG, capacity=CAPACITY, chunk=chunk
    )
    logits, cache = jax.jit(run)(model().params, jnp.asarray(prompts), jnp.asarray(LENGTHS, jnp.int32))
    return np.asarray(logits), cache


def later_tokens() -> jax.Array:
    return jnp.asarray(np.stack([text[n:] for text, n in zip(texts(), LENGTHS, strict=True)]))


def test_the_exact_pass_equals_a_plain_decoder() -> None:
    text = texts()[0]
    logits = exact_logits(model().params, jnp.asarray(text[None]), CONFIG)[0]
    np.testing.assert_allclose(logits, decoder_oracle.logits(CONFIG, model().params, text), atol=2e-5)


def test_reading_layers_have_no_projections_of_keys_and_values() -> None:
    names = {path.split("/")[2] for path in parameter_shapes(CONFIG) if path.startswith("layer_2/attention/")}
    assert names == {"q", "q_norm", "o", "sinks"}


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "full + in_windows",
        "snapkv:budget=64,window=4,kernel=3",
        "streaming_llm:recent=44",
        "quest:budget=48,page=4",
        "offload",
    ],
)
def test_methods_that_keep_everything_equal_the_exact_pass(method: str) -> None:
    last, cache = read(method)
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = functional.extend(model().params, token[:, None], cache)
        return cache, logits[:, 0]

    _, logits = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens.T))(cache, later_tokens())
    np.testing.assert_allclose(np.asarray(logits).swapaxes(0, 1), exact()[:, 1:], atol=2e-5)


@pytest.mark.parametrize("method", ["streaming_llm:recent=12"])
def test_further_tokens_at_once_equal_single_steps(method: str) -> None:
    _, cache = read(method)
    single, after = [], cache
    extend = jax.jit(lambda tokens, cache: functional.extend(model().params, tokens, cache))
    for token in later_tokens().T:
        logits, after = extend(token[:, None], after)
        single.append(logits[:, 0])
    at_once, _ = extend(later_tokens(), cache)
    np.testing.assert_allclose(at_once, np.stack(single, 1), atol=2e-5)


def test_more_tokens_than_a_ring_has_room_for_equal_the_exact_pass() -> None:
    text = np.random.default_rng(1).integers(0, V, 45).astype(np.int32)
    run = functools.partial(functional.prefill, plan=functional.bind("full", CONFIG), config=CONFIG, capacity=64)
    _, cache = run(model().params, jnp.asarray(text[None, :5]), jnp.asarray([5], jnp.int32))
    logits, _ = functional.extend(model().params, jnp.asarray(text[None, 5:]), cache)
    np.testing.assert_allclose(logits[0], decoder_oracle.logits(CONFIG, model().params, text)[5:], atol=2e-5)


def test_the_last_layer_computes_the_outputs_of_the_last_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SHORT_PROMPT_TOKENS", 4)
    last, _ = read("full")
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)


def test_heads_and_sequences_on_four_devices_equal_the_exact_pass() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split = dataclasses.replace(
        model(), params=jax.device_put(model().params, param_shardings(CONFIG, mesh)), mesh=mesh
    )
    prompts = [list(map(int, text[:n])) for text, n in zip(texts(), LENGTHS, strict=True)]
    last, cache = kvjax.prefill(split, prompts, "full", capacity=CAPACITY)
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)
    logits, _ = kvjax.extend(split, [[int(row[0])] for row in later_tokens()], cache)
    np.testing.assert_allclose(np.asarray(logits)[:, 0], exact()[:, 1], atol=2e-5)


def test_a_prompt_in_chunks_equals_the_exact_pass() -> None:
    last, _ = read("full", chunk=8)
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)


@pytest.mark.parametrize("method", ["cake:budget=64,window=4", "kvzip:budget=64", "keydiff:budget=64 + adakv:page=4"])
def test_methods_that_see_all_layers_leave_reading_layers_out(method: str) -> None:
    last, cache = read(method)
    logits, _ = functional.extend(model().params, later_tokens()[:, :1], cache)
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)
    np.testing.assert_allclose(logits[:, 0], exact()[:, 1], atol=2e-5)


def test_codes_are_read_by_all_layers_as_the_layer_that_holds_them_reads_them() -> None:
    last, cache = read("int8")
    np.testing.assert_allclose(last, exact()[:, 0], atol=2e-5)  # prompts are read exactly
    logits, _ = functional.extend(model().params, later_tokens()[:, :1], cache)
    assert 1e-4 < np.abs(logits[:, 0] - exact()[:, 1]).mean() < 0.03


def test_bytes_are_those_of_the_layers_that_hold_tokens() -> None:
    prompt, itemsize = 32, 4
    plan = kvjax.planned_bytes("full", CONFIG, prompt, capacity=CAPACITY, dtype="float32")
    ring, whole = (K * (H + width) * itemsize + 4 for width in (4, H))  # of a token, with its position
    assert plan.held["device"] == plan.full == WINDOW * ring + prompt * whole + 2 * 4 + 4
    assert kvjax.planned_bytes("snapkv:budget=8,window=4", CONFIG, prompt, dtype="float32").held["device"] == (
        WINDOW * ring + 8 * (whole + (K - 1) * 4) + 2 * 4 + 4  # heads keep tokens of their own
    )
    # A step reads the cache of layer 1 three times, and that of layer 0 twice; it writes each once.
    step = kvjax.step_bytes("full", CONFIG, prompt, capacity=CAPACITY, dtype="float32")
    slots = WINDOW + 16
    assert step.device == 2 * (slots * ring + 4) + 3 * (CAPACITY * whole + 4)
    assert step.device_written == ring - 4 + whole - 4
    logits, cache = kvjax.prefill(model(), [list(texts()[0])], "full", capacity=CAPACITY)
    assert (
        kvjax.state_bytes(cache).held == kvjax.planned_bytes("full", model(), len(texts()[0]), capacity=CAPACITY).held
    )
    assert [len(layer[0][0]) for layer in kvjax.kept_positions(cache)] == [WINDOW, len(texts()[0]), 0, 0, 0]


def test_caches_are_taken_apart_cropped_and_saved(tmp_path: Any) -> None:
    whole = [list(map(int, text)) for text in texts()]
    _, cache = kvjax.prefill(model(), whole, "full", capacity=CAPACITY)
    cropped = cache_ops.take(cache_ops.crop(cache, [len(text) - 2 for text in whole]), [1])
    logits, _ = kvjax.extend(model(), [whole[1][-2:]], cropped)
    np.testing.assert_allclose(np.asarray(logits)[0, -1], exact()[1, STEPS], atol=2e-5)
    context = kvjax.read(model(), whole, "snapkv:budget=64,window=4,kernel=3", capacity=CAPACITY)
    context.save(tmp_path / "context")
    resumed = kvjax.resume(model(), tmp_path / "context")
    for a, b in zip(jax.tree.leaves(context.cache), jax.tree.leaves(resumed.cache), strict=True):
        np.testing.assert_array_equal(a, b)


def test_configs_and_checkpoints_round_trip(tmp_path: Any) -> None:
    assert Config.from_json(CONFIG.to_json()) == CONFIG
    assert eval(repr(CONFIG), vars(kvjax.models) | globals()) == CONFIG  # noqa: S307
    checkpoint.save(tmp_path / "model", CONFIG, model().params)
    loaded = kvjax.load(tmp_path / "model")
    assert loaded.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model().params)
    # Configs of before keep their text, and so their digests.
    assert "reads_layer" not in config_of(RING, READ, pattern=(0, 1)).to_json()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("minicache:start=0.0", "side_store"),
        ("tidal_decode:topk=4", "hands the choice"),
        ("specache:bits=2,group=8,topk=4,residual=8", "drafts"),
        ("infllm:block=4,sinks=2,local=8,topk=2,representatives=2,chunk=8", "BlockReader"),
        ("rekv:topk=4,block=4,recent=8", "queries of earlier steps"),
    ],
)
def test_methods_that_other_layers_cannot_read_are_refused_by_name(method: str, message: str) -> None:
    with pytest.raises(IncompatibleMethod, match=rf"read the cache of another layer.*{message}.*use a method without"):
        functional.bind(method, config_of(READ, dataclasses.replace(READS, reads_layer=5), pattern=(0,) * 6 + (1,)))


@pytest.mark.parametrize(
    ("attentions", "message"),
    [
        ((RING, dataclasses.replace(READS, reads_layer=3)), "does not come before it"),
        ((RING, dataclasses.replace(READS_RING, head_dim=10)), "head_dim is 10 and there 8"),
        ((RING, dataclasses.replace(READS_RING, rule=Rule(4))), "window=4.*give both layers equal values"),
        ((RING, dataclasses.replace(READS_RING, rope=Rope(H, 500.0))), "500"),
        ((RING, READS_RING, dataclasses.replace(READS_RING, reads_layer=1)), "name the layer that it reads, 0"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(attentions: tuple[AttentionKind, ...], message: str) -> None:
    with pytest.raises(KvjaxError, match=message):
        config_of(*attentions, pattern=tuple(range(len(attentions))))


def test_what_needs_every_layers_keys_is_refused() -> None:
    with pytest.raises(KvjaxError, match="reads_layer"):
        AttentionKind(4, 1, 16, Rope(4), value_dim=12, latent=Latent(12, 6, 5), reads_layer=0)
    with pytest.raises(KvjaxError, match="reads_layer"):
        dataclasses.replace(RING, reads_layer=-1)
    with pytest.raises(KvjaxError, match="layer 2 of this model has none: it reads those of layer 1"):
        kvjax.reuse.read_exactly(model(), [[1, 2, 3]])
    with pytest.raises(KvjaxError, match="read the prompts with kvjax.prefill"):
        kvjax.reuse.read_packed(model(), [[1, 2, 3], [4, 5]], "full", capacity=8)
    with pytest.raises(IncompatibleMethod, match="layer 2 of this model reads the cache of layer 1, and TracedLayer"):
        functional.bind(TracedMethod(kvjax.parse("full"), 8), CONFIG)
    with pytest.raises(KvjaxError, match="custom_decoder.attach does not serve"):
        custom_decoder.attach("full", kvjax.engine.plan.specs(CONFIG), capacity=8)
