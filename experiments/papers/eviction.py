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

import numpy as np

import kvjax
from experiments.bench.common import progress
from experiments.papers import common, questions
from kvjax import Context, KvjaxError, Model
from kvjax.cache.protocol import KVMethod
from kvjax.generation.inputs import round_up
from kvjax.methods.strings import Methods, named
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
    asked = rng.permutation(pairs)[:questions]
    found = tuple(tasks.Question(np.array([ASK, keys[i]]), values[i], starts[i] / length) for i in asked)
    return tasks.Instance("phrases", context, found)


TASKS: dict[str, Callable[..., tasks.Instance]] = {"phrases": phrases, **tasks.TASKS}


def arguments(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """The parser of these scripts: `common.parser` and the sizes that `measure` reads; `defaults` replace theirs."""
    p = common.parser(doc)
    p.add_argument("--tasks", type=common.split_words, help=common.tasks_said(TASKS))
    p.add_argument("--contexts", type=int, default=24, help="per task")
    p.add_argument("--batch", type=int, default=24, help="contexts at a time")
    p.add_argument("--windows", type=int, default=16, help="windows of text")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that follow its --length tokens")
    p.set_defaults(**{"length": 1024, "tasks": ["phrases", "copying", "variables"], **defaults})
    return p


class Prompts:
    """Prompts run once in full attention, and room behind them; any number of methods then compress them."""

    def __init__(self, model: Model, prompts: Sequence[np.ndarray], room: int):
        """room: tokens that will follow the longest prompt."""
        self.exact = kvjax.reuse.read_exactly(model, prompts)
        self.capacity = round_up(max(map(len, prompts)) + room)

    def under(self, method: str | KVMethod) -> Context:
        """What `kvjax.read` gives of them."""
        return self.exact.under(method, self.capacity)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Per context and question, f32[n questions]: exactly right or not, and nats per token of the right answer."""

    right: np.ndarray
    nats: np.ndarray


class Asked(Prompts):
    """Contexts with questions: rows 0..n-1 are the contexts alone, rows n..2n-1 end with their first question."""

    def __init__(self, model: Model, instances: Sequence[tasks.Instance]):
        self.instances = instances
        asked = [np.concatenate([i.context, i.questions[0].prompt]) for i in instances]
        longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
        room = 2 * longest + max(len(i.between) for i in instances)
        super().__init__(model, [i.context for i in instances] + asked, room)

    def outcomes(self, method: str | KVMethod) -> tuple[dict[str, Outcome], Context]:
        """{"first", "later", "unseen"} -> Outcome, as far as the task has such questions; and what was compressed."""
        n, count = len(self.instances), len(self.instances[0].questions)
        context = self.under(method)
        found: dict[str, list] = {when: [] for when in WHEN}
        for i in range(count):
            follow = min(max(i, 1), count - 1)
            rows = self._rows(i, follow)
            found_there = zip(context.score(rows, decoded=self._decoded(i, follow)), rows, strict=True)
            scored = [(logp, likeliest, np.array(row)) for (logp, likeliest), row in found_there]
            firsts = [len(x.questions[0].answer) for x in self.instances]
            answers = [len(x.questions[i].answer) for x in self.instances]
            found["unseen"].append(_score(scored[:n], [slice(-size, None) for size in answers]))
            if i == 0 and min(firsts) > 1:  # a single token would come from the exact prompt
                found["first"].append(_score(scored[n:], [slice(size) for size in firsts]))
            elif i:
                found["later"].append(_score(scored[n:], [slice(-size, None) for size in answers]))
        return {when: Outcome(*np.stack(x, 2)) for when, x in found.items() if x}, context

    def _rows(self, i: int, follow: int) -> list[list[int]]:
        """Question i behind the context alone; question `follow` behind the first one's right answer."""
        alone = [[*x.questions[i].prompt, *x.questions[i].answer] for x in self.instances]
        later = [(x.questions[0].answer, x.between, x.questions[follow]) for x in self.instances]
        return alone + [[*first, *between, *q.prompt, *q.answer] for first, between, q in later]

    def _decoded(self, i: int, follow: int) -> list[list[bool]]:
        """Which tokens of `_rows` a method would have to decode: all but the question's."""

        def marks(q: tasks.Question, before: int = 0, between: int = 0) -> list[bool]:
            return [True] * before + [False] * (between + len(q.prompt)) + [True] * len(q.answer)

        alone = [marks(x.questions[i]) for x in self.instances]
        later = [marks(x.questions[follow], len(x.questions[0].answer), len(x.between)) for x in self.instances]
        return alone + later


def _score(scored: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], at: Sequence[slice]) -> np.ndarray:
    """Of teacher-forced rows the answer, row by row at a slice -> f32[2 n]: all of it likeliest, and nats per token."""
    right, nats = [], []
    for (logp, likeliest, tokens), answer in zip(scored, at, strict=True):
        right.append(float((likeliest[answer] == tokens[answer]).all()))
        nats.append(-logp[answer].mean())
    return np.array([right, nats], np.float32)


class Continued(Prompts):
    """Windows of text i32[n context + tokens]: the tokens after the context are teacher-forced, one cache each."""

    def __init__(self, model: Model, windows: np.ndarray, context: int):
        self.rest = windows[:, context:].astype(np.int32)
        super().__init__(model, list(windows[:, :context]), self.rest.shape[1])

    def outcomes(self, method: str | KVMethod) -> tuple[dict[str, Outcome], Context]:
        """{"text"} -> Outcome per window and token; and what was compressed."""
        context = self.under(method)
        logp, likeliest = (np.stack(x) for x in zip(*context.score(self.rest), strict=True))
        return {"text": Outcome((likeliest == self.rest).astype(np.float32), -logp)}, context


def instances(args: argparse.Namespace, model: Model, task: str) -> list[tasks.Instance]:
    """`args.contexts` held-out instances of a task, those of symbols in filler of held-out code."""
    if task in questions.TASKS:
        return questions.in_text(args, model, task)
    held_out = corpus.load("held_out")
    seeds = ([args.seed, list(TASKS).index(task), args.length, i] for i in range(args.contexts))
    return [TASKS[task](np.random.default_rng(s), args.length, held_out.window) for s in seeds]


class Found:
    """Outcomes by method, task and when the question came; text counts as a task with when = "text"."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str, str], Outcome] = {}
        self.bytes: dict[str, Mapping[str, int]] = {}  # held, per context
        self.dtype = ""  # of the model's keys and values

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
        named = self._named(when, task)
        ours, theirs = ([self._by_context(m, t, when, field) for t in named] for m in (method, base))
        return self._over([a - b for a, b in zip(ours, theirs, strict=True)])

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
    model: Model, args: argparse.Namespace, methods: Methods | Mapping[str, KVMethod], with_text: bool = False
) -> Found:
    """All methods on the same prompts: those tasks of `args` that the model can be asked, and text where none can.

    methods: strings, which are then their names too, or methods by name.
    """
    methods = methods if isinstance(methods, Mapping) else named(methods)
    found, parts = Found(), {}
    work = [(t, instances(args, model, t), Asked) for t in questions.asked(model, args.tasks, TASKS)]
    if with_text or not work:
        rows = common.windows(args, model, args.length + args.tokens)
        work.append(("text", rows, lambda model, rows: Continued(model, rows, args.length)))
    for task, rows, make in work:
        for start in range(0, len(rows), args.batch):
            prompts = make(model, rows[start : start + args.batch])
            for name, method in methods.items():
                progress(f"{task}, contexts from {start}: {name}")
                outcomes, context = prompts.outcomes(method)
                size = context.bytes.per_sequence(context.rows)
                found.bytes.setdefault(name, size.held)
                found.dtype = size.dtype
                for when, o in outcomes.items():
                    parts.setdefault((name, task, when), []).append(o)
    found.outcomes = {
        key: Outcome(np.concatenate([o.right for o in each]), np.concatenate([o.nats for o in each]))
        for key, each in parts.items()
    }
    return found
