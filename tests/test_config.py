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
