"""Starts the processes of a test: their own interpreters, as a user starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*words: str, devices: int = 1) -> subprocess.Popen[str]:
    """Starts python with these words, with CPU devices of its own and the tests' cache of programs."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def start_two(*words: str, devices: int = 1) -> list[subprocess.Popen[str]]:
    """Starts two processes of one run: `words` with {coordinator}, {process} and {number} filled in."""
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        start(*(w.format(coordinator=coordinator, process=f"{i}/2", number=i) for w in words), devices=devices)
        for i in (1, 2)
    ]
