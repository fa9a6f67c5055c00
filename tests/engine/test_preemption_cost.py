"""What computing and moving are estimated to cost where a model is split over stages and devices."""

from __future__ import annotations

import pytest

from jaxpage.config import EngineArgs, resolve
from jaxpage.engine.build import place
from jaxpage.engine.preemption_cost import RATES, preemption_policy
from jaxpage.models.registry import build_config
from jaxpage.plan.slices import StandIn
from jaxpage.runner.programs import StagePrograms
from jaxpage.scheduler.preemption import PreemptionPolicy

VALUES = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
VALUES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
NUM_PARAMS = 1_000_000
BLOCK_BYTES = 4 * 2 * 2 * 16 * 32 * 4
"""Four layers, keys and values of two heads, 16 numbers each, of 32 tokens in float32."""


def policy_with(tensor_size: int, num_stages: int, num_processes: int = 1) -> PreemptionPolicy:
    args = EngineArgs(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages, max_model_len=64)
    model, specs = build_config(VALUES)
    count = tensor_size * num_stages
    devices = [StandIn(index, "cpu", process_index=index * num_processes // count) for index in range(count)]
    config = resolve(args, model_max_len=64, vocab_size=512, platform="cpu")
    model, _, placements = place(args, model, specs, devices)
    programs = [StagePrograms(model, config, placement, stage) for stage, placement in placements]
    return preemption_policy("auto", NUM_PARAMS, programs, "cpu")


def test_a_token_and_a_block_pass_all_stages_wherever_they_are() -> None:
    operations_per_s, bytes_per_s = RATES["cpu"]
    alone = policy_with(1, 1)
    assert alone.seconds_per_token == 2 * NUM_PARAMS / operations_per_s
    assert alone.seconds_per_block == BLOCK_BYTES / bytes_per_s
    for num_stages, num_processes in ((2, 1), (2, 2), (4, 4)):
        split = policy_with(1, num_stages, num_processes)
        assert split.seconds_per_token == alone.seconds_per_token
        assert split.seconds_per_block == pytest.approx(alone.seconds_per_block)


def test_devices_that_share_a_layer_share_both() -> None:
    alone, split = policy_with(1, 1), policy_with(2, 2)
    assert split.seconds_per_token == alone.seconds_per_token / 2
    assert split.seconds_per_block == pytest.approx(alone.seconds_per_block / 2)
