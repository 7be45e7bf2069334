"""Solved examples before a question: their number in a prompt, and the reason where some are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.tasks.encoding import EncodedPrompt, encode_prompt
from kvjax.models.model import Model


def fit_examples(
    model: Model, examples: Sequence[dict], make_prompt: Callable[[Sequence[dict]], str], length: int
) -> tuple[int, str, EncodedPrompt]:
    """Makes a prompt of as many of the examples as it takes at most `length` tokens with, or of none.

    Returns:
      The number of examples, the prompt, and its tokens.
    """
    for num_used in range(len(examples), -1, -1):
        text = make_prompt(examples[:num_used])
        encoded = encode_prompt(model, text)
        if len(encoded.ids) <= length:
            return num_used, text, encoded
    return 0, text, encoded


def describe_examples(num_used: int, num_wanted: int, num_available: int, train: Path, length: int) -> dict[str, Any]:
    """Returns what `Case.about` says of a prompt's solved examples.

    Args:
      num_used: examples in the prompt.
      num_wanted: examples that the task means to have.
      num_available: examples that were read from `train`.
      train: the file of examples.
      length: tokens that a prompt may take.
    """
    if num_used == num_wanted:
        return {"shots": num_used}
    file = f"{train.parent.name}/{train.name}"  # below --data, wherever that is
    if num_used < num_available:
        why = f"no room for more in {length} tokens"
    else:
        why = f"{file} has no more that can be used" if train.is_file() else f"no {file} in the folder of --data"
    return {"shots": num_used, "wanted": num_wanted, "lacking": why}


def missing_example_notes(cases: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns a line for each task whose prompts lack examples, from pairs (task, `Case.about`)."""
    short: dict[str, list[Mapping[str, Any]]] = {}
    for task, about in cases:
        if "lacking" in about:
            short.setdefault(task, []).append(about)
    notes = []
    for task, abouts in short.items():
        numbers = sorted({about["shots"] for about in abouts})
        few = " to ".join(dict.fromkeys(str(n) for n in (numbers[0], numbers[-1])))
        why = ", ".join(dict.fromkeys(about["lacking"] for about in abouts))
        notes.append(f"{task}: {few} of {abouts[0]['wanted']} solved examples: {why}")
    return notes
