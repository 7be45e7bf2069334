"""The curriculum: sequences grow when recall is learned at the present length."""

from __future__ import annotations

import dataclasses

import numpy as np

# First repeats and recall: induction appears within minutes, and never without the repeats. Then also text. Once recall
# is learned: half text, which takes far longer, and the other tasks.
EARLY = {"repeats": 0.4, "recall": 0.4, "text": 0.2}
GROWING = {"repeats": 0.1, "recall": 0.25, "needle": 0.05, "copying": 0.05, "variables": 0.05, "text": 0.5}
GROWN = {
    "repeats": 0.02, "recall": 0.1, "needle": 0.04, "copying": 0.06, "variables": 0.06,
    "multivalue": 0.08, "multiquery": 0.08, "common": 0.05, "frequent": 0.05, "text": 0.46,
}  # fmt: skip
EARLY_LENGTH, GROWN_LENGTH, MIXED_LENGTH = 64, 1024, 512


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Batch shapes of growing length.

    Lengths up to GROWN_LENGTH are stages. After the last stage all lengths from MIXED_LENGTH on are drawn, longer ones
    more rarely: recall then already works at four times the length, since positions cover the longest length from early
    on, and text is learned fastest from short windows.
    """

    shapes: tuple[tuple[int, int], ...]  # (length, sequences)
    bar: float = 0.93  # running recall accuracy that ends a stage
    stay: int = 60  # least number of steps of a stage
    review: float = 0.3  # fraction of steps at one of the two stages before
    left_out: tuple[str, ...] = ()  # kinds that are not drawn

    @property
    def stages(self) -> int:
        """Number of stages; a run at stage `stages` is past them all."""
        return max(1, sum(length <= GROWN_LENGTH for length, _ in self.shapes))

    def reach(self, length: int) -> int:
        """Range of positions at this length: the longest length's after the first lengths."""
        return length if length <= EARLY_LENGTH else self.shapes[-1][0]

    def pick(self, rng: np.random.Generator, stage: int) -> int:
        """Draws the index of the shape of one step."""
        if stage == self.stages:
            weights = np.array([n**-1.5 if n >= min(MIXED_LENGTH, self.shapes[-1][0]) else 0 for n, _ in self.shapes])
            return int(rng.choice(len(weights), p=weights / weights.sum()))
        return stage if stage == 0 or rng.random() >= self.review else max(0, stage - int(rng.integers(1, 3)))

    def mixture(self, stage: int) -> dict[str, float]:
        """Weights of the kinds of sequences in this stage."""
        early = stage < self.stages and self.shapes[stage][0] <= EARLY_LENGTH
        weights = GROWN if stage == self.stages else EARLY if early else GROWING
        return {kind: weight for kind, weight in weights.items() if kind not in self.left_out}


@dataclasses.dataclass
class Progress:
    """Progress of a run: its stage, and the steps and the running recall accuracy of this stage."""

    stage: int = 0
    steps: int = 0
    recall: float = 0.0

    def update(self, curriculum: Curriculum, shape: int, accuracy: float | None) -> None:
        """Counts one step at `shape`, and enters the next stage when the bar is passed."""
        # Steps of review are shorter, and say nothing about recall at this length.
        if shape != self.stage or self.stage == curriculum.stages:
            return
        self.steps += 1
        if accuracy is not None:
            # A running mean over some 20 steps, as a batch of long sequences has few recall questions.
            self.recall += 0.05 * (accuracy - self.recall)
        if self.steps >= curriculum.stay and self.recall >= curriculum.bar:
            self.stage, self.steps, self.recall = self.stage + 1, 0, 0.0
