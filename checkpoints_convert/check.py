"""Is a converted directory the same model? Every tensor against the source; logits against transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from checkpoints_convert.conversion_plan import Plan, plan
from checkpoints_convert.convert import Progress, size
from checkpoints_convert.source import Source, opened
from kvjax.errors import KvjaxError
from kvjax.generation.calls import logits
from kvjax.models import Config, checkpoint
from kvjax.models.model import Model

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit, in float32."""

PROMPT_LENGTHS = (3, 17, 40)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found: tensors compared, the worst logit (None: not compared), and the packages lacking for that."""

    tensors: int
    logit_difference: float | None
    lacking: tuple[str, ...] = ()


def check(src, dst, *, compare_logits: bool | None = None, progress: Progress | None = None) -> Report:
    """Compares config, every tensor (bit for bit, in dst's dtype) and logits; raises KvjaxError listing what differs.

    `compare_logits`: None does so if the packages for it are installed; it needs both models in memory, in float32.
    """
    source, record = opened(src), checkpoint.read_manifest(dst)
    todo = plan(source)
    problems = _config(todo.config, record.config) + _files(source, Path(dst))
    if not problems:
        problems = _tensors(source, todo, Path(dst), record, progress)
    if problems:
        raise KvjaxError(f"{dst} is not {src}; convert it again:\n  " + "\n  ".join(problems))
    absent = lacking(src)
    wanted = not absent if compare_logits is None else compare_logits
    difference = logit_difference(src, dst, record) if wanted else None
    if difference is not None and not difference <= TOLERANCE:
        raise KvjaxError(
            f"logits differ from transformers' by {difference:.1e} of the largest; the limit is {TOLERANCE:.0e}"
        )
    return Report(len(todo.bindings), difference, absent)


def lacking(src: str | Path) -> tuple[str, ...]:
    """The packages that are not installed of those with which transformers loads a directory or a GGUF file."""
    needed = ("accelerate", "torch", "transformers") if Path(src).is_file() else ("torch", "transformers")
    return tuple(name for name in needed if importlib.util.find_spec(name) is None)


def _config(wanted: Config, found: Config) -> list[str]:
    fields = (f.name for f in dataclasses.fields(Config))
    pairs = ((name, getattr(wanted, name), getattr(found, name)) for name in fields)
    return [f"config field {name}: {b!r}, the source says {a!r}" for name, a, b in pairs if a != b]


def _files(source: Source, dst: Path) -> list[str]:
    def is_copied(name: str, content: bytes) -> bool:
        file = dst / name
        return file.is_file() and file.read_bytes() == content

    wanted = source.tokenizer_files()
    return [f"{name}: not the source's" for name, content in wanted.items() if not is_copied(name, content)]


def _tensors(
    source: Source, todo: Plan, dst: Path, record: checkpoint.Manifest, progress: Progress | None
) -> list[str]:
    """Rebuilds each source tensor from our parameters, one top-level entry at a time."""
    problems, dtype, read = [], np.dtype(record.dtype), source.peer()
    done, total = 0, sum(size(b.shape, dtype) for b in todo.bindings)
    if progress:
        progress("", done, total)
    for name, bindings in todo.parts.items():
        ours = {
            p: np.asarray(x) for p, x in flatten_dict({name: checkpoint.read_part(dst, name, record)}, sep="/").items()
        }
        for b in bindings:
            if not np.array_equal(b.join(ours), read(b.source).astype(dtype)):
                problems.append(f"{b.source}: differs")
            done += size(b.shape, dtype)
        if progress:
            progress(name, done, total)
    return problems


def logit_difference(src: str | Path, dst: str | Path, record: checkpoint.Manifest) -> float:
    """The worst logit, relative to the largest, against transformers with the weights rounded as dst's."""
    model = Model(*checkpoint.restore(dst, dtype=jnp.float32))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n) for n in PROMPT_LENGTHS]
    pairs = zip(np.asarray(logits(model, prompts)), transformers_logits(src, prompts, record.dtype), strict=True)
    return float(np.max([np.abs(ours[: len(peer)] - peer).max() / np.abs(peer).max() for ours, peer in pairs]))


def transformers_logits(src: str | Path, prompts: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    """Logits [T V] of each prompt, computed by transformers in float32 from weights rounded to `dtype`."""
    import torch  # pyright: ignore[reportMissingImports]  (an optional library)
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    directory, options = Path(src), {"dtype": torch.float32, "attn_implementation": "eager"}
    if directory.is_file():
        options["gguf_file"] = directory.name
        directory = directory.parent
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(getattr(torch, dtype)))
        return [model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy() for ids in prompts]
