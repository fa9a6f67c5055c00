"""``python -m jaxpage.plan``: what it takes, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpage.errors import ParameterError
from jaxpage.plan import compiled, readme_table
from jaxpage.plan.cli import main, parse_variant
from jaxpage.plan.models import find_values
from jaxpage.plan.slices import find_slice

LLAMA = ["--model", "llama-3-8b", "--target", "h200x8"]
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3-8b"], "--target: is needed"),
        (["--model", "llama-3-8b", "--target", "v6e-3"], "--target: v6e comes in"),
        ([*LLAMA, "--tensor-parallel-size", "16"], "--target: h200x8 has 8 devices; tensor_parallel_size 16 x"),
        ([*LLAMA, "--block-size", "0"], "--block-size: "),
        (
            [*LLAMA, "--tensor-parallel-size", "3"],
            "--tensor-parallel-size: layers.0.gate_up: ffn of 14336 does not divide over the 3",
        ),
        ([*LLAMA, "--tensor-parallel-size", "3", "--sharding", "megatron"], "--sharding: "),
        ([*LLAMA, "--compare", "tp=8", "tp=3"], "--compare: tp=3: "),
        ([*LLAMA, "--max-model-len", "9000"], "--max-model-len: 9000 is above the model's limit 8192"),
        ([*LLAMA, "--sharding", "nothing"], "--sharding: must be "),
        (
            [*LLAMA, "--no-compile", "--context", "999999999"],
            "--context: 999,999,999 is above max_model_len 8,192, which can be raised",
        ),
        (
            [*LLAMA, "--no-compile", "--context", "2049", "--max-model-len", "2048"],
            "--context: 2,049 is above max_model_len 2,048",
        ),
        (
            ["--model", "llama-3.2-1b", "--target", "v5e-32", "--no-compile", "--compare", "tp=32", "ep"],
            "--compare: ep: the model (LlamaForCausalLM) has no experts to split",
        ),
        ([*LLAMA, "--compare", "tp=8,x"], "--compare: must be such as tp=4,dp=2 or ep, or "),
        ([*LLAMA, "--no-compile", "--json", "/nowhere/x.json"], "--json: no such directory: /nowhere"),
        (["--model", "mixtral-8x7b", "--target", "v6e-8", "--quantization", "int4"], "quantization int4: tensor"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[*LLAMA, "--kv-cache-dtype", "x"], [*LLAMA, "--context", "0"]])
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "invalid choice: 'x'" in (text := capsys.readouterr().err) or "must be a positive number, got '0'" in text


def test_what_has_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled.compiler, "missing", lambda target: f"compiling for {target.name} needs libtpu")
    assert main(["--model", "llama-3-8b", "--target", "v6e-8"]) == 1
    error = capsys.readouterr().err
    assert "jaxpage: error: compiling for v6e needs libtpu; or plan by arithmetic with --no-compile" in error


def test_a_plan_is_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, plots = tmp_path / "plan.json", tmp_path / "plots"
    arguments = ["--model", "llama-3-70b", "--target", "v5e-16", "--max-model-len", "4096", "--no-compile"]
    assert main([*arguments, "--json", str(json_file), "--plots", str(plots)]) == 0
    text = capsys.readouterr().out
    for words in ("320.0 KiB", "1.25 GiB at 4,096 tokens", "(estimate)", "requests of 4,096 tokens", "tok/s at most"):
        assert words in text
    found = json.loads(json_file.read_text())
    assert found["works"] and found["problems"] == [] and found["kv_bytes_per_token"] == 320 * 1024
    (stage,) = found["stages"]
    assert stage["usable_bytes"] >= sum(stage[f"{name}_bytes"] for name in ("weight", "state", "temp", "kv"))
    assert [rate["size"] for rate in found["decode"]] == [1, 8, 32, 64, 128, 256]
    assert found["chip"]["source"].startswith("Google") and found["suggestions"]
    assert {file.name for file in plots.iterdir()} == {"memory.png", "roofline.png"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in plots.iterdir())


def test_what_jax_has_of_a_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--no-compile", "--gpu-memory-utilization", "0.8"]) == 0
    text = capsys.readouterr().out
    assert "lets JAX set 83 % of a GPU's memory aside" in text and "with XLA_CLIENT_MEM_FRACTION=0.83" in text
    assert main(["--model", "llama-3-8b", "--target", "v6e-8", "--no-compile"]) == 0
    assert "XLA_CLIENT_MEM_FRACTION" not in capsys.readouterr().out


def test_what_does_not_fit_exits_with_1_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3-70b", "--target", "v5e-8", "--max-model-len", "4096", "--no-compile"]) == 1
    text = capsys.readouterr().out
    assert "Does not work: not enough memory" in text and "missing" in text
    assert "What would make it fit" in text and "--target v5e-16" in text


def test_shardings_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "plan.json"
    variants = ["tp=8", "tp=4,dp=2", "tp=4,pp=2", "two_dimensional"]
    assert main([*LLAMA, "--no-compile", "--compare", *variants, "--json", str(json_file)]) == 0
    text = capsys.readouterr().out
    for name in ("TP 8", "TP 4 x DP 2", "TP 4 x PP 2", "two_dimensional 8"):
        assert name in text
    assert [item["num_engines"] for item in json.loads(json_file.read_text())] == [1, 2, 1, 1]


def test_what_has_no_effect_is_said_as_the_engine_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--no-compile", "--compare", "expert_parallel", "expert_parallel,dp=2"]) == 0
    note = "sharding expert_parallel: experts are split over expert, and the model (LlamaForCausalLM) has none\n"
    assert capsys.readouterr().err == f"jaxpage: {note}"


def test_a_cpu_compiles_and_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, json_file = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(TINY))
    arguments = ["--model", str(tmp_path), "--target", "cpu", "--tensor-parallel-size", "2", "--max-model-len", "64"]
    arguments += ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--json", str(json_file)]
    assert main(arguments) == 0
    assert "measured here" in capsys.readouterr().out
    found = json.loads(json_file.read_text())
    decode, prefill = found["steps"]
    assert (decode["num_tokens"], prefill["num_tokens"]) == (4, 16)
    for step in (decode, prefill):
        assert step["problem"] is None and step["step_bytes"] > 0
        (layers,) = [item for item in step["collectives"] if item["where"] == "layers"]
        # Two sums a layer, of hidden states in float32, of which two devices send as much as they are.
        assert (layers["operation"], layers["count"], layers["layer_count"]) == ("all-reduce", 4, 2)
        assert layers["num_bytes"] == layers["wire_bytes"] == 4 * step["num_tokens"] * 64 * 4
    assert not found["stages"][0]["is_estimate"]


def test_the_words_of_compare() -> None:
    assert parse_variant("tp=4,dp=2") == {"tensor_parallel_size": 4, "data_parallel_size": 2}
    assert parse_variant("ep,pp=2") == {"enable_expert_parallel": True, "pipeline_parallel_size": 2}
    assert parse_variant("two_dimensional") == {"sharding": "two_dimensional"}
    with pytest.raises(ParameterError, match="got 'tp=x'"):
        parse_variant("tp=x")


@pytest.mark.parametrize(
    ("model", "target", "cell"),
    [
        ("llama-3.3-70b", "l4x1", "-"),
        ("mixtral-8x7b", "l4x1", "-"),
        ("gemma-3-27b", "l4x1", "int4, int8 KV TP 1: "),
        ("llama-3.3-70b", "v5e-8", "int8 TP 8: "),
        ("qwen2.5-7b", "h100x8", "TP 4 x DP 2: "),
    ],
)
def test_cells_of_the_table(model: str, target: str, cell: str) -> None:
    assert readme_table.make_cell(model, find_values(model), find_slice(target)).startswith(cell)


def test_the_table_has_ten_models_and_nine_slices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells: list[Any] = []
    monkeypatch.setattr(readme_table, "make_cell", lambda *cell: cells.append(cell) or "cell")
    assert main(["--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(cells) == 90 and len(lines[0].split("|")) == 12 and lines[2].startswith("| llama-3.2-1b | cell |")
