"""Orders of methods that the papers claim, checked on a run of the methods of results/eval.

python -m experiments.paper_claims experiments/results/eval
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvjax.eval.page import summary
from kvjax.eval.page.paired_difference import MEASURES, SCORE, Difference, Measure, RecordedRun, format_number
from kvjax.eval.page.summary import Record
from kvjax.eval.run import store
from kvjax.utils import display

NEAR_LOSS = 0.02  # a loss below this, in score or in bits per byte, counts as near
SHOWN, NOT_SHOWN, WITHIN = "shown", "not shown", "within the error"
KVCRUSH, SNAPKV, H2O = "snapkv:budget=512 + kvcrush", "snapkv:budget=512", "h2o:heavy=256,recent=256"
RECENT = 508
STREAMING = f"streaming_llm:recent={RECENT}"
INFLLM = "infllm:block=64,sinks=64,local=256,topk=4,chunk=256"


def later_gain(record: Record) -> float | None:
    """The score of a conversation's later questions minus that of its first one."""
    split = summary.first_later(record) if record.get("turns") else None
    return split[1] - split[0] if split else None


def far_needle_score(record: Record) -> float | None:
    """The score of a needle that more than `RECENT` tokens follow."""
    if record["task"] != "niah":
        return None
    about = record["about"]
    return SCORE.value(record) if (1 - about["depth"]) * about["length"] > RECENT else None


LATER = (Measure("score, later - first question", later_gain, (-1, 1)),)
FAR = (Measure("score of far needles", far_needle_score, (0, 1)),)


class Claim(NamedTuple):
    """An order that a paper reports: the left method of each pair is better than the right one."""

    text: str
    pairs: tuple[tuple[str, str], ...]
    measures: tuple[Measure, ...] = MEASURES
    tolerated: float = 0.0  # by which the left one may be worse


CLAIMS = (
    Claim("KCache with 64 values is near full", (("kcache:n=64", "full"),), tolerated=NEAR_LOSS),
    Claim(
        "KCache gains from first layers on the device",
        (("kcache:n=16,device_layers=1", "kcache:n=16,device_layers=0"),),
    ),
    Claim("SpeCache is better than KIVI at 1 bit", (("specache:bits=1", "kivi:bits=1"),)),
    Claim("SpeCache is better than KIVI at 2 bits", (("specache:bits=2", "kivi:bits=2"),)),
    Claim("KVCrush is better than its base at equal budget", ((KVCRUSH, SNAPKV),)),
    Claim("StreamingLLM is worst at far needles", tuple((x, STREAMING) for x in (SNAPKV, H2O, INFLLM)), FAR),
    Claim("Eviction loses on later questions", tuple(("full", x) for x in (SNAPKV, KVCRUSH, H2O, STREAMING)), LATER),
    Claim(
        "Offloading does not",
        tuple((x, "full") for x in ("offload", "kcache:n=64", "specache:bits=1", "specache:bits=2")),
        LATER,
        NEAR_LOSS,
    ),
)


def judge(d: Difference, tolerated: float) -> str:
    """The verdict on "left is better than right, or worse by less than `tolerated`"."""
    if d.low is None or d.high is None or d.low + tolerated <= 0 <= d.high + tolerated:
        return WITHIN
    return SHOWN if d.low + tolerated > 0 else NOT_SHOWN


def describe(d: Difference, measure: str) -> str:
    """Formats left, right and their difference with its interval, as they are read: fewer bits per byte are better."""
    is_text = measure.startswith("bits")
    left, right = (format_number(-x if is_text else x, measure) for x in (d.left, d.right))
    read, unit = (d.reverse(), "bits per byte") if is_text else (d, "points")
    numbers = [read.mean] if read.low is None else [read.mean, read.low, read.high]
    mean, *ends = (("+" if x >= 0 else "") + format_number(x, measure) for x in numbers)
    interval = f" ({ends[0]} to {ends[1]})" if ends else ", a single context"
    return f"{measure}: {left} against {right}, {mean}{interval} {unit}, {display.count(d.cases, 'context')}"


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path, help="the folder that kvjax eval wrote")
    run = RecordedRun(store.read(p.parse_args(argv).run))
    for claim in CLAIMS:
        print(claim.text)
        for left, right in claim.pairs:
            if missing := [name for name in (left, right) if name not in run.cases]:
                print(f"  not in this run: {', '.join(missing)}")
                continue
            for measure in claim.measures:
                if d := run.difference(left, right, measure):
                    print(f"  {judge(d, claim.tolerated)}: {left} against {right}; {describe(d, measure.name)}")


if __name__ == "__main__":
    main()
