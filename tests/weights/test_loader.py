"""From a checkpoint's tensors to the parameter tree: all of them, once, in the right shape and type."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage.config import EngineArgs
from jaxpage.errors import ParameterError
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import ON_ONE_DEVICE, Placement
from jaxpage.parallel.sharding import choose_layout
from jaxpage.plan.slices import find_slice
from jaxpage.weights import WeightsError, open_checkpoint
from jaxpage.weights.loader import dummy_params, load_params

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

Change = Callable[[dict[str, np.ndarray]], None]


@pytest.fixture
def base(random_model: Callable[..., RandomModel]) -> RandomModel:
    return random_model()


def load(directory: Path, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    checkpoint = open_checkpoint(directory)
    model, specs = build_config(checkpoint.config | changes)
    return load_params(checkpoint, model, specs, dtype, ON_ONE_DEVICE)


@pytest.fixture
def changed(base: RandomModel, tmp_path: Path) -> Callable[[Change], Path]:
    """Writes the base model's directory with other tensors."""

    def write(change: Change) -> Path:
        tensors = dict(base.tensors)
        change(tensors)
        (tmp_path / "config.json").write_text(json.dumps(base.config))
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
        )
        return tmp_path

    return write


def test_every_parameter_is_where_the_specs_say(base: RandomModel) -> None:
    params = load(base.directory)
    np.testing.assert_array_equal(params["embedding"], base.tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], base.tensors["lm_head.weight"])
    mlp = [base.tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(params["layers"][1]["gate_up"], np.stack(mlp))
    # Two KV heads, each with its two query heads, its key and its value.
    q, k, v = (base.tensors[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(-1, 16, 64) for name in "qkv")
    expected = np.stack([np.stack([q[0], q[1], k[0], v[0]]), np.stack([q[2], q[3], k[1], v[1]])])
    np.testing.assert_array_equal(params["layers"][1]["qkv"], expected)


def test_cfg_2a_any_missing_tensor_is_named(base: RandomModel, changed: Callable[[Change], Path]) -> None:
    for name in base.tensors:
        with pytest.raises(WeightsError, match=f"tensor {re.escape(name)} is missing"):
            load(changed(lambda tensors, name=name: tensors.pop(name)))


def test_cfg_2a_any_misshaped_tensor_is_named_with_both_shapes(
    base: RandomModel, changed: Callable[[Change], Path]
) -> None:
    for name, tensor in base.tensors.items():
        # Square ones look the same turned around: a row less then.
        wrong = tensor.T if tensor.shape != tensor.shape[::-1] else tensor[:-1]
        message = re.escape(f"tensor {name} has shape {list(wrong.shape)}, expected {list(tensor.shape)}")
        with pytest.raises(WeightsError, match=message):
            load(changed(lambda tensors, name=name, wrong=wrong: tensors.update({name: wrong})))
    name = "model.embed_tokens.weight"
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} has shape \[293, 64\], expected \[294, 64\]"):
        load(changed(lambda tensors: tensors.update({name: tensors[name][:-1]})))


def test_cfg_2a_a_renamed_layer_is_refused(changed: Callable[[Change], Path]) -> None:
    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.layers.1.", "model.layers.7.")] = tensors.pop(name)

    with pytest.raises(WeightsError, match=r"tensor model\.layers\.1\.\S+ is missing \(and 8 more\)"):
        load(changed(rename))


def test_cfg_2a_names_without_the_prefix_are_refused_by_name(changed: Callable[[Change], Path]) -> None:
    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    with pytest.raises(WeightsError, match=r"tensor model\.embed_tokens\.weight is missing"):
        load(changed(rename))


def test_an_unknown_tensor_is_named(changed: Callable[[Change], Path]) -> None:
    with pytest.raises(WeightsError, match=r"tensor visual\.weight is not part of this model"):
        load(changed(lambda tensors: tensors.update({"visual.weight": np.zeros(3, np.float32)})))


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("mlp_bias", r"mlp\.down_proj\.bias is not part of this model \(and 5"),
        ("attention_bias", r"self_attn\.k_proj\.bias is not part of this model \(and 7"),
    ],
)
def test_cfg_3_biases_the_config_does_not_mention_are_named(
    flag: str, named: str, random_model: Callable[..., RandomModel]
) -> None:
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.0\." + named):
        load(random_model(**{flag: True}).directory, **{flag: False})


def test_stored_rope_frequencies_are_ignored(changed: Callable[[Change], Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(changed(lambda tensors: tensors.update({name: np.zeros(8, np.float32)})))


def test_cfg_2_tied_and_missing_output_weights(
    random_model: Callable[..., RandomModel], base: RandomModel, changed: Callable[[Change], Path]
) -> None:
    assert "lm_head" not in load(random_model(tie_word_embeddings=True).directory)
    # A copy of the tied table, as some writers store it, is not an extra tensor.
    assert "lm_head" not in load(base.directory, tie_word_embeddings=True)
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        load(changed(lambda tensors: tensors.pop("lm_head.weight")))


def test_wgt_1a_numbers_are_converted_once_and_exactly(base: RandomModel, changed: Callable[[Change], Path]) -> None:
    kinds = {
        "lm_head.weight": np.float16,
        "model.embed_tokens.weight": ml_dtypes.bfloat16,
        "model.layers.0.mlp.down_proj.weight": np.float64,
    }

    def convert(tensors: dict[str, np.ndarray]) -> None:
        for name, kind in kinds.items():
            tensors[name] = tensors[name].astype(kind)

    directory = changed(convert)
    for dtype in ("float32", "bfloat16"):
        params = load(directory, dtype)
        loaded = (params["lm_head"], params["embedding"], params["layers"][0]["down"])
        for (name, kind), leaf in zip(kinds.items(), loaded, strict=True):
            expected = base.tensors[name].astype(kind).astype(dtype)
            assert leaf.dtype == dtype
            assert np.asarray(leaf).tobytes() == expected.tobytes()
        gate = base.tensors["model.layers.0.mlp.gate_proj.weight"].astype(dtype)
        assert np.asarray(params["layers"][0]["gate_up"])[0].tobytes() == gate.tobytes()


@pytest.mark.parametrize("kind", [np.int8, np.int32, ml_dtypes.float8_e4m3fn])
def test_wgt_1a_numbers_without_a_scheme_are_refused_by_name(
    kind: type, changed: Callable[[Change], Path], base: RandomModel
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} has type {np.dtype(kind)}, which is not supported"):
        load(changed(lambda tensors: tensors.update({name: np.zeros(base.tensors[name].shape, kind)})))


def test_gemma_norms_are_offset_before_rounding(tiny_model_dir: Callable[[str], Path]) -> None:
    directory = tiny_model_dir("gemma3_text")
    stored = open_checkpoint(directory).read("model.norm.weight")
    np.testing.assert_array_equal(load(directory)["final_norm"], stored + np.float32(1))
    rounded = (stored + np.float32(1)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(load(directory, "bfloat16")["final_norm"], rounded)


def test_dummy_weights_have_the_shapes_of_real_ones(random_model: Callable[..., RandomModel]) -> None:
    directory = random_model(attention_bias=True).directory
    model, specs = build_config(open_checkpoint(directory).config)
    placement = ON_ONE_DEVICE
    dummy = dummy_params(model, specs, "float32", placement, seed=1)
    real = load(directory)
    assert jax.tree.map(np.shape, dummy) == jax.tree.map(np.shape, real)
    assert not np.asarray(dummy["layers"][0]["qkv_bias"]).any()
    assert (np.asarray(dummy["layers"][1]["mlp_norm"]) == 1).all()
    assert 0.019 < np.asarray(dummy["embedding"]).std() < 0.021
    again, other = (dummy_params(model, specs, "float32", placement, seed)["embedding"] for seed in (1, 2))
    np.testing.assert_array_equal(dummy["embedding"], again)
    assert (np.asarray(again) != np.asarray(other)).any()


def test_dummy_weights_that_do_not_divide_are_named_like_real_ones(base: RandomModel) -> None:
    checkpoint = open_checkpoint(base.directory)
    model, specs = build_config(checkpoint.config)
    layout = choose_layout(EngineArgs(tensor_parallel_size=5), model, find_slice("cpu").stand_ins(5))
    messages = []
    for make in (
        lambda: dummy_params(model, specs, "float32", Placement(layout=layout), seed=1),
        lambda: load_params(checkpoint, model, specs, "float32", Placement(layout=layout)),
    ):
        with pytest.raises(ParameterError, match=r"^sharding: embedding: vocab of .* over the 5 devices") as raised:
            make()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_dummy_weights_need_nothing_but_a_config_and_a_tokenizer(
    base: RandomModel, tmp_path: Path, llm_for: Callable[..., LLM]
) -> None:
    shutil.copytree(base.directory, tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with pytest.raises(WeightsError, match=r"holds no model\.safetensors"):
        llm_for(tmp_path)
    output = llm_for(tmp_path, load_format="dummy").generate("Hi", use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) > 0
