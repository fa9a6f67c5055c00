"""Weights that stay in the blocks of a GGUF file: what they stand for, and whom it is for."""

from __future__ import annotations

import logging

import pytest
from cpp import needs_compiler
from loaded_blocks import kept_blocks

from jaxpage import LLM, SamplingParams
from jaxpage.engine.build import tell_of_native_kernels
from jaxpage.models.registry import build_config
from jaxpage.weights.source import open_checkpoint, resolve_model

MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
"""Q4_1 and Q8_0, with rows of q and k in another order; and Q4_K, Q5_0, Q6_K and Q8_0, mixed within q, k and v."""
BLOCKS = {"embedding", "qkv", "output", "gate_up", "down"}


@pytest.mark.parametrize("name", MODELS)
def test_no_number_is_changed(name: str) -> None:
    checkpoint = open_checkpoint(resolve_model(name))
    config, specs = build_config(checkpoint.config)
    some = [spec for spec in specs if spec.path[:1] != ("layers",) or spec.path[1] in (0, 7)]
    found = {path[-1] for path in kept_blocks(checkpoint, config, specs, some)}
    assert found == BLOCKS


@needs_compiler
@pytest.mark.parametrize(
    ("options", "kept"), [({}, True), ({"dtype": "bfloat16"}, False), ({"quantization": "int8"}, True)]
)
def test_an_engine_keeps_them_for_float32_on_cpu(
    options: dict[str, str], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jaxpage"):
        llm = LLM(model=MODELS[0], max_model_len=64, max_num_seqs=1, **options)  # pyright: ignore[reportArgumentType]
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Loaded ")]
    assert (" and 8-bit blocks weights" in line) is kept
    [output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1))
    assert output.outputs[0].text == " Paris"


def test_where_nothing_multiplies_blocks_an_engine_makes_them_real(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxpage.engine.build.multiplies_blocks", lambda platform: platform != "cpu")
    with caplog.at_level(logging.INFO, "jaxpage"):
        llm = LLM(model=MODELS[0], max_model_len=64, max_num_seqs=1)
    assert any(" of float32 weights" in record.getMessage() for record in caplog.records)
    [output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1))
    assert output.outputs[0].text == " Paris"


def test_a_start_says_that_there_are_no_cpp_kernels_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXPAGE_NATIVE", "0")
    with caplog.at_level(logging.INFO, "jaxpage"):
        tell_of_native_kernels()
    assert "No C++ kernels (JAXPAGE_NATIVE=0 is set): XLA does their work" in caplog.text
