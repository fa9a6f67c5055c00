"""What the device has to do with whole blocks before a step, as plain data."""

from __future__ import annotations

import enum
from typing import NamedTuple


class BlockOpKind(enum.Enum):
    """From where to where a block goes: device to device, device to host, host to device."""

    COPY = enum.auto()
    SWAP_OUT = enum.auto()
    SWAP_IN = enum.auto()


class BlockOp(NamedTuple):
    """One block that moves. Operations take effect one after the other, all before the step's own writes."""

    kind: BlockOpKind
    source: int
    destination: int
