"""LongRoPE's factors, which each call chooses by the length of its texts, as transformers does, and each cache keeps.

That a config with one choice for all texts equals transformers is tested in `tests/models/test_loud_parity.py`, with
the long factors by `phi3_longrope` and the short ones by `llama_longrope`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.core.rope import RopeScaling, longrope_scaling
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.explore.exploration import explore
from kvjax.generation import user_warnings
from kvjax.models import Config, checkpoint
from kvjax.reuse import blend, pack_exactly, read_batch, read_exactly, read_packed

ORIGINAL, POSITIONS, VOCABULARY = 24, 128, 40
SCALING = longrope_scaling((1.0, 1.5), (2.0, 0.6), POSITIONS / ORIGINAL, ORIGINAL, is_long=True)
CONFIG = Config.llama(
    VOCABULARY, 8, 2, 2, 1, 4, 16, max_positions=POSITIONS, rope_theta=100.0, rope_scaling=SCALING, bos_id=1
)
TEXT = np.random.default_rng(0).integers(1, VOCABULARY, 60).tolist()
WITHIN, MORE = TEXT[:14], TEXT[14:20]
METHODS = ("full", "kcache:n=8", "snapkv:budget=8,window=4", "streaming_llm:recent=12")
"""Methods that keep keys after RoPE, turn them to other positions, and evict."""


@functools.cache
def make_model() -> kvjax.Model:
    return kvjax.random_model(CONFIG, seed=3)


@functools.cache
def make_short() -> kvjax.Model:
    return kvjax.Model(CONFIG.with_max_positions(ORIGINAL), make_model().params)


@functools.cache
def make_long() -> kvjax.Model:
    return kvjax.Model(CONFIG.with_max_positions(POSITIONS), make_model().params)


def equal(ours, theirs) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


@pytest.fixture(autouse=True)
def no_model_has_warned(monkeypatch):
    monkeypatch.setattr(user_warnings, "_WARNED_MODELS", set())


def test_the_factors_matter():
    short, long = (np.asarray(kvjax.logits(model, [WITHIN])) for model in (make_short(), make_long()))
    assert np.abs(short - long).max() > 0.1 * np.abs(short).max()


def test_the_length_decides_and_an_explicit_choice_holds():
    assert CONFIG.for_length(ORIGINAL) == make_short().config and CONFIG.for_length(ORIGINAL + 1) == make_long().config
    assert set(CONFIG.variants) == {CONFIG, make_short().config, make_long().config}
    for config in (make_short().config, make_long().config, CONFIG.with_max_positions(ORIGINAL + 1)):
        assert config.for_length(3) is config.for_length(POSITIONS) is config and config.variants == (config,)
    plain = Config.llama(VOCABULARY, 8, 1, 2, 1, 4, 16, rope_scaling=RopeScaling("llama3", 8.0))
    assert plain.for_length(3) is plain and plain.variants == (plain,)
    never_long = dataclasses.replace(SCALING, is_long=False)
    config = Config.llama(VOCABULARY, 8, 1, 2, 1, 4, 16, rope_scaling=never_long)
    assert config.for_length(ORIGINAL + 1) is config
    # The choice can be made again, and configs of before it was one keep their text.
    assert make_long().config.with_max_positions(ORIGINAL) == make_short().config
    assert "is_fixed" not in CONFIG.to_json() and Config.from_json(make_short().config.to_json()) == make_short().config


def test_configs_of_several_kinds_keep_their_text_too():
    kinds = tuple(
        dataclasses.replace(kind, attention=dataclasses.replace(kind.attention, heads=heads))
        for kind in CONFIG.kinds
        for heads in (1, 2)
    )
    config = dataclasses.replace(CONFIG, kinds=kinds, pattern=(0, 1))
    assert config.llama_arguments() is None and "is_fixed" not in config.to_json()
    for variant in config.variants:
        assert Config.from_json(variant.to_json()) == variant


def test_a_loaded_model_chooses_and_one_that_is_loaded_with_max_positions_does_not(tmp_path):
    checkpoint.save(tmp_path / "model", CONFIG, make_model().params)
    assert kvjax.load(tmp_path / "model").config == CONFIG
    for positions, model in ((ORIGINAL, make_short()), (POSITIONS, make_long())):
        assert kvjax.load(tmp_path / "model", max_positions=positions).config == model.config


def test_logits_of_a_batch_choose_for_each_text():
    texts = [TEXT, WITHIN, TEXT[: ORIGINAL + 1], TEXT[:ORIGINAL]]
    logits = kvjax.logits(make_model(), texts)
    for row, text, model in zip(logits, texts, (make_long(), make_short(), make_long(), make_short()), strict=True):
        np.testing.assert_allclose(row[: len(text)], kvjax.logits(model, [text])[0, : len(text)], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_within_the_original_context_takes_the_short_factors_and_its_cache_keeps_them(method):
    """The room that calls leave by default reaches beyond the original context, and is not asked for."""
    last, cache = kvjax.prefill(make_model(), [WITHIN], method)
    expected, by_choice = kvjax.prefill(make_short(), [WITHIN], method)
    assert cache.config == make_short().config and equal((last, cache), (expected, by_choice))
    assert equal(
        kvjax.extend(make_model(), [MORE], cache, method), kvjax.extend(make_short(), [MORE], by_choice, method)
    )
    ours, theirs = (kvjax.read(model, [WITHIN], method) for model in (make_model(), make_short()))
    assert ours.model is make_model() and equal(ours.cache, theirs.cache)
    assert equal(ours.feed([MORE]).last_logits, theirs.feed([MORE]).last_logits)
    assert equal(ours.score([MORE]), theirs.score([MORE]))
    assert equal(
        kvjax.score(make_model(), [WITHIN], [MORE], method), kvjax.score(make_short(), [WITHIN], [MORE], method)
    )
    options = {"max_new_tokens": 5, "eos_ids": (), "logprobs": 2}
    calls = (
        lambda model, context, cache: kvjax.generate(model, [WITHIN], method, **options).logprobs,
        lambda model, context, cache: kvjax.generate(model, [MORE], cache=cache, **options).logprobs,
        lambda model, context, cache: context.generate(**options).logprobs,
        lambda model, context, cache: context.ask([MORE], **options).logprobs,
        lambda model, context, cache: list(context.stream(max_new_tokens=5, eos_ids=())),
        lambda model, context, cache: list(kvjax.stream(model, [WITHIN], method, max_new_tokens=5, eos_ids=())),
    )
    for call in calls:
        assert equal(call(make_model(), ours, cache), call(make_short(), theirs, by_choice))


@pytest.mark.parametrize("method", METHODS)
def test_a_longer_text_takes_the_long_factors(method):
    options = {"max_new_tokens": 5, "eos_ids": (), "logprobs": 2}
    for call in (
        lambda model: kvjax.prefill(model, [TEXT], method),
        lambda model: kvjax.read(model, [TEXT], method).ask([MORE], **options).logprobs,
        lambda model: kvjax.generate(model, [TEXT], method, **options).logprobs,
    ):
        ours, theirs = call(make_model()), call(make_long())
        assert equal(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: kvjax.prefill(model, [WITHIN], "full", capacity=ORIGINAL + 1)[0],
        lambda model: kvjax.read(model, [WITHIN], "full", headroom=ORIGINAL).last_logits,
        lambda model: kvjax.read(model, [WITHIN], "full", capacity=POSITIONS).last_logits,
        lambda model: kvjax.generate(model, [WITHIN], "full", max_new_tokens=ORIGINAL, logprobs=2).logprobs,
        lambda model: kvjax.generate(model, [WITHIN], "full", max_new_tokens=2, capacity=64, logprobs=2).logprobs,
        lambda model: kvjax.prefill(model, [WITHIN, TEXT], "full")[0],
        lambda model: kvjax.score(model, [WITHIN], [TEXT], "full"),
        lambda model: read_packed(model, [WITHIN], "full", headroom=ORIGINAL).last_logits,
        lambda model: kvjax.speculative.speculate(model, [WITHIN], "full", max_new_tokens=ORIGINAL).tokens,
    ],
)
def test_a_text_that_is_to_grow_beyond_takes_the_long_factors_from_its_first_token_and_says_so_once(call):
    with pytest.warns(KvjaxWarning, match="a text of 14 tokens is read with LongRoPE's factors for long texts"):
        ours = call(make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(ours, call(make_long())) and equal(ours, call(make_model()))


def test_a_short_text_that_grows_beyond_says_so_with_the_remedy():
    says = "beyond the 24 positions of LongRoPE's factors for short texts.*capacity= or headroom="
    context, beyond = kvjax.read(make_model(), [WITHIN], "full"), TEXT[14 : ORIGINAL + 1]
    for call in (
        lambda: context.feed([beyond]),
        lambda: context.generate(max_new_tokens=12),
        lambda: context.extend_prefix([beyond]),
        lambda: kvjax.extend(make_model(), [beyond], context.cache),
        lambda: kvjax.generate(make_model(), [MORE], cache=context.cache, max_new_tokens=6),
        lambda: read_exactly(make_model(), [WITHIN]).compress("full", 64).feed([beyond]),
    ):
        with pytest.warns(KvjaxWarning, match=says):
            call()
    # Up to the last position nothing is said; the last token of an answer is not fed, and takes none.
    context.feed([beyond[:-1]])
    context.generate(max_new_tokens=11)
    kvjax.generate(make_model(), [WITHIN], "full", max_new_tokens=11)
    kvjax.prefill(make_model(), [WITHIN], "full", capacity=ORIGINAL)


def test_speculation_exact_keys_and_packed_texts_choose_too():
    draws = [
        kvjax.speculative.speculate(model, [WITHIN], "full", max_new_tokens=5, eos_ids=(), logprobs=2).logprobs
        for model in (make_model(), make_short())
    ]
    assert equal(*draws)
    for read in (read_exactly, pack_exactly):
        ours, theirs = (read(model, [WITHIN, MORE]) for model in (make_model(), make_short()))
        assert equal(ours.prompts, theirs.prompts)
        fed = [x.compress("kcache:n=8", 64).feed([MORE, MORE]).last_logits for x in (ours, theirs)]
        assert equal(*fed)
    assert equal(
        *(
            kvjax.read(model, [WITHIN], "full").extend_prefix([MORE]).last_logits
            for model in (make_model(), make_short())
        )
    )


@pytest.mark.parametrize(
    ("lengths", "room", "choice"),
    [((20, 18), None, make_short), ((20, 18), 4, make_short), ((40, 30), None, make_long)],
)
def test_prompts_with_a_shared_prefix_choose_by_the_longest(lengths, room, choice):
    """The prefix alone is within the original context."""
    prompts = [TEXT[:16] + [5 + i] * (n - 16) for i, n in enumerate(lengths)]
    ours, theirs = (read_batch(model, prompts, headroom=room) for model in (make_model(), choice()))
    assert ours.model is make_model() and ours.cache.plan[0].prefix is not None
    assert equal((ours.last_logits, ours.cache), (theirs.last_logits, theirs.cache))
    np.testing.assert_allclose(ours.last_logits, kvjax.read(choice(), prompts, "full").last_logits, atol=1e-5)


def test_room_for_shared_prefixes_that_reaches_beyond_takes_the_long_factors():
    prompts = [[*TEXT[:16], 5], [*TEXT[:16], 6]]
    with pytest.warns(KvjaxWarning, match="a text of 17 tokens is read with LongRoPE's factors for long texts"):
        ours = read_batch(make_model(), prompts, headroom=ORIGINAL)
    assert equal(ours.last_logits, read_batch(make_long(), prompts, headroom=ORIGINAL).last_logits)


def test_an_exploration_chooses_by_its_texts_and_not_by_the_rounded_capacity():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = (
            explore(model, WITHIN, "full", ORIGINAL - len(WITHIN)) for model in (make_model(), make_short())
        )
    np.testing.assert_array_equal(ours.attention, theirs.attention)


def test_chunks_that_are_put_together_beyond_say_so_with_a_remedy_that_they_can_follow(tmp_path):
    checkpoint.save(tmp_path / "model", CONFIG, make_model().params)
    chunks = [TEXT[:14], TEXT[14:28]]

    def join_chunks(model: kvjax.Model) -> kvjax.Context:
        return blend(read_exactly(model, chunks), [[0, 1]], [MORE], ratio=1.0).compress("full", 64)

    with pytest.warns(KvjaxWarning, match="beyond the 24 positions.*load the model with max_positions= where a call"):
        join_chunks(make_model())
    loaded = kvjax.load(tmp_path / "model", max_positions=POSITIONS)
    np.testing.assert_allclose(
        join_chunks(loaded).last_logits, kvjax.read(make_long(), [TEXT[:28] + MORE], "full").last_logits, atol=1e-5
    )


def test_operations_on_caches_and_files_keep_the_choice(tmp_path):
    for text, choice in ((WITHIN, make_short()), (TEXT[:30], make_long())):
        ours, theirs = (kvjax.read(model, [text], "full") for model in (make_model(), choice))
        path = ours.save(tmp_path / f"{len(text)}.npz")
        assert equal(kvjax.resume(make_model(), path).feed([MORE]).last_logits, theirs.feed([MORE]).last_logits)
        assert equal(kvjax.resume(choice, path).feed([MORE]).last_logits, theirs.feed([MORE]).last_logits)
        edited = [context.edit(2, 4, [[7, 8, 9]]).feed([MORE]).last_logits for context in (ours, theirs)]
        assert equal(*edited)
        assert equal(
            ours.crop(8).fork(2).feed([MORE] * 2).last_logits, theirs.crop(8).fork(2).feed([MORE] * 2).last_logits
        )
        keys = kvjax.cachegen.write(tmp_path / f"{len(text)}.keys", ours)
        fed = [
            kvjax.cachegen.read(model, keys).compress("full", 64).feed([MORE]).last_logits
            for model in (make_model(), choice)
        ]
        assert equal(*fed)
    with pytest.raises(KvjaxError, match="or of LongRoPE's other factors"):
        kvjax.read(make_model(), [WITHIN], "full", capacity=24).join(
            kvjax.read(make_model(), [TEXT[:30]], "full", capacity=64)
        )
    with pytest.raises(KvjaxError, match="filled by another model"):
        kvjax.extend(make_short(), [MORE], kvjax.prefill(make_model(), [TEXT], "full")[1])


def test_pure_functions_take_the_choice_of_the_config():
    tokens = jnp.asarray([WITHIN])
    assert equal(
        functional.logits(make_model().params, tokens, CONFIG),
        functional.logits(make_model().params, tokens, make_short().config),
    )
    run = jax.jit(functional.prefill, static_argnames=("plan", "config", "capacity"))
    with pytest.raises(KvjaxError, match="config = config.for_length\\(capacity\\) before functional.bind"):
        run(make_model().params, tokens, jnp.array([14]), functional.bind("full", CONFIG), CONFIG, ORIGINAL)
    with pytest.raises(KvjaxError, match="layer 0 of the plan has another rotary embedding"):
        functional.empty(functional.bind("full", CONFIG), make_short().config, 1, ORIGINAL)
    config = CONFIG.for_length(ORIGINAL)
    plan = functional.bind("kcache:n=8", config)
    last, cache = run(make_model().params, tokens, jnp.array([14]), plan, config, ORIGINAL)
    np.testing.assert_allclose(last, kvjax.prefill(make_short(), [WITHIN], "kcache:n=8")[0], atol=1e-5)
    fed, _ = functional.extend(make_model().params, jnp.asarray([MORE]), cache)
    cache = dataclasses.replace(cache, weights=make_model().fingerprint)
    np.testing.assert_allclose(kvjax.extend(make_model(), [MORE], cache)[0], fed, atol=1e-5)
    # A cache that is to grow beyond takes the long factors, as these functions always did.
    plan = functional.bind("full", CONFIG)
    long, _ = run(make_model().params, tokens, jnp.array([14]), plan, CONFIG, ORIGINAL + 1)
    np.testing.assert_allclose(long, kvjax.prefill(make_long(), [WITHIN], "full")[0], atol=1e-5)


def test_both_choices_share_one_fingerprint(monkeypatch):
    model = kvjax.Model(CONFIG, make_model().params)
    chosen = model.with_config(make_short().config)
    assert chosen.fingerprint == make_model().fingerprint
    monkeypatch.setattr("kvjax.models.model.fingerprint", lambda params: "computed again")
    assert model.fingerprint == chosen.fingerprint == make_model().fingerprint
    assert model.with_config(CONFIG) is model
