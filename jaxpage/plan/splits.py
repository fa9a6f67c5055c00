"""How the devices of a slice are shared out where nobody says: the rule of plans, suggestions and the README's table.

It must not know what else could be turned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpage.errors import ParameterError
from jaxpage.plan.memory import find_memory
from jaxpage.plan.scenario import Scenario, make_scenario
from jaxpage.plan.slices import Slice

AS_GOOD = 0.98
"""A split that holds this share of what the best one holds is as good: then more devices to a layer are faster."""


def choose_scenario(
    name: str, values: Mapping[str, Any], where: Slice, options: Mapping[str, Any], temp_factor: float = 1.0
) -> Scenario:
    """``make_scenario``, where ``tensor_parallel_size`` may be left open, and ``data_parallel_size`` with it.

    Of the ways to share the devices between tensor parallelism and replicas it takes the one that holds the most
    requests of full length, of equal ones the one with fewer replicas: beyond as many devices as KV heads, a larger
    tensor_parallel_size keeps each key and value more than once, and a smaller one the weights. If none holds any
    request, and for a sharding that is given by name, it is the largest tensor_parallel_size that can be laid out.

    Args:
        temp_factor: see ``find_memory``.

    Raises:
        ParameterError: naming the option that does not fit, with the numbers.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if "tensor_parallel_size" in options:
        return make_scenario(name, values, where, options)
    splits = _splits(name, values, where, options)
    if "sharding" in options:
        return next(splits)
    first, *others = splits
    if not others:
        return first
    held = [(_full_requests(scenario, temp_factor), scenario) for scenario in (first, *others)]
    most = max(requests for requests, _ in held)
    return next(scenario for requests, scenario in held if requests >= AS_GOOD * most)


def _splits(name: str, values: Mapping[str, Any], where: Slice, options: Mapping[str, Any]) -> Iterator[Scenario]:
    """All that can be laid out, the one with most devices to a layer first. A CPU is one device."""
    shared = options.get("pipeline_parallel_size", 1) * options.get("data_parallel_size", 1)
    available = 1 if where.is_cpu else max(1, where.num_devices // shared)
    for size in range(available, 0, -1):
        if available % size:
            continue
        chosen = {"data_parallel_size": available // size, **options, "tensor_parallel_size": size}
        try:
            scenario = make_scenario(name, values, where, chosen)
        except ParameterError:
            if size == 1:
                raise
            continue
        if scenario.splits_attention or "sharding" in options:  # which may leave attention whole
            yield scenario


def _full_requests(scenario: Scenario, temp_factor: float) -> float:
    """Of max_model_len tokens, that all engines together hold."""
    memory = find_memory(scenario, factor=temp_factor)
    return memory.full_requests * scenario.num_replicas if memory.fits else 0.0
