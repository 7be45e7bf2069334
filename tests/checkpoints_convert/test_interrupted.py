"""The command line when it is interrupted, and where the terminal knows no other letters."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.fixtures import ROOT

# A child of a shell without job control (`make test &`) inherits that SIGINT is ignored, and Python then leaves it so.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvjax.models import checkpoint
put = checkpoint.Writer.put
def slow(self, name, subtree):
    put(self, name, subtree)
    print(name, flush=True)
    time.sleep(60)
checkpoint.Writer.put = slow
from checkpoints_convert.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["job control", "none"])
def shell(request):
    """Sets the SIGINT handling that a child inherits from a shell."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("shell")
def test_an_interrupted_conversion_says_so_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", SLOW, "convert", str(ROOT / "llama3"), str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT.parent.parent, **pipes) as process:
        assert process.stdout.readline()  # one part is written
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "stopped" and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_modules_are_imported_does_the_same(tmp_path):
    (tmp_path / "jax.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "checkpoints_convert", "inspect", str(ROOT / "llama3")]
    path = os.pathsep.join([str(tmp_path), str(ROOT.parent.parent)])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_beyond_the_terminals_letters_are_shown(tmp_path, encoding):
    source = shutil.copytree(ROOT / "llama3", tmp_path / "modèle-模型")
    command = [sys.executable, "-m", "checkpoints_convert", "inspect", str(source)]
    done = subprocess.run(
        command, cwd=ROOT.parent.parent, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}
    )
    assert done.returncode == 0, done.stderr
    assert "modèle-模型" in done.stdout.decode()
