"""Layers with a sliding window hold the tokens of their window, under every codec and reader, and stay exact."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.cache.calibration import table_file
from kvjax.cache.rings import HEADROOM_TOKENS, RingLayer
from kvjax.engine.forward import exact_logits
from kvjax.engine.plan import bind
from kvjax.engine.plan import specs as layer_specs
from kvjax.errors import IncompatibleMethod, KvjaxError, KvjaxWarning
from kvjax.generation import user_warnings
from kvjax.models.config import Config
from kvjax.testing import full_copies, toy_model

WINDOW = 5
SLOTS = WINDOW + HEADROOM_TOKENS
PROMPTS = [[7, 3, 9, 1, 4, 8, 2, 6, 5, 11, 13, 12], [1, 2, 3], list(range(1, 41))]  # below and beyond the ring
EXACT = (
    "full",
    "offload",
    "quest",
    "kcache",
    "snapkv:budget=100%",
    "h2o:heavy=100,recent=100",
)


@functools.cache
def model():
    return toy_model(layers=3, windows=(WINDOW, None, WINDOW), vocab_size=64)


def texts(length: int) -> list[list[int]]:
    """The prompts, continued to `length` tokens after their own."""
    rng = np.random.default_rng(0)
    return [prompt + rng.integers(1, 60, length).tolist() for prompt in PROMPTS]


def expected_logits(whole: list[list[int]]) -> list[np.ndarray]:
    return [np.asarray(exact_logits(model().params, jnp.array([text]), model().config)[0]) for text in whole]


def decode_logits(method, whole, steps, width=1, **options) -> list[np.ndarray]:
    """Logits of the last prompt token, and of all tokens after it, fed `width` at a time."""
    tokens = [text[: len(prompt)] for text, prompt in zip(whole, PROMPTS, strict=True)]
    last, cache = kvjax.prefill(model(), tokens, method, capacity=len(whole[-1]) + 8, **options)
    out = [np.asarray(last)[:, None]]
    for at in range(0, steps, width):
        more = [text[len(p) + at : len(p) + min(at + width, steps)] for text, p in zip(whole, PROMPTS, strict=True)]
        logits, cache = kvjax.extend(model(), more, cache)
        out.append(np.asarray(logits))
    return np.concatenate(out, 1), cache


def assert_exact(method, steps=4 * WINDOW, width=1, **options):
    whole = texts(steps)
    found, cache = decode_logits(method, whole, steps, width, **options)
    for row, expected, prompt in zip(found, expected_logits(whole), PROMPTS, strict=True):
        np.testing.assert_allclose(row, expected[len(prompt) - 1 :], atol=2e-5)
    return cache


@pytest.mark.parametrize("method", EXACT)
def test_four_windows_of_decoding_are_the_exact_forward_pass(method):
    cache = assert_exact(method)
    assert [isinstance(layer, RingLayer) for layer in cache.plan] == [True, False, True]
    assert [state.pos.shape[2] for state in cache.layers][::2] == [SLOTS, SLOTS]


@pytest.mark.parametrize(("width", "options"), [(3, {}), (20, {"chunk": 7})])
def test_chunks_of_any_length_are_the_exact_forward_pass(width, options):
    assert_exact("full", width=width, **options)


def assert_as_without_rings(method, steps=4 * WINDOW, sequences=3):
    """Compares the logits of the first sequences."""
    whole = texts(steps)
    rings, cache = decode_logits(method, whole, steps)
    assert [isinstance(layer, RingLayer) for layer in cache.plan] == [True, False, True]
    tokens, cache = decode_logits(kvjax.compose(method, "in_windows"), whole, steps)
    assert not any(isinstance(layer, RingLayer) for layer in cache.plan)
    np.testing.assert_allclose(rings[:sequences], tokens[:sequences], atol=5e-6)
    return rings


@pytest.mark.parametrize("method", ["int8", "offload + fp8"])
def test_a_ring_of_codes_gives_what_all_tokens_in_codes_give_in_steps_of_one_token_or_many(method):
    rings = assert_as_without_rings(method)
    error = np.abs(decode_logits(method, texts(20), 20, width=20)[0] - rings).max(-1)
    # A number between two codes may be rounded to the other one in a program of another width, which moves the tokens
    # after it a little: by 2.5e-5 under fp8 on one processor. A window one token shorter moves each by 0.6 or more.
    assert np.median(error) < 5e-6 and error.max() < 2e-4, error.max()


def random_table(path, kind, groups, *names):
    """A table of random orthonormal bases for the model, written to a path."""
    rng, channels = np.random.default_rng(3), 2 * 8 // groups
    arrays = {name: np.linalg.qr(rng.normal(size=(groups, channels, channels)))[0] for name in names}
    arrays |= {f"{name}_mean": rng.normal(size=(groups, channels)) for name in names}
    layers = [{name: array.astype(np.float32) for name, array in arrays.items()}] * 3
    return table_file.write(path / kind, kind, layer_specs(model().config)[0], layers)


def test_heads_that_are_stored_together_are_in_a_ring_what_they_are_without(tmp_path):
    bases = {
        "bases": random_table(tmp_path, "bases", 2, "bare_keys", "values"),
        "joint_bases": random_table(tmp_path, "joint_bases", 1, "bare_keys", "values"),
    }
    rotate = kvjax.parse(f"rotatekv:bits=4,table={bases['bases']}").k.inner
    low_rank = kvjax.parse(f"cskv:window=3,table={bases['joint_bases']}").v.inner
    assert_as_without_rings(kvjax.Method(k=rotate, v=low_rank))


CODED_TOGETHER = (
    "kivi:group=8,residual=8",
    "saq:bits=8-4,group=4,every=8",
    "cskv:window=3",
    "gear:bits=2,rank=2,every=4,share=0.3",
    "kvquant:bits=4,outliers=0.3,first=2,every=8",
    "zipcache:every=5",
    "zipvl:every=4",
)


@pytest.mark.parametrize("method", CODED_TOGETHER)
def test_codecs_that_code_tokens_together_hold_a_window_by_token_in_eight_bits(method):
    config = model().config
    for placed, by_token in ((method, "int8"), (f"{method} + offload", "int8 + offload")):
        try:
            plan = bind(placed, config)
        except KvjaxError as error:  # what works on the device alone, and tables of other models
            assert "offload" in placed or "table" in str(error)
            continue
        expected = bind(by_token, config)
        assert plan[0] == plan[2] == expected[0] and plan[1] != expected[1]


def test_a_model_whose_layers_all_have_windows_is_the_same_under_codecs_of_groups_and_by_token():
    windows = toy_model(layers=2, windows=(WINDOW, WINDOW), vocab_size=64)
    groups, by_token = (
        kvjax.generate(windows, PROMPTS, method, max_new_tokens=20, logprobs=True)
        for method in ("kivi:bits=2,group=8,residual=8", "int8")
    )
    assert groups.tokens == by_token.tokens and groups.bytes == by_token.bytes
    exact = kvjax.generate(windows, PROMPTS, "full", max_new_tokens=1, logprobs=True)
    np.testing.assert_allclose(groups.logprobs[0][0], exact.logprobs[0][0], atol=1e-5)


def test_gradients_pass_through_codecs_that_code_tokens_together():
    kivi, int8 = (functional.bind(m, model().config, differentiable=True) for m in (CODED_TOGETHER[0], "int8"))
    assert kivi[0] == int8[0] and kivi[1] != int8[1]


def test_a_ring_never_holds_more_than_the_window_and_the_bytes_are_those_of_the_hand():
    long, short = kvjax.prefill(model(), [PROMPTS[2], PROMPTS[1]], "full", capacity=128)[1], 3
    kv_bytes = 2 * 2 * 8 * 4 + 4
    held = sum(min(n, WINDOW) * 2 + n for n in (40, short)) * kv_bytes + 2 * (3 * 4 + 4)
    assert kvjax.state_bytes(long).held["device"] == kvjax.state_bytes(long).full == held
    assert kvjax.state_bytes(long).total["device"] == 2 * ((2 * SLOTS + long.capacity) * kv_bytes + 3 * 4 + 4)
    assert [[len(head) for head in layer[0]] for layer in kvjax.kept_positions(long)] == [
        [WINDOW] * 2,
        [40] * 2,
        [WINDOW] * 2,
    ]
    planned = kvjax.planned_bytes("full", model(), 40, capacity=128)
    alone = kvjax.state_bytes(kvjax.prefill(model(), [PROMPTS[2]], "full", capacity=128)[1])
    assert planned == alone
    step = kvjax.step_bytes("full", model(), 40, capacity=128).device
    assert step == (2 * SLOTS + 128) * kv_bytes + 3 * 4
    whole = kvjax.planned_bytes("full + in_windows", model(), 40, capacity=128)
    assert whole.held["device"] == 3 * (40 * kv_bytes + 4) + 4 and whole.full == planned.full


def test_gemma_3_270m_holds_5_6_times_less_at_32768_tokens():
    windows = tuple(None if (i + 1) % 6 == 0 else 512 for i in range(18))
    config = Config.llama(
        vocab_size=64, width=640, layers=18, heads=4, kv_heads=1, head_dim=256, mlp_width=64, windows=windows
    )
    rings, whole = (kvjax.planned_bytes(m, config, 32768, dtype="bfloat16") for m in ("full", "full + in_windows"))
    assert rings.held["device"] == 3 * 32768 * 1028 + 15 * 512 * 1028 + 18 * 4 + 4
    assert round(whole.held["device"] / rings.held["device"], 1) == 5.6
    assert whole.held["device"] / rings.total["device"] > 5.5


def test_a_sequence_can_take_back_what_the_ring_has_room_for_and_says_so_beyond():
    whole = texts(40)
    tokens = [text[:41] for text in whole]
    last, cache = kvjax.prefill(model(), tokens, "full", capacity=100)
    cropped = kvjax.cache_ops.crop(cache, [41 - HEADROOM_TOKENS] * 3)
    logits, _ = kvjax.extend(model(), [text[25:41] for text in whole], cropped)
    np.testing.assert_allclose(logits[:, -1], last, atol=2e-5)
    with pytest.raises(KvjaxError, match="cannot give back its last 18 tokens, 17 at most.*`full \\+ in_windows`"):
        kvjax.cache_ops.crop(cache, 23)
    more = [5], [5, 6, 7], [9, 8]
    ragged = kvjax.extend(model(), more, cache)[1]
    assert np.asarray(ragged.plan[0].max_rollback(ragged.layers[0])).tolist() == [HEADROOM_TOKENS, 17, HEADROOM_TOKENS]
    lengths = [42 - HEADROOM_TOKENS, 44 - 17, 43 - HEADROOM_TOKENS]
    back, again = kvjax.cache_ops.crop(ragged, lengths), [text + m for text, m in zip(tokens, more, strict=True)]
    logits, _ = kvjax.extend(model(), [text[n:] for text, n in zip(again, lengths, strict=True)], back)
    expected, _ = kvjax.prefill(model(), again, "full", capacity=100)
    np.testing.assert_allclose([row[n - 1] for row, n in zip(logits, (16, 17, 16), strict=True)], expected, atol=2e-5)


@pytest.mark.parametrize(
    "method",
    [
        "pyramidkv:budget=9,window=2,rule=peer",
        "snapkv:budget=9,window=2 + adakv:scope=model,page=2",
    ],
)
def test_a_budget_of_the_model_is_divided_among_the_layers_without_a_window(method):
    with_windows = toy_model(layers=4, windows=(None, 3, None, 3))
    cache = kvjax.prefill(with_windows, [PROMPTS[2]], method)[1]
    kept = [[len(head) for head in layer[0]] for layer in kvjax.kept_positions(cache)]
    assert kept[1] == kept[3] == [3] * len(kept[1])
    assert sum(kept[0] + kept[2]) == 2 * 9 * len(kept[0])
    everywhere = kvjax.prefill(with_windows, [PROMPTS[2]], f"{method} + in_windows")[1]
    assert sum(len(head) for layer in kvjax.kept_positions(everywhere) for head in layer[0]) == 4 * 9 * len(kept[0])


def test_a_decode_loop_writes_a_ring_in_place_and_is_the_exact_forward_pass():
    prompt, steps = jnp.array([PROMPTS[2]]), 2 * SLOTS
    plan, lengths = bind("full", model().config), jnp.array([40])
    logits, cache = functional.prefill(model().params, prompt, lengths, plan, model().config, 128)
    first = logits.argmax(-1).astype(jnp.int32)
    decode = jax.jit(lambda cache, first: functional.decode(model().params, cache, first, steps), donate_argnums=0)
    compiled = decode.lower(cache, first).compile()
    assert not full_copies(compiled.as_text(), cache.layers[0].k.data.shape)
    assert cache.layers[0].k.data.shape[2] == SLOTS
    tokens, _ = compiled(cache, first)
    whole = jnp.concatenate([prompt, first[:, None], tokens], 1)
    expected = exact_logits(model().params, whole[:, :-1], model().config)[:, prompt.shape[1] :].argmax(-1)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("method", ["int8 + offload", "gear:every=4,share=0.3 + offload"])
def test_saved_taken_and_joined_rings_go_on_as_before(tmp_path, method):
    context = kvjax.read(model(), PROMPTS, method, capacity=64)
    more = [[3, 4], [5], [6, 7, 8]]
    expected = context.feed(more).last_logits
    resumed = kvjax.resume(model(), context.save(tmp_path / "rings"))
    np.testing.assert_array_equal(resumed.feed(more).last_logits, expected)
    joined = context.take([2]).join(context.take([0, 1]))
    np.testing.assert_allclose(
        joined.feed([more[2], more[0], more[1]]).last_logits, expected[np.array([2, 0, 1])], atol=1e-5
    )


def test_pairs_of_layers_need_neighbors_without_a_window():
    with pytest.raises(IncompatibleMethod, match="no two neighbors without a sliding window.*minicache \\+ in_windows"):
        bind("minicache:start=0", model().config)
    assert len(bind("minicache:start=0 + in_windows", model().config)) == 3


def test_gradients_pass_through_a_ring():
    prompt, more = jnp.array([PROMPTS[2]]), jnp.array([[3, 4, 5]])

    def loss(params, method):
        plan = functional.bind(method, model().config, differentiable=True)
        _, cache = functional.prefill(params, prompt, jnp.array([40]), plan, model().config, 64)
        return functional.extend(params, more, cache)[0].sum()

    ring, tokens = (jax.grad(loss)(model().params, method) for method in ("int8", "int8 + in_windows"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-3), ring, tokens)


def test_a_method_with_no_layer_to_work_in_says_so_once(monkeypatch):
    monkeypatch.setattr(user_warnings, "_WARNED_METHODS", set())
    mistral = toy_model(layers=2, windows=(WINDOW, WINDOW), vocab_size=64)
    with pytest.warns(KvjaxWarning, match="^`select` of snapkv.* does nothing.*'snapkv:budget=3,window=2 \\+ in_win"):
        kvjax.read(mistral, [PROMPTS[0]], "snapkv:budget=3,window=2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.read(mistral, [PROMPTS[0]], "snapkv:budget=3,window=2")
        kvjax.read(mistral, [PROMPTS[0]], "snapkv:budget=3,window=2 + in_windows")
        kvjax.read(mistral, [PROMPTS[0]], "int8")
    with pytest.warns(KvjaxWarning, match="`decode` of h2o.* does nothing"):
        kvjax.generate(mistral, [PROMPTS[0]], "h2o:heavy=2,recent=2", max_new_tokens=2)
