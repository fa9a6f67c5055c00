"""Which layout options and a model lead to, and models whose KV heads are repeated."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_in

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import ParamSpec, repeat_kv_heads
from jaxpage.parallel.sharding import Layout, choose_layout, kv_repeats, load_table, without_effect

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 4,
}


def model(num_heads: int, num_kv_heads: int, num_experts: int = 0) -> tuple[ModelConfig, list[ParamSpec]]:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "attention_bias": not num_experts}
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2} if num_experts else {}
    return build_config(
        {"architectures": ["MixtralForCausalLM" if num_experts else "LlamaForCausalLM"]} | SIZES | heads | experts
    )


def choose(config: ModelConfig, tensor_size: int, stages: int = 1, **options: Any) -> Layout:
    args = EngineArgs(tensor_parallel_size=tensor_size, pipeline_parallel_size=stages, **options)
    return choose_layout(args, config, stand_in.devices(tensor_size * stages))


@pytest.mark.parametrize(("tensor_size", "repeats"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_kv_heads_are_split_and_then_repeated(tensor_size: int, repeats: int) -> None:
    config, _ = model(8, 2)
    layout = choose(config, tensor_size)
    assert layout.table == load_table("megatron") and layout.ways("kv_heads") == tensor_size
    assert kv_repeats(layout, config) == repeats
    assert kv_repeats(None, config) == 1


@pytest.mark.parametrize("tensor_size", [2, 4, 8])
def test_smollm2s_attention_is_whole_where_nine_heads_do_not_divide(
    tensor_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = model(9, 3)
    with caplog.at_level(logging.INFO, "jaxpage"):
        layout = choose(config, tensor_size)
    assert [record.getMessage() for record in caplog.records] == [
        f"9 heads and 3 KV heads do not split over {tensor_size} devices: each computes the whole attention; "
        "MLP and vocabulary are split"
    ]
    assert dict(layout.table.rules) == dict(load_table("replicated_kv").rules)
    assert kv_repeats(layout, config) == 1
    assert choose(config, 3).ways("heads") == 3


def test_a_table_that_was_asked_for_is_not_changed() -> None:
    message = r"9 heads and 3 KV heads do not split over the 2 devices of model \(sequence_sharded\); replicated_kv"
    with pytest.raises(ParameterError, match=message):
        choose(model(9, 3)[0], 2, sharding="sequence_sharded")


def test_experts_get_as_many_devices_as_divide_them() -> None:
    for tensor_size, sizes in ((4, (1, 4)), (8, (2, 4)), (2, (1, 2))):
        layout = choose(model(8, 8, num_experts=4)[0], tensor_size, enable_expert_parallel=True)
        assert (layout.mesh.shape["model"], layout.mesh.shape["expert"]) == sizes
        assert layout.ways("heads") == tensor_size


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(ParameterError, match=r"enable_expert_parallel: the model \(LlamaForCausalLM\) has no experts"):
        choose(model(8, 8)[0], 2, enable_expert_parallel=True)
    with pytest.raises(ParameterError, match="the sharding megatron does not split the experts"):
        choose(model(8, 8, num_experts=4)[0], 2, enable_expert_parallel=True, sharding="megatron")


ALL_BY_MODEL = "vocab: model, hidden: null, heads: model, kv_heads: model, ffn: model, experts: null, expert_ffn: model"


@pytest.mark.parametrize(
    ("table", "num_experts", "lines"),
    [
        ("megatron", 0, []),
        ("two_dimensional", 4, []),
        ("collective_matmul", 0, []),
        ("collective_matmul", 4, []),  # the attention of each layer
        ("expert_parallel", 4, []),
        ("expert_parallel", 0, ["expert_parallel: experts are split over expert, and the model (Llama.*) has none"]),
        ("expert_parallel", 3, ["expert_parallel: experts are split over expert, which is of size 1 here: "]),
        (
            "{name: x, mesh: {model: 2, expert: 2}, axes: {%s}}",
            0,
            ["x: expert splits no parameter of the model: the 2 devices along it hold and multiply the same"],
        ),
        ("{name: x, mesh: {model: 2, expert: 2}, axes: {%s, tokens: expert}}", 4, ["x: expert splits no parameter"]),
        ("{name: x, overlap: true, mesh: {model: 4, expert: 1}, axes: {%s, tokens: model}}", 0, []),
        (
            "{name: x, overlap: true, mesh: {model: 4, expert: 1}, axes: {%s, tokens: expert}}",
            0,
            ["x: overlap hides nothing: neither kv_heads nor ffn is split as tokens are"],
        ),
    ],
)
def test_what_has_no_effect_is_said(table: str, num_experts: int, lines: list[str], tmp_path: Path) -> None:
    if "{" in table:
        file = tmp_path / "table.yaml"
        file.write_text(table % ALL_BY_MODEL)
        table = str(file)
    config, specs = model(8, 8, num_experts)
    found = without_effect(choose(config, 4, sharding=table), config, (spec.axes for spec in specs))
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert re.match(f"sharding {re.escape(expected).replace(re.escape('.*'), '.*')}", line), line


def test_an_engine_says_it_when_it_starts(tiny_model_dir: Callable[[str], Path]) -> None:
    words = ["-m", "jaxpage", "generate", "Hi", "--model", tiny_model_dir("llama"), "--max-tokens", "1"]
    words += ["--enforce-eager", "--tensor-parallel-size", "2", "--sharding", "expert_parallel"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = "jaxpage: sharding expert_parallel: experts are split over expert, and the model (llama) has none"
    assert ended.stderr.splitlines().count(line) == 1


def test_two_axes_are_divided_evenly_and_stages_come_first() -> None:
    layout = choose(model(8, 8)[0], 8, stages=2, sharding="two_dimensional")
    assert dict(layout.mesh.shape) == {"data": 1, "stage": 2, "model": 4, "expert": 2}
    assert [device.id for device in layout.stage(1).mesh.devices.flat] == list(range(8, 16))


def test_sizes_that_a_file_fixes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{name: mine, mesh: {model: 2, expert: 3}, axes: {heads: model, kv_heads: model, ffn: expert}}")
    layout = choose(model(8, 8)[0], 6, sharding=str(file))
    assert (layout.ways("heads"), layout.ways("ffn")) == (2, 3)
    message = "mine is for a mesh of model 2, expert 3, which is 6 devices; tensor_parallel_size is 4"
    with pytest.raises(ParameterError, match=message):
        choose(model(8, 8)[0], 4, sharding=str(file))


def test_the_number_of_devices_must_be_that_of_the_options() -> None:
    args = EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3)
    message = r"2 devices in each of 3 stages \(pipeline_parallel_size\) are 6, and 4 are there"
    with pytest.raises(ParameterError, match=message):
        choose_layout(args, model(8, 8)[0], stand_in.devices(4))


def test_repeated_kv_heads_are_copies_in_the_order_of_their_query_heads() -> None:
    config, specs = model(8, 2)
    wide, wide_specs = repeat_kv_heads(config, specs, 2)
    assert (wide.num_kv_heads, wide.num_heads) == (4, 8)
    for spec, repeated in zip(specs, wide_specs, strict=True):
        sources = [np.random.default_rng(index).normal(size=shape) for index, shape in enumerate(spec.sources.values())]
        before, after = spec.assemble(*sources).reshape(spec.shape), repeated.assemble(*sources)
        assert after.reshape(repeated.shape) is not None and repeated.axes == spec.axes
        if not str(spec.path[-1]).startswith("qkv"):
            np.testing.assert_array_equal(before, after.reshape(spec.shape))
            continue
        assert after.shape == repeated.shape
        # Query head n is group member n % 4 of KV head n // 4 before, n % 2 of n // 2 after.
        for head in range(8):
            np.testing.assert_array_equal(before[head // 4, head % 4], after[head // 2, head % 2])
            np.testing.assert_array_equal(before[head // 4, 4:], after[head // 2, 2:])
    assert repeat_kv_heads(config, specs, 1) == (config, specs)
    with pytest.raises(ValueError, match="4 query heads of each KV head do not divide by 3"):
        repeat_kv_heads(config, specs, 3)
