"""Logits that are not finite raise an error on every path, which says where they come up and what helps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

import kvjax
from kvjax import KvjaxError, calibrate, cli, functional
from kvjax.eval.run.evaluate import evaluate
from kvjax.eval.run.store import Store
from kvjax.eval.tasks.case import Spec
from kvjax.explore.exploration import explore
from kvjax.generation.finite import find_layer
from kvjax.models import checkpoint
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

IDS = [[1, 2, 3], [4, 5]]
LAYERS = 3


def with_params(model: kvjax.Model, dtype=jnp.float32, **changes) -> kvjax.Model:
    """A model with some parameters replaced by functions of them, by path, and all of them in a dtype."""
    flat = flatten_dict(model.params, sep="/")
    flat |= {path: change(flat[path]) for path, change in changes.items()}
    params = jax.tree.map(lambda x: x.astype(dtype), unflatten_dict(flat, sep="/"))
    return dataclasses.replace(model, params=params, tokenizer=Tokenizer(vocab.tokenizer()))


@functools.cache
def large_in_float16() -> kvjax.Model:
    """A float16 model in whose last layer the MLP exceeds 65,504; its weights do not."""
    paths = {f"layer_{LAYERS - 1}/mlp/{name}/kernel": lambda x: x * 3e3 for name in ("up", "down")}
    return with_params(toy_model(layers=LAYERS, vocab_size=512), jnp.float16, **paths)


@functools.cache
def sound_in_float32() -> kvjax.Model:
    return with_params(large_in_float16())


@pytest.mark.parametrize(("path", "value"), [("layer_1/mlp/up/kernel", np.nan), ("embedding", np.inf)])
def test_weights_that_are_not_finite_are_named(path, value):
    model, says = with_params(toy_model(), **{path: lambda x: x.at[0].set(value)}), f"the parameter {path} of the model"
    with pytest.raises(KvjaxError, match=f"after prompt 0 are not finite: {says} is not; convert its checkpoint"):
        kvjax.generate(model, [[0, 2, 3], [4, 5]], "full", max_new_tokens=2)


def test_the_error_says_what_helps_and_how_to_find_the_layer():
    with pytest.raises(KvjaxError, match=r"float16 cannot hold .*; load .* dtype='bfloat16' .*find_layer\("):
        kvjax.read(large_in_float16(), IDS, "full")
    assert find_layer(large_in_float16(), IDS[0]) == LAYERS - 1 and find_layer(sound_in_float32(), IDS[0]) is None


PROMPT_CALLS = {
    "logits": lambda m: kvjax.logits(m, IDS),
    "prefill": lambda m: kvjax.prefill(m, IDS, "full"),
    "prefill in chunks": lambda m: kvjax.prefill(m, IDS, "full", chunk=2),
    "prefill of a global budget": lambda m: kvjax.prefill(m, IDS, "turned_queries:budget=64"),
    "read": lambda m: kvjax.read(m, IDS, "snapkv:budget=64"),
    "generate": lambda m: kvjax.generate(m, IDS, "int4", max_new_tokens=2),
    "stream": lambda m: next(kvjax.stream(m, IDS, "full", max_new_tokens=2)),
    "stream_text": lambda m: next(kvjax.stream_text(m, IDS[0], "full", max_new_tokens=2)),
    "score": lambda m: kvjax.score(m, IDS, [[6, 7], [8]], "full"),
    "speculate": lambda m: kvjax.speculative.speculate(m, IDS, "int4", max_new_tokens=2),
    "speculate with a draft": lambda m: kvjax.speculative.speculate(
        sound_in_float32(), IDS, draft_model=m, max_new_tokens=2
    ),
    "read_exactly": lambda m: kvjax.reuse.read_exactly(m, IDS),
    "read_packed": lambda m: kvjax.reuse.read_packed(m, IDS, "full"),
    "read_batch": lambda m: kvjax.reuse.read_batch(m, [[1, 2, 3], [1, 2, 4]], least=2),
}


@pytest.mark.parametrize("name", PROMPT_CALLS)
def test_every_call_with_prompts_raises(name):
    with pytest.raises(KvjaxError, match="are not finite: float16 cannot hold"):
        PROMPT_CALLS[name](large_in_float16())


# Token 9 alone makes the last MLP exceed float16, so that prompts of other tokens are sound.
BAD_TOKEN, PROMPTS = 9, [[1, 2, 3, 4], [5, 6]]


def bad_at_a_token(token: int = BAD_TOKEN, layer: int = 0) -> kvjax.Model:
    """A float16 model whose numbers are too large after one token."""
    # One channel that this token's embedding alone has, and that the MLP of one layer multiplies.
    changes = {"embedding": lambda x: x.at[:, 0].set(0).at[token, :].set(0).at[token, 0].set(1)}
    for i in range(1 + layer):
        changes |= {f"layer_{i}/{name}/kernel": lambda x: x.at[..., 0].set(0) for name in ("attention/o", "mlp/down")}
    for name in ("gate", "up"):
        changes[f"layer_{layer}/mlp/{name}/kernel"] = lambda x: x.at[0].set(0).at[0, 0].set(1e3)
    return with_params(toy_model(seed=2, layers=1 + layer, vocab_size=512), jnp.float16, **changes)


AT_TOKEN = bad_at_a_token()


def test_the_model_of_these_tests_is_bad_after_one_token_alone():
    logits = functional.logits(AT_TOKEN.params, jnp.asarray([[1, 2, BAD_TOKEN, 3]]), AT_TOKEN.config)
    assert np.isfinite(logits).all(-1).tolist() == [[True, True, False, True]]


FED = [[7, 8], [BAD_TOKEN]]
EXTEND_CALLS = {
    "feed": lambda c: c.feed(FED),
    "ask": lambda c: c.ask(FED, max_new_tokens=2),
    "ask one context several questions": lambda c: c.take([0]).ask([[7], [BAD_TOKEN]], max_new_tokens=2),
    "score": lambda c: c.score([[7, 8], [BAD_TOKEN, 3]]),
    "score within a continuation": lambda c: c.score([[7, 8], [3, BAD_TOKEN, 4, 5]]),
    "extend": lambda c: kvjax.extend(c.model, [[7, 8], [BAD_TOKEN, 3]], c.cache),
    "generate": lambda c: kvjax.generate(c.model, FED, cache=c.cache, max_new_tokens=2),
    "stream": lambda c: next(kvjax.stream(c.model, FED, cache=c.cache, max_new_tokens=2)),
    "extend_prefix": lambda c: c.extend_prefix(FED, of=[0, 1]),
    "after a crop": lambda c: c.crop(1).ask(FED, max_new_tokens=2),
}


@pytest.mark.parametrize("name", EXTEND_CALLS)
def test_every_call_with_a_cache_raises(name):
    context = kvjax.read(AT_TOKEN, PROMPTS, "full", headroom=32)
    with pytest.raises(KvjaxError, match="are not finite: float16 cannot hold .*; load the model"):
        EXTEND_CALLS[name](context)


def test_the_sequence_and_the_token_after_a_cache_are_named():
    context = kvjax.read(AT_TOKEN, PROMPTS, "int4", headroom=32)
    with pytest.raises(KvjaxError, match="after the tokens fed to sequence 1 are not finite"):
        context.feed(FED)
    with pytest.raises(KvjaxError, match="sequence 1, token 1 of 3 are not finite"):
        kvjax.extend(context.model, [[7, 8], [3, BAD_TOKEN, 4]], context.cache)


def test_padding_and_tokens_that_nobody_reads_may_be_anything():
    """Padding is token 0, and so is what is fed where a continuation of one token has nothing to feed."""
    model = bad_at_a_token(token=0)
    assert np.isfinite(kvjax.logits(model, PROMPTS)[0]).all()
    context = kvjax.read(model, PROMPTS, "full", headroom=32)
    context.feed([[7, 8, 9], [1]])
    for scores in (context.score([[7, 8, 9], [3]]), context.score([[0], [0]]), context.score([[7, 0], [0]])):
        assert all(np.isfinite(logp).all() for logp, _ in scores)
    kvjax.extend(model, [[7, 8, 9], [1]], context.cache)
    kvjax.generate(model, [[7, 8, 9], [1]], cache=context.cache, max_new_tokens=1)
    with pytest.raises(KvjaxError):
        context.score([[7, 0, 1], [0]])


@functools.cache
def bad_in_decoding() -> tuple[kvjax.Model, list[list[int]]]:
    """A model whose logits are not finite after the fourth token that sequence 0 draws, and the tokens without that."""
    sound = bad_at_a_token(UNUSED)
    tokens = kvjax.generate(sound, PROMPTS, "full", max_new_tokens=9, eos_ids=()).tokens
    token = tokens[0][3]
    assert {token, UNUSED} & {*tokens[0][:3], *tokens[1], *PROMPTS[0], *PROMPTS[1]} == set()
    return bad_at_a_token(token), tokens


UNUSED = 500


@pytest.mark.parametrize("loop", ["layers", "while", "scan"])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_every_loop_raises_at_the_step(loop, temperature):
    model, tokens = bad_in_decoding()
    options = {"eos_ids": (), "loop": loop, "temperature": temperature}
    says = "after 4 new tokens of sequence 0 are not finite: float16 cannot hold"
    assert kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, **options).tokens == [x[:4] for x in tokens]
    with pytest.raises(KvjaxError, match=says):
        kvjax.generate(model, PROMPTS, "full", max_new_tokens=9, **options)
    context = kvjax.read(model, [p[:-1] for p in PROMPTS], "full", headroom=32)
    last = [p[-1:] for p in PROMPTS]
    with pytest.raises(KvjaxError, match=says):
        context.ask(last, max_new_tokens=9, **options)
    with pytest.raises(KvjaxError, match=says):
        kvjax.generate(model, last, cache=context.cache, max_new_tokens=9, **options)


def test_a_stream_yields_the_sound_tokens_first():
    model, tokens = bad_in_decoding()
    seen = []
    with pytest.raises(KvjaxError, match="after 4 new tokens of sequence 0"):
        for column in kvjax.stream(model, PROMPTS, "full", max_new_tokens=9, eos_ids=()):
            seen.append(column)
    assert [list(x) for x in zip(*seen, strict=True)] == [x[:4] for x in tokens]


@pytest.mark.parametrize("loop", ["layers", "while", "scan"])
def test_a_sequence_that_has_ended_may_be_anything(loop):
    """The token that ends sequence 0 is fed on while the others are decoded, and its logits are read by nobody."""
    model, tokens = bad_in_decoding()
    out = kvjax.generate(model, PROMPTS, "full", max_new_tokens=9, eos_ids=tokens[0][3], loop=loop)
    assert out.tokens == [tokens[0][:4], tokens[1][:9]]


def test_speculation_raises_for_the_verifier_and_for_the_draft():
    model, tokens = bad_in_decoding()
    options = {"max_new_tokens": 9, "eos_ids": (), "num_draft_tokens": 2}
    with pytest.raises(KvjaxError, match="of the draft in sequence 0 are not finite"):
        kvjax.speculative.speculate(model, PROMPTS, "full", **options)
    sound = bad_at_a_token(UNUSED)
    with pytest.raises(KvjaxError, match="of the verifier in sequence 0 are not finite: float16"):
        kvjax.speculative.speculate(model, PROMPTS, "full", draft_model=sound, **options)
    ended = kvjax.speculative.speculate(model, PROMPTS, "full", **options | {"eos_ids": tokens[0][3]})
    assert ended.tokens == [tokens[0][:4], tokens[1][:9]]


def test_a_context_that_was_saved_or_made_with_such_logits_answers_nothing(tmp_path):
    context = kvjax.read(sound_in_float32(), IDS, "full", headroom=16)
    context = dataclasses.replace(context, last_logits=context.last_logits.at[1, 3].set(jnp.nan))
    for each in (context, kvjax.resume(sound_in_float32(), context.save(tmp_path / "file")), context.take([1, 1])):
        with pytest.raises(KvjaxError, match="new tokens of sequence [01] are not finite"):
            each.generate(max_new_tokens=2)
        with pytest.raises(KvjaxError, match="before continuation [01] are not finite"):
            each.score([[3], [4]])
    assert context.take([0]).generate(max_new_tokens=2).tokens


def test_reuse_systems_raise():
    chunks = kvjax.reuse.read_exactly(AT_TOKEN, PROMPTS)
    with pytest.raises(KvjaxError, match="after text 0 are not finite"):
        kvjax.reuse.blend(chunks, [[0, 1]], [[7, BAD_TOKEN]], layer=0)
    with pytest.raises(KvjaxError, match="after text 0 are not finite"):
        kvjax.reuse.cut(chunks, [[2, 2], [2]]).reuse([[0, 2]], [[7, BAD_TOKEN]])


def test_evaluations_and_explorations_end_with_the_error(tmp_path):
    spec = Spec(lengths=(64,), contexts=1, depths=1)
    for tasks in ("ppl", "niah"):
        with pytest.raises(KvjaxError, match=rf"full on {tasks}: the logits after prompt 0 are not finite"):
            kvjax.eval.compare(large_in_float16(), ["full", "int4"], tasks, spec, progress=False)
    with pytest.raises(KvjaxError, match="full on speed: the logits after prompt 0"):
        evaluate(large_in_float16(), "full", [], Store(tmp_path, {}, []), batch=1, speed=[8], progress=None)
    with pytest.raises(KvjaxError, match="after prompt 0 are not finite"):
        explore(large_in_float16(), IDS[0], "full", 2)
    with pytest.raises(KvjaxError, match="after a token of answer 0 are not finite: float16 cannot hold"):
        explore(bad_in_decoding()[0], PROMPTS[0], "full", 6)


def test_a_table_is_not_counted_on_such_numbers():
    with pytest.raises(KvjaxError, match="after prompt 0 are not finite"):
        calibrate.count_arrays(large_in_float16(), "bases", IDS)
    large_keys = bad_at_a_token(layer=1)  # and a second layer that reads what the first one's MLP made
    second = large_keys.params["layer_1"]["mlp"]
    changes = {f"layer_0/mlp/{name}/kernel": lambda _, name=name: second[name]["kernel"] for name in ("gate", "up")}
    large_keys = with_params(large_keys, jnp.float16, **changes)
    with pytest.raises(KvjaxError, match="not finite"):
        calibrate.count_arrays(large_keys, "bases", [[1, BAD_TOKEN, 3]])


def test_the_command_line_ends_with_the_error(tmp_path, capsys):
    checkpoint.save(
        tmp_path / "bad", large_in_float16().config, large_in_float16().params, extra_files=vocab.tokenizer_files()
    )
    assert cli.main(["generate", "--model", str(tmp_path / "bad"), "--method", "full", "--prompt", "def"]) == 2
    assert "are not finite: float16 cannot hold" in capsys.readouterr().err


def test_two_devices_say_the_same():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    model = dataclasses.replace(
        AT_TOKEN, params=jax.device_put(AT_TOKEN.params, param_shardings(AT_TOKEN.config, mesh)), mesh=mesh
    )
    with pytest.raises(KvjaxError, match="after prompt 0 are not finite"):
        kvjax.generate(model, [[1, BAD_TOKEN]], "full", max_new_tokens=2)
    context = kvjax.read(model, [[1, 2]], "full", headroom=16)
    with pytest.raises(KvjaxError, match="after the tokens fed to sequence 0 are not finite"):
        context.ask([[BAD_TOKEN]], max_new_tokens=2)


def test_sound_logits_pass():
    assert kvjax.generate(toy_model(), IDS, "full", max_new_tokens=2).tokens
    assert not np.isfinite(
        functional.logits(large_in_float16().params, jnp.asarray(IDS[:1]), large_in_float16().config)
    ).all()  # it stays pure
