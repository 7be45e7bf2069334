"""Eviction methods compared on prompts that run once: questions by time of asking, and paired statistics.

Every context occurs twice in a batch. Alone, it is compressed before any question is known ("unseen"). With its first
question at the end, the method compresses it knowing that question, as in LongBench ("first"); the same cache is then
asked the other questions ("later"). All questions of a context start from one cache. The first token of the first
answer comes from the exact prefill, all others from the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from experiments.bench.measuring import log_progress
from experiments.papers import common, questions
from kvjax import Context, KvjaxError, Model
from kvjax.cache.protocol import KVMethod
from kvjax.eval.page.intervals import Interval, average_interval, paired_interval, score_interval
from kvjax.generation.inputs import round_up
from kvjax.registry.strings import Methods, resolve
from kvjax.testbed import corpus, tasks
from kvjax.testbed.vocab import ASK, PAIR, SYMBOLS

WHEN = ("first", "later", "unseen")  # times of asking; text counts as a task with the time "text"


def phrases(
    rng: np.random.Generator,
    length: int,
    filler: tasks.Filler = tasks.noise,
    pairs: int = 16,
    span: int = 4,
    questions: int = 8,
) -> tasks.Instance:
    """Makes a recall task with values of `span` symbols: `<pair> key value..` in filler; `<ask> key` -> the value."""
    # No symbol occurs twice, so that another fact's value cannot be right by chance.
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


def eviction_parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """The parser of the eviction scripts: `common.model_parser`, the sizes of `measure`, and other `defaults`."""
    p = common.model_parser(doc)
    p.add_argument("--tasks", type=common.split_words, help=common.tasks_help(TASKS))
    p.add_argument("--contexts", type=int, default=24, help="per task")
    p.add_argument("--batch", type=int, default=24, help="contexts at a time")
    p.add_argument("--windows", type=int, default=16, help="windows of text")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that follow its --length tokens")
    p.set_defaults(**{"length": 1024, "tasks": ["phrases", "copying", "variables"], **defaults})
    return p


class Prompts:
    """Prompts that run once in full attention and are then compressed by any number of methods.

    Args:
      model: the model.
      prompts: i32[T] each.
      room: tokens that will follow the longest prompt.
    """

    def __init__(self, model: Model, prompts: Sequence[np.ndarray], room: int):
        self.exact = kvjax.reuse.read_exactly(model, prompts)
        # The capacity is rounded, so that batches of about the same length share one program.
        self.capacity = round_up(max(map(len, prompts)) + room)

    def compress(self, method: str | KVMethod) -> Context:
        """The context that `kvjax.read` of these prompts under the method returns."""
        return self.exact.compress(method, capacity=self.capacity)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Answers to the questions of n contexts, f32[n questions]."""

    right: np.ndarray  # 1 where all tokens of the right answer are the likeliest
    nats: np.ndarray  # per token of the right answer


class QuestionPrompts(Prompts):
    """Contexts with questions: sequences 0..n-1 are the contexts alone, n..2n-1 end with their first question."""

    def __init__(self, model: Model, instances: Sequence[tasks.Instance]):
        self.instances = instances
        # Both forms in one batch: they are read and compressed alike, so that "later" and "unseen" differ by the first
        # question alone.
        asked = [np.concatenate([i.context, i.questions[0].prompt]) for i in instances]
        longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
        room = 2 * longest + max(len(i.between) for i in instances)  # the first answer and one later question
        super().__init__(model, [i.context for i in instances] + asked, room)

    def outcomes(self, method: str | KVMethod) -> tuple[dict[str, Outcome], Context]:
        """Asks all questions under a method.

        Returns:
          "first", "later", "unseen" -> Outcome, where the task has such questions; and the compressed context.
        """
        n, count = len(self.instances), len(self.instances[0].questions)
        context = self.compress(method)
        found: dict[str, list] = {when: [] for when in WHEN}
        for i in range(count):
            # In the first round only the first answer counts; a question after it gives the text the usual length.
            follow = min(max(i, 1), count - 1)
            texts = self._texts(i, follow)
            scores = zip(context.score(texts, decoded=self._decoded_masks(i, follow)), texts, strict=True)
            scored = [(logp, likeliest, np.array(text)) for (logp, likeliest), text in scores]
            firsts = [len(x.questions[0].answer) for x in self.instances]
            answers = [len(x.questions[i].answer) for x in self.instances]
            found["unseen"].append(_score(scored[:n], [slice(-size, None) for size in answers]))
            if i == 0 and min(firsts) > 1:  # a single token would come from the exact prompt
                found["first"].append(_score(scored[n:], [slice(size) for size in firsts]))
            elif i:
                found["later"].append(_score(scored[n:], [slice(-size, None) for size in answers]))
        return {when: Outcome(*np.stack(x, 2)) for when, x in found.items() if x}, context

    def _texts(self, i: int, follow: int) -> list[list[int]]:
        """Question i for the context alone; question `follow` after the first question's right answer."""
        alone = [[*x.questions[i].prompt, *x.questions[i].answer] for x in self.instances]
        # The right first answer stands there, whatever the method would write: a mistake counts once, not again later.
        later = [(x.questions[0].answer, x.between, x.questions[follow]) for x in self.instances]
        return alone + [[*first, *between, *q.prompt, *q.answer] for first, between, q in later]

    def _decoded_masks(self, i: int, follow: int) -> list[list[bool]]:
        """Marks the tokens of `_texts` that a method would decode: all but the questions'."""

        def mask(q: tasks.Question, before: int = 0, between: int = 0) -> list[bool]:
            return [True] * before + [False] * (between + len(q.prompt)) + [True] * len(q.answer)

        alone = [mask(x.questions[i]) for x in self.instances]
        later = [mask(x.questions[follow], len(x.questions[0].answer), len(x.between)) for x in self.instances]
        return alone + later


def _score(scored: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], at: Sequence[slice]) -> np.ndarray:
    """Scores the answers in teacher-forced texts, each at its slice: f32[2 n], right or not and nats per token."""
    right, nats = [], []
    for (logp, likeliest, tokens), answer in zip(scored, at, strict=True):
        right.append(float((likeliest[answer] == tokens[answer]).all()))
        nats.append(-logp[answer].mean())
    return np.array([right, nats], np.float32)


class TextPrompts(Prompts):
    """Windows of text i32[n context + tokens], whose tokens after the context are teacher-forced."""

    def __init__(self, model: Model, windows: np.ndarray, context: int):
        self.rest = windows[:, context:].astype(np.int32)
        super().__init__(model, list(windows[:, :context]), self.rest.shape[1])

    def outcomes(self, method: str | KVMethod) -> tuple[dict[str, Outcome], Context]:
        """ "text" -> Outcome by window and token; and the compressed context."""
        context = self.compress(method)
        logp, likeliest = (np.stack(x) for x in zip(*context.score(self.rest), strict=True))
        return {"text": Outcome((likeliest == self.rest).astype(np.float32), -logp)}, context


def instances(args: argparse.Namespace, model: Model, task: str) -> list[tasks.Instance]:
    """Draws `args.contexts` held-out instances of a task; tasks of symbols are in filler of held-out code."""
    if task in questions.TASKS:
        return questions.in_text(args, model, task)
    return draw_instances(task, args.contexts, args.length, args.seed, "held_out")


def draw_instances(task: str, num: int, length: int, seed: int, split: str, **sizes: Any) -> list[tasks.Instance]:
    """Draws instances of a task in filler of the "train" or the "held_out" files."""
    filler = corpus.load(split).window
    # Each instance has a seed, so that the first ones stay the same when `num` grows.
    seeds = ([seed, list(TASKS).index(task), length, i] for i in range(num))
    return [TASKS[task](np.random.default_rng(s), length, filler, **sizes) for s in seeds]


class Measurements:
    """Outcomes by method, task and time of asking."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str, str], Outcome] = {}
        self.bytes: dict[str, Mapping[str, int]] = {}  # of the stored tokens of one context, by memory kind
        self.dtype = ""  # of the model's keys and values

    def tasks(self, when: str) -> list[str]:
        """The tasks with questions at this time."""
        return list(dict.fromkeys(t for _, t, w in self.outcomes if w == when))

    def score(self, method: str, when: str, field: str = "right", task: str | None = None) -> tuple[float, float]:
        """(mean, standard error over contexts) of one task, or of all tasks with equal weights."""
        return _mean_over_tasks([self._by_context(method, t, when, field) for t in self._select(when, task)])

    def gain(
        self, method: str, base: str, when: str, field: str = "right", task: str | None = None
    ) -> tuple[float, float]:
        """Difference to `base` on the same contexts: (mean, standard error of the paired difference)."""
        selected = self._select(when, task)
        ours, theirs = ([self._by_context(m, t, when, field) for t in selected] for m in (method, base))
        return _mean_over_tasks([a - b for a, b in zip(ours, theirs, strict=True)])

    def score_interval(self, method: str, when: str, task: str | None = None) -> Interval | None:
        """Wilson's 95% interval over contexts of right answers to one task, or to all with equal weights, if any."""
        parts = [self._by_context(method, t, when, "right") for t in self._select(when, task)]
        return average_interval([x.mean() for x in parts], [score_interval(x) for x in parts]) if parts else None

    def gain_interval(self, method: str, base: str, when: str, task: str | None = None) -> Interval | None:
        """Newcombe's 95% interval of the paired difference in right answers to `base`, as in `score_interval`."""
        selected = self._select(when, task)
        ours, theirs = ([self._by_context(m, t, when, "right") for t in selected] for m in (method, base))
        pairs = list(zip(ours, theirs, strict=True))
        return average_interval([(a - b).mean() for a, b in pairs], [paired_interval(a, b) for a, b in pairs])

    def _select(self, when: str, task: str | None) -> list[str]:
        return self.tasks(when) if task is None else [task]

    def _by_context(self, method: str, task: str, when: str, field: str) -> np.ndarray:
        # Questions of one context share its compressed cache; only contexts are independent.
        return getattr(self.outcomes[method, task, when], field).mean(1)

    def records(self) -> list[dict[str, Any]]:
        """Entries of the JSON document: one per method, task and time of asking."""
        records = []
        for method, task, when in self.outcomes:
            numbers = {f: self.score(method, when, f, task) for f in ("right", "nats")}
            flat = {f: m for f, (m, _) in numbers.items()} | {f + "_se": s for f, (_, s) in numbers.items()}
            size = {"questions": int(self.outcomes[method, task, when].right.size), "bytes": self.bytes.get(method)}
            records.append({"method": method, "task": task, "when": when, **flat, **size})
        return records


def _mean_over_tasks(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean of the tasks' means over contexts, and its standard error."""
    if not parts:
        return float("nan"), float("nan")
    errors = [x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else np.nan for x in parts]
    return float(np.mean([x.mean() for x in parts])), float(np.sqrt(np.square(errors).sum()) / len(parts))


def measure(
    model: Model, args: argparse.Namespace, methods: Methods | Mapping[str, KVMethod], with_text: bool = False
) -> Measurements:
    """Measures all methods on the same prompts.

    Args:
      model: the model.
      args: options of `eviction_parser`; tasks that do not fit the model are left out.
      methods: strings, which are then their names too, or methods by name.
      with_text: measures continuations of text too, as is done anyway where no task fits.

    Returns:
      the outcomes, and the bytes of each method.
    """
    methods = methods if isinstance(methods, Mapping) else resolve(methods)
    found, parts = Measurements(), {}
    selected = questions.select_tasks(model, args.tasks, TASKS)
    work: list[tuple[str, Any]] = [(task, instances(args, model, task)) for task in selected]
    if with_text or not work:
        work.append(("text", common.windows(args, model, args.length + args.tokens)))
    for task, items in work:
        for start in range(0, len(items), args.batch):
            batch = items[start : start + args.batch]
            prompts = TextPrompts(model, batch, args.length) if task == "text" else QuestionPrompts(model, batch)
            for name, method in methods.items():
                log_progress(f"{task}, contexts from {start}: {name}")
                outcomes, context = prompts.outcomes(method)
                # Bytes are of one sequence's stored tokens: --batch and the room for answers are no part of a method.
                size = context.bytes.per_sequence(context.num_sequences)
                found.bytes.setdefault(name, size.held)
                found.dtype = size.dtype
                for when, o in outcomes.items():
                    parts.setdefault((name, task, when), []).append(o)
    found.outcomes = {
        key: Outcome(np.concatenate([o.right for o in each]), np.concatenate([o.nats for o in each]))
        for key, each in parts.items()
    }
    return found
