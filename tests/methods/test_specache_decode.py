"""SpeCache in the decode loop: guesses choose rows and nothing else, and no step waits for the rows of the next."""

from __future__ import annotations

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core import memory
from kvjax.core.types import KVBlock
from kvjax.engine import forward
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import KvjaxError
from kvjax.generation import decode_loop
from kvjax.generation.programs import jit_with
from kvjax.testing import full_copies, toy_model
from tests.contract.layer import bind as bind_layer

PROMPTS = [list(range(1, 18)), [8, 3], list(range(40, 60))]
EXACT = "specache:bits=1,group=8,residual=8,topk=99"
SMALL = "specache:bits=1,group=8,residual=8,topk=3"


@pytest.fixture(scope="module")
def model():
    return toy_model(windows=(None, 5, None))


def start_decode(model, method, temperature=0.0, length=12):
    """A state after the first draft, its sampler and its target."""
    s = SamplingParams(temperature).sampler()
    last, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    state = decode_loop.init_state(last, jax.random.key(0), jnp.zeros((0,), jnp.int32), s, num_tokens=length)
    state, target = dataclasses.replace(state, cache=cache), Target(model.config)
    if num_draft_tokens(cache.plan):
        state = jax.jit(decode_loop.draft_first, static_argnames="target")(model.params, state, s, target=target)
    return state, s, target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_come_true_when_nothing_is_held_in_low_bits(model, temperature):
    """Draft and truth have equal logits here, and share their randomness."""
    state, s, target = start_decode(model, "specache:bits=1,group=8,residual=64", temperature)
    step = jax.jit(decode_loop.step, static_argnames="target")
    for _ in range(8):
        guess = state.tokens[:, 1]
        state = step(model.params, state, s, target=target)
        np.testing.assert_array_equal(state.tokens[:, 0], guess)


def test_only_true_tokens_are_kept(model):
    """The host's rows after decoding are those of a prefill of prompt and answer, whatever the drafts were."""
    out = kvjax.generate(model, PROMPTS, kvjax.parse(EXACT), max_new_tokens=9, capacity=64)
    state, s, target = start_decode(model, EXACT, length=9)
    step = jax.jit(decode_loop.step, static_argnames="target")
    for _ in range(8):
        state = step(model.params, state, s, target=target)
    assert [row.tolist() for row in np.asarray(state.out)] == out.tokens
    whole = [p + t[:-1] for p, t in zip(PROMPTS, out.tokens, strict=True)]
    _, cache = kvjax.prefill(model, whole, kvjax.methods.offload(), capacity=64)
    np.testing.assert_array_equal(state.cache.length, cache.length)
    for layer, expected in zip(state.cache.layers, cache.layers, strict=True):
        np.testing.assert_array_equal(layer.pos, expected.pos)
        for a, b in ((layer.k, expected.k), (layer.v, expected.v)):
            assert a.host
            a, b = np.asarray(memory.unpack(a)), np.asarray(memory.unpack(b))
            for row, ids in enumerate(whole):
                np.testing.assert_allclose(a[row, :, : len(ids)], b[row, :, : len(ids)], atol=2e-5)


def test_tokens_given_in_a_chunk_are_decoded_as_in_the_loop(model):
    """`extend`, fed with the tokens that the loop chose, gives the logits that chose them."""
    parsed = kvjax.parse(SMALL)
    out = kvjax.generate(model, PROMPTS, parsed, max_new_tokens=9).tokens
    _, state = kvjax.prefill(model, PROMPTS, parsed, capacity=64)
    logits, _ = kvjax.extend(model, [row[:-1] for row in out], state, parsed, decoded=True)
    np.testing.assert_array_equal(np.asarray(logits).argmax(-1), np.array(out)[:, 1:])


def test_tokens_that_are_given_choose_their_own_rows(model):
    """The next token is known here, so each finds the rows that its own query chose, as if it had waited for them."""
    ahead, waiting = (kvjax.parse(SMALL + more) for more in ("", ",speculative=false"))
    fed, outs = [list(range(70, 75))] * 3, []
    for method in (ahead, waiting):
        _, state = kvjax.prefill(model, PROMPTS, method, capacity=64)
        outs.append(np.asarray(kvjax.extend(model, fed, state, method)[0]))
    _, state = kvjax.prefill(model, PROMPTS, ahead, capacity=64)
    guessed = np.asarray(kvjax.extend(model, fed, state, ahead, decoded=True)[0])
    known_error, guessed_error = (np.abs(x - outs[1]).mean() for x in (outs[0], guessed))
    assert known_error < 0.5 * guessed_error


def test_a_second_turn_of_unequal_length(model):
    """Rows that end early in the chunk are left alone by what follows."""
    parsed, more = kvjax.parse(SMALL), [[5, 6, 7, 8], [9], [1, 2]]
    _, state = kvjax.prefill(model, PROMPTS, parsed, capacity=64)
    together = kvjax.generate(model, more, parsed, max_new_tokens=8, cache=state).tokens
    for i, prompt in enumerate(PROMPTS):
        _, alone = kvjax.prefill(model, [prompt], parsed, capacity=64)
        assert kvjax.generate(model, [more[i]], parsed, max_new_tokens=8, cache=alone).tokens[0] == together[i]


def statements(text: str) -> list[str]:
    """The statements of a lowered program's main function, each with the regions inside it."""
    main = text[text.index("@main") :]
    lines = main[: main.index("\n  }")].splitlines()[1:]
    out: list[str] = []
    for line in lines:
        if re.match(r"    (%|return|\")", line):
            out.append(line)
        else:
            out[-1] += "\n" + line
    return out


def statements_after_fetch(text: str) -> list[str]:
    """All statements that need a row fetched from the host in this step."""
    dependents, host_names = [], set()
    for s in statements(text):
        uses = set(re.findall(r"%\w+", s.split("=", 1)[-1]))
        fetch = '_xla_compute_type = "host"' in s
        if fetch or uses & host_names:
            result = re.match(r"    (%\w+)", s)
            if result:
                host_names.add(result.group(1))
            if not fetch:
                dependents.append(s)
    return dependents


def lower_step(model, method: str) -> str:
    state, s, target = start_decode(model, method)
    # So that a layer is no call in the text.
    target = dataclasses.replace(target, run_layer=forward.apply_layer, unembed=forward.apply_unembed)
    step = jax.jit(decode_loop.step, static_argnames="target")
    return step.lower(model.params, state, s, target=target).as_text()


def test_nothing_in_a_step_waits_for_the_rows_of_the_next():
    model = toy_model()
    after = statements_after_fetch(lower_step(model, SMALL))
    assert len(after) > 4 * model.config.layers and after[-1].startswith("    return")
    called = {name for s in after for name in re.findall(r"call @(\w+)", s)}
    assert all(name.startswith(("_where", "annotate_device_placement")) for name in called)
    assert not any(op in s for s in after for op in ("dot_general", "while", "case", "reduce"))
    waits = statements_after_fetch(lower_step(model, SMALL + ",speculative=false"))
    assert any("dot_general" in s for s in waits)


def test_the_loop_copies_no_host_buffer(model):
    state, s, target = start_decode(model, SMALL)
    decode_until = jit_with(decode_loop.decode_until, ("target",), ("state",), ())
    program = decode_until.lower(model.params, state, jnp.int32(5), s, target=target).compile().as_text()
    assert not full_copies(program, state.cache.layers[0].k.data.shape)


def test_beams_and_trees_are_refused(model):
    layer = bind(SMALL, model.config)[0]
    _, state = kvjax.prefill(model, [[1, 2, 3]], kvjax.parse(SMALL), capacity=64)
    q, k = jnp.zeros((1, 2, 2, 3, 8)), jnp.zeros((1, 2, 3, 8))
    with pytest.raises(KvjaxError, match="at most one draft, got 3 tokens: no tree or beam"):
        layer.extend(state.layers[0], q, KVBlock(k, k, jnp.asarray([[[3, 4, 5]]], jnp.int32)), 1, None)
    with pytest.raises(KvjaxError, match="2 texts were given for 1 sequences; give one"):
        kvjax.extend(model, [[1], [2]], state, kvjax.parse(SMALL))


@pytest.mark.parametrize(("bits", "window"), [(2, None), (1, 24)])
def test_the_kernel_reads_and_fetches_what_the_plain_form_does(monkeypatch, bits, window):
    """Ragged sequences decode over several flushes, each token with a draft; the kernel is interpreted."""
    rng, lengths, H = np.random.default_rng(bits), np.array([37, 3]), 16
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 48, H)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(2, 2, 2, 2, H)), jnp.float32)
    pos = jnp.asarray(np.where(np.arange(48) < lengths[:, None], np.arange(48), -1), jnp.int32)[:, None]
    bound = bind_layer(kvjax.methods.specache(bits, group=8, residual=8, topk=5), window, H)
    outputs = []
    for has_kernel in (False, True):
        monkeypatch.setattr(importlib.import_module("kvjax.methods.specache"), "use_kernels", lambda x=has_kernel: x)

        def run(k, v, q):
            state = bound.prefill(KVBlock(k, v, pos), None, 80)

            def step(state, i):
                offset = i.astype(jnp.float32)
                new_pos = (lengths[:, None] + i + jnp.arange(2)[None]).astype(jnp.int32)[:, None]
                new = KVBlock(k[:, :, :2] + offset, v[:, :, :2] - offset, new_pos)
                out, state, _ = bound.extend(state, q * jnp.cos(offset), new, 1, None)
                return state, (out, state.reader_state.fetched.idx)

            return jax.lax.scan(step, state, jnp.arange(20))[1]

        outputs.append(jax.jit(run)(k, v, q))
    np.testing.assert_allclose(outputs[1][0], outputs[0][0], atol=2e-5)
    np.testing.assert_array_equal(np.sort(outputs[1][1]), np.sort(outputs[0][1]))
