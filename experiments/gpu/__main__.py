"""Runs the stages that need a GPU, each in a process and a time of its own, and keeps what each prints.

python -m experiments.gpu [--stages kernels,methods] [--out DIR] [--seconds 540] [--again]

A stage whose result stands in DIR (by default experiments/results/gpu/NAME-OF-THE-DEVICE) is left out, so that a run
that was cut off goes on where it stopped: call it again until it says that nothing is left. Stages end after --seconds
at the latest, and write what they have measured by then.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench import measuring

RESULTS = Path(__file__).parent.parent / "results" / "gpu"
GPU = "experiments.gpu."
BENCH = "experiments.bench."
LOW_BITS = "kivi:bits=2,group=64,residual=128"
# The others of tests/core are about programs for CPUs.
TESTS = ["tests/core", "--ignore=tests/core/test_matmul.py", "--ignore=tests/core/test_compile_cache.py"]
STAGES: dict[str, list[str]] = {
    # Correctness first: speed of a wrong kernel means nothing.
    "kernels": ["-m", GPU + "kernels"],
    "methods": ["-m", GPU + "methods"],
    "methods-bfloat16": ["-m", GPU + "methods", "--dtype", "bfloat16"],
    "tests": ["-m", "pytest", "-q", "-n", "8", "-p", "no:benchmark", *TESTS],
    "packed": ["-m", BENCH + "packed_kernel"],
    "host": ["-m", BENCH + "host", "--megabytes", "256,1024,4096,16384"],
    "decode-1b": ["-m", GPU + "decode", "--model", "1b", "--cells", "4096x1; 32768x1; 32768x8"],
    "decode-8b": ["-m", GPU + "decode", "--model", "8b", "--cells", "4096x1; 32768x1; 32768x4"],
    "equal-memory": ["-m", GPU + "decode", "--model", "8b", "--cells", "8192; 32768", "--memory-gb", "8.7"]
    + ["--methods", f"full; kcache:n=128; specache:bits=2,group=64,residual=128; {LOW_BITS}"],
    "overlap": ["-m", GPU + "overlap"],
    "prefill": ["-m", BENCH + "prefill"],
    "steps": ["-m", BENCH + "steps"],
}


def device_name() -> str:
    """The first GPU's name, as a folder; asked of the driver, so that this process takes no memory of it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise SystemExit("no NVIDIA GPU answers, as nvidia-smi failed: the stages need one") from None
    return re.sub(r"[^a-z0-9]+", "-", name.split(",")[0].lower()).strip("-")


def run_stage(name: str, out: Path, seconds: float) -> bool:
    """Runs one stage, whose JSON document is the last line that it prints; returns whether it ended well."""
    measuring.log_progress(f"{name}: python {' '.join(STAGES[name])}")
    started = time.monotonic()
    # The whole of the GPU's memory at once would leave none to transformers, which shares the process, nor to other
    # workers of the tests, whose tolerances are those of full float32.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ)
    if name == "tests":
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    log = out / f"{name}.log"
    with log.open("w") as file:
        try:
            command = [sys.executable, *STAGES[name]]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds)
            ended = f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {seconds:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    measuring.log_progress(f"{name}: {ended}, {time.monotonic() - started:.0f} s")
    print("\n".join(line for line in lines if not line.startswith("{"))[-6000:], flush=True)
    if ended != "status 0":
        return False
    if lines and lines[-1].startswith("{"):
        document = json.dumps(json.loads(lines[-1]), indent=1) + "\n"
    else:  # of pytest, which prints no document
        document = json.dumps({"stage": name, "says": lines[-1] if lines else ""}) + "\n"
    (out / f"{name}.json").write_text(document)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help="from: " + ", ".join(STAGES))
    parser.add_argument("--out", type=measuring.output_folder, help="folder of results")
    parser.add_argument("--seconds", type=float, default=540.0, help="the most that a stage may take")
    parser.add_argument("--again", action="store_true", help="run stages that have a result, too")
    args = parser.parse_args(argv)
    stages = [s.strip() for s in args.stages.split(",") if s.strip()]
    if unknown := [s for s in stages if s not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; stages are {', '.join(STAGES)}")
    out = args.out or RESULTS / device_name()
    out.mkdir(parents=True, exist_ok=True)
    todo = [s for s in stages if args.again or not (out / f"{s}.json").exists()]
    failed = [s for s in todo if not run_stage(s, out, args.seconds)]
    if failed:
        raise SystemExit(f"these stages failed or were cut off: {', '.join(failed)}; their logs are in {out}")
    print(f"nothing is left: results of {len(stages)} stages are in {out}")


if __name__ == "__main__":
    main()
