"""Speculative decoding: no token changes when greedy, and no probability when sampling."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import IncompatibleMethod, KvjaxError
from kvjax.engine.sampling import SamplingParams
from kvjax.generation.programs import jit_with
from kvjax.models.sharding import param_shardings
from kvjax.speculative import acceptance
from kvjax.speculative.acceptance import acceptance_probabilities, make_shift, shift_logits
from kvjax.speculative.speculation_loop import run_rounds
from kvjax.testing import toy_model
from tests.oracles import speculation as oracle

RNG = np.random.default_rng(0)
PROMPTS, OTHERS = ([RNG.integers(0, 96, n).tolist() for n in (40, 23, 1)] for _ in range(2))
QUEST = "quest:budget=6,page=2,device_layers=0 + in_windows"  # as it would be without the window
GREEDY = {"max_new_tokens": 17, "eos_ids": ()}
SAMPLED = {**GREEDY, "temperature": 1.3, "top_p": 0.9}
verify = jax.jit(acceptance.verify)


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, windows=(25,), vocab_size=96)


def test_greedy_is_what_generate_gives():
    out = kvjax.speculative.speculate(make_model(), PROMPTS, QUEST, num_draft_tokens=3, **GREEDY)
    assert out.tokens == kvjax.generate(make_model(), PROMPTS, "full", **GREEDY).tokens
    assert out.finish_reasons == ["length"] * 3 and out.text is None and out.num_sequences == 3
    assert max(out.drafted) == 3 * out.verifier_calls and 0 < out.acceptance < 1
    for tokens, accepted, drafted in zip(out.tokens, out.accepted, out.drafted, strict=True):
        rounds = drafted // 3
        assert drafted % 3 == 0 and 0 <= accepted + rounds - (len(tokens) - 1) <= 3  # too many in the last round only
    programs = []
    for ends in ((out.tokens[0][4], out.tokens[1][9]), (out.tokens[0][3], out.tokens[1][8])):
        stopped = kvjax.speculative.speculate(
            make_model(), PROMPTS, QUEST, num_draft_tokens=3, **{**GREEDY, "eos_ids": ends}
        )
        assert stopped.tokens == kvjax.generate(make_model(), PROMPTS, "full", **{**GREEDY, "eos_ids": ends}).tokens
        assert stopped.finish_reasons[:2] == ["stop"] * 2 and len(stopped.tokens[0]) <= 5
        programs.append(jit_with(run_rounds, ("num_draft_tokens", "targets"), ("state",), ())._cache_size())
    assert programs[0] == programs[1]  # other end-of-sequence ids need no other program


def test_another_model_drafts_from_a_shorter_text():
    drafter, short = toy_model(layers=1, width=16, vocab_size=96, seed=1), [prompt[-5:] for prompt in PROMPTS]
    out = kvjax.speculative.speculate(
        make_model(), PROMPTS, "int4", "offload", draft_model=drafter, draft_prompts=short, num_draft_tokens=1, **GREEDY
    )
    assert out.tokens == kvjax.generate(make_model(), PROMPTS, "full", **GREEDY).tokens
    assert out.bytes.total["pinned_host"] > sum(out.draft_bytes.total.values()) > 0
    assert out.verifier_calls > 8  # few drafts of an unrelated model are right


def test_two_devices_do_what_one_does():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    params = jax.device_put(make_model().params, param_shardings(make_model().config, mesh))
    spread = dataclasses.replace(make_model(), params=params, mesh=mesh)
    one, two = (
        kvjax.speculative.speculate(m, PROMPTS, QUEST, num_draft_tokens=3, **GREEDY) for m in (make_model(), spread)
    )
    assert (two.tokens, two.accepted) == (one.tokens, one.accepted)


def test_sampling_from_an_equal_draft_accepts_everything_and_is_what_generate_draws():
    out = kvjax.speculative.speculate(make_model(), PROMPTS, "full", **SAMPLED, seed=3)
    assert out.tokens == kvjax.generate(make_model(), PROMPTS, "full", **SAMPLED, seed=3).tokens
    assert out.acceptance == 1.0 and out.accepted == out.drafted == [16] * 3 and out.verifier_calls == 4


def test_sampled_rows_depend_on_the_seed_and_on_no_neighbour():
    def speculate(prompts, draft_prompts, **more) -> kvjax.speculative.Speculation:
        return kvjax.speculative.speculate(
            make_model(), prompts, "full", draft_prompts=draft_prompts, **{**SAMPLED, **more}
        )

    one = speculate(PROMPTS, OTHERS, seed=3)
    assert 0 < one.acceptance < 1 and len({*map(tuple, one.tokens)}) == 3
    neighbours = speculate([PROMPTS[0], *OTHERS[1:]], [OTHERS[0], *PROMPTS[1:]], seed=3)
    assert neighbours.tokens[0] == one.tokens[0] and neighbours.accepted[0] == one.accepted[0]
    assert speculate(PROMPTS, OTHERS, seed=4).tokens != one.tokens
    # Only one token is left to draw from, so that sampling is greedy; a draft does not change that.
    only = speculate(PROMPTS, OTHERS, top_p=1e-6)
    assert only.tokens == kvjax.generate(make_model(), PROMPTS, "full", **GREEDY).tokens
    swayed = speculate(PROMPTS, OTHERS, seed=3, transfer=20.0)
    assert swayed.acceptance > one.acceptance and swayed.tokens != one.tokens


LOGITS = 2 * RNG.standard_normal((2, 4, 6))  # [verifier or draft, place, token]


def verify_one_place(z: np.ndarray, y: np.ndarray, m: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Runs `verify` at one place -> (acceptance probability of each drafted token, distribution after a rejection).

    The probability is checked from both sides: a random number just below it accepts, one just above it rejects.
    """
    V, shift, sampler = len(z), make_shift(m, 0.1), SamplingParams(1.0).sampler()
    drafted = jnp.arange(V, dtype=jnp.int32)[:, None]
    shifted = shift_logits(shift, jnp.float32(z), jax.nn.softmax(jnp.float32(z)), jax.nn.softmax(jnp.float32(y)))
    p, q = (jnp.broadcast_to(jax.nn.softmax(jnp.float32(x)), (V, 1, V)) for x in (shifted, y))
    acceptance = acceptance_probabilities(p, q, drafted)
    verifier_logits = jnp.broadcast_to(jnp.float32(np.stack([z, z])), (V, 2, V))
    draft_logits = jnp.broadcast_to(jnp.float32(y), (V, 1, V))
    below, bonus = verify(sampler, shift, verifier_logits, draft_logits, drafted, acceptance - 1e-6)
    above, residual = verify(sampler, shift, verifier_logits, draft_logits, drafted, acceptance + 1e-6)
    assert below.tolist() == [1] * V and above.tolist() == [0] * V
    # The token after the last draft comes from the verifier.
    np.testing.assert_allclose(bonus, np.tile(oracle.softmax(z), (V, 1)), atol=1e-6)
    np.testing.assert_allclose(residual, np.tile(residual[:1], (V, 1)), atol=1e-6)
    return np.asarray(acceptance[:, 0], np.float64), np.asarray(residual[0], np.float64)


@pytest.mark.parametrize("m", [0.0, 3.0])
def test_a_place_is_judged_as_the_oracle_judges_it(m):
    for z, y in LOGITS.swapaxes(0, 1):
        for actual, expected in zip(verify_one_place(z, y, m), oracle.acceptance_and_residual(z, y, m), strict=True):
            np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_what_comes_out_is_distributed_as_the_verifiers_tokens():
    """Each drafted token is accepted, or rejected and drawn anew; only `transfer` changes the distribution."""
    for z, y in LOGITS.swapaxes(0, 1):
        q = oracle.softmax(y)
        for m, lossless in ((0.0, True), (3.0, False)):
            accept, residual = verify_one_place(z, y, m)
            out = q * accept + (q * (1 - accept)).sum() * residual
            np.testing.assert_allclose(out.sum(), 1, atol=1e-5)
            assert np.allclose(out, oracle.softmax(z), atol=1e-5) == lossless


def test_the_first_rejection_ends_a_row_and_equals_leave_no_remainder():
    z, y = jnp.float32(LOGITS)
    greedy, shift = SamplingParams().sampler(), make_shift(0.0, 0.1)
    best = z.argmax(-1).astype(jnp.int32)
    draft_logits = jnp.where(z == z.max(-1, keepdims=True), 9.0, y)[None, :3]
    for wrong, count in ((None, 3), (0, 0), (1, 1)):
        drafted, offered = best[None, :3], draft_logits
        if wrong is not None:
            drafted = drafted.at[0, wrong].set((best[wrong] + 1) % 6)
            offered = offered.at[0, wrong, (best[wrong] + 1) % 6].set(99.0)
        accepted, residual = verify(greedy, shift, z[None], offered, drafted, jnp.zeros((1, 3)))
        assert (
            accepted.tolist() == [count] and residual.argmax(-1).tolist() == [int(best[count])] and residual.sum() == 1
        )
    # A random number of 1 is never drawn; it rejects even equal drafts, and the residual must still not be NaN.
    sampler = SamplingParams(1.0).sampler()
    accepted, residual = verify(sampler, shift, z[None], z[None, :3], best[None, :3], jnp.ones((1, 3)))
    assert accepted.tolist() == [0]
    np.testing.assert_allclose(residual[0], oracle.softmax(LOGITS[0, 0]), atol=1e-6)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be an integer from 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer from 1"),
        ({"temperature": -1.0}, "temperature must be a number"),
        ({"transfer": -1.0}, "transfer must be a number from 0 to inf, got -1"),
        ({"transfer": float("nan")}, "got nan"),
        ({"alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5; RAPID uses 0.1"),
        ({"draft_prompts": [[1]]}, "1 draft_prompts for 3 prompts; give one per prompt"),
        ({"draft_model": toy_model(layers=1, vocab_size=97)}, "has 97 tokens .* the verifier 96; draft with a model"),
        (
            {"capacity": 50},
            "capacity must be an integer from 61 .*, got 50: the longest prompt has 40 tokens and 21 more",
        ),
    ],
)
def test_values_that_cannot_be_used_are_named(more, says):
    with pytest.raises(KvjaxError, match=says):
        kvjax.speculative.speculate(make_model(), PROMPTS, "full", **{**GREEDY, **more})


@pytest.mark.parametrize(
    ("draft", "method", "says"),
    [
        (
            "snapkv:budget=8,window=4 + in_windows",
            "full",
            r"draft='snapkv:budget=8,window=4 \+ in_windows' cannot give .* back: component `select`",
        ),
        (
            "full",
            "h2o:heavy=8,recent=8 + in_windows",
            "method='h2o:heavy=8,recent=8 .*' cannot give .*: component `decode`",
        ),
        (f"int4 + {QUEST}", "full", "component `k`, PerTokenCodec, holds keys inexactly"),
        ("specache:group=8,residual=8,topk=8 + in_windows", "full", "already guesses ahead by itself"),
        (
            "kivi:bits=2,group=8,residual=8 + in_windows",
            "full",
            "draft='kivi.* could not give rejected tokens back in round",
        ),
    ],
)
def test_a_method_that_cannot_go_back_is_refused(draft, method, says):
    with pytest.raises(IncompatibleMethod, match=says + ".*take one that only appends, .*'quest:budget=256'"):
        kvjax.speculative.speculate(make_model(), PROMPTS, draft, method, **GREEDY)
