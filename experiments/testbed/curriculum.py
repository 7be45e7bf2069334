"""What is trained on when: sequences grow once recall is learned at the present length."""

from __future__ import annotations

import dataclasses

import numpy as np

# Copying and recall first (induction appears within minutes, and not at all without the copying), then also text;
# once recall is learned half text, which takes far longer, and the other tasks.
EARLY = {"repeats": 0.4, "recall": 0.4, "text": 0.2}
GROWING = {"repeats": 0.1, "recall": 0.25, "needle": 0.05, "copying": 0.05, "variables": 0.05, "text": 0.5}
GROWN = {
    "repeats": 0.02, "recall": 0.1, "needle": 0.04, "copying": 0.06, "variables": 0.06,
    "multivalue": 0.08, "multiquery": 0.08, "common": 0.05, "frequent": 0.05, "text": 0.46,
}  # fmt: skip
EARLY_LENGTH, GROWN_LENGTH, MIXED_LENGTH = 64, 1024, 512


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Batch shapes (length, rows), growing: the next one is taken up when the running recall accuracy passes `bar`.

    Lengths up to GROWN_LENGTH are stages, of at least `stay` steps. After the last of them all lengths from
    MIXED_LENGTH on are drawn, the longer the rarer: by then recall holds at four times the length (positions reach
    the longest length from early on), and text is learned soonest from short windows.
    """

    shapes: tuple[tuple[int, int], ...]
    bar: float = 0.93
    stay: int = 60
    review: float = 0.3  # share of steps at one of the two stages before
    left_out: tuple[str, ...] = ()  # kinds that are not drawn

    @property
    def stages(self) -> int:
        """How many stages there are; a run at stage `stages` is grown."""
        return max(1, sum(length <= GROWN_LENGTH for length, _ in self.shapes))

    def reach(self, length: int) -> int:
        """The range of positions at this length: soon that of the longest."""
        return length if length <= EARLY_LENGTH else self.shapes[-1][0]

    def pick(self, rng: np.random.Generator, stage: int) -> int:
        """The index of the shape of one step."""
        if stage == self.stages:
            share = np.array([n**-1.5 if n >= min(MIXED_LENGTH, self.shapes[-1][0]) else 0 for n, _ in self.shapes])
            return int(rng.choice(len(share), p=share / share.sum()))
        return stage if stage == 0 or rng.random() >= self.review else max(0, stage - int(rng.integers(1, 3)))

    def mixture(self, stage: int) -> dict[str, float]:
        """Shares of row kinds in this stage."""
        early = stage < self.stages and self.shapes[stage][0] <= EARLY_LENGTH
        shares = GROWN if stage == self.stages else EARLY if early else GROWING
        return {kind: share for kind, share in shares.items() if kind not in self.left_out}


@dataclasses.dataclass
class Progress:
    """Where a run stands: the stage, steps taken in it, and the running recall accuracy in it."""

    stage: int = 0
    steps: int = 0
    recall: float = 0.0

    def update(self, curriculum: Curriculum, shape: int, accuracy: float | None) -> None:
        """Counts one step that was taken at `shape` and moves on when the bar is passed."""
        if shape != self.stage or self.stage == curriculum.stages:
            return
        self.steps += 1
        if accuracy is not None:
            self.recall += 0.05 * (accuracy - self.recall)
        if self.steps >= curriculum.stay and self.recall >= curriculum.bar:
            self.stage, self.steps, self.recall = self.stage + 1, 0, 0.0
