"""Which device holds what, as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import stand_in

from jaxpage.errors import ParameterError
from jaxpage.parallel.mesh import make_mesh
from jaxpage.parallel.sharding import Layout, load_table
from jaxpage.parallel.show import plot_sharding, show_sharding


def layout(name: str, **sizes: int) -> Layout:
    return Layout(make_mesh(stand_in.devices(8), **sizes), load_table(name))


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


ARRAYS = {
    "embedding": (array(512, 64), ("vocab", "hidden")),
    "layers.0.norm": (array(64), (None,)),
    "layers.0.down": (array(64, 128), ("hidden", "ffn")),
    "layers.1.norm": (array(64), (None,)),
    "layers.1.down": (array(64, 128), ("hidden", "ffn")),
}


def test_the_table_says_what_each_device_has() -> None:
    text = show_sharding(layout("two_dimensional", model=4, expert=2), ARRAYS)
    title, arrays, devices = text.split("\n\n")
    assert title == "two_dimensional on 8 devices (model 4, expert 2)"
    rows = [line.split(maxsplit=3) for line in arrays.splitlines()]
    assert rows[1][:3] == ["embedding", "1", "bfloat16"]
    assert rows[1][3].split("  ")[0] == "[512, 64]" and "vocab / 4, hidden / 2  [128, 32]" in rows[1][3]
    assert rows[2][:2] == ["layers.*.norm", "2"] and "whole" in rows[2][3]
    assert rows[3][:2] == ["layers.*.down", "2"] and "hidden / 2, ffn / 4" in rows[3][3]
    assert len(rows) == 5 and rows[4][0] == "all"
    columns, *parts = [line.split() for line in devices.splitlines()]
    assert columns[:3] == ["device", "model", "expert"]
    # device, model, expert, part of the vocabulary, of the hidden features, of the inner ones
    assert parts[0] == ["0", "0", "0", "0", "0", "0"] and parts[5] == ["5", "2", "1", "2", "1", "2"]


def test_bytes_are_those_of_a_device() -> None:
    big = {"embedding": (array(2**20, 64), ("vocab", "hidden"))}
    lines = show_sharding(layout("megatron", model=8), big).splitlines()
    assert lines[3].split()[-1] == lines[4].split()[-1] == "16.00"


def test_an_array_that_does_not_divide_is_named() -> None:
    with pytest.raises(ParameterError, match=r"lm_head: vocab of 9 does not divide over the 8 devices of model"):
        show_sharding(layout("megatron", model=8), {"lm_head": (array(9, 4), ("vocab", "hidden"))})


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    experts = {"experts": (array(4, 2, 32, 8), ("experts", None, "expert_ffn", "hidden"))}
    plot_sharding(layout("expert_parallel", model=2, expert=4), ARRAYS | experts, tmp_path / "held.svg")
    # Text is drawn as shapes, with the text itself in a comment.
    drawn = (tmp_path / "held.svg").read_text()
    assert "<!-- layers.*.down (x 2) -->" in drawn and "<!-- 0 to 7 -->" in drawn and "<!-- experts 4 -->" in drawn
