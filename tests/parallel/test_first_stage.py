"""A mesh whose first stage is not on the leading process is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import stand_in

from jaxpage.config import EngineArgs
from jaxpage.engine.build import check_first_stage, place
from jaxpage.errors import StartupError
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import Placement

VALUES = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
VALUES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}


def placements(processes: Sequence[int], tensor_size: int) -> list[Placement]:
    """Of stages over devices of these processes, in the order of the mesh."""
    devices = [stand_in.Device(index, process_index=process) for index, process in enumerate(processes)]
    num_stages = len(devices) // tensor_size
    args = EngineArgs(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    return [placement for _, placement in place(args, *build_config(VALUES), devices)[2]]


@pytest.mark.parametrize(
    ("processes", "tensor_size"), [([0], 1), ([0, 1], 1), ([0, 1], 2), ([1, 0, 2, 3], 2), ([0, 0, 1, 1], 1)]
)
def test_process_0_leads_where_the_first_stage_is(processes: list[int], tensor_size: int) -> None:
    check_first_stage(placements(processes, tensor_size))


@pytest.mark.parametrize(
    ("processes", "tensor_size", "message"),
    [
        ([1, 0], 1, "first stage are those of process 1, and those of process 0, which leads, are of stage 1: another"),
        ([2, 3, 2, 3, 0, 1, 0, 1], 4, "those of process 2 and 3, and those of process 0, which leads, are of stage 1"),
        ([1, 1, 2, 2], 2, "process 0, which leads, are of none: another pipeline_parallel_size or tensor_parallel_si"),
    ],
)
def test_else_it_is_said_whose_it_is(processes: list[int], tensor_size: int, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_first_stage(placements(processes, tensor_size))
