"""Chips by name: how many devices they are, what stands in for them, and what is refused."""

from __future__ import annotations

import pytest

from jaxpage.errors import ParameterError
from jaxpage.plan.slices import CPU, find_slice, larger_slices
from pallas_kernels.targets import TARGETS
from pallas_kernels.targets.chips import CHIPS


@pytest.mark.parametrize(
    ("name", "num_devices", "topology"),
    [
        ("v6e-8", 8, "v6e:2x4"),
        ("V5E-16", 16, "v5e:4x4"),
        ("v5e-1", 1, "v5e:1x1"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v7x-8", 8, "tpu7x:2x2x1"),
        ("h200x8", 8, "1x1x8"),
        ("l4x1", 1, "1x1x1"),
    ],
)
def test_a_slice_is_named_as_its_vendor_names_it(name: str, num_devices: int, topology: str) -> None:
    where = find_slice(name)
    assert (where.num_devices, where.topology) == (num_devices, topology)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e", r"target: must be such as v6e-8 or h200x8 of a100, .*, or cpu, got 'v6e'"),
        ("h300x8", r"must be such as"),
        ("h200-8", r"must be such as"),
        ("h200x9", r"must have 1 to 8 GPUs, as in h200x8, got 'h200x9'"),
        ("v6e-7", r"v6e comes in 1, 4, 8, 16, 32, 64, 128, 256, got 'v6e-7'"),
        ("v5p-6", r"v5p comes in multiples of 8 cores, got 'v5p-6'"),
        ("v5p-0", r"v5p comes in multiples of 8 cores, got 'v5p-0'"),
    ],
)
def test_other_slices_are_refused(name: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        find_slice(name)


def test_every_target_has_limits_and_a_document() -> None:
    assert CHIPS.keys() == TARGETS.keys()
    for chip in CHIPS.values():
        assert chip.source and chip.memory_bytes >= 2**34 and {"bfloat16", "float32"} <= chip.flops_per_s.keys()
    # A chip of two devices is shared by them.
    assert find_slice("v7x-8").chip == CHIPS["v7x"].device
    assert CHIPS["v7x"].device.memory_bytes == CHIPS["v7x"].memory_bytes / 2


def test_a_stand_in_tells_its_memory_as_a_device_does() -> None:
    (device,) = find_slice("h100x8").stand_ins(1, bytes_in_use=5)
    assert device.memory_stats() == {"bytes_limit": 80_000_000_000, "bytes_in_use": 5}
    assert find_slice(CPU).stand_ins(2)[1].platform == "cpu"


def test_larger_slices_are_of_the_same_chip() -> None:
    assert [where.name for where in larger_slices(find_slice("v5e-8"))] == ["v5e-16", "v5e-32"]
    assert [where.name for where in larger_slices(find_slice("h100x4"))] == ["h100x8"]
    assert larger_slices(find_slice("cpu")) == []
