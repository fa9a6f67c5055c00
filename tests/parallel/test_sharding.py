"""Meshes, sharding tables and the layouts that they make."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import stand_in
from jax.sharding import PartitionSpec

from jaxpage.errors import ParameterError
from jaxpage.parallel import table as tables
from jaxpage.parallel.mesh import MESH_AXES, make_mesh, submesh
from jaxpage.parallel.sharding import Layout, constrain, load_table, on_local_parts
from jaxpage.parallel.table import parse_table, presets

PRESETS = ["collective_matmul", "expert_parallel", "megatron", "replicated_kv", "sequence_sharded", "two_dimensional"]


def layout(name: str, **sizes: int) -> Layout:
    count = 1
    for size in sizes.values():
        count *= size
    return Layout(make_mesh(stand_in.devices(count), **sizes), load_table(name))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_mesh_has_all_four_axes() -> None:
    mesh = make_mesh(stand_in.devices(8), model=4, data=2)
    assert mesh.axis_names == MESH_AXES and dict(mesh.shape) == {"data": 2, "stage": 1, "model": 4, "expert": 1}
    second = submesh(mesh, "data", 1)
    assert [device.id for device in second.devices.flat] == [4, 5, 6, 7]
    assert dict(second.shape) == {"data": 1, "stage": 1, "model": 4, "expert": 1}


def test_mesh_sizes_that_do_not_match_the_devices() -> None:
    with pytest.raises(ValueError, match=r"a mesh of model 4, expert 2 has 8 devices, got 6"):
        make_mesh(stand_in.devices(6), model=4, expert=2)
    with pytest.raises(ValueError, match=r"mesh axes are data, stage, model, expert, got tensor"):
        make_mesh(stand_in.devices(2), tensor=2)
    with pytest.raises(ValueError, match=r"stage 2 is not in a mesh with 2 of them"):
        submesh(make_mesh(stand_in.devices(2), stage=2), "stage", 2)


def test_chips_that_lie_in_no_box_make_a_mesh_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a hole")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    assert [device.id for device in make_mesh(stand_in.devices(3), model=3).devices.flat] == [0, 1, 2]


def test_parts_of_a_layout() -> None:
    whole = layout("megatron", data=2, stage=2, model=2)
    part = whole.replica(1).stage(0)
    assert [device.id for device in part.mesh.devices.flat] == [4, 5]
    assert part == layout("megatron", data=2, stage=2, model=2).replica(1).stage(0), "equal layouts are one key"
    assert hash(part) == hash(layout("megatron", data=2, stage=2, model=2).replica(1).stage(0))


def test_there_is_a_preset_for_each_way() -> None:
    assert list(presets()) == PRESETS
    for name in PRESETS:
        table = load_table(name)
        assert table.name == name
        # No array of a model uses a mesh axis twice.
        for axes in (("kv_heads", "hidden"), ("hidden", "heads"), ("ffn", "hidden"), ("vocab", "hidden"),
                     ("experts", "expert_ffn", "hidden"), ("blocks", "kv_heads"), ("slots", "vocab")):  # fmt: skip
            table.spec(axes)


def test_logical_axes_become_mesh_axes() -> None:
    assert load_table("megatron").spec(("kv_heads", None, "hidden")) == PartitionSpec("model", None, None)
    assert load_table("expert_parallel").spec(("heads", "experts")[:1]) == PartitionSpec(("model", "expert"))
    assert load_table("two_dimensional").spec(("ffn", "hidden")) == PartitionSpec("model", "expert")
    with pytest.raises(ParameterError, match=r"megatron has no rule for colour"):
        load_table("megatron").spec(("colour",))
    with pytest.raises(ParameterError, match=r"expert_parallel splits both heads and experts of an array over expert"):
        load_table("expert_parallel").spec(("heads", "experts"))


@pytest.mark.parametrize(("num_kv_heads", "num_devices"), [(6, 4), (3, 2), (1, 2)])
def test_cfg_4a_a_dimension_that_does_not_divide_is_named(num_kv_heads: int, num_devices: int) -> None:
    message = (
        rf"layers\.3\.qkv: kv_heads of {num_kv_heads} does not divide over the {num_devices} devices of model "
        r"\(megatron\)"
    )
    with pytest.raises(ValueError, match=message):
        layout("megatron", model=num_devices).laid_out(f32(num_kv_heads, 2), ("kv_heads", None), "layers.3.qkv")


def test_an_array_without_a_rule_is_named() -> None:
    small = parse_table({"name": "small", "axes": {"hidden": None}})
    message = r"layers\.0\.down: small has no rule for ffn; ffn: null would keep it whole on each device"
    with pytest.raises(ParameterError, match=message):
        Layout(make_mesh(stand_in.devices(1)), small).laid_out(f32(4, 4), ("hidden", "ffn"), "layers.0.down")


def test_two_mesh_axes_split_one_dimension() -> None:
    struct = layout("expert_parallel", model=2, expert=4).laid_out(f32(16, 3), ("heads", "hidden"))
    assert struct.sharding is not None and struct.sharding.shard_shape(struct.shape) == (2, 3)


def test_one_device_is_a_plain_call() -> None:
    alone = layout("megatron", model=1)
    x = jnp.ones(3)
    assert constrain(alone, x, ("tokens",)) is x and constrain(None, x, ("tokens",)) is x
    for which in (alone, None):
        assert on_local_parts(which, lambda y: y, (("heads",),), ("heads",), x) is x


WRONG = {
    "[]": "must hold name and axes",
    "name: x": "must hold name and axes",
    "{name: x, axes: {}, rules: {}}": "key must be one of name, mesh, overlap, axes, got 'rules'",
    "{axes: {}}": "name must be a word, got None",
    "{name: x, axes: {kv_head: model}}": r"logical axis must be one of vocab, .*got 'kv_head'; did you mean kv_heads\?",
    "{name: x, axes: {ffn: modle}}": r"ffn: mesh axis must be one of model, expert, got 'modle'; did you mean model\?",
    "{name: x, axes: {ffn: data}}": "ffn: mesh axis must be one of model, expert, got 'data'",
    "{name: x, axes: {ffn: [model, model]}}": r"ffn: a mesh axis can split it once only, got \['model', 'model'\]",
    "{name: x, axes: {heads: model}}": "heads and kv_heads must be split over the same mesh axes",
    "{name: x, axes: {blocks: model}}": "blocks can only be null, got 'model'",
    "{name: x, axes: {layers: model}}": "layers: mesh axis must be one of stage, got 'model'",
    "{name: x, axes: {layers: null}}": "layers can only be stage, got None",
    "{name: x, axes: {}, mesh: 4}": "mesh must be sizes of mesh axes, got 4",
    "{name: x, axes: {}, mesh: {stage: 2}}": "mesh axis must be one of model, expert, got 'stage'",
    "{name: x, axes: {}, mesh: {model: 0}}": "mesh: model must be a number of devices, got 0",
    "{name: x, overlap: 1, axes: {tokens: model}}": "overlap must be true or false, got 1",
    "{name: x, overlap: true, axes: {ffn: model}}": "overlap needs tokens to be split over one mesh axis",
    "{name: x, overlap: true, axes: {tokens: model, hidden: expert}}": "overlap needs hidden: null, got 'expert'",
    "{name: x, axes: {ffn: model, ffn: null}}": "ffn: is given twice",
    "{name: x, axes: [": "is not YAML",
}


@pytest.mark.parametrize("content", WRONG)
def test_what_is_wrong_with_a_file_is_said(content: str, tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(content)
    with pytest.raises(ParameterError, match=WRONG[content]) as raised:
        load_table(str(file))
    assert raised.value.parameter == "sharding" and str(file) in raised.value.reason and "\n" not in str(raised.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{name: mine, mesh: {model: 2}, axes: {heads: [model], kv_heads: model, ffn: null, layers: stage}}")
    table = load_table(str(file))
    assert table.sizes == (("model", 2),)
    assert table.spec(("heads", "ffn", "tokens")) == PartitionSpec("model", None, None)
    with pytest.raises(ParameterError, match=r"must be collective_matmul, .* or a YAML file, got 'nobody'"):
        load_table("nobody")
    with pytest.raises(ParameterError, match=r"or a YAML file, got '.*', which is a directory$"):
        load_table(str(tmp_path))


def test_an_installed_package_has_the_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a wheel has them; no folder at all is no error until a table is wanted."""
    monkeypatch.setattr(tables, "__file__", str(tmp_path / "site" / "jaxpage" / "parallel" / "table.py"))
    assert presets() == {}
    folder = tmp_path / "site" / "jaxpage" / "parallel" / "configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("{name: mine, axes: {}}")
    assert list(presets()) == ["mine"] and load_table("mine").name == "mine"
