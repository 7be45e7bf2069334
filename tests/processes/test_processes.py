"""Two processes of two devices each give what one process of four devices gives."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from kvjax import cli
from tests.processes import launch, work


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two processes sees, and what this one sees alone."""
    folder = tmp_path_factory.mktemp("two")
    two = launch.start_two(
        "-m", "tests.processes.work", "{coordinator}", "{process}", f"{folder}/{{number}}", devices=2
    )
    (folder / "alone").mkdir()
    try:  # beside the others, which wait for each other much of the time
        alone = json.loads(json.dumps(work.run_all(folder / "alone")))
    finally:
        outputs = [process.communicate(timeout=300) for process in two]
    for process, (_, errors) in zip(two, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [*(json.loads((folder / str(i)).read_text()) for i in (1, 2)), alone]


def assert_alike(one: Any, other: Any, where: str) -> None:
    """Numbers are equal, and floats up to the order in which devices add them up."""
    if isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key, x in other.items():
            assert_alike(one[key], x, f"{where}, {key}")
    elif isinstance(other, list):
        assert len(one) == len(other), where
        for i, x in enumerate(other):
            assert_alike(one[i], x, f"{where}[{i}]")
    elif isinstance(other, float):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5, err_msg=where)
    else:
        assert one == other, where


@pytest.mark.parametrize("boundary, method", [(b, m) for b, methods in work.METHODS.items() for m in methods])
def test_a_method_gives_what_one_process_gives(outcomes, boundary, method):
    name = f"{boundary}: {method}"
    first, second, alone = (x[name] for x in outcomes)
    assert_alike(first, second, name)
    assert_alike(first, alone, name)


def test_no_method_comes_out_as_full(outcomes):
    """As one does that leaves a model's first layers exact, or whose budget the prompt does not fill."""
    sizes = {method: outcomes[0][f"heads: {method}"]["bytes"][0] for method in work.METHODS["heads"]}
    assert all(size != sizes["full"] for method, size in sizes.items() if method != "full")
    assert sizes["kcache:n=8"]["pinned_host"] and sizes["snapkv:budget=8,window=4 + offload"]["pinned_host"]


def test_streams_files_and_operations_give_what_one_process_gives(outcomes):
    first, second, alone = (x["operations"] for x in outcomes)
    assert_alike(first, second, "operations")
    assert_alike(first, alone, "operations")
    assert (
        first["streamed"] == np.transpose(first["generated"]).tolist() == np.transpose(first["in one program"]).tolist()
    )


def test_a_step_gathers_nothing(outcomes):
    """The host reads whether the batch has ended, and its tokens, from what every device has."""
    assert outcomes[0]["gatherings"] == outcomes[1]["gatherings"] == [0, True, True, 4]


def test_processes_that_disagree_are_refused_by_what_differs(outcomes):
    first, second = (x["refusals"] for x in outcomes[:2])
    assert first == second and set(first) == {"method", "tokens", "model", "options", "version", "mesh"}
    assert "method is .." in first["method"] and "tokens=1" in first["method"] and "tokens=2" in first["method"]
    assert "token ids is [[" in first["tokens"] and "number 1 in" in first["model"]
    assert "options is" in first["options"] and "mesh is" in first["mesh"]
    assert "kvjax is '1.1' in process 1 and '1.2' in process 2" in first["version"]


def test_values_are_exchanged(outcomes):
    assert outcomes[0]["exchange"] == [[[1], [2]], {"work": 1}, True]
    assert outcomes[1]["exchange"] == [[[1], [2]], {"work": 1}, False]


def test_the_command_line_generates_in_two_processes(monkeypatch, capsys):
    """Heads lie in two processes; the first prints, what one process prints."""
    monkeypatch.setenv("KVJAX_CACHE", str(jax.config.jax_compilation_cache_dir))
    words = ["generate", "--prompt", "def main():\n    import ", "--method", "kcache:n=16", "--json", "--mesh", "1x2"]
    words += ["--max-new-tokens", "6", "--stop", "zzz"]
    two = launch.start_two("-m", "kvjax", *words, "--coordinator", "{coordinator}", "--process", "{process}")
    assert cli.main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    outputs = [process.communicate(timeout=300) for process in two]
    assert [process.returncode for process in two] == [0, 0], outputs
    assert outputs[1][0] == ""
    together = json.loads(outputs[0][0])
    assert [together[x] for x in ("tokens", "text", "bytes")] == [alone[x] for x in ("tokens", "text", "bytes")]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--mesh", "3x3"], "asks for 9 devices and there are 4; take 1x4 or 2x2 or 4x1"),
        (["--mesh", "1x4"], "axis K of size 2 does not divide over the 4 devices"),
        (["--mesh", "heads=1,batch=2"], "axis B of size 1 does not divide over the 2 devices"),
        (["--mesh", "2"], "'2' is no mesh: write batch x heads"),
        (["--process", "1/2"], "needs both, the coordinator's host:port and the process as 1/2"),
        (["--coordinator", "here", "--process", "1/2"], "such as 10.0.0.1:1234, got 'here'"),
        (["--coordinator", "here:1", "--process", "3/2"], "'3/2' must be a number and a count"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(words, message, capsys):
    assert cli.main(["generate", "--prompt", "a", *words]) == 2
    assert message in capsys.readouterr().err
