"""One training run: parameters, optimizer, progress, a compiled step, and checkpoints from which it resumes exactly."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from experiments.testbed import attention, batches, precision
from experiments.testbed.curriculum import Curriculum, Progress
from kvjax.errors import KvjaxError
from kvjax.models import Config, Decoder
from kvjax.models.decoder import init
from kvjax.testbed.corpus import Corpus


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines a run."""

    config: Config
    curriculum: Curriculum
    seed: int = 0
    steps: int = 10_000
    learning_rate: float = 2e-3
    warmup: int = 100
    decay: float = 0.2  # last fraction of the steps, over which the rate falls linearly to zero
    weight_decay: float = 0.05

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after clipping, warm-up, constant rate, linear decay."""
        tail = max(1, int(self.decay * self.steps))
        rate = optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.learning_rate, self.warmup),
                optax.constant_schedule(self.learning_rate),
                optax.linear_schedule(self.learning_rate, 0.0, tail),
            ],
            [self.warmup, self.steps - tail],
        )

        def is_matrix(params: Any) -> Any:
            return jax.tree.map(lambda x: x.ndim > 1, params)

        # Norms' scales do not decay: they belong near 1, not near 0.
        adamw = optax.adamw(rate, b2=0.98, weight_decay=self.weight_decay, mask=is_matrix)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def attend(layer: int, q, k, v, x):
    """Full causal attention that keeps no state."""
    return attention.causal(q, k, v), None


def init_params(config: Config, seed: int) -> dict[str, Any]:
    """Initializes parameters; projections into the residual stream start small (GPT-2, section 2.3)."""
    params = nn.unbox(init(config, jax.random.key(seed)))
    small = (config.width * 2 * config.layers) ** -0.5

    def scale(path, x):
        return x * small if {"o", "down"} & {part.key for part in path} else x

    return jax.tree_util.tree_map_with_path(scale, params)


def losses(config: Config, params, tokens, pos, weight):
    """Weighted cross entropy: (its mean over sequences, (per sequence, fraction of predicted targets per sequence))."""
    with precision.mixed_precision():
        hidden, _ = Decoder(config).apply({"params": params}, tokens, pos, attend)
    logits = precision.einsum("td,vd->tv", hidden.reshape(-1, config.width), params["embedding"])
    logits = logits.reshape(*tokens.shape, -1)
    target, weight = jnp.roll(tokens, -1, 1), jnp.roll(weight, -1, 1)  # weight[:, 0] is 0, so nothing wraps around
    entropy = (optax.softmax_cross_entropy_with_integer_labels(logits, target) * weight).sum(1)
    hits = jnp.where(logits.argmax(-1) == target, weight, 0).sum(1)
    return entropy.mean(), (entropy, hits)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(recipe: Recipe, params, opt_state, tokens, pos, weight):
    gradient = jax.value_and_grad(losses, argnums=1, has_aux=True)
    (_, by_sequence), grads = gradient(recipe.config, params, tokens, pos, weight)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
        updates, opt_state = recipe.optimizer().update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, by_sequence


class Run:
    """Training state of a recipe; `step` is deterministic, also across `save` and `restore`."""

    def __init__(self, recipe: Recipe, corpus: Corpus):
        self.recipe, self.corpus = recipe, corpus
        self.params = init_params(recipe.config, recipe.seed)
        self.opt_state = recipe.optimizer().init(self.params)
        self.progress, self.at = Progress(), 0

    def begin_grown(self, params: Any) -> None:
        """Starts from given parameters, past all stages of the curriculum."""
        if (got := jax.tree.map(jnp.shape, params)) != (want := jax.tree.map(jnp.shape, self.params)):
            raise KvjaxError(f"the parameters to start from have shapes {got}, this recipe's model {want}")
        self.params, self.progress = jax.tree.map(jnp.copy, params), Progress(self.recipe.curriculum.stages)

    def step(self) -> dict[str, Any]:
        """Trains on the next batch; returns {"step", "length", "stage", "loss/KIND", "hits/KIND"}."""
        # The generator depends on the step alone, so that a resumed run draws the same batches.
        rng = np.random.default_rng([self.recipe.seed, self.at])
        curriculum = self.recipe.curriculum
        shape = curriculum.pick(rng, self.progress.stage)
        length, num_sequences = curriculum.shapes[shape]
        mixture = curriculum.mixture(self.progress.stage)
        b = batches.make(rng, num_sequences, length, mixture, curriculum.reach(length), self.corpus)
        self.params, self.opt_state, out = _step(self.recipe, self.params, self.opt_state, b.tokens, b.pos, b.weight)
        record = {"step": self.at, "length": length, "stage": self.progress.stage}
        for i, kind in enumerate(batches.KINDS):
            for name, values in zip(("loss", "hits"), map(np.asarray, out), strict=True):
                if (b.kind == i).any():
                    record[f"{name}/{kind}"] = float(values[b.kind == i].mean())
        self.progress.update(curriculum, shape, record.get("hits/recall"))
        self.at += 1
        return record

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes a checkpoint."""
        state = ocp.args.StandardSave({"params": self.params, "opt_state": self.opt_state})
        progress = ocp.args.JsonSave(dataclasses.asdict(self.progress))
        manager.save(self.at, args=ocp.args.Composite(state=state, progress=progress))
        manager.wait_until_finished()

    def restore(self, manager: ocp.CheckpointManager) -> bool:
        """Continues from the newest checkpoint; returns False if there is none."""
        if (step := manager.latest_step()) is None:
            return False
        state = ocp.args.StandardRestore({"params": self.params, "opt_state": self.opt_state})
        found = manager.restore(step, args=ocp.args.Composite(state=state, progress=ocp.args.JsonRestore()))
        self.params, self.opt_state = found["state"]["params"], found["state"]["opt_state"]
        self.progress, self.at = Progress(**found["progress"]), step
        return True


def open_manager(directory: Path, keep: int = 3) -> ocp.CheckpointManager:
    """Opens the Orbax manager of a run's checkpoints."""
    return ocp.CheckpointManager(Path(directory).resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=keep))
