"""Options of an engine: names of the model, and what stands in for sampling values that requests leave open."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError


def parsed(*flags: str) -> EngineArgs:
    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(flags))


@pytest.mark.parametrize(
    ("names", "expected"), [(None, ["m"]), ("a", ["a"]), (["a", "b/c"], ["a", "b/c"]), (("a",), ["a"])]
)
def test_names_of_the_model(names: Any, expected: list[str]) -> None:
    assert EngineArgs(model="m", served_model_name=names).model_names == expected


@pytest.mark.parametrize("names", [" ", ["a", ""], ["a", 5]])
def test_bad_names_are_refused(names: Any) -> None:
    with pytest.raises(ParameterError, match="served_model_name"):
        EngineArgs(model="m", served_model_name=names)


def test_flags_with_several_values_and_with_objects() -> None:
    args = parsed("--served-model-name", "a", "b", "--override-generation-config", '{"temperature": 0.5}')
    assert args.model_names == ["a", "b"]
    assert args.override_generation_config == {"temperature": 0.5}
    assert parsed("--generation-config", "vllm").generation_config == "vllm"


@pytest.mark.parametrize("values", [{"temperature": 3}, {"max_tokens": 5}, {"top_p": "x"}, 5])
def test_sampling_values_that_no_request_could_have(values: Any) -> None:
    with pytest.raises(ParameterError, match="override_generation_config"):
        EngineArgs(override_generation_config=values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # A number that cannot be comes before what is missing, or does not go with it.
        ({"num_processes": 2, "process_id": 2}, "process_id: must be in [0, 1], got 2"),
        ({"num_processes": 1, "process_id": 1}, "process_id: must be in [0, 0], got 1"),
        ({"process_id": -1}, "process_id: must be at least 0, got -1"),
        ({"num_processes": 0, "coordinator": "a:1"}, "num_processes: must be at least 1, got 0"),
        ({"num_processes": 2, "coordinator": "a"}, "coordinator: must be HOST:PORT, got 'a'"),
        ({"num_processes": 2}, "coordinator: must be given too: coordinator, num_processes, process_id belong"),
        ({"process_id": 1}, "coordinator: must be given too"),
        ({"num_processes": 2, "process_id": 1, "coordinator": "a:1"}, "num_processes: 2 do not share 1 devices"),
        ({"pipeline_layers": "3", "pipeline_parallel_size": 2}, "pipeline_layers: must be 2 numbers of layers with co"),
        ({"pipeline_layers": "a,b", "pipeline_parallel_size": 2}, "pipeline_layers: must be 2 numbers of layers with"),
        ({"pipeline_layers": "2,2"}, "pipeline_layers: must be 1 number of layers, one for each stage (pipeline_para"),
        (
            {"pipeline_layers": "0,4", "pipeline_parallel_size": 2},
            "pipeline_layers: must be at least 1 layer for each stage, got '0,4'",
        ),
        (
            {"pipeline_layers": "-1,5", "pipeline_parallel_size": 2},
            "pipeline_layers: must be at least 1 layer for each stage, got '-1,5'",
        ),
    ],
)
def test_the_fault_that_is_there_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as raised:
        EngineArgs(**options)
    assert str(raised.value).startswith(message)


def test_a_process_alone_may_say_so() -> None:
    assert EngineArgs(num_processes=1, process_id=0).process_id == 0
    assert EngineArgs(num_processes=1, coordinator="a:1").process_id is None
    assert EngineArgs(pipeline_layers=" 1, 3", pipeline_parallel_size=2).num_stage_layers == [1, 3]


def test_several_engines_over_several_hosts_are_rays() -> None:
    hosts = {"coordinator": "10.0.0.1:80", "num_processes": 2, "process_id": 0, "tensor_parallel_size": 2}
    EngineArgs(**hosts)
    with pytest.raises(ParameterError, match="data_parallel_size: engines that span several hosts are placed by data_"):
        EngineArgs(data_parallel_size=2, **hosts)
