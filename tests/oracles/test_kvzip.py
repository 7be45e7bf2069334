"""KVzip against its oracle, alone and through a model.

KVzip in NumPy, float64, from kvpress and its paper (arXiv 2505.23416, section 3): one head and chunk.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.protocol import BoundLayer, LayerSpec, Needs, Replay, Traits
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.engine import replay
from kvjax.generation.inputs import pad
from kvjax.generation.model_calls import replay_prompts
from kvjax.methods.kvzip import ReplayAttention
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import model_ranking


def chunk_scores(
    q: np.ndarray,
    prompt: np.ndarray,
    replay_keys: np.ndarray,
    start: int,
    end: int,
    sinks: int,
    output_norms: np.ndarray | None = None,
    hidden_norms: np.ndarray | None = None,
) -> np.ndarray:
    """The scores of tokens start..end-1 from q [G P H], prompt keys [S H] and the replay's own keys [P H].

    KVzip+ adds the norms of what values add to the output, [G end-start], and the norms of hidden states, [P].
    """
    G, P, H = q.shape
    num_sinks = min(sinks, start)
    scores = np.zeros(end - start)
    for g in range(G):
        for t in range(P):
            keys = np.concatenate([prompt[:num_sinks], prompt[start:end], replay_keys[: t + 1]])
            logits = keys @ q[g, t] / np.sqrt(H)
            weights = np.exp(logits - logits.max())
            weights = (weights / weights.sum())[num_sinks : num_sinks + end - start]
            if output_norms is not None:
                weights = weights * output_norms[g] / hidden_norms[t]
            scores = np.maximum(scores, weights)
    return scores


PROMPTS = [list(range(1, 14)), [7, 3], [5, 3, 1, 60, 61, 62, 63]]
CHUNK, LEAD, SINKS = 4, 2, 1


def test_a_query_that_favours_one_key_twice_gives_it_half():
    k = jnp.array([[np.log(2.0) * np.sqrt(2.0), 0.0], [0.0, 0.0]], jnp.float32)[None, None]
    block = KVBlock(k, k, jnp.arange(2)[None, None])
    q, new = jnp.array([1.0, 0.0])[None, None, None, None], jnp.zeros((1, 1, 1, 2))
    observation, replay = Observation(q, jnp.array([[2]])), KVBlock(new, new, jnp.array([[[2]]]))
    actual = ReplayAttention(sinks=0).update_scores(
        block, jnp.int32(0), observation, replay, jnp.zeros((1, 1, 2)), layer.spec(head_dim=2)
    )
    np.testing.assert_allclose(actual[0, 0], [0.5, 0.25], atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Everything:
    """A method whose state is the prompt with all its queries and all that a layer may observe."""

    traits: ClassVar[Traits] = Traits()
    needs: ClassVar[Needs] = Needs(observed_queries=None, output_projection=True, hidden_states=True)

    def bind(self, spec: LayerSpec) -> BoundLayer:
        return self

    def num_slots(self, prompt_tokens: int, headroom_tokens: int) -> int:
        return prompt_tokens

    def prefill(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Any:
        return block, observation


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=2)


def oracle_scores(model: kvjax.Model, tokens: list[int], plus: bool) -> list[np.ndarray]:
    """The scores [K S] of each layer's tokens, with each replay run as one long prompt of its own."""
    a = model.config.kind(0).attention
    n, scores = len(tokens), [np.zeros((a.kv_heads, len(tokens))) for _ in range(model.config.layers)]
    for start in range(0, n, CHUNK):
        end = min(start + CHUNK, n)
        text = [*tokens, *tokens[max(0, start - LEAD) : end]]
        for layer_scores, (block, observation) in zip(
            scores, kvjax.prefill(model, [text], Everything())[1].layers, strict=True
        ):
            k, v, q = (np.asarray(x[0], np.float64) for x in (block.k, block.v, observation.q))
            hidden, output = (
                np.asarray(observation.hidden_states[0, 0], np.float64),
                np.asarray(observation.output_projection[0], np.float64),
            )
            for head in range(a.kv_heads):
                more = []
                if plus:
                    added = np.einsum("sh,ghd->gsd", v[head, start:end], output[head])
                    more = [np.linalg.norm(added, axis=-1), np.linalg.norm(hidden[n : len(text)], axis=-1)]
                arrays = q[head, :, n : len(text)], k[head, :n], k[head, n : len(text)]
                layer_scores[head, start:end] = chunk_scores(*arrays, start, end, SINKS, *more)
    return scores


@pytest.mark.parametrize("plus", [False, True])
def test_a_ragged_batch_keeps_what_each_row_attends_to_while_it_repeats_itself(model, plus):
    method = kvjax.methods.kvzip(6, CHUNK, LEAD, SINKS, plus, level="head")
    positions = kvjax.kept_positions(kvjax.prefill(model, PROMPTS, method)[1])
    for b, tokens in enumerate(PROMPTS):
        for i, scores in enumerate(oracle_scores(model, tokens, plus)):
            for head, head_scores in enumerate(scores):
                head_scores[:SINKS] = np.inf
                expected = np.argsort(-head_scores, kind="stable")[:6]
                assert positions[i][b][head].tolist() == sorted(expected.tolist())


def test_the_logits_and_the_length_are_those_of_the_prompt(model):
    (actual, cache), (expected, _) = (
        kvjax.prefill(model, PROMPTS, m) for m in ("kvzip:budget=6,chunk=4,lead=2", "full")
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert cache.length.tolist() == [len(tokens) for tokens in PROMPTS]


def test_each_piece_is_repeated_behind_the_instruction_and_the_tokens_before_it():
    class Words:
        def encode_continuation(self, text: str) -> list[int]:
            return {"go": [90], "on": [91, 92]}[text]

    @dataclasses.dataclass(frozen=True)
    class Repeats:
        needs: Needs = Needs(replay=Replay(chunk_tokens=4, lead_tokens=2, first="go", later="on"))

    model = dataclasses.replace(toy_model(layers=1), tokenizer=Words())
    texts = replay_prompts(model, (Repeats(),))
    assert texts == ([90], [91, 92])
    assert replay_prompts(dataclasses.replace(model, tokenizer=None), (Repeats(),)) == ([], [])
    tokens, lengths = pad(PROMPTS)

    copies = [
        [row[at >= 0].tolist() for row, at in zip(np.asarray(copy.tokens), np.asarray(copy.pos), strict=True)]
        for copy in replay.copy_chunks(tokens, lengths, (Repeats(),), texts)
    ]
    assert copies[0] == [[90, 1, 2, 3, 4], [90, 7, 3], [90, 5, 3, 1, 60]]
    assert copies[1] == [[91, 92, 3, 4, 5, 6, 7, 8], [], [91, 92, 1, 60, 61, 62, 63]]


@pytest.mark.parametrize("level", ["layer", "model"])
@pytest.mark.parametrize("plus", [False, True])
def test_heads_share_a_budget_by_one_ranking_of_their_level(model, level, plus):
    method, budget = kvjax.methods.kvzip(6, CHUNK, LEAD, SINKS, plus, level, page=1), 6
    positions = kvjax.kept_positions(kvjax.prefill(model, PROMPTS, method)[1])
    unequal = 0
    for b, tokens in enumerate(PROMPTS):
        scores = [layer[:, SINKS:].tolist() for layer in oracle_scores(model, tokens, plus)]
        quota = min(budget, len(tokens)) - SINKS
        groups = [scores] if level == "model" else [[layer] for layer in scores]
        expected = [heads for group in groups for heads in model_ranking.select_units(group, [quota] * len(group))]
        for i, heads in enumerate(expected):
            for head, units in enumerate(heads):
                assert positions[i][b][head].tolist() == [*range(SINKS), *(SINKS + unit for unit in units)]
                unequal += len(units) != quota
    assert unequal


def test_a_projection_that_another_component_asks_for_changes_no_score():
    """`kvzip + criticalkv`: the second stage needs the output projection, and KVzip without plus does not use it."""
    rng = np.random.default_rng(0)
    k, v, q = (jnp.asarray(rng.standard_normal((1, 1, 5, 4)), jnp.float32) for _ in range(3))
    pos = jnp.arange(5)[None, None]
    observation = Observation(q[:, :, None], pos[0] + 5)
    arguments = jnp.zeros((1, 1, 5)), layer.spec(head_dim=4)
    projection = jnp.asarray(rng.standard_normal((1, 1, 1, 4, 3)), jnp.float32)
    plain, with_projection = (
        ReplayAttention(sinks=0).update_scores(KVBlock(k, v, pos), jnp.int32(0), x, KVBlock(k, v, pos + 5), *arguments)
        for x in (observation, observation._replace(output_projection=projection))
    )
    np.testing.assert_array_equal(plain, with_projection)
