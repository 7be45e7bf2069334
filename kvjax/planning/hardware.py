"""Accelerators by name: memory, rates and links of one device, as their vendors state them.

Rates are peaks that no program reaches. A bandwidth that a vendor gives for both directions together is halved, and a
rate of matrix products is the one without sparsity. Bytes are decimal (80 GB = 80e9) but for `memory_bytes` of NVIDIA's
devices and TPUs, whose makers count 2^30 (`GIB`).
"""

from __future__ import annotations

import dataclasses

from kvjax.errors import KvjaxError
from kvjax.utils import arguments

GB, TFLOP = 1e9, 1e12
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, and the host that it stands in.

    Attributes:
      name: in the catalogue.
      memory_bytes: of one device.
      memory_bandwidth: bytes per second between a device's memory and its processor.
      flops: multiplications and additions per second of matrix products in bfloat16, without sparsity.
      host_link: bytes per second from the host's memory to one device, in one direction.
      device_link: bytes per second that one device sends to the others of a mesh axis, in one direction.
      host_bandwidth: bytes per second that the host's processors read for each of its devices.
      host_bytes: memory of the host for each of its devices, in the server that `source` names.
      source: where the figures are from.
      layer_seconds: of a layer of a decode step, besides its bytes and operations: starting programs and small
        reductions. Vendors state none of this and the following; `kvjax.planning.measurement` fills them in.
      cache_bandwidth: bytes of an exact cache that attention reads per second; None for `memory_bandwidth`.
      decoded_values: numbers of a quantized cache that are decoded per second; None where that is taken to be hidden
        behind the reading.
      ranked_values: scores that are ranked per second, by methods that search for what to read; None as above.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: float
    host_link: float
    device_link: float
    host_bandwidth: float
    host_bytes: int
    source: str
    layer_seconds: float = 0.0
    cache_bandwidth: float | None = None
    decoded_values: float | None = None
    ranked_values: float | None = None


PCIE4, PCIE5 = 32 * GB, 64 * GB  # x16, one direction; data sheets state both together

_TPU_HOST = (
    "host link: Google states none, 16 GB/s (v6e: 32) as in How To Scale Your Model, chapter 2, jax-ml.github.io/"
    "scaling-book; device link: two of a chip's links, which a ring over one mesh axis uses; host bandwidth: "
    "that of two processors with eight (v6e: twelve) channels is assumed"
)
_ENTRIES = (
    Hardware(
        "a100-40",
        memory_bytes=40 * GIB,
        memory_bandwidth=1_555 * GB,
        flops=312 * TFLOP,
        host_link=PCIE4,
        device_link=300 * GB,
        host_bandwidth=51 * GB,
        host_bytes=128 * GIB,
        source="NVIDIA A100 data sheet (40GB SXM; NVLink 600 GB/s both directions); host: DGX A100 320GB, 1 TB for 8, "
        "16 channels of DDR4-3200",
    ),
    Hardware(
        "a100-80",
        memory_bytes=80 * GIB,
        memory_bandwidth=2_039 * GB,
        flops=312 * TFLOP,
        host_link=PCIE4,
        device_link=300 * GB,
        host_bandwidth=51 * GB,
        host_bytes=256 * GIB,
        source="NVIDIA A100 data sheet (80GB SXM; NVLink 600 GB/s both directions); host: DGX A100 640GB, 2 TB for 8, "
        "16 channels of DDR4-3200",
    ),
    Hardware(
        "h100",
        memory_bytes=80 * GIB,
        memory_bandwidth=3_350 * GB,
        flops=989 * TFLOP,
        host_link=PCIE5,
        device_link=450 * GB,
        host_bandwidth=77 * GB,
        host_bytes=256 * GIB,
        source="NVIDIA H100 data sheet (SXM; 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both directions); host: DGX "
        "H100, 2 TB for 8, 16 channels of DDR5-4800",
    ),
    Hardware(
        "h100-pcie",
        memory_bytes=80 * GIB,
        memory_bandwidth=2_000 * GB,
        flops=756 * TFLOP,
        host_link=PCIE5,
        device_link=300 * GB,
        host_bandwidth=77 * GB,
        host_bytes=256 * GIB,
        source="NVIDIA H100 data sheet (PCIe; 1,513 TFLOP/s with sparsity; NVLink bridge of two, 600 GB/s both "
        "directions); host: as a DGX H100",
    ),
    Hardware(
        "h200",
        memory_bytes=141 * GIB,
        memory_bandwidth=4_800 * GB,
        flops=989 * TFLOP,
        host_link=PCIE5,
        device_link=450 * GB,
        host_bandwidth=77 * GB,
        host_bytes=256 * GIB,
        source="NVIDIA H200 data sheet (SXM; 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both directions); host: DGX "
        "H200, 2 TB for 8, 16 channels of DDR5-4800",
    ),
    Hardware(
        "b200",
        memory_bytes=180 * GIB,
        memory_bandwidth=8_000 * GB,
        flops=2_250 * TFLOP,
        host_link=PCIE5,
        device_link=900 * GB,
        host_bandwidth=90 * GB,
        host_bytes=256 * GIB,
        source="NVIDIA HGX B200 and DGX B200 data sheets (1,440 GB and 64 TB/s of 8 devices; 4,500 TFLOP/s with "
        "sparsity; NVLink 1.8 TB/s both directions); host: DGX B200, 2 TB for 8, 16 channels of DDR5-5600",
    ),
    Hardware(
        "l4",
        memory_bytes=24 * GIB,
        memory_bandwidth=300 * GB,
        flops=121 * TFLOP,
        host_link=PCIE4,
        device_link=PCIE4,
        host_bandwidth=35 * GB,
        host_bytes=48 * GIB,
        source="NVIDIA L4 data sheet (242 TFLOP/s with sparsity; PCIe 64 GB/s both directions, no NVLink); host: "
        "Google Cloud g2-standard-96, 384 GB for 8, twelve channels of DDR4-2933 assumed",
    ),
    Hardware(
        "rtx-4090",
        memory_bytes=24 * GIB,
        memory_bandwidth=1_008 * GB,
        flops=165.2 * TFLOP,
        host_link=PCIE4,
        device_link=PCIE4,
        host_bandwidth=83 * GB,
        host_bytes=64 * GIB,
        source="NVIDIA Ada GPU architecture white paper, appendix A (bfloat16 with float32 sums; PCIe 4.0 x16, no "
        "NVLink); host: a desktop computer with 64 GB in two channels of DDR5-5200 is assumed",
    ),
    Hardware(
        "v5e",
        memory_bytes=16 * GIB,
        memory_bandwidth=819 * GB,
        flops=197 * TFLOP,
        host_link=16 * GB,
        device_link=100 * GB,
        host_bandwidth=51 * GB,
        host_bytes=48 * GIB,
        source="cloud.google.com/tpu/docs/v5e (4 links, 1,600 Gbit/s per chip both directions); host: "
        f"ct5lp-hightpu-8t, 384 GB for 8; {_TPU_HOST}",
    ),
    Hardware(
        "v5p",
        memory_bytes=95 * GIB,
        memory_bandwidth=2_765 * GB,
        flops=459 * TFLOP,
        host_link=16 * GB,
        device_link=200 * GB,
        host_bandwidth=102 * GB,
        host_bytes=112 * GIB,
        source="cloud.google.com/tpu/docs/v5p (6 links, 4,800 Gbit/s per chip both directions); host: ct5p-hightpu-4t, "
        f"448 GB for 4; {_TPU_HOST}",
    ),
    Hardware(
        "v6e",
        memory_bytes=32 * GIB,
        memory_bandwidth=1_638 * GB,
        flops=918 * TFLOP,
        host_link=32 * GB,
        device_link=200 * GB,
        host_bandwidth=144 * GB,
        host_bytes=180 * GIB,
        source="cloud.google.com/tpu/docs/v6e (4 links, 3,200 Gbit/s per chip both directions); host: "
        f"ct6e-standard-8t, 1,440 GB for 8; {_TPU_HOST}",
    ),
)
CATALOGUE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
"""Name -> device."""


GPU_OVERHEADS: dict[str, float] = {"layer_seconds": 100e-6, "ranked_values": 7e9}
"""Fields of `Hardware` for GPUs, from measurements of kvjax on one NVIDIA H200 (experiments/results/gpu).

A layer takes some 100 us for the starting of its kernels, and XLA sorts all scores to find the largest.
"""


def find_hardware(name: str) -> Hardware:
    """Returns a device of the catalogue; raises KvjaxError, with all names, for an unknown one."""
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    if word in CATALOGUE:
        return CATALOGUE[word]
    raise KvjaxError(
        f"unknown hardware {name!r:.80}{arguments.suggest_name(word, CATALOGUE)}; the catalogue has "
        f"{', '.join(CATALOGUE)}, each as one device: several are a mesh, as in --hardware h100 --mesh 1x8; --measured "
        "plans for this machine"
    )
