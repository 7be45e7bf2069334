"""Time of a decode step as the bytes in host memory grow: it must not grow with them.

python -m experiments.bench.host [--megabytes 64,256,1024]

The first table runs `kvjax.core.memory` alone in a compiled loop, which appends one token vector to a host buffer, and
one that also fetches `n` vectors per head at random places. (The larger the buffer, the fewer lie in the CPU's caches.)
The second table runs the real decode loop on random keys and values. KCache reads all keys on the device, and this
takes longer with more tokens, wherever the values are; the same method with its values on the device is therefore the
baseline, and the difference is the cost of host memory. `offload` copies everything back every step and must grow.
"copies" counts the instructions of the decode program that copy a whole host buffer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import KvjaxDecoder, random_loop, time_decode_steps
from experiments.bench.shapes import describe
from kvjax.core import memory
from kvjax.eval.run.machine import machine
from kvjax.testing import full_copies

CONFIG = kvjax.Config.llama(
    vocab_size=256, width=256, layers=2, heads=4, kv_heads=4, head_dim=128, mlp_width=256, max_positions=2**20
)


# Donated: a jitted function would otherwise copy its argument in order to write into it. This copy grows with the
# buffer, and is the very cost that must not be there.
@functools.partial(jax.jit, donate_argnums=0)
def append_and_recall(buf: memory.Buffer, idx: jax.Array) -> tuple[memory.Buffer, jax.Array]:
    """Appends ones at slot i and fetches the slots idx[i], i32[B K n], in each step i; returns the buffer and a sum."""
    B, K, _, W = buf.data.shape
    ones = jnp.ones((B, K, 1, W), jnp.float32)

    def step(carry, xs):
        buf, total = carry
        i, idx = xs
        # Without the sum, XLA would leave out the fetches, whose results nobody reads.
        buf = memory.append(buf, ones, jnp.broadcast_to(i, (B, 1)))
        return (buf, total + memory.gather_tokens(buf, idx).sum() if idx.size else total), None

    xs = (jnp.arange(idx.shape[0], dtype=jnp.int32), idx)
    return jax.lax.scan(step, (buf, jnp.float32(0)), xs)[0]


class HostBuffer:
    """A loop of appends and fetches on one host buffer, without a model."""

    def __init__(self, megabytes: int, n: int, steps: int, K: int = 4, W: int = 128):
        # K and W are those of CONFIG, so that both tables move vectors of one size.
        slots = megabytes * 2**20 // (4 * K * W)
        self.buf = memory.pack(jnp.zeros((1, K, slots, W), jnp.float32), host=True)
        self.idx = jnp.asarray(np.random.default_rng(0).integers(0, slots, (steps, 1, K, n), np.int32))

    def seconds(self) -> float:
        """Seconds per step."""

        def run():
            self.buf, total = append_and_recall(self.buf, self.idx)  # donates the buffer
            return total

        return measuring.time_run(run) / self.idx.shape[0]


def measure_memory(sizes: Sequence[int], n: int, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds per step at each size of the buffer in MB, with `n` vectors fetched per head and without."""
    kinds = {"append": 0, "recall": n}
    buffers = {(mb, kind): HostBuffer(mb, fetched, steps) for mb in sizes for kind, fetched in kinds.items()}
    for buffer in buffers.values():  # compiles
        buffer.seconds()
    seconds = measuring.time_in_turns({key: buffer.seconds for key, buffer in buffers.items()}, repeats)
    return [{"megabytes": mb, **{kind: measuring.summary(seconds[mb, kind]) for kind in kinds}} for mb in sizes]


def loops(model: kvjax.Model, megabytes: int, n: int, room: int) -> dict[str, KvjaxDecoder]:
    """Decode loops under each method, with `megabytes` of values in all layers together."""
    # The buffers have `megabytes` with their room, since a copy of a whole buffer moves the room, too.
    c = model.config
    a = c.kind(0).attention
    tokens = megabytes * 2**20 // (c.layers * a.kv_heads * a.head_dim * model.dtype.itemsize) - room
    kcache = kvjax.methods.kcache(n=n, device_layers=0)  # or fewer than `megabytes` would be on the host
    methods = {
        "kcache": kcache,
        "kcache, V on device": dataclasses.replace(kcache, v=kcache.v.on_device()),
        "offload": kvjax.methods.offload(),
    }
    return {name: random_loop(model, method, 1, tokens, room) for name, method in methods.items()}


def measure(model: kvjax.Model, megabytes: int, n: int, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds per step and bytes of each loop, for one size."""
    sides = loops(model, megabytes, n, room=steps * (repeats + 1))
    for side in sides.values():
        side.decode(steps)
    seconds = time_decode_steps(sides, steps, repeats)
    host, program = sides["kcache"].cache, sides["kcache"].program()
    copies = full_copies(program, host.layers[0].v.data.shape)
    return {
        "tokens": int(host.length[0]),
        "seconds_per_step": {name: measuring.summary(s) for name, s in seconds.items()},
        "bytes": {name: kvjax.state_bytes(side.cache).total for name, side in sides.items()},
        # Host buffers hold u32 words; device arrays of this shape hold floats.
        "full_copies": [line for line in copies if "u32" in line],
    }


COLUMNS = ("MB of V", "tokens", "kcache: MB on host", "us/step", "V on device", "difference", "copies")
COLUMNS += ("offload: MB on host", "us/step ")


def row(megabytes: int, cell: dict[str, Any]) -> list[Any]:
    """Formats the results of one size."""
    micro = {name: s["median"] * 1e6 for name, s in cell["seconds_per_step"].items()}
    sizes = {name: f"{b['pinned_host'] / 2**20:.0f}" for name, b in cell["bytes"].items()}
    ours, device = micro["kcache"], micro["kcache, V on device"]
    times = (f"{ours:.0f}", f"{device:.0f}", f"{ours - device:+.0f}")
    copies = len(cell["full_copies"])
    return [megabytes, cell["tokens"], sizes["kcache"], *times, copies, sizes["offload"], f"{micro['offload']:.0f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument(
        "--megabytes", type=measuring.parse_integers, default=[64, 256, 1024], help="of values, in all layers"
    )
    parser.add_argument("--n", type=int, default=128, help="values that kcache fetches per head and step")
    parser.add_argument("--steps", type=int, default=16, help="steps per turn of the decode loop")
    parser.add_argument("--row-steps", type=int, default=512, help="steps per turn of the first table")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)

    before, model = machine(), kvjax.random_model(CONFIG)
    rows = measure_memory(args.megabytes, args.n, args.row_steps, args.repeats)
    cells = {}
    for mb in args.megabytes:
        measuring.log_progress(f"decode loop, {mb} MB of values")
        cells[mb] = measure(model, mb, args.n, args.steps, args.repeats)
    tables = [
        measuring.table(
            f"kvjax.core.memory alone, n={args.n}, us/step",
            ("MB on host", "append", "append and recall"),
            [(r["megabytes"], *(f"{r[k]['median'] * 1e6:.1f}" for k in ("append", "recall"))) for r in rows],
        ),
        measuring.table(f"Decode loop, n={args.n}", COLUMNS, [row(mb, cell) for mb, cell in cells.items()]),
    ]
    results = {"memory": rows, "decode": [{"megabytes": mb, **cell} for mb, cell in cells.items()]}
    measuring.report("host", before, tables, [describe("model", model.config, model.params)], results)


if __name__ == "__main__":
    main()
