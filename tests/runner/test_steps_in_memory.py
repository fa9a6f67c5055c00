"""What the results of steps in flight take: once for each step that can be on the device."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpage.benchmarks.pipeline import Simulation
from jaxpage.config import EngineArgs, resolve
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import build_config
from jaxpage.parallel.pipeline import Stage, split_layers, stage_specs
from jaxpage.runner.programs import StagePrograms, device_bytes
from jaxpage.weights.loader import param_shapes

NUM_TOKENS = 16
VALUES = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
VALUES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def model() -> ModelConfig:
    return build_config(VALUES)[0]


def programs_of(stage: Stage | None, max_logprobs: int = -1) -> StagePrograms:
    args = EngineArgs(max_num_seqs=4, max_num_batched_tokens=NUM_TOKENS, max_model_len=64, max_logprobs=max_logprobs)
    config = resolve(args, model_max_len=64, vocab_size=512, platform="cpu")
    return StagePrograms(model(), config, stage=stage)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_no_more_steps_are_in_flight_than_are_counted(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(8, [1.0] * num_stages)
    core, counts = simulation.core, []
    dispatch = core.runner.dispatch

    def counted(*arguments: Any) -> Any:
        counts.append(len(core._in_flight) + 1)
        return dispatch(*arguments)

    monkeypatch.setattr(core.runner, "dispatch", counted)
    simulation.run(20)
    stage = split_layers(4, num_stages)[0] if num_stages > 1 else None
    assert max(counts) == programs_of(stage).num_in_flight == num_stages + 1


def test_a_stage_holds_what_it_is_given_and_gives_once_for_each_step() -> None:
    first, middle, last = (programs_of(stage) for stage in split_layers(3, 3))
    hidden = NUM_TOKENS * 64 * 4
    outputs = device_bytes(last.output_shapes(NUM_TOKENS))
    # Ids and logprobs of the whole vocabulary for each of 16 prompt tokens and 4 samples.
    assert outputs > (16 + 4) * 512 * 8
    assert first.in_flight_bytes(NUM_TOKENS) == 4 * hidden
    assert middle.in_flight_bytes(NUM_TOKENS) == 4 * 2 * hidden
    assert last.in_flight_bytes(NUM_TOKENS) == 4 * (hidden + outputs)
    assert programs_of(None).in_flight_bytes(NUM_TOKENS) == 2 * outputs


@pytest.mark.parametrize("index", [None, 0, 1])
def test_guess_and_compiled_step_both_count_them(index: int | None) -> None:
    _, specs = build_config(VALUES)
    stage = None if index is None else split_layers(3, 2)[index]
    programs = programs_of(stage)
    own = specs if stage is None else stage_specs(specs, stage, programs.model.tied_embeddings)
    params = param_shapes(programs.model, own, "float32", programs.placement, None)
    compiled = programs.lower(NUM_TOKENS, params, num_blocks=2).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    once = programs.state_bytes + analysis.temp_size_in_bytes
    counted = programs.step_bytes(NUM_TOKENS, compiled)
    assert counted is not None
    # The compiler's outputs have a few pointers more than their shapes say.
    assert counted - once == pytest.approx(programs.in_flight_bytes(NUM_TOKENS), rel=0.02)
    few = programs_of(stage, max_logprobs=1)
    difference = programs.guessed_step_bytes(NUM_TOKENS) - few.guessed_step_bytes(NUM_TOKENS)
    assert difference == programs.in_flight_bytes(NUM_TOKENS) - few.in_flight_bytes(NUM_TOKENS)
