"""What a chip can do at most, from its vendor's public documents: memory, bandwidth, operations a second.

It must not know what is computed on it, nor how compilers call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """The limits of one chip.

    Attributes:
        memory_bytes: of its HBM; what a runtime keeps to itself is not taken off.
        bytes_per_s: between HBM and the cores.
        flops_per_s: operations a second of dense matrix products by the type that is multiplied. float32 is full
            float32: on a TPU six products of bfloat16 pieces, on a GPU outside its tensor cores.
        interconnect_bytes_per_s: to and from all other chips together, both directions added, as vendors count.
        source: the document.
        num_devices: devices that JAX shows it as; each has its share of everything.
    """

    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    interconnect_bytes_per_s: float
    source: str
    num_devices: int = 1

    @property
    def device(self) -> Chip:
        """The limits of one device of the chip."""
        share = 1 / self.num_devices
        return Chip(
            self.memory_bytes * share,
            self.bytes_per_s * share,
            {dtype: rate * share for dtype, rate in self.flops_per_s.items()},
            self.interconnect_bytes_per_s * share,
            self.source,
        )


def _tpu(
    gib: float, gb_per_s: float, bfloat16: float, other: Mapping[str, float], ici: float, page: str, devices: int = 1
) -> Chip:
    rates = {"bfloat16": bfloat16, "float32": bfloat16 / 6, **other}
    return Chip(
        gib * GIB,
        gb_per_s * 1e9,
        {dtype: tflops * 1e12 for dtype, tflops in rates.items()},
        ici * 1e9,
        f"Google Cloud TPU documentation, {page}: cloud.google.com/tpu/docs/{page}",
        devices,
    )


def _gpu(num_bytes: float, gb_per_s: float, rates: Mapping[str, float], link: float, sheet: str) -> Chip:
    flops = {dtype: tflops * 1e12 for dtype, tflops in rates.items()}
    return Chip(num_bytes, gb_per_s * 1e9, flops, link * 1e9, f"NVIDIA {sheet}, rates without sparsity")


H100 = {"bfloat16": 989.4, "float32": 66.9, "int8": 1979, "float8": 1979}

CHIPS: Mapping[str, Chip] = {
    "a100": _gpu(80e9, 2039, {"bfloat16": 312, "float32": 19.5, "int8": 624}, 600, "A100 80GB SXM datasheet"),
    "l4": _gpu(24e9, 300, {"bfloat16": 121, "float32": 30.3, "int8": 242, "float8": 242}, 64, "L4 datasheet"),
    "h100": _gpu(80e9, 3350, H100, 900, "H100 SXM datasheet"),
    "h200": _gpu(141e9, 4800, H100, 900, "H200 SXM datasheet"),
    "b200": _gpu(
        180e9, 8000, {"bfloat16": 2250, "float32": 75, "int8": 4500, "float8": 4500}, 1800, "HGX B200 datasheet"
    ),
    "v4": _tpu(32, 1200, 275, {"int8": 275}, 600, "v4"),
    "v5e": _tpu(16, 819, 197, {"int8": 393}, 400, "v5e"),
    "v5p": _tpu(95, 2765, 459, {"int8": 918}, 1200, "v5p"),
    "v6e": _tpu(32, 1638, 918, {"int8": 1836}, 800, "v6e"),
    "v7x": _tpu(192, 7380, 2307, {"float8": 4614}, 1200, "tpu7x", devices=2),
}
"""By the names of ``TARGETS``."""
