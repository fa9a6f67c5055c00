"""How arrays lie over devices: a mesh and a table together, which of these an engine gets, and work on local parts.

Must not know what the arrays mean; they name their logical axes themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxpage.errors import ParameterError
from jaxpage.parallel.mesh import make_mesh, shown_sizes, submesh
from jaxpage.parallel.table import SPLITTING_AXES, ShardingTable, load_table

__all__ = [
    "Layout",
    "ShardingTable",
    "choose_layout",
    "constrain",
    "kv_repeats",
    "load_table",
    "local_index",
    "naming_what_was_given",
    "on_local_parts",
    "summed",
    "without_effect",
]

logger = logging.getLogger("jaxpage")

ArrayT = TypeVar("ArrayT")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the table that lays arrays over it. Hashable: a static argument of jitted functions."""

    mesh: Mesh
    table: ShardingTable

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Where the parts of an array with these logical axes lie."""
        return NamedSharding(self.mesh, self.table.spec(axes))

    def ways(self, axis: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[name] for name in self.table.mesh_axes(axis))

    def passes_tokens(self, axis: str | None, num_tokens: int) -> bool:
        """Whether devices pass tokens on in products with a weight that is split by ``axis`` (see ``ring``)."""
        if axis is None or not self.table.overlap or self.table.mesh_axes(axis) != self.table.mesh_axes("tokens"):
            return False
        return self.ways("tokens") > 1 and num_tokens % self.ways("tokens") == 0

    def laid_out(
        self, struct: jax.ShapeDtypeStruct, axes: Sequence[str | None], path: str = ""
    ) -> jax.ShapeDtypeStruct:
        """``struct`` laid over the mesh by its logical axes.

        Args:
            path: of the array, for messages.

        Raises:
            ParameterError: naming path and numbers, for an axis without a rule, a dimension that does not divide over
                its devices, or two that the same mesh axis splits.
        """
        where = f"{path}: " if path else ""
        try:
            sharding = self.sharding(axes)
        except ParameterError as error:
            raise ParameterError("sharding", f"{where}{error.reason}") from None
        for size, axis in zip(struct.shape, axes, strict=True):
            if axis is not None and size % self.ways(axis):
                raise ParameterError(
                    "sharding",
                    f"{where}{axis} of {size} does not divide over the {self.ways(axis)} devices of "
                    f"{' and '.join(self.table.mesh_axes(axis))} ({self.table.name})",
                )
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    def replica(self, index: int) -> Layout:
        """The part of one data index: a mesh of its own."""
        return dataclasses.replace(self, mesh=submesh(self.mesh, "data", index))

    def stage(self, index: int) -> Layout:
        """The part of one stage: a mesh of its own."""
        return dataclasses.replace(self, mesh=submesh(self.mesh, "stage", index))


def constrain(layout: Layout | None, x: ArrayT, axes: Sequence[str | None]) -> ArrayT:
    """Tells the compiler how an activation is split; where its size does not divide, it is whole.

    The tokens of a small step, for example.
    """
    if layout is None or layout.mesh.size == 1:
        return x
    shape: tuple[int, ...] = x.shape  # type: ignore[attr-defined]
    dividing = [
        None if axis is None or size % layout.ways(axis) else axis for size, axis in zip(shape, axes, strict=True)
    ]
    return lax.with_sharding_constraint(x, layout.sharding(dividing))


def on_local_parts(
    layout: Layout | None, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any, *arguments: Any
) -> Any:
    """``function(*arguments)``, run by each device of the layout on its part of the arrays.

    For kernels, which the compiler cannot split. Whatever ``function`` does must be independent along split axes.
    Without a layout, or with one device, it is a plain call.

    Args:
        in_axes: for each argument, a pytree like it whose leaves are tuples of logical axes.
        out_axes: the same for the result.
    """
    if layout is None or layout.mesh.size == 1:
        return function(*arguments)

    def specs(axes: Any) -> Any:
        return jax.tree.map(layout.table.spec, axes, is_leaf=_is_axes)

    # Kernels say nothing of how their results vary over the mesh, so that this cannot be checked.
    return jax.shard_map(
        function, mesh=layout.mesh, in_specs=tuple(map(specs, in_axes)), out_specs=specs(out_axes), check_vma=False
    )(*arguments)


def local_index(layout: Layout | None, axis: str) -> Any:
    """Inside ``on_local_parts``: which part of a logical axis this device has."""
    names = () if layout is None else layout.table.mesh_axes(axis)
    return lax.axis_index(names) if names else 0


def summed(layout: Layout | None, x: ArrayT, *axes: str | None) -> ArrayT:
    """Inside ``on_local_parts``: the sum over all devices that have different parts of these logical axes."""
    if layout is None:
        return x
    names = [name for axis in axes if axis is not None for name in layout.table.mesh_axes(axis)]
    split = tuple(name for name in names if layout.mesh.shape[name] > 1)
    return lax.psum(x, split) if split else x


def _is_axes(node: Any) -> bool:
    return type(node) is tuple and all(axis is None or isinstance(axis, str) for axis in node)


class _Options(Protocol):
    """What of ``EngineArgs`` decides a layout."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    sharding: str | None


class _Model(Protocol):
    """What of a ``ModelConfig`` decides a layout; models are a higher layer than this one."""

    @property
    def model_type(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def layers(self) -> tuple[Any, ...]: ...


def choose_layout(args: _Options, model: _Model, devices: Sequence[Any]) -> Layout:
    """The layout of one engine over all of ``devices``, its stages included.

    Without ``args.sharding`` it is Megatron's, or expert parallelism if that is enabled. KV heads that are fewer than
    the devices are repeated (see ``kv_repeats``). Where heads do not divide over the devices either, a layout that was
    not asked for by name leaves the attention whole on each, and says so in the log.

    Raises:
        ParameterError: if options, table, model and devices do not fit each other, with the numbers.
    """
    num_experts = max((layer.experts.num_experts for layer in model.layers if layer.experts is not None), default=0)
    if args.enable_expert_parallel and not num_experts:
        raise ParameterError("enable_expert_parallel", f"the model ({model.model_type}) has no experts to split")
    table = load_table(args.sharding or ("expert_parallel" if args.enable_expert_parallel else "megatron"))
    if args.enable_expert_parallel and not table.mesh_axes("experts"):
        raise ParameterError("enable_expert_parallel", f"the sharding {table.name} does not split the experts")
    tensor_size, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    sizes = _mesh_sizes(table, tensor_size, num_experts)
    if len(devices) != tensor_size * num_stages:
        raise ParameterError(
            "tensor_parallel_size",
            f"{tensor_size} devices in each of {num_stages} stages (pipeline_parallel_size) are "
            f"{tensor_size * num_stages}, and {len(devices)} are there",
        )
    layout = Layout(make_mesh(devices, stage=num_stages, **sizes), table)
    if _splits_heads(layout, model):
        return layout
    numbers = f"{model.num_heads} heads and {model.num_kv_heads} KV heads do not split over"
    if args.sharding is not None:
        raise ParameterError(
            "sharding",
            f"{numbers} the {layout.ways('kv_heads')} devices of {' and '.join(table.mesh_axes('kv_heads'))} "
            f"({table.name}); replicated_kv, or null for heads and kv_heads, leaves attention whole on each device",
        )
    logger.info("%s %d devices: each computes the whole attention; MLP and vocabulary are split", numbers, tensor_size)
    return dataclasses.replace(layout, table=table.whole("heads", "kv_heads"))


@contextlib.contextmanager
def naming_what_was_given(args: _Options) -> Iterator[None]:
    """Errors of a table that nobody has asked for are about the number of devices, which somebody has."""
    try:
        yield
    except ParameterError as error:
        if error.parameter != "sharding" or args.sharding is not None:
            raise
        raise ParameterError("tensor_parallel_size", error.reason) from None


def kv_repeats(layout: Layout | None, model: _Model) -> int:
    """On how many devices each KV head lies, because there are more of them than KV heads. 1: all are different.

    The model then runs with so many copies of each KV head, see ``jaxpage.models.weight_map.repeat_kv_heads``.
    """
    return 1 if layout is None else max(1, layout.ways("kv_heads") // model.num_kv_heads)


def without_effect(layout: Layout, model: _Model, params: Iterable[Sequence[str | None]]) -> list[str]:
    """What of a layout does nothing for a model, in words: devices without work of their own, rules without arrays.

    Args:
        params: logical axes of each of the model's parameters.
    """
    table, rules = layout.table, dict(layout.table.rules)
    params = list(params)
    axes = {axis for param in params for axis in param if axis is not None}
    used = {name for axis in axes for name in rules.get(axis, ())}
    found = [
        f"{name} splits no parameter of the model: the {size} devices along it hold and multiply the same"
        for name, size in ((name, layout.mesh.shape[name]) for name in SPLITTING_AXES)
        if size > 1 and name not in used
    ]
    if rules.get("experts"):
        split_over = " and ".join(rules["experts"])
        if "experts" not in axes:
            found.append(f"experts are split over {split_over}, and the model ({model.model_type}) has none")
        elif layout.ways("experts") == 1:
            found.append(f"experts are split over {split_over}, which is of size 1 here: each device has all of them")
    outside_of_experts = (axis for param in params if "experts" not in param for axis in param)
    passing = {"kv_heads", "ffn"} & set(outside_of_experts)
    if table.overlap and not any(layout.passes_tokens(axis, layout.ways("tokens")) for axis in passing):
        found.append("overlap hides nothing: neither kv_heads nor ffn is split as tokens are")
    return [f"sharding {table.name}: {reason}" for reason in found]


def _splits_heads(layout: Layout, model: _Model) -> bool:
    ways = layout.ways("kv_heads")
    return model.num_kv_heads % ways == 0 or (ways % model.num_kv_heads == 0 and model.num_heads % ways == 0)


def _mesh_sizes(table: ShardingTable, tensor_size: int, num_experts: int) -> Mapping[str, int]:
    """How the devices of a stage are divided between the mesh axes that split arrays."""
    sizes = dict(table.sizes)
    if sizes:
        if math.prod(sizes.values()) != tensor_size:
            raise ParameterError(
                "sharding",
                f"{table.name} is for a mesh of {shown_sizes(sizes)}, which is {math.prod(sizes.values())} devices; "
                f"tensor_parallel_size is {tensor_size}",
            )
        return sizes
    used = {name for _, names in table.rules for name in names}
    if "expert" not in used:
        along_expert = 1
    elif "model" not in used:
        along_expert = tensor_size
    elif table.mesh_axes("experts") == ("expert",):
        along_expert = math.gcd(tensor_size, num_experts) if num_experts else 1
    else:
        # As square as can be: what each axis moves falls with the size of the other.
        along_expert = max(size for size in range(1, math.isqrt(tensor_size) + 1) if tensor_size % size == 0)
    return {"model": tensor_size // along_expert, "expert": along_expert}
