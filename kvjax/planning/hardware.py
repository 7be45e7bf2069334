"""Accelerators by name: memory, bandwidth and host link of one device, as their vendors state them.

A bandwidth that a vendor gives for both directions together is halved. Rates are in decimal bytes (1 GB/s is 1e9), and
memory is in units of 2^30 (`GIB`), as the makers of these devices count it.
"""

from __future__ import annotations

import dataclasses

from kvjax.errors import KvjaxError
from kvjax.utils import arguments

GB = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, and the host that it stands in.

    Attributes:
      name: in the catalogue.
      memory_bytes: of one device.
      memory_bandwidth: bytes per second between a device's memory and its processor; a peak that no program reaches.
      host_link: bytes per second from the host's memory to one device, in one direction.
      host_bytes: memory of the host for each of its devices, in the server that `source` names.
      source: where the figures are from.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    host_link: float
    host_bytes: int
    source: str


PCIE4, PCIE5 = 32 * GB, 64 * GB  # x16, one direction; data sheets state both together

_TPU_LINK = (
    "host link: Google states none, 16 GB/s (v6e and v7x: 32) as in How To Scale Your Model, chapter 2, "
    "jax-ml.github.io/scaling-book"
)
_ENTRIES = (
    Hardware(
        *("a100-40", 40 * GIB, 1_555 * GB, PCIE4, 128 * GIB),
        "NVIDIA A100 data sheet (40GB SXM); host: DGX A100 320GB, 1 TB for 8",
    ),
    Hardware(
        *("a100-80", 80 * GIB, 2_039 * GB, PCIE4, 256 * GIB),
        "NVIDIA A100 data sheet (80GB SXM); host: DGX A100 640GB, 2 TB for 8",
    ),
    Hardware(
        *("h100", 80 * GIB, 3_350 * GB, PCIE5, 256 * GIB),
        "NVIDIA H100 data sheet (SXM); host: DGX H100, 2 TB for 8",
    ),
    Hardware(
        *("h100-pcie", 80 * GIB, 2_000 * GB, PCIE5, 256 * GIB),
        "NVIDIA H100 data sheet (PCIe); host: as a DGX H100",
    ),
    Hardware(
        *("h200", 141 * GIB, 4_800 * GB, PCIE5, 256 * GIB),
        "NVIDIA H200 data sheet (SXM); host: DGX H200, 2 TB for 8",
    ),
    Hardware(
        *("b200", 180 * GIB, 8_000 * GB, PCIE5, 256 * GIB),
        "NVIDIA HGX B200 and DGX B200 data sheets (1,440 GB and 64 TB/s of 8 devices); host: DGX B200, 2 TB for 8",
    ),
    Hardware(
        *("l4", 24 * GIB, 300 * GB, PCIE4, 48 * GIB),
        "NVIDIA L4 data sheet (PCIe 64 GB/s both directions); host: Google Cloud g2-standard-96, 384 GB for 8",
    ),
    Hardware(
        *("l40s", 48 * GIB, 864 * GB, PCIE4, 128 * GIB),
        "NVIDIA L40S data sheet (PCIe 4.0 x16); host: a server with 1 TB for 8",
    ),
    Hardware(
        *("rtx-a6000", 48 * GIB, 768 * GB, PCIE4, 128 * GIB),
        "NVIDIA RTX A6000 data sheet (PCIe 4.0 x16); host: a workstation with 128 GB",
    ),
    Hardware(
        *("rtx-3090", 24 * GIB, 936 * GB, PCIE4, 64 * GIB),
        "NVIDIA Ampere GA102 GPU architecture white paper (PCIe 4.0 x16); host: a desktop computer with 64 GB",
    ),
    Hardware(
        *("rtx-4090", 24 * GIB, 1_008 * GB, PCIE4, 64 * GIB),
        "NVIDIA Ada GPU architecture white paper, appendix A (PCIe 4.0 x16); host: a desktop computer with 64 GB",
    ),
    Hardware(
        *("rtx-5090", 32 * GIB, 1_792 * GB, PCIE5, 64 * GIB),
        "NVIDIA RTX Blackwell GPU architecture white paper (PCIe 5.0 x16); host: a desktop computer with 64 GB",
    ),
    Hardware(
        *("mi300x", 192 * GIB, 5_300 * GB, PCIE5, 256 * GIB),
        "AMD Instinct MI300X data sheet (HBM3, PCIe 5.0 x16); host: a server with 2 TB for 8",
    ),
    Hardware(
        *("v5e", 16 * GIB, 819 * GB, 16 * GB, 48 * GIB),
        f"cloud.google.com/tpu/docs/v5e; host: ct5lp-hightpu-8t, 384 GB for 8; {_TPU_LINK}",
    ),
    Hardware(
        *("v5p", 95 * GIB, 2_765 * GB, 16 * GB, 112 * GIB),
        f"cloud.google.com/tpu/docs/v5p; host: ct5p-hightpu-4t, 448 GB for 4; {_TPU_LINK}",
    ),
    Hardware(
        *("v6e", 32 * GIB, 1_638 * GB, 32 * GB, 180 * GIB),
        f"cloud.google.com/tpu/docs/v6e; host: ct6e-standard-8t, 1,440 GB for 8; {_TPU_LINK}",
    ),
    Hardware(
        *("v7x", 96 * GIB, 3_690 * GB, 32 * GB, 112 * GIB),
        "cloud.google.com/tpu/docs/tpu7x (a chip has 192 GiB and 7,380 GB/s, and is two devices); host: "
        f"tpu7x-standard-4t, 960 GB for 8 devices; {_TPU_LINK}",
    ),
)
CATALOGUE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
"""Name -> device."""


def find_hardware(name: str) -> Hardware:
    """Returns a device of the catalogue; raises KvjaxError, with all names, for an unknown one."""
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    if word in CATALOGUE:
        return CATALOGUE[word]
    raise KvjaxError(
        f"unknown hardware {name!r:.80}{arguments.suggest_name(word, CATALOGUE)}; the catalogue has "
        f"{', '.join(CATALOGUE)}, each as one device: several are a mesh, as in kvjax plan --hardware h100 --mesh 1x8. "
        "For another device kvjax plan takes --memory-gb and --bandwidth with a name, and kvjax recommend the bytes "
        "that its cache may take, as in --budget 2GB"
    )
