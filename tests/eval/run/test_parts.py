"""Parts of a run: which one a job array asks for, and how cells are divided."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.run import parts
from kvjax.eval.run.cells import make_cells
from kvjax.eval.run.parts import Part, assign_parts, detect_part, parse_part
from kvjax.eval.tasks.case import Ask, Case


def slurm(task, count, first, last, step=None):
    """The variables of one task of `sbatch --array`, as SLURM sets them."""
    values = {"ID": task, "COUNT": count, "MIN": first, "MAX": last} | ({} if step is None else {"STEP": step})
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("ids", "step"), [(range(8), 1), (range(1, 9), 1), (range(100, 108), None), (range(5, 30, 7), 7), ([3], 1)]
)
def test_the_tasks_of_an_array_are_all_parts_once(ids, step):
    found = [detect_part(slurm(i, len(ids), ids[0], ids[-1], step)) for i in ids]
    assert [part for part, _ in found] == [Part(n, len(ids)) for n in range(1, len(ids) + 1)]
    assert f"SLURM_ARRAY_TASK_ID={ids[0]}" in found[0][1]


def test_the_pods_of_an_indexed_job_are_all_parts_once():
    pods = [{"JOB_COMPLETION_INDEX": str(i), "JOB_COMPLETIONS": "3"} for i in range(3)]
    assert [detect_part(pod)[0] for pod in pods] == [Part(1, 3), Part(2, 3), Part(3, 3)]
    # Pods that are the processes of one run are no parts of it, but the array that started them is.
    assert detect_part(pods[0], num_processes=3) is None
    assert detect_part(pods[0] | slurm(2, 2, 1, 2), num_processes=3)[0] == Part(2, 2)


@pytest.mark.parametrize("environment", [{}, {"SLURM_ARRAY_TASK_ID": "", "JOB_COMPLETION_INDEX": " "}])
def test_outside_of_a_job_array_there_is_no_part(environment):
    assert detect_part(environment | {"SLURM_JOB_ID": "7", "JOB_COMPLETIONS": "3"}) is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (slurm(3, 3, 1, 7, 1), "one of 3 from 1 to 7, which are not evenly spaced"),  # --array=1,3,7
        (slurm(4, 3, 1, 9), "not evenly spaced"),  # --array=1,4,9 where SLURM says no step
        (slurm(9, 8, 0, 7, 1), "SLURM_ARRAY_TASK_ID=9"),
        (slurm("x", 8, 0, 7, 1), "SLURM_ARRAY_TASK_ID is 'x', and not a whole number"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, "without SLURM_ARRAY_TASK_COUNT, _MIN and _MAX"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "without SLURM_ARRAY_TASK_COUNT"),
        ({"JOB_COMPLETION_INDEX": "0"}, r"set JOB_COMPLETIONS to the job's \.spec\.completions, or say which part"),
        ({"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "3"}, "is beyond JOB_COMPLETIONS=3"),
        ({"JOB_COMPLETION_INDEX": "-1", "JOB_COMPLETIONS": "3"}, "JOB_COMPLETION_INDEX is '-1'"),
        (slurm(1, 8, 0, 7) | {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "8"}, "both SLURM_ARRAY_TASK_ID=1 and"),
    ],
)
def test_an_array_that_does_not_say_which_part_this_is_is_refused(environment, says):
    with pytest.raises(KvjaxError, match=says):
        detect_part(environment)


def test_a_part_is_a_number_from_1_and_how_many_there_are():
    assert (parse_part("3/8"), parse_part(" 8 / 8 ")) == (Part(3, 8), Part(8, 8))
    assert (str(Part(3, 8)), Part(3, 8).folder) == ("part 3 of 8", "part-3-of-8")
    for wrong in ("3", "3/", "0/8", "9/8", "-1/8", "1/0", "a/b", "3/8/9", "1/100001", "", "٣/٨"):
        with pytest.raises(KvjaxError, match="part"):
            parse_part(wrong)


def make_cases(*groups):
    """Cases of (task, length, how many, new tokens); a task "ppl" has text that follows."""
    for task, length, number, new_tokens in groups:
        for i in range(number):
            context, about = np.full(length, 40, np.int32), {"length": length}
            if task == "ppl":
                yield Case(task, f"ppl/{length}/{i}", context, follows=context[:new_tokens], bytes=9, about=about)
            else:
                ask = Ask(np.array([63]), "exact", ("a",), new_tokens)
                yield Case(task, f"{task}/{length}/{i}", context, (ask,), about=about)


def count_work(cell):
    return cell.count_tokens(False) * len(cell.methods)


def test_the_work_of_a_cell_is_its_tokens():
    ask = Ask(np.zeros(5, np.int32), "exact", ("x",), 7)
    context = np.zeros(100, np.int32)

    def count(*cases, question_aware=False, batch=2, speed=()):
        (cell,) = make_cells(cases, ["full"], batch, speed)
        return cell.count_tokens(question_aware)

    asks = Case("niah", "0", context, asks=(ask, ask))
    assert count(asks) == 100 + 2 * (5 + 16 * 7) and count(asks, question_aware=True) == count(asks) + 100
    turns = dataclasses.replace(asks, turns=True)
    assert count(turns, question_aware=True) == count(turns) == count(asks)
    assert count(Case("ppl", "0", context, follows=context[:20]), Case("ppl", "1", context, follows=context)) == 320
    assert count(speed=(64,), batch=8) == 3 * 8 * (64 + 16 * 64)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_all_parts_are_the_whole_and_none_is_larger_than_it_must_be(count):
    sizes = ("niah", 512, 24, 16), ("niah", 1024, 24, 16), ("niah", 8192, 12, 16), ("ppl", 2048, 16, 512)
    cells = make_cells(list(make_cases(*sizes)), [f"m{i}" for i in range(20)], 4, (512, 8192))
    numbers = assign_parts(cells, count, False)
    assert len(numbers) == len(cells) and set(numbers) == set(range(1, count + 1))
    work = [count_work(cell) for cell in cells]
    totals = [sum(w for w, n in zip(work, numbers, strict=True) if n == part) for part in range(1, count + 1)]
    assert max(totals) <= sum(work) / count + max(work)
    # Cells of one shape and group stay together, so that a part compiles few programs.
    shapes = [(cell.methods, cell.task, cell.batch.cases[0].about["length"]) for cell in cells]
    assert len(set(zip(shapes, numbers, strict=True))) <= len(set(shapes)) + count - 1
    assert numbers == assign_parts(cells, count, False)


def test_lengths_that_differ_much_weigh_by_their_work():
    cells = make_cells(list(make_cases(("a", 256, 22, 8), ("b", 8192, 3, 8))), ["full"], 1)
    numbers, work = assign_parts(cells, 4, False), [count_work(cell) for cell in cells]
    totals = [sum(w for w, n in zip(work, numbers, strict=True) if n == part) for part in range(1, 5)]
    assert max(totals) < 1.1 * sum(work) / 4
    assert Counter(numbers) == {1: 22, 2: 1, 3: 1, 4: 1}


def test_the_cut_is_the_best_of_all():
    rng = np.random.default_rng(3)
    for _ in range(60):
        work = [int(x) for x in rng.integers(1, 30, rng.integers(1, 9))]
        count = int(rng.integers(1, 6))
        cuts = parts._cut_evenly(work, count)
        assert len(cuts) == count + 1 and (cuts[0], cuts[-1]) == (0, len(work)) and sorted(cuts) == cuts
        every = itertools.combinations_with_replacement(range(len(work) + 1), count - 1)
        runs = [[0, *middle, len(work)] for middle in every]
        largest = [max(sum(work[a:b]) for a, b in itertools.pairwise(run)) for run in [*runs, cuts]]
        assert largest[-1] == min(largest)
        assert sum(a < b for a, b in itertools.pairwise(cuts)) == min(count, len(work))  # no machine stands idle


def test_there_may_be_more_parts_than_cells():
    cells = make_cells(list(make_cases(("a", 64, 2, 8))), ["full"], 1)
    numbers = assign_parts(cells, 5, False)
    assert len(set(numbers)) == 2 and set(numbers) <= set(range(1, 6))
