"""Generation equals the uncached forward pass, and its forms equal each other."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.engine import forward
from kvjax.errors import KvjaxError
from kvjax.generation import decode_loop
from kvjax.generation.options import LOOPS
from kvjax.generation.programs import jit_loop, jit_with
from kvjax.testing import toy_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
METHODS = [
    "full",
    "offload",
    "kcache:n=99,device_layers=0",
    "kcache:n=99,granularity=kv",
    "kivi:bits=2,group=8,residual=64",
    "specache:bits=1,group=8,residual=8,topk=99",
    "snapkv:budget=64 + kvcrush",
    "streaming_llm:recent=90,reindex=false",
    "h2o:heavy=60,recent=9",
    "infllm:local=64,sinks=4,block=8,chunk=8",
]


@pytest.fixture(scope="module")
def model():
    return toy_model(windows=(None, 5, None))


def greedy_tokens(model, prompt: list[int], count: int) -> list[int]:
    """Decodes token by token through the uncached forward pass."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(kvjax.logits(model, [ids])[0, -1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("method", METHODS)
def test_cached_greedy_is_uncached_greedy(model, method):
    out = kvjax.generate(model, PROMPTS, method, max_new_tokens=6)
    assert out.tokens == [greedy_tokens(model, p, 6) for p in PROMPTS]
    assert out.finish_reasons == ["length"] * 3
    assert out.decode_steps == 5 and out.decode_seconds > 0 and out.prefill_seconds > 0 and out.tokens_per_second > 0


@pytest.mark.parametrize(
    "method", ["full", "kcache:n=2", "specache:bits=1,group=8,residual=8,topk=3", "h2o:heavy=3,recent=2"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_loop_and_stream_make_the_same_tokens(model, method, temperature):
    options = {"max_new_tokens": 9, "temperature": temperature, "seed": 5, "eos_ids": ()}
    first, *others = (kvjax.generate(model, PROMPTS, method, loop=loop, **options) for loop in LOOPS)
    assert [other.tokens for other in others] == [first.tokens] * 2
    for loop in ("layers", "while"):
        columns = list(kvjax.stream(model, PROMPTS, method, loop=loop, **options))
        assert [list(sequence) for sequence in zip(*columns, strict=True)] == first.tokens


def test_offload_is_full_bit_for_bit(model):
    logits = []
    for method in ("full", "offload"):
        prompt_logits, cache = kvjax.prefill(model, PROMPTS, method)
        new_logits, _ = kvjax.extend(model, [[5, 6, 7, 8], [1, 2, 3, 4], [3, 3, 3, 3]], cache, method)
        logits.append((np.asarray(prompt_logits), np.asarray(new_logits)))
    chex.assert_trees_all_equal(*logits)


def test_rows_end_on_any_end_of_sequence_id_and_all_ended_stops_the_loop(model):
    free = kvjax.generate(model, PROMPTS, "full", max_new_tokens=12, eos_ids=()).tokens
    ends = (free[0][2], free[1][4])
    out = kvjax.generate(model, PROMPTS[:2], "full", max_new_tokens=12, eos_ids=ends)
    lengths = [next((i + 1 for i, t in enumerate(tokens) if t in ends), 12) for tokens in free[:2]]
    assert out.tokens == [tokens[:n] for tokens, n in zip(free, lengths, strict=False)]
    assert out.finish_reasons == ["stop" if n < 12 or free[i][-1] in ends else "length" for i, n in enumerate(lengths)]
    assert out.decode_steps == max(lengths) - 1
    columns = list(kvjax.stream(model, PROMPTS[:2], "full", max_new_tokens=12, eos_ids=ends))
    assert len(columns) == max(lengths)
    assert [[t for t in tokens if t is not None] for tokens in zip(*columns, strict=True)] == out.tokens


def test_a_row_samples_the_same_alone_and_in_company(model):
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.95, "seed": 7}
    together = kvjax.generate(model, PROMPTS, "full", **options).tokens
    assert kvjax.generate(model, PROMPTS[:1], "full", **options).tokens[0] == together[0]
    other = kvjax.generate(model, PROMPTS, "full", **{**options, "seed": 8}).tokens
    assert other != together


def test_several_questions_draw_as_the_rows_of_a_batch(model):
    document, question = PROMPTS[0], [5, 6]
    one, batch = (kvjax.read(model, [document] * n, "full", headroom=32) for n in (1, 3))
    options = {"max_new_tokens": 8, "seed": 3, "eos_ids": ()}
    tokens = one.ask([question] * 3, temperature=1.0, **options).tokens
    assert tokens == batch.ask([question] * 3, temperature=1.0, **options).tokens
    assert len(set(map(tuple, tokens))) == 3
    assert one.ask([question], temperature=1.0, **options).tokens == tokens[:1]
    assert one.ask([question] * 2, temperature=1.0, first_sequence=1, **options).tokens == tokens[1:]
    assert one.ask([question] * 3, **options).tokens == batch.ask([question] * 3, **options).tokens


@pytest.mark.parametrize("method", ["full", "offload", "kcache:n=99"])  # with n for all further tokens it is exact
def test_going_on_from_a_state_is_one_long_prompt(model, method):
    _, state = kvjax.prefill(model, PROMPTS, method, capacity=64)
    more = [[20, 21], [22], [23, 24, 25]]
    long_prompts = [p + m for p, m in zip(PROMPTS, more, strict=True)]
    expected = kvjax.generate(model, long_prompts, method, max_new_tokens=5).tokens
    for _ in range(2):  # the state is still usable
        assert kvjax.generate(model, more, method, max_new_tokens=5, cache=state).tokens == expected


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("method", ["full", "offload", "kcache:n=2"])
def test_prefill_in_chunks_is_prefill(model, method, chunk):
    expected, whole_cache = kvjax.prefill(model, PROMPTS, method)
    logits, chunked_cache = kvjax.prefill(model, PROMPTS, method, chunk=chunk)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert jax.tree.map(jax.typeof, whole_cache) == jax.tree.map(jax.typeof, chunked_cache)
    new = [[5], [6], [7]]
    logits, expected = (kvjax.extend(model, new, cache, method)[0] for cache in (chunked_cache, whole_cache))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["full", "kcache:n=99"])
def test_scores_are_the_uncached_log_probabilities(model, method):
    continuations = [[3, 1, 4], [1], [5, 9]]
    scores = kvjax.score(model, PROMPTS, continuations, method)
    for prompt, continuation, token_scores in zip(PROMPTS, continuations, scores, strict=True):
        logp = jax.nn.log_softmax(kvjax.logits(model, [prompt + continuation])[0], -1)
        expected = [float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(continuation)]
        np.testing.assert_allclose(token_scores, expected, atol=1e-5)


def test_one_trace_serves_prompts_of_one_size():
    model = toy_model(seed=1)
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def logits(params, tokens, config):
        return functional.logits(params, tokens, config)

    jitted = jax.jit(logits, static_argnums=2)
    for seed in range(3):
        jitted(model.params, jax.numpy.full((2, 8), seed), model.config)
    kvjax.prefill(model, [[1, 2, 3]], "full", capacity=64)
    run_layer = jit_with(forward.apply_layer, ("call", "target"), ("state", "hidden"), ())
    before = run_layer._cache_size()
    for prompts in ([[4] * 60], [[7] * 33]):
        kvjax.prefill(model, prompts, "full", capacity=64)
    assert run_layer._cache_size() == before > 0


@pytest.mark.parametrize("loop", ["while", "layers"])
def test_sampling_numbers_do_not_recompile(model, loop):
    decode_until = jit_loop(decode_loop.decode_until, None)
    program = decode_until if loop == "while" else decode_loop.draw_next
    args = {"max_new_tokens": 4, "eos_ids": (), "loop": loop}
    kvjax.generate(model, PROMPTS, "full", temperature=0.5, top_k=4, **args)
    before = program._cache_size()
    kvjax.generate(model, PROMPTS, "full", temperature=0.9, top_k=7, **args)
    assert program._cache_size() == before > 0


def test_bytes_of_the_result_are_the_states(model):
    c, B, S = model.config, len(PROMPTS), 64
    a = c.kind(0).attention
    keys_of_slot = B * a.kv_heads * a.head_dim * 4  # as many bytes as its values
    keys = keys_of_slot * S  # of one layer
    lengths = c.layers * 4 * B + 4 * B
    positions_and_lengths = c.layers * 4 * B * S + lengths
    out = kvjax.generate(model, PROMPTS, "kcache:device_layers=1 + in_windows", max_new_tokens=4)
    assert out.bytes.total == {"device": 4 * keys + positions_and_lengths, "pinned_host": 2 * keys}
    full = kvjax.generate(model, PROMPTS, "full", max_new_tokens=4)
    # Layer 1 sees 5 tokens: it holds them, and has room for 16.
    ring = (5 + 16) * (2 * keys_of_slot + 4 * B)
    assert full.bytes.total["device"] == 4 * keys + 2 * 4 * B * S + ring + lengths
    in_windows = kvjax.generate(model, PROMPTS, "full + in_windows", max_new_tokens=4)
    assert in_windows.bytes.total["device"] == 6 * keys + positions_and_lengths


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: kvjax.generate(m, [], "full"), "no prompts"),
        (lambda m: kvjax.generate(m, [[1], []], "full"), "prompt 1 is empty"),
        (lambda m: kvjax.generate(m, [[97]], "full"), "token id 97, outside the vocabulary 0..96"),
        (lambda m: kvjax.generate(m, [[-1]], "full"), "token id -1"),
        (lambda m: kvjax.generate(m, [[0.5]], "full"), "flat list of integer ids"),
        (lambda m: kvjax.read(m, [1, 2, 3], "full"), r"^\[1, 2, 3\] looks like .* one prompt; .*: \[\[1, 2, 3\]\]$"),
        (lambda m: kvjax.read(m, np.arange(9), "full"), r"give a list of prompts: \[\[0, 1, 2, \.\.\]\]"),
        (lambda m: kvjax.read(m, jax.numpy.arange(2), "full"), r"give a list of prompts: \[\[0, 1\]\]"),
        (lambda m: kvjax.generate(m, ["text"], "full"), "no tokenizer.json"),
        (lambda m: kvjax.generate(m, [[1]], "full", max_new_tokens=0), "max_new_tokens must be an integer from 1"),
        (
            lambda m: kvjax.generate(m, [[1] * 9], "full", capacity=10),
            "capacity must be an integer from 73 .*, got 10: the longest",
        ),
        (lambda m: kvjax.generate(m, [[1]], "full", loop="for"), "loop must be"),
        (
            lambda m: kvjax.generate(m, [[1]], kvjax.methods.kcache(device_layers=4)),
            "device_layers=4 but the model has 3",
        ),
        (lambda m: kvjax.methods.kcache(n=0), "n must be at least 1"),
        (lambda m: kvjax.methods.kcache(granularity="head"), "granularity must be"),
        (lambda m: kvjax.methods.kcache(device_layers=-1), "device_layers must be 0 or more"),
        (lambda m: kvjax.prefill(m, [[1]], "full", chunk=0), "chunk must be an integer from 1"),
        (lambda m: kvjax.score(m, [[1]], [[1], [2]], "full"), "2 texts were given for 1 sequences; give one"),
        (lambda m: kvjax.generate("testbed", [[1]], "full"), "the model comes first, as kvjax.load gives it"),
        (lambda m: kvjax.generate(m, None, "full"), "in a list or an array, got None"),
        (lambda m: kvjax.generate(m, (x for x in ["a"]), "full"), "in a list or an array, got <generator"),
        (lambda m: kvjax.generate(m, np.array("a"), "full"), "in a list or an array, got array"),
        (lambda m: kvjax.generate(m, [[1]], "full", max_new_tokens="4"), "max_new_tokens must be an integer from 1"),
        (lambda m: kvjax.generate(m, [[1]], "full", capacity="9"), "capacity must be an integer from 65"),
        (
            lambda m: kvjax.generate(m, [[1]], "full", eos_ids=(97,)),
            "an id in eos_ids must be an integer from 0 to 96, got 97; .. ends at none",
        ),
        (lambda m: kvjax.generate(m, [[1]], "full", eos_ids=("a",)), "an id in eos_ids must be an integer"),
        (lambda m: kvjax.generate(m, [[1]], "full", stop=None), "stop takes texts .* got None; .. is none"),
        (lambda m: kvjax.read(m, [[1]], "full", headroom="8"), "headroom must be an integer from 0"),
        (lambda m: kvjax.read(m, [[1]], "full").feed([[1, 2]], width=1), "width must be an integer from 2"),
        (lambda m: kvjax.read(m, [[1] * 100], "full", width=64), "width must be an integer from 100 .* got 64"),
        (lambda m: kvjax.read(m, [[1]], "full", width="64"), "width must be an integer from 1 .* got '64'"),
        (lambda m: kvjax.read(m, [[1]], "full", width=0), "width must be an integer from 1 .* got 0"),
        (
            lambda m: kvjax.read(m, [[1]], "full").ask([[1]] * 2, first_sequence=-1),
            "first_sequence must be an integer from 0",
        ),
        (lambda m: kvjax.read(m, [[1]], "full").join(3), "joined with other contexts, got 3"),
        (
            lambda m: kvjax.load("testbed", dtype="int8"),
            "dtype must be one of float32, bfloat16, float16, .* got 'int8'",
        ),
        (lambda m: kvjax.random_model(m.config, dtype=bool), "dtype must be one of float32"),
        (lambda m: kvjax.read(m, [[1]], "full").feed([[1, 2]], decoded=[[True]]), "token of sequences of .2. tok"),
        (lambda m: kvjax.read(m, [[1]], "full").feed([[1, 2]], decoded=5), "decoded is true, false, or a list"),
        (lambda m: kvjax.read(m, [[1]], "full").score([[1, 2]], decoded=5), "decoded is true, false, or a list"),
        (lambda m: kvjax.read(m, [[1]], "full").score([[1]], decoded=[[]]), "token of sequences of .1. tok"),
        (lambda m: kvjax.read(m, [[1]], "full").edit(0, 1, 5), "one text or list of ids per sequence, empty ones"),
        (lambda m: kvjax.reuse.read_packed(m, [[1]], "full", headroom="5"), "headroom must be an integer from 0"),
        (lambda m: kvjax.reuse.read_packed(m, [[1, 2]], "full", width=50.5), "width must be an integer from 2"),
        (lambda m: kvjax.reuse.read_batch(m, [[1]], least="3"), "least must be an integer from 1"),
        (lambda m: kvjax.read(m, [[1]], "full").fork(1.5), "times must be an integer from 1"),
        (lambda m: kvjax.parse("kivi:bits=2,bits=4"), "parameter 'bits' of kivi is given twice"),
        (lambda m: kvjax.parse("snapkv:budget=150%"), "a fraction of each prompt from above 0% to 100%, got '150%'"),
        (lambda m: kvjax.parse("snapkv:budget=many"), "parameter 'budget' of snapkv: a budget is a number of tokens"),
        (lambda m: kvjax.planned_bytes("full", m.config, 100), "takes a model, whose dtype it counts in"),
        (lambda m: kvjax.planned_bytes("full", "m", 9), "or a configuration such as model.config; .* got 'm'"),
        (lambda m: kvjax.planned_bytes("full", m, "9"), "prompt must be an integer from 1"),
        (lambda m: kvjax.planned_bytes("full", m, 10**9), "prompt must be an integer from 1 to 16777216"),
        (lambda m: kvjax.planned_bytes("full", m, 9, batch=0), "batch must be an integer from 1"),
        (lambda m: kvjax.planned_bytes("full", m, 9, capacity=8), "capacity must be an integer from 9"),
        (lambda m: kvjax.planned_bytes("full", m, 9, width=-1), "width must be an integer from 1"),
        (lambda m: kvjax.planned_bytes("full", m, 9, dtype="zz"), "dtype must be one of"),
    ],
)
def test_input_that_cannot_be_used_is_named(model, call, says):
    with pytest.raises(KvjaxError, match=says):
        call(model)


def test_overrun_of_a_state_is_an_error_before_the_run(model):
    _, state = kvjax.prefill(model, [[1] * 60], "full", capacity=64)
    with pytest.raises(KvjaxError, match="room for 64 tokens per sequence and holds 60; 5 more do not fit"):
        kvjax.extend(model, [[1] * 5], state, "full")
    with pytest.raises(KvjaxError, match="prefill with capacity=65"):
        kvjax.generate(model, [[1]], "full", max_new_tokens=4, cache=state)
    context = kvjax.read(model, [[1] * 60], "full", headroom=4)
    for call in (context.feed, lambda more: context.score([more[0] + [1]])):
        with pytest.raises(KvjaxError, match="capacity=65 or more, or read with that, or with a larger headroom="):
            call([[1] * 5])
    with pytest.raises(KvjaxError, match="2 texts were given for 1 sequences; give one"):
        kvjax.extend(model, [[1], [1]], state, "full")
    assert kvjax.extend(model, [[1] * 4], state, "full")[1].length.tolist() == [64]
