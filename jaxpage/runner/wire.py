"""Commands as bytes, for other processes. Plain numbers: nothing that is read can run code."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.runner.commands import Command, StateFill

_ARRAY = 1
_DTYPES = ("int32", "float32")
_KINDS = {kind.name: kind for kind in BlockOpKind}


def pack_command(command: Command) -> bytes:
    """One command."""
    fields = [
        command.call,
        [(op.kind.name, op.source, op.destination) for op in command.block_ops],
        [(fill.slot, fill.token_ids, fill.num_prompt_tokens, fill.bias, fill.stop_ids) for fill in command.fills],
        list(command.masks.items()),
        command.num_tokens,
        command.packed,
    ]
    return bytes(msgpack.packb(fields, default=_pack_array))  # pyright: ignore[reportArgumentType]


def unpack_command(data: bytes) -> Command:
    """What ``pack_command`` made bytes of.

    Raises:
        ValueError: for anything else.
    """
    try:
        call, ops, fills, masks, num_tokens, packed = msgpack.unpackb(
            data, ext_hook=_unpack_array, strict_map_key=False, use_list=False
        )
        block_ops = [BlockOp(_KINDS[kind], source, destination) for kind, source, destination in ops]
        return Command(call, block_ops, [StateFill(*fill) for fill in fills], dict(masks), num_tokens, packed)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no command of {len(data)} bytes: {error}") from error


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = bytes([_DTYPES.index(value.dtype.name)])
        return msgpack.ExtType(_ARRAY, head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot send {type(value).__name__}")


def _unpack_array(code: int, data: bytes) -> Any:
    if code != _ARRAY or not data or data[0] >= len(_DTYPES):
        raise ValueError(f"unknown extension {code}")
    return np.frombuffer(data, _DTYPES[data[0]], offset=1)
