"""Quality of a method on a model: contexts are prefilled once, then asked and scored on their state."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import state_bytes
from kvjax.cache.contract import State
from kvjax.cache.method import Method
from kvjax.core.types import Array
from kvjax.eval.tasks.case import Ask, Case
from kvjax.eval.tasks.texts import prompt_ids
from kvjax.models.model import Model
from kvjax.run import api
from kvjax.run.generate import BEGIN, LOOK_AHEAD, UNTIL, generate
from kvjax.run.prompts import pad, round_up, token_ids
from kvjax.run.sampling import row_keys, sampler
from kvjax.testbed.tasks import Instance

Rows = Sequence[np.ndarray]
Replies = tuple[list[list[str]], dict[str, int]]
"""[ask][row], the generated text up to the first stop; bytes of the prefilled state by memory kind, of all rows."""

SPEED_TOKENS, SPEED_RUNS = 64, 3


def answers(model: Model, method: Method, instances: Sequence[Instance]) -> tuple[list[list[bool]], State]:
    """Whether each question of each instance is answered exactly, greedily, on the state of its context alone.

    The instances form one batch and must have equally many questions. Returns also the contexts' state.
    """
    longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    contexts = [i.context for i in instances]
    _, state = api.prefill(model, contexts, method, capacity=max(map(len, contexts)) + longest)
    right: list[list[bool]] = [[] for _ in instances]
    for asked in zip(*(i.questions for i in instances), strict=True):
        new = max(len(q.answer) for q in asked)
        out = generate(model, [q.prompt for q in asked], method, max_new_tokens=new, state=state, eos_ids=())
        for row, q, tokens in zip(right, asked, out.tokens, strict=True):
            row.append(q.right(tokens))
    return right, state


def continuation(model: Model, method: Method, tokens: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Teacher-forced: tokens i32[B T], of which the first `context` are prefilled and the rest decoded.

    Returns (log-probabilities in nats f32[B T-context], the likeliest token at each of these places).
    """
    first, state = api.prefill(model, tokens[:, :context], method, capacity=tokens.shape[1])
    rest, _ = api.extend(model, tokens[:, context:-1], state, method, decoded=True)
    logits = jnp.concatenate([first[:, None], rest], 1)
    target = jnp.asarray(tokens[:, context:], jnp.int32)
    return np.asarray(api.log_probs(logits, target)), np.asarray(logits.argmax(-1))


def shared(model: Model, method: Method, cases: Sequence[Case], new: int) -> Replies:
    """Each context is prefilled once, and every question is asked of that state as if it were the first.

    The cases have equally many questions; new: the most tokens that any of them may answer.
    """
    widest = max(bucket(len(a.prompt)) for c in cases for a in c.asks)
    _, state = _prefill(model, method, [c.context for c in cases], widest + new)
    size, replies = state_bytes(state), []
    for asked in zip(*(c.asks for c in cases), strict=True):
        logits, extended = _feed(model, method, state, [a.prompt for a in asked])
        replies.append(_reply(model, method, logits, extended, new, asked))
    return replies, size


def seen(model: Model, method: Method, cases: Sequence[Case], new: int) -> Replies:
    """Each question ends a prompt of its own, and is there when the method compresses (LongBench's protocol)."""
    sizes, replies = [], []
    for asked in zip(*(c.asks for c in cases), strict=True):
        prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, asked, strict=True)]
        logits, state = _prefill(model, method, prompts, new)
        sizes.append(state_bytes(state))
        replies.append(_reply(model, method, logits, state, new, asked))
    return replies, sizes[0]


def conversation(model: Model, method: Method, cases: Sequence[Case], new: int) -> Replies:
    """The first question ends the prompt; each next one follows on the same state, after the answer to the last one.

    That answer is the reference, not what the model said, so that one mistake does not spoil the turns after it, and
    every method is asked the same: SCBench's multi-turn mode (Li et al., 2024, arXiv 2412.10319; `pre_ans` in the
    prompt templates of its code).
    """
    turns = list(zip(*(c.asks for c in cases), strict=True))
    told = [[reference(model, a) for a in asked] for asked in turns[:-1]]
    fed = [
        [np.concatenate([r, a.prompt]) for r, a in zip(answers, asked, strict=True)]
        for answers, asked in zip(told, turns[1:], strict=True)
    ]
    prompts = [np.concatenate([c.context, a.prompt]) for c, a in zip(cases, turns[0], strict=True)]
    more = sum(bucket(max(map(len, rows))) for rows in fed)
    logits, state = _prefill(model, method, prompts, more + new)
    size, replies = state_bytes(state), []
    for i, asked in enumerate(turns):
        # The next turn is fed first: answering uses up the state.
        after = _feed(model, method, state, fed[i], [len(r) for r in told[i]]) if i < len(fed) else (None, None)
        replies.append(_reply(model, method, logits, state, new, asked))
        logits, state = after
    return replies, size


def following(model: Model, method: Method, cases: Sequence[Case]) -> tuple[list[np.ndarray], list[np.ndarray], dict]:
    """Teacher-forced: (per row the bits of each token f64[T], per row the likeliest i32[T], bytes of the state)."""
    rows = [c.follows for c in cases]
    longest = max(map(len, rows))
    logits, state = _prefill(model, method, [c.context for c in cases], bucket(longest))
    size, out = state_bytes(state), logits[:, None]
    if longest > 1:
        fed = [r[:-1] if len(r) > 1 else r for r in rows]  # a row of one token feeds it to nobody
        out = jnp.concatenate([out, _extend(model, method, state, fed, [len(r) for r in fed])[0]], 1)
    target, lengths = pad([r.tolist() for r in rows], out.shape[1])
    bits = -np.asarray(api.log_probs(out, jnp.asarray(target)), np.float64) / np.log(2)
    best = np.asarray(out.argmax(-1))
    cut = lambda x: [row[:n] for row, n in zip(x, lengths, strict=True)]  # noqa: E731
    return cut(bits), cut(best), size


def speed(model: Model, method: Method, length: int, batch: int, seed: int) -> tuple[float, float, dict[str, int]]:
    """Contexts of random tokens: (prefill seconds, decoded tokens per second, bytes of the state), medians."""
    ids = np.random.default_rng([seed, length]).integers(0, model.config.vocab_size, (batch, length))
    runs = [generate(model, ids, method, max_new_tokens=SPEED_TOKENS, eos_ids=()) for _ in range(SPEED_RUNS)]
    middle = lambda of: statistics.median(map(of, runs))  # noqa: E731
    return middle(lambda r: r.prefill_seconds), middle(lambda r: r.tokens_per_second), runs[0].bytes


def bucket(n: int) -> int:
    """The width that rows of up to n tokens are padded to: few widths, hence few programs, and little too wide."""
    return n if n <= 16 else round_up(n, 1 << max(4, n.bit_length() - 6))


def reference(model: Model, ask: Ask) -> np.ndarray:
    """The true answer as it follows its question: the first reference, or all of them where all are asked for."""
    tokenizer = model.text_tokenizer()
    asked = tokenizer.decode(ask.prompt[-1:], skip_special_tokens=False)
    gap = " " if asked[-1:].isalnum() or asked.endswith(":") else ""
    return prompt_ids(
        tokenizer, gap + (", ".join(ask.references) if ask.metric == "contains_all" else ask.references[0])
    )


def _prefill(model: Model, method: Method, rows: Rows, more: int) -> tuple[Array, State]:
    """`api.prefill` in a padded width, with room for `more` tokens after that."""
    ids = token_ids(model, rows)
    longest = max(map(len, ids))
    width = round_up(bucket(longest))
    setting = api.setting(model, method, max(width, round_up(longest + more)), [len(r) for r in ids])
    return api.PREFILL(params=model.params, **api.inputs(model, *pad(ids, width)), setting=setting)


def _extend(
    model: Model, method: Method, state: State, rows: Rows, decoded: Sequence[int] | None = None
) -> tuple[Array, State]:
    """`api.extend` in a padded width; decoded: so many first tokens of each row stand for what would be decoded."""
    ids = token_ids(model, rows)
    args = api.inputs(model, *pad(ids, bucket(max(map(len, ids)))))
    if method.lookahead and decoded is not None:
        following = np.arange(1, args["tokens"].shape[1] + 1)[None]
        args["told"] = api.place(model, following >= np.array(decoded)[:, None], "B T")
    setting = api.setting(model, method, state.capacity)
    return api.EXTEND(params=model.params, **args, state=state, setting=setting)


def _feed(model: Model, method: Method, state: State, rows: Rows, decoded=None) -> tuple[Array, State]:
    """As `_extend`, with the logits f32[B V] of each row's last token."""
    logits, state = _extend(model, method, state, rows, decoded)
    at = jnp.asarray([len(r) - 1 for r in rows])
    return jnp.take_along_axis(logits, at[:, None, None], 1)[:, 0], state


def _reply(model: Model, method: Method, logits: Array, state: State, new: int, asked: Sequence[Ask]) -> list[str]:
    """Greedy answers of each row, from the logits f32[B V] of its last token; uses the state up."""
    greedy, eos = sampler(), model.config.eos_ids
    keys = row_keys(jax.random.key(0), len(asked))
    carry = BEGIN(
        logits=logits, state=state, keys=keys, eos=jnp.asarray(np.array(eos, np.int32)), sampler=greedy, length=new
    )
    args = {"params": model.params, "sampler": greedy, "setting": api.setting(model, method, state.capacity)}
    if method.lookahead and new > 1:
        carry = LOOK_AHEAD(carry=carry, **args)
    out = np.asarray(UNTIL(carry=carry, limit=jnp.int32(new), **args).out)
    return [text(model, row[row >= 0], a) for row, a in zip(out, asked, strict=True)]


def text(model: Model, tokens: np.ndarray, ask: Ask) -> str:
    """What was answered: no more than was asked for, without end tokens, up to the first stop."""
    ends = set(model.config.eos_ids)
    ids = [t for t in tokens.tolist()[: ask.new_tokens] if t not in ends]
    whole = model.text_tokenizer().decode(ids, skip_special_tokens=False)
    return whole[: min((at for at in map(whole.find, ask.stop) if at >= 0), default=len(whole))]
