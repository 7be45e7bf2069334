"""Check of a converted directory: every tensor against the source, and the logits against transformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from checkpoints_convert.conversion_plan import ConversionPlan, plan_conversion
from checkpoints_convert.convert import Progress, open_source, read_parts
from checkpoints_convert.families import FAMILIES
from checkpoints_convert.source import Source
from kvjax.errors import KvjaxError
from kvjax.generation.model_calls import logits
from kvjax.models import checkpoint
from kvjax.models.model import Model
from kvjax.models.quantized_params import find_dtype, quantize_params
from kvjax.utils.files import expand_user
from kvjax.utils.packages import import_optional

LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit, in float32."""

PROMPT_LENGTHS = (3, 17, 40)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a check."""

    tensors: int  # number of tensors compared
    logit_difference: float | None  # the worst one, relative to the largest logit; None if not compared
    lacking: tuple[str, ...] = ()  # packages that the comparison of logits needs and that are not installed
    weights: str | None = None  # the kind of codes that were compared in place of the tensors


def check(src, dst, *, compare_logits: bool | None = None, progress: Progress | None = None) -> Report:
    """Compares config, tokenizer files, every tensor (bit for bit, in the dtype of `dst`) and logits.

    In a directory with quantized kernels, codes and scales are compared with those that the source's tensors give, and
    logits are not compared.

    Args:
      src: the source.
      dst: the directory made from it.
      compare_logits: needs both models in memory, in float32; None compares if the packages for it are installed.
      progress: called after each part.

    Raises:
      KvjaxError: listing all differences; or naming what `compare_logits` needs and is not installed.
    """
    src, dst = expand_user(src), expand_user(dst)
    source, record = open_source(src), checkpoint.read_manifest(dst)
    plan = plan_conversion(source)
    problems = []
    configs = plan.config, record.config
    if any(config.llama_arguments() is None for config in configs):
        expected, found = (_list_values(dataclasses.asdict(config)) for config in configs)
    else:
        expected, found = (_list_values(json.loads(config.to_json())) for config in configs)
    for name in dict.fromkeys([*expected, *found]):
        ours, theirs = found.get(name), expected.get(name)
        if ours != theirs:
            problems.append(f"config field {name}: {ours!r}, the source says {theirs!r}")
    for name, content in source.tokenizer_files().items():
        file = dst / name
        if not file.is_file() or file.read_bytes() != content:
            problems.append(f"{name}: not the source's")
    if not problems:
        compare = _compare_tensors if record.weights is None else _compare_codes
        problems = compare(source, plan, dst, record, progress)
    lacking, difference, refusal = missing_packages(src), None, None
    if problems:
        refusal = f"{dst} is not {src}; convert it again:\n  " + "\n  ".join(problems)
    elif record.weights is not None and compare_logits:
        refusal = (
            f"{dst} holds {record.weights} weights, whose logits are not transformers'; compare their codes alone, "
            "check(.., compare_logits=False)"
        )
    elif record.weights is None and (compare_logits or (compare_logits is None and not lacking)):
        difference = logit_difference(src, dst, record)
        if not difference <= LOGIT_TOLERANCE:
            refusal = (
                f"logits differ from transformers' by {difference:.1e} of the largest; the limit is "
                f"{LOGIT_TOLERANCE:.0e}"
            )
    if refusal is not None:
        raise KvjaxError(refusal)
    return Report(sum(len(b.sources) for b in plan.bindings), difference, lacking, record.weights)


def _list_values(value: Any, name: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts and lists by their place, as in "kinds.0.attention.head_dim"."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: x for key, own in items for k, x in _list_values(own, f"{name}.{key}".lstrip(".")).items()}


def missing_packages(src: str | Path) -> tuple[str, ...]:
    """Returns those packages that transformers needs to load a directory or a GGUF file and that are not installed."""
    needed = ("accelerate", "torch", "transformers") if expand_user(src).is_file() else ("torch", "transformers")
    return tuple(name for name in needed if importlib.util.find_spec(name) is None)


def _compare_tensors(
    source: Source, plan: ConversionPlan, dst: Path, record: checkpoint.Manifest, progress: Progress | None
) -> list[str]:
    """Rebuilds each source tensor from our parameters, one top-level entry at a time."""
    problems, dtype = [], np.dtype(record.dtype)
    done, total = 0, sum(b.num_values for b in plan.bindings) * dtype.itemsize
    if progress:
        progress("", done, total)
    for name, bindings in plan.parts.items():
        flat = flatten_dict({name: checkpoint.read_part(dst, name, record)}, sep="/")
        ours = {p: np.asarray(x) for p, x in flat.items()}
        for b in bindings:
            for tensor, joined in zip(b.sources, b.join(ours), strict=True):
                if not np.array_equal(joined, source.read(tensor).astype(find_dtype(b.targets[0].path, dtype, dtype))):
                    problems.append(f"{tensor}: differs")
            done += b.num_values * dtype.itemsize
        if progress:
            progress(name, done, total)
    return problems


def _compare_codes(
    source: Source, plan: ConversionPlan, dst: Path, record: checkpoint.Manifest, progress: Progress | None
) -> list[str]:
    """Quantizes the source's tensors again, one top-level entry at a time."""
    assert record.weights is not None
    problems, dtype = [], np.dtype(record.dtype)
    done, total = 0, sum(b.num_values for b in plan.bindings) * dtype.itemsize
    if progress:
        progress("", done, total)
    for name, part in read_parts(source, plan, dtype):
        expected: dict[str, Any] = flatten_dict(quantize_params({name: part}, record.weights), sep="/")
        ours: dict[str, Any] = flatten_dict({name: checkpoint.read_part(dst, name, record)}, sep="/")
        problems += [f"{path}: differs" for path, x in expected.items() if not np.array_equal(x, ours[path])]
        done += sum(b.num_values for b in plan.parts[name]) * dtype.itemsize
        if progress:
            progress(name, done, total)
    return problems


def logit_difference(src: str | Path, dst: str | Path, record: checkpoint.Manifest) -> float:
    """Returns the worst difference of a logit from transformers', relative to the largest logit."""
    config, params = checkpoint.restore(dst, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    lengths = [n for n in PROMPT_LENGTHS if n <= config.max_positions]
    prompts = [rng.integers(0, config.vocab_size, n) for n in lengths]
    errors = []
    for prompt, theirs in zip(prompts, transformers_logits(src, prompts, record.dtype), strict=True):
        ours = np.asarray(logits(Model(config, params), [prompt.tolist()]))[0]
        errors.append(np.abs(ours[: len(theirs)] - theirs).max() / np.abs(theirs).max())
    return float(np.max(errors))


def transformers_logits(src: str | Path, prompts: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    """Computes logits [T V] of each prompt with transformers, in float32 from weights rounded to `dtype`."""
    torch, transformers = (import_optional(n, "comparing logits needs", "parity") for n in ("torch", "transformers"))
    directory, options = expand_user(src), {"dtype": torch.float32, "attn_implementation": "eager"}
    model_class = transformers.AutoModelForCausalLM
    if directory.is_file():
        options["gguf_file"] = directory.name
        directory = directory.parent
    else:  # of a model that reads images too, whose class is in none of transformers' lists of decoders
        model_class = getattr(transformers, FAMILIES[open_source(src).config["model_type"]].architecture)
    model = model_class.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(getattr(torch, dtype)))
        return [model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy() for ids in prompts]
