"""The planner: what it takes, what it reads from compiled programs, what it says is missing. Compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpage import plan
from jaxpage.errors import ParameterError
from jaxpage.models.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "num_devices", "topology"),
    [
        ("v6e-8", 8, "v6e:2x4"),
        ("V5E-16", 16, "v5e:4x4"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v7x-8", 8, "tpu7x:2x2x1"),
        ("h200x8", 8, "1x1x8"),
        ("l4x1", 1, "1x1x1"),
    ],
)
def test_a_slice_is_named_as_its_vendor_names_it(name: str, num_devices: int, topology: str) -> None:
    assert plan.find_slice(name)[1:] == (num_devices, topology)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e", r"target: must be such as v6e-8 or h200x8 of a100, .*, got 'v6e'"),
        ("h300x8", r"must be such as"),
        ("h200-8", r"must be such as"),
        ("h200x9", r"must have 1 to 8 GPUs, as in h200x8, got 'h200x9'"),
        ("v6e-7", r"v6e comes in 4, 8, 16, got 'v6e-7'"),
        ("v5p-6", r"v5p comes in multiples of 8 cores, got 'v5p-6'"),
    ],
)
def test_other_slices_are_refused(name: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        plan.find_slice(name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models_that_are_served(name: str) -> None:
    model, specs = plan.find_model(name.upper())
    sizes = {"llama-3.1-8b": 8.03e9, "llama-3.3-70b": 70.6e9, "mixtral-8x7b": 46.7e9, "smollm2-135m": 135e6}
    sizes |= {"qwen3-8b": 8.19e9, "qwen2.5-0.5b": 494e6}
    count = 0
    for spec in specs:
        size = 1
        for dimension in spec.shape:
            size *= dimension
        count += size
    assert count == pytest.approx(sizes[name], rel=0.01)
    assert model.num_layers == PRESETS[name]["num_hidden_layers"]


def test_a_model_is_a_config_file_or_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["qwen3-8b"]))
    assert plan.find_model(str(tmp_path))[0] == plan.find_model(str(path))[0] == plan.find_model("qwen3-8b")[0]
    path.write_text("{")
    with pytest.raises(ParameterError, match=r"model: .*config.json' is not JSON"):
        plan.find_model(str(path))
    path.write_text('{"architectures": ["Other"]}')
    with pytest.raises(ParameterError, match="model: architecture 'Other'"):
        plan.find_model(str(path))
    with pytest.raises(ParameterError, match=r"model: must be a config.json, its directory or llama.*, got 'nothing'"):
        plan.find_model("nothing")


HLO = """
  %all-reduce.1 = bf16[8,64]{1,0} all-reduce(%dot.1), metadata={op_name="jit(step)/layer_0/mlp/dot"}
  %all-reduce.2 = (f32[8]{0}, f32[8]{0}) all-reduce-start(%dot.2), metadata={op_name="jit(step)/layer_0/attention/dot"}
  %all-reduce.3 = f32[8]{0} all-reduce-done(%all-reduce.2), metadata={op_name="jit(step)/layer_0/attention/dot"}
  %all-reduce.4 = bf16[8,64]{1,0} all-reduce(%dot.4), metadata={op_name="jit(step)/layer_10/mlp/dot"}
  %all-gather.1 = f32[8]{0} all-gather(%max.1), metadata={op_name="jit(step)/sample/reduce"}
  %k.1 = bf16[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="step/decode/pallas_call"}
  %k.3 = bf16[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="step/tile/mpmd_map" id=7}
  %k.2 = bf16[8]{0} custom-call(%a), custom_call_target="TopK", metadata={op_name="jit(step)/sample/top_k"}
"""


def test_collectives_and_kernels_are_counted() -> None:
    assert plan.count_collectives(HLO) == ({"all-reduce": 2}, {"all-gather": 1})
    assert plan.count_kernels(HLO) == {"decode": 1, "tile": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3.1-8b", "--target", "v6e-3"], "--target: v6e comes in"),
        (["--model", "smollm2-135m", "--target", "v6e-8"], "--target: num_kv_heads 3 does not divide over 8 devices"),
        (["--model", "llama-3.1-8b", "--target", "h200x8", "--num-blocks", "1"], "--num-blocks: must be at least 2"),
        (["--model", "llama-3.1-8b", "--target", "h200x8", "--kv-cache-dtype", "x"], "--kv-cache-dtype: must be one"),
        (["--model", "llama-3.1-8b", "--target", "h200x8", "--block-size", "0"], "--block-size: "),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_what_has_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan.compiler, "missing", lambda target: f"compiling for {target.name} needs libtpu")
    assert plan.main(["--model", "llama-3.1-8b", "--target", "v6e-8"]) == 1
    assert "jaxpage: error: compiling for v6e needs libtpu" in capsys.readouterr().err
