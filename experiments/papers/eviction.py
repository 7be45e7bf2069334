"""What the eviction scripts share: prompts that are run once, many methods that compress them, and statistics.

Every context is there twice. Alone, so that it is compressed before any question is known ("unseen"); and with its
first question behind it, so that the method sees that question when it compresses, which is how LongBench is run
("first"). The same compressed state is then asked the other questions ("later"). All questions of a context start
from one state; of the first answer the first token comes from the exact prefill, all others from the state.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.common import progress
from experiments.papers import common
from kvjax import KvjaxError, Method, Model, State
from kvjax.eval.tasks.symbols import knows_symbols
from kvjax.run import api, forward
from kvjax.run.forward import Setting
from kvjax.run.prompts import pad, round_up
from kvjax.testbed import corpus, tasks
from kvjax.testbed.vocab import ASK, PAIR, SYMBOLS

WHEN = ("first", "later", "unseen")


def phrases(
    rng: np.random.Generator,
    length: int,
    filler: tasks.Filler = tasks.noise,
    pairs: int = 16,
    span: int = 4,
    questions: int = 8,
) -> tasks.Instance:
    """Recall with values of `span` symbols: `<pair> key value..` in filler; `<ask> key` -> the whole value."""
    symbols = rng.choice(SYMBOLS, pairs * (1 + span), replace=False)
    keys, values = symbols[:pairs], symbols[pairs:].reshape(pairs, span)
    facts = np.column_stack([np.full(pairs, PAIR), keys, values])
    room = length - facts.size
    if room < 0:
        raise KvjaxError(f"{pairs} facts take {facts.size} tokens, the context has {length}; use a longer one")
    cuts = np.sort(rng.integers(0, room + 1, pairs))
    context = np.insert(filler(rng, room), np.repeat(cuts, facts.shape[1]), facts.ravel()).astype(np.int32)
    starts = cuts + facts.shape[1] * np.arange(pairs)
    ask = lambda i: tasks.Question(np.array([ASK, keys[i]]), values[i], starts[i] / length)  # noqa: E731
    return tasks.Instance("phrases", context, tuple(map(ask, rng.permutation(pairs)[:questions])))


TASKS: dict[str, Callable[..., tasks.Instance]] = {"phrases": phrases, **tasks.TASKS}


def arguments(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """The parser of these scripts: `common.parser` and the sizes that `measure` reads; `defaults` replace theirs."""
    p = common.parser(doc)
    p.add_argument("--tasks", type=common.words, help="from: " + ", ".join(TASKS))
    p.add_argument("--contexts", type=int, default=24, help="per task")
    p.add_argument("--batch", type=int, default=24, help="contexts at a time")
    p.add_argument("--windows", type=int, default=16, help="windows of text")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that follow its --length tokens")
    p.set_defaults(**{"length": 1024, "tasks": ["phrases", "copying", "variables"], **defaults})
    return p


class Exact:
    """Prompts run once in full attention; any number of methods then compress their keys and values."""

    def __init__(self, model: Model, prompts: Sequence[np.ndarray], room: int):
        """room: tokens that will follow the longest prompt."""
        self.model, self.prompts = model, prompts
        self.capacity = round_up(max(map(len, prompts)) + room)
        inputs = api.inputs(model, *pad([p.tolist() for p in prompts]))
        tokens, self.lengths = inputs["tokens"], inputs["lengths"]
        setting = Setting(model.config, kvjax.zoo.accumulated().plan(model.config))  # a scorer that sees all queries
        past = forward.start_chunks(len(prompts), tokens.shape[1], model.dtype, setting)
        past = api.CHUNK(params=model.params, **inputs, start=jnp.int32(0), past=past, setting=setting)
        self.layers = past.layers
        self.last = api.UNEMBED(params=model.params, hidden=past.last, setting=api.setting(model))

    def compress(self, method: Method) -> tuple[jax.Array, State]:
        """What `kvjax.prefill` gives: (logits of each row's last token f32[B V], state)."""
        lengths = [len(p) for p in self.prompts]
        setting = api.setting(self.model, method, self.capacity, lengths)
        if any(m.restricted for m in setting.plan):  # their prompts' attention is not exact
            return api.prefill(self.model, self.prompts, method, capacity=self.capacity)
        plan = shared(setting.plan, lengths)
        layers = []
        for (k, v, q), m, slots in zip(self.layers, plan, setting.slots, strict=True):
            one = dataclasses.replace(setting, plan=(m,), slots=(slots,))
            q = self._shown(q, m.queries)
            layers.append(api.ENCODE(k=k, v=v, q=q, lengths=self.lengths, layer=0, setting=one))
        return self.last, State(tuple(layers), self.lengths, self.capacity)

    def _shown(self, q: jax.Array, n: int | None) -> jax.Array:
        """Of all queries [B K G T H] each row's last n."""
        if n is None:
            return q
        at = jnp.maximum(self.lengths[:, None] - n + jnp.arange(n, dtype=jnp.int32)[None], 0)
        return jnp.take_along_axis(q, at[:, None, None, :, None], 3)


def shared(plan: tuple[Any, ...], lengths: Sequence[int]) -> tuple[Any, ...]:
    """The plan, its layers under one number where they keep equally many tokens: they then share a program."""
    if not all(getattr(m, "select", None) for m in plan) or any(len({m.kept(n) for m in plan}) > 1 for n in lengths):
        return plan
    return tuple(dataclasses.replace(m, select=dataclasses.replace(m.select, layer=0)) for m in plan)


def decoding(method: Method) -> Method:
    """What reads a state that the method's prefill made: eviction after the prompt leaves nothing to do."""
    if getattr(method, "select", None) is None or method.again:
        return method
    return dataclasses.replace(method, select=None, rest=None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Per context and question, f32[n questions]: exactly right or not, and nats per token of the right answer."""

    right: np.ndarray
    nats: np.ndarray


class Asked(Exact):
    """Contexts with questions: rows 0..n-1 are the contexts alone, rows n..2n-1 end with their first question."""

    def __init__(self, model: Model, instances: Sequence[tasks.Instance]):
        self.instances = instances
        asked = [np.concatenate([i.context, i.questions[0].prompt]) for i in instances]
        room = 2 * max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
        super().__init__(model, [i.context for i in instances] + asked, room)

    def outcomes(self, method: Method) -> tuple[dict[str, Outcome], State]:
        """{"first", "later", "unseen"} -> Outcome, as far as the task has such questions; and the state."""
        n, count = len(self.instances), len(self.instances[0].questions)
        last, state = self.compress(method)
        found: dict[str, list] = {when: [] for when in WHEN}
        for i in range(count):
            follow = min(max(i, 1), count - 1)
            fed = self._fed(i, follow)
            logits, _ = api.extend(self.model, fed, state, decoding(method), decoded=self._decoded(fed, i))
            answers = [x.questions[i].answer for x in self.instances]
            at = len(self.instances[0].questions[i].prompt) - 1
            found["unseen"].append(_score(logits[:n, at:], answers))
            first = [x.questions[0].answer for x in self.instances]
            if i == 0 and len(first[0]) > 1:  # a single token would come from the exact prefill
                found["first"].append(_score(jnp.concatenate([last[n:, None], logits[n:]], 1), first))
            elif i:
                found["later"].append(_score(logits[n:, len(first[0]) + at :], answers))
        return {when: Outcome(*np.stack(x, 2)) for when, x in found.items() if x}, state

    def _fed(self, i: int, follow: int) -> list[list[int]]:
        """Question i behind the context alone; question `follow` behind the first one's right answer."""
        questions = [(x.questions[0], x.questions[i], x.questions[follow]) for x in self.instances]
        alone = [[*q.prompt, *q.answer[:-1]] for _, q, _ in questions]
        return alone + [[*f.answer, *q.prompt, *q.answer[:-1]] for f, _, q in questions]

    def _decoded(self, fed: list[list[int]], i: int) -> list[list[bool]]:
        """Which of these tokens a method would have to decode: all but the question's."""
        question = self.instances[0].questions[i]
        asked = range(1 - len(question.answer) - len(question.prompt), 1 - len(question.answer))
        return [[t - len(row) not in asked for t in range(len(row))] for row in fed]


def _score(logits: jax.Array, answers: Sequence[np.ndarray]) -> np.ndarray:
    """logits f32[n >=T V] that should say answers i32[T] -> f32[2 n]: all of them likeliest, and nats per token."""
    target = jnp.asarray(np.stack(answers).astype(np.int32))
    logits = logits[:, : target.shape[1]]
    right = np.asarray((logits.argmax(-1) == target).all(-1), np.float32)
    return np.stack([right, -np.asarray(api.log_probs(logits, target)).mean(-1)])


class Continued(Exact):
    """Windows of text i32[n context + tokens]: the tokens after the context are teacher-forced, one state each."""

    def __init__(self, model: Model, windows: np.ndarray, context: int):
        self.rest = windows[:, context:].astype(np.int32)
        super().__init__(model, list(windows[:, :context]), self.rest.shape[1])

    def outcomes(self, method: Method) -> tuple[dict[str, Outcome], State]:
        """{"text"} -> Outcome per window and token; and the state."""
        last, state = self.compress(method)
        logits, _ = api.extend(self.model, self.rest[:, :-1], state, decoding(method), decoded=True)
        logits = jnp.concatenate([last[:, None], logits], 1)
        right = np.asarray(logits.argmax(-1) == jnp.asarray(self.rest), np.float32)
        nats = -np.asarray(api.log_probs(logits, jnp.asarray(self.rest)))
        return {"text": Outcome(right, nats)}, state


def instances(args: argparse.Namespace, task: str) -> list[tasks.Instance]:
    """`args.contexts` held-out instances of a task, in filler of held-out code."""
    if task not in TASKS:
        raise KvjaxError(f"unknown task {task!r}; use {', '.join(TASKS)}")
    held_out = corpus.load("held_out")
    seeds = ([args.seed, list(TASKS).index(task), args.length, i] for i in range(args.contexts))
    return [TASKS[task](np.random.default_rng(s), args.length, held_out.window) for s in seeds]


class Found:
    """Outcomes by method, task and when the question came; text counts as a task with when = "text"."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str, str], Outcome] = {}
        self.bytes: dict[str, dict[str, int]] = {}  # per context

    def tasks(self, when: str) -> list[str]:
        """The tasks that have such questions."""
        return list(dict.fromkeys(t for _, t, w in self.outcomes if w == when))

    def score(self, method: str, when: str, field: str = "right", task: str | None = None) -> tuple[float, float]:
        """(mean, standard error over contexts); of all tasks, each counting the same, unless one is named."""
        return self._over([self._by_context(method, t, when, field) for t in self._named(when, task)])

    def gain(
        self, method: str, base: str, when: str, field: str = "right", task: str | None = None
    ) -> tuple[float, float]:
        """How much more than under `base`, on the same contexts: (mean, standard error of the paired difference)."""
        of = lambda t: (self._by_context(m, t, when, field) for m in (method, base))  # noqa: E731
        return self._over([np.subtract(*of(t)) for t in self._named(when, task)])

    def _named(self, when: str, task: str | None) -> list[str]:
        return self.tasks(when) if task is None else [task]

    def _by_context(self, method: str, task: str, when: str, field: str) -> np.ndarray:
        return getattr(self.outcomes[method, task, when], field).mean(1)

    @staticmethod
    def _over(parts: Sequence[np.ndarray]) -> tuple[float, float]:
        if not parts:
            return float("nan"), float("nan")
        errors = [x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else np.nan for x in parts]
        return float(np.mean([x.mean() for x in parts])), float(np.sqrt(np.square(errors).sum()) / len(parts))

    def records(self) -> list[dict[str, Any]]:
        """For the JSON document: one entry per method, task and when."""
        out = []
        for method, task, when in self.outcomes:
            numbers = {f: self.score(method, when, f, task) for f in ("right", "nats")}
            flat = {f: m for f, (m, _) in numbers.items()} | {f + "_se": s for f, (_, s) in numbers.items()}
            size = {"questions": int(self.outcomes[method, task, when].right.size), "bytes": self.bytes.get(method)}
            out.append({"method": method, "task": task, "when": when, **flat, **size})
        return out


def measure(
    model: Model, args: argparse.Namespace, methods: Sequence[str] | Mapping[str, Method], with_text: bool = False
) -> Found:
    """All methods on the same prompts: the tasks of `args`, and text; only text for a model of another vocabulary.

    methods: strings, which are then their names too, or methods by name.
    """
    methods = methods if isinstance(methods, Mapping) else {m: kvjax.parse(m) for m in methods}
    known, found, parts = knows_symbols(model), Found(), {}
    work = [(t, instances(args, t), Asked) for t in (args.tasks if known else ())]
    if with_text or not known:
        rows = common.windows(args, model, args.length + args.tokens)
        work.append(("text", rows, lambda model, rows: Continued(model, rows, args.length)))
    for task, rows, make in work:
        for start in range(0, len(rows), args.batch):
            prompts = make(model, rows[start : start + args.batch])
            for name, method in methods.items():
                progress(f"{task}, contexts from {start}: {name}")
                outcomes, state = prompts.outcomes(method)
                size = {kind: n // len(prompts.prompts) for kind, n in kvjax.state_bytes(state).items()}
                found.bytes.setdefault(name, size)
                for when, o in outcomes.items():
                    parts.setdefault((name, task, when), []).append(o)
    join = lambda field, os: np.concatenate([getattr(o, field) for o in os])  # noqa: E731
    found.outcomes = {key: Outcome(join("right", os), join("nats", os)) for key, os in parts.items()}
    return found
