"""Sharding tables: which mesh axes split each logical axis of an array, and the YAML files that say so.

Must not know the devices, nor any array beyond the names of its axes.

A file has a ``name``, ``axes`` (logical axis: mesh axis, list of mesh axes, or null for none) and, if the table is for
one size of mesh only, ``mesh`` (mesh axis: size). ``overlap: true`` hides exchanges of tokens behind products (see
``ring``). Files in ``configs/sharding`` are presets, known by their names.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jax.sharding import PartitionSpec

from jaxpage.config_file import ConfigFileError, StrictLoader
from jaxpage.errors import ParameterError, shown

LOGICAL_AXES = {
    "vocab": "tokens of the vocabulary: embedding, output projection, logits",
    "hidden": "features of hidden states, and of the weights that read or write them",
    "heads": "query heads",
    "kv_heads": "key and value heads: weights, KV cache",
    "ffn": "inner features of the MLP",
    "experts": "experts of a mixture",
    "expert_ffn": "inner features of each expert",
    "tokens": "tokens of the step, in hidden states between blocks",
    "layers": "layers",
    "blocks": "blocks of the KV cache",
    "slots": "running requests",
}
"""What arrays are made of, by the names that tables use."""
FIXED_AXES: dict[str, tuple[str, ...]] = {"layers": ("stage",), "blocks": (), "slots": ()}
"""Axes that are the same in every table: stages split the layers, and one block table serves all devices."""
SPLITTING_AXES = ("model", "expert")
"""Mesh axes that a table may use: of the others, one engine's devices differ by stage only, and by no data."""


@dataclasses.dataclass(frozen=True)
class ShardingTable:
    """The mesh axes that split each logical axis; none: each device has all of it.

    Attributes:
        rules: logical axis and mesh axes, the slowest first.
        sizes: sizes of mesh axes that are part of the table, if any.
        overlap: products with weights that are split over the mesh axis of the tokens pass these on, share by share.
    """

    name: str
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, int], ...] = ()
    overlap: bool = False

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of one logical axis.

        Raises:
            ParameterError: the table says nothing of it.
        """
        found = ({"tokens": ()} | dict(self.rules) | FIXED_AXES).get(axis)
        if found is None:
            raise ParameterError(
                "sharding", f"{self.name} has no rule for {axis}; {axis}: null would keep it whole on each device"
            )
        return found

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The mesh axes of each dimension of an array with these logical axes; None is never split.

        Raises:
            ParameterError: for a logical axis without a rule, or a mesh axis that would split two dimensions.
        """
        entries = [() if axis is None else self.mesh_axes(axis) for axis in axes]
        used = [name for names in entries for name in names]
        twice = sorted({name for name in used if used.count(name) > 1})
        if twice:
            both = " and ".join(str(axis) for axis, names in zip(axes, entries, strict=True) if twice[0] in names)
            raise ParameterError("sharding", f"{self.name} splits both {both} of an array over {twice[0]}")
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in entries))

    def whole(self, *axes: str) -> ShardingTable:
        """The table with some logical axes not split."""
        rules = tuple((axis, () if axis in axes else names) for axis, names in self.rules)
        return dataclasses.replace(self, name=f"{self.name} with whole {' and '.join(axes)}", rules=rules)


def presets() -> dict[str, Path]:
    """The files of the tables that come with jaxpage, by name."""
    package = Path(__file__).resolve().parent
    # A wheel has them in the package, a clone of the repository beside it.
    for folder in (package / "configs", package.parents[1] / "configs" / "sharding"):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def load_table(name_or_path: str) -> ShardingTable:
    """A preset, or the table of a YAML file.

    Raises:
        ParameterError: naming the file and what is wrong with it.
    """
    known = presets()
    path = known.get(name_or_path, Path(name_or_path))
    if name_or_path not in known and not path.is_file():
        fault = (
            "which is a directory" if path.is_dir() else "which is no file" if path.exists() else "which is not there"
        )
        raise ParameterError(
            "sharding", f"must be {', '.join(known)} or a YAML file, got {shown(name_or_path)}, {fault}"
        )
    try:
        return parse_table(yaml.load(path.read_text(encoding="utf-8"), StrictLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError("sharding", f"{path}: is not YAML: {' '.join(str(error).split())[:200]}") from None
    except (ConfigFileError, ParameterError) as error:
        reason = error.reason if isinstance(error, ParameterError) else str(error)
        raise ParameterError("sharding", f"{path}: {reason}") from None
    except OSError as error:
        raise ParameterError("sharding", f"{path}: {error.strerror or error}") from None


def parse_table(content: Any) -> ShardingTable:
    """The table in a file's content.

    Raises:
        ParameterError: saying what is wrong.
    """
    if not isinstance(content, dict) or not isinstance(content.get("axes"), dict):
        raise ParameterError("sharding", "must hold name and axes, for example axes: {heads: model}")
    _check_names("key", content, ("name", "mesh", "overlap", "axes"))
    name = content.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ParameterError("sharding", f"name must be a word, got {shown(name)}")
    _check_names("logical axis", content["axes"], LOGICAL_AXES)
    rules = {axis: _mesh_axes(axis, value) for axis, value in content["axes"].items()}
    for axis in rules.keys() & FIXED_AXES.keys():
        if rules[axis] != FIXED_AXES[axis]:
            only = " and ".join(FIXED_AXES[axis]) or "null"
            raise ParameterError("sharding", f"{axis} can only be {only}, got {shown(content['axes'][axis])}")
    if rules.get("heads") != rules.get("kv_heads"):
        # A device computes the query heads of the KV heads that it has.
        raise ParameterError("sharding", "heads and kv_heads must be split over the same mesh axes")
    sizes = content.get("mesh") or {}
    if not isinstance(sizes, dict):
        raise ParameterError("sharding", f"mesh must be sizes of mesh axes, got {shown(sizes)}")
    _check_names("mesh axis", sizes, SPLITTING_AXES)
    for axis, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ParameterError("sharding", f"mesh: {axis} must be a number of devices, got {shown(size)}")
    overlap = content.get("overlap", False)
    if type(overlap) is not bool:
        raise ParameterError("sharding", f"overlap must be true or false, got {shown(overlap)}")
    if overlap and len(rules.get("tokens", ())) != 1:
        raise ParameterError("sharding", "overlap needs tokens to be split over one mesh axis, such as tokens: model")
    if overlap and rules.get("hidden"):
        # A product that passes tokens on would add up its device's share of the features only.
        raise ParameterError("sharding", f"overlap needs hidden: null, got {shown(content['axes']['hidden'])}")
    return ShardingTable(name, tuple(rules.items()), tuple(sizes.items()), overlap)


def _mesh_axes(axis: str, value: Any) -> tuple[str, ...]:
    names = [] if value is None else value if isinstance(value, list) else [value]
    _check_names(f"{axis}: mesh axis", names, FIXED_AXES.get(axis) or SPLITTING_AXES)
    if len(set(names)) < len(names):
        raise ParameterError("sharding", f"{axis}: a mesh axis can split it once only, got {shown(value)}")
    return tuple(names)


def _check_names(kind: str, names: Iterable[Any], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ParameterError("sharding", f"{kind} must be one of {', '.join(known)}, got {shown(name)}{hint}")
