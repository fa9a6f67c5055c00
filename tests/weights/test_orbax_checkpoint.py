"""Checkpoints that jaxpage writes: what is loaded from them, what is refused, and damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpage import SamplingParams
from jaxpage.errors import StartupError
from jaxpage.models.registry import build_config
from jaxpage.models.weight_map import repeat_kv_heads
from jaxpage.parallel.pipeline import split_layers, stage_model, stage_specs
from jaxpage.parallel.placement import Placement
from jaxpage.weights import WeightsError, open_checkpoint
from jaxpage.weights.loader import load_params
from jaxpage.weights.orbax_checkpoint import MANIFEST_FILE, OrbaxCheckpoint, find_damage
from jaxpage.weights.orbax_writer import WriteOptions, convert

if TYPE_CHECKING:
    from jaxpage import LLM

FAMILIES = ("llama", "llama_bias_headdim", "llama3_rope_tied", "qwen3", "gemma3_text", "qwen3_moe")
"""With biases, tied embeddings, norms of queries and keys, offset norms, and experts."""


def options(**changes: Any) -> WriteOptions:
    return WriteOptions(tensor_parallel_size=1, **changes)


def written(source: Path, target: Path, **changes: Any) -> OrbaxCheckpoint:
    convert(open_checkpoint(source), source.name, target, options(**changes))
    checkpoint = open_checkpoint(target)
    assert isinstance(checkpoint, OrbaxCheckpoint)
    return checkpoint


def load(checkpoint: Any, dtype: str = "float32", quantization: str | None = None, **changes: Any) -> Any:
    model, specs = build_config(checkpoint.config, checkpoint.generation_config)
    return load_params(checkpoint, model, specs, dtype, Placement(), quantization=quantization, **changes)


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit, and of the same types."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == wanted.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(wanted).tobytes()


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny Llama, quantised to int8; not to be changed."""
    target = tmp_path_factory.mktemp("orbax") / "tiny"
    written(tiny_model_dir("llama"), target, quantization="int8")
    return target


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(tiny, tmp_path / "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_source(family: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model_dir(family))
    checkpoint = written(source.path, tmp_path / "model")
    assert checkpoint.manifest.dtype == "float32"
    assert (checkpoint.config, checkpoint.generation_config) == (source.config, source.generation_config)
    assert checkpoint.load_tokenizer().encode("Hi there") == source.load_tokenizer().encode("Hi there")
    assert_same(load(checkpoint), load(source))
    assert_same(load(checkpoint, "bfloat16"), load(source, "bfloat16"))
    assert_same(load(checkpoint, quantization="int8"), load(source, quantization="int8"))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantised_weights_are_those_of_the_source(
    kind: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_model_dir("llama")
    checkpoint = written(source, tmp_path / "model", quantization=kind, dtype="bfloat16")
    expected = load(open_checkpoint(source), "bfloat16", kind)
    assert_same(load(checkpoint, "bfloat16"), expected)
    assert_same(load(checkpoint, "bfloat16", kind), expected)
    assert checkpoint.quantization == kind
    assert load(checkpoint, "float32")["embedding"].dtype == np.float32
    others = [other for other in ("int8", "int4", "fp8") if other != kind]
    for other in others:
        with pytest.raises(StartupError, match=f"model holds {kind} weights, which cannot be made {other}"):
            load(checkpoint, "bfloat16", other)


def test_quantised_experts_are_those_of_the_source(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model_dir("mixtral")
    checkpoint = written(source, tmp_path / "model", quantization="fp8")
    assert_same(load(checkpoint), load(open_checkpoint(source), quantization="fp8"))


def test_an_engine_gives_the_tokens_of_the_source(
    tiny: Path, tiny_model_dir: Callable[[str], Path], llm_for: Callable[..., LLM], random_ids: Callable[..., list[int]]
) -> None:
    prompt = [{"prompt_token_ids": random_ids(5)}]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (expected,) = llm_for(tiny_model_dir("llama"), quantization="int8").generate(prompt, greedy)
    (found,) = llm_for(tiny).generate(prompt, greedy)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_without_a_type_nothing_is_lost(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = written(tiny_model_dir("llama"), tmp_path / "narrow", dtype="bfloat16")
    assert source.manifest.dtype == "bfloat16"
    again = written(source.path, tmp_path / "again")
    assert again.manifest.dtype == "bfloat16"
    assert_same(load(again, "bfloat16"), load(source, "bfloat16"))
    assert_same(load(again, "float32"), load(source, "float32"))


def test_what_was_written_can_be_the_source(tiny: Path, tmp_path: Path) -> None:
    checkpoint = written(tiny, tmp_path / "again", dtype="bfloat16")
    assert checkpoint.quantization == "int8"
    assert_same(load(checkpoint, "bfloat16"), load(open_checkpoint(tiny), "bfloat16"))
    with pytest.raises(StartupError, match="holds int8 weights"):
        written(tiny, tmp_path / "other", quantization="int4")
    assert not (tmp_path / "other").exists()


def test_a_gguf_file_keeps_its_tokenizer(builtin_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    tokenizer = open_checkpoint(builtin_gguf("smollm2-135m-instruct")).load_tokenizer()
    tokenizer.save_directory(tmp_path)
    again = type(tokenizer).from_directory(tmp_path)
    text = "<|im_start|>Grüße, 世界!  3.14\n\tdef f(x):\n<|im_end|>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    for name in ("vocab_size", "bos_token", "eos_token_id", "pad_token", "adds_bos", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_stages_and_repeated_kv_heads_are_made_from_the_whole_model(
    kind: str | None, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_model_dir("llama_bias_headdim"))
    checkpoint = written(source.path, tmp_path / "model", quantization=kind)
    model, specs = build_config(source.config, source.generation_config)
    model, specs = repeat_kv_heads(model, specs, 2)
    stages = split_layers(model.num_layers, model.num_layers)
    for stage in stages:
        arguments = stage_model(model, stage), stage_specs(specs, stage, model.tied_embeddings), "float32", Placement()
        found = load_params(checkpoint, *arguments, all_specs=specs)
        assert_same(found, load_params(source, *arguments, quantization=kind, all_specs=specs))


def test_orbax_alone_can_read_it(tiny: Path) -> None:
    expected = load(open_checkpoint(tiny))["layers"][1]
    struct = {
        name: {"values": leaf.values, "scales": leaf.scales} if hasattr(leaf, "scales") else leaf
        for name, leaf in expected.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(tiny / "params", ocp.args.Composite(**{"layers.1": ocp.args.StandardRestore(struct)}))
    assert_same(found["layers.1"], struct)


def test_a_changed_config_is_refused(tiny: Path) -> None:
    checkpoint = OrbaxCheckpoint(tiny)
    checkpoint.config = checkpoint.config | {"intermediate_size": 64}
    with pytest.raises(WeightsError, match=r"gate_up.values has shape \[2, 128, 64\], config.json says \[2, 64, 64\]"):
        load(checkpoint)
    checkpoint.config = checkpoint.config | {"intermediate_size": 128, "num_key_value_heads": 1}
    with pytest.raises(WeightsError, match=r"qkv.values has shape \[2, 4, 16, 64\], config.json says \[1, 6, 16, 64\]"):
        load(checkpoint)
    checkpoint.config = checkpoint.config | {"num_key_value_heads": 2, "num_hidden_layers": 4}
    with pytest.raises(WeightsError, match=r"the checkpoint has no parameter params/layers.3/attention_norm"):
        load(checkpoint)


FILES = (
    "config.json",
    "tokenizer.json",
    "params/layers.1/_METADATA",
    "params/layers.1/array_metadatas/process_0",
    "params/layers.1/qkv.values/.zarray",
    "params/layers.1/qkv.values/0.0.0.0",
    "params/layers.1/down.scales/0",
    "params/embedding/embedding/0.0",
)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flipped,
    "shorter": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_any_damage_is_named_before_anything_is_loaded(copy: Path, name: str, damage: str) -> None:
    DAMAGES[damage](copy / name)
    with pytest.raises(WeightsError, match=rf"^{name}: ") as caught:
        load(open_checkpoint(copy))
    assert "\n" not in str(caught.value)
    assert [fault.partition(":")[0] for fault in find_damage(copy)] == [name]


def test_verifying_finds_what_does_not_belong(copy: Path) -> None:
    assert list(find_damage(copy)) == []
    (copy / "params" / "layers.0" / "qkv.values" / "9.0.0.0").write_bytes(b"")
    assert list(find_damage(copy)) == ["params/layers.0/qkv.values/9.0.0.0: is no part of the checkpoint"]


def test_a_damaged_manifest_is_refused_or_does_no_harm(tiny: Path, copy: Path) -> None:
    expected = load(open_checkpoint(tiny))
    content = (tiny / MANIFEST_FILE).read_bytes()
    refused = 0
    for seed in range(24):
        random = np.random.default_rng(seed)
        changed = bytearray(content)
        changed[random.integers(len(changed))] ^= 1 << random.integers(7)
        (copy / MANIFEST_FILE).write_bytes(changed)
        try:
            assert_same(load(open_checkpoint(copy)), expected)
        except StartupError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format_version=2), "format_version 2 is not 1"),
        (lambda content: content.pop("arrays"), "is damaged: KeyError 'arrays'"),
        (lambda content: content["files"].pop("params/layers.0/qkv.values/0.0.0.0"), r"0.0.0.0: is missing in jaxpage"),
        (
            lambda content: content["arrays"]["params/final_norm/final_norm"].update(dtype="bfloat16"),
            r"\.zarray: holds <f4",
        ),
        (lambda content: content["arrays"].pop("params/layers.0/qkv.scales"), "no parameter params/layers.0/qkv"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(copy: Path, change: Callable[[Any], Any], message: str) -> None:
    content = json.loads((copy / MANIFEST_FILE).read_text())
    change(content)
    (copy / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=message):
        load(open_checkpoint(copy))


def test_unfinished_and_foreign_directories_are_refused(tiny: Path, copy: Path, tmp_path: Path) -> None:
    left = copy.rename(tmp_path / ".model.converting-0badcafe")
    with pytest.raises(WeightsError, match="conversion left that was interrupted"):
        open_checkpoint(left)
    (left / MANIFEST_FILE).unlink()
    with pytest.raises(WeightsError, match=r"holds no model\.safetensors"):
        open_checkpoint(left)
    source = open_checkpoint(tiny)
    with pytest.raises(StartupError, match="such a name is for conversions under way"):
        convert(source, "x", left, options())
    with pytest.raises(StartupError, match="tiny exists; --overwrite would replace it"):
        convert(source, "x", tiny, options())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(StartupError, match="mine is not a checkpoint that jaxpage wrote, and is not replaced"):
        convert(source, "x", tmp_path / "mine", options(overwrite=True))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_checkpoint_can_be_replaced_by_one_made_from_it(copy: Path) -> None:
    checkpoint = written(copy, copy, dtype="bfloat16", overwrite=True)
    assert checkpoint.manifest.dtype == "bfloat16"
    assert list(find_damage(copy)) == []
    assert [entry.name for entry in copy.parent.iterdir()] == ["tiny"]


def test_a_failure_in_the_middle_leaves_nothing(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("jaxpage.weights.orbax_writer._save", full)
    with pytest.raises(OSError, match="No space"):
        written(tiny_model_dir("llama"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_half_precision_sources_become_float32(random_model: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    model = random_model()
    source = shutil.copytree(model.directory, tmp_path / "half")
    for kind, expected in ((np.float16, "float32"), (ml_dtypes.bfloat16, "bfloat16")):
        save_file({name: tensor.astype(kind) for name, tensor in model.tensors.items()}, source / "model.safetensors")
        checkpoint = written(source, tmp_path / expected)
        assert checkpoint.manifest.dtype == expected
        assert_same(load(checkpoint), load(open_checkpoint(source)))
