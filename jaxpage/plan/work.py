"""What a step has to compute, read and send on each device, counted from shapes, and the least time that takes.

Counted is what cannot be avoided: products of weights and of attention, each weight and each key and value read once,
new keys and values written, sums over devices. Norms, sampling and activations that may stay on the chip are left out,
so times are lower bounds and rates upper bounds. It must not know what fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from jaxpage.models.config import ExpertsSpec
from jaxpage.models.weight_map import ParamSpec
from jaxpage.plan.hlo import Collective, total_wire_bytes, wire_bytes
from jaxpage.plan.scenario import StagePart
from jaxpage.runner.programs import device_bytes
from pallas_kernels.targets.chips import Chip


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one step on one device."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    wire_bytes: float

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def times(self, chip: Chip, dtype: str) -> dict[str, float]:
        """Seconds that each resource is busy. They overlap at best, so that the step takes the longest of them.

        Products are in the type of the activations, whatever weights are stored in.
        """
        return {
            "compute": self.flops / chip.flops_per_s[dtype],
            "memory": self.memory_bytes / chip.bytes_per_s,
            # Vendors add up both directions, of which a device sends in one.
            "interconnect": self.wire_bytes / (chip.interconnect_bytes_per_s / 2),
        }


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A parameter's part on a device.

    Attributes:
        kind: "token": multiplies each token; "row": each row that is sampled; "look-up": nothing is multiplied.
        experts: of a mixture, of which a token takes a few; None: all of it is for every token.
    """

    kind: str
    size: int
    num_bytes: int
    experts: ExpertsSpec | None


class StageWork:
    """Counts the work of steps of one stage."""

    def __init__(self, part: StagePart) -> None:
        self.part = part
        self.model = part.programs.model

    def decode(self, num_requests: float, context: int) -> Work:
        """A token each for requests that have ``context`` tokens in the cache."""
        keys = [min(context, layer.sliding_window or context) for layer in self.model.layers]
        return self._work(num_requests, num_requests, num_requests * sum(keys), num_requests * (sum(keys) + len(keys)))

    def prefill(self, num_tokens: int, context: int) -> Work:
        """A step of ``num_tokens`` prompt tokens, of prompts of ``context`` tokens that are computed in such steps."""
        pairs = read = 0.0
        for layer in self.model.layers:
            window = min(layer.sliding_window or context, context)
            # Keys that a token sees, on average over its prompt; the first ones of a window see fewer.
            pairs += num_tokens * (window - window * (window - 1) / (2 * context))
            # A chunk reads what is there of its prompt once, half of it on average.
            read += num_tokens + (min(window, context / 2) if num_tokens < context else num_tokens)
        return self._work(num_tokens, max(1.0, num_tokens / context), pairs, read)

    def _work(self, tokens: float, rows: float, pairs: float, kv_tokens: float) -> Work:
        """``pairs`` of a query and a key, and keys read or written, are summed over layers."""
        flops = weight_bytes = 0.0
        for weight in self._weights:
            experts = weight.experts
            if experts is None:
                count = {"token": tokens, "row": rows, "look-up": 0.0}[weight.kind]
                flops += 2 * count * weight.size
                weight_bytes += weight.num_bytes
            else:
                share = experts.num_experts_per_tok / experts.num_experts
                flops += 2 * tokens * share * weight.size
                # Of experts that are chosen evenly, so many are expected to be chosen at all.
                weight_bytes += weight.num_bytes * (1 - (1 - share) ** tokens)
        flops += 4 * pairs * self._local_heads * self.model.head_dim
        kv_bytes = kv_tokens * self.part.programs.device_bytes_per_block / (
            self.part.programs.config.block_size * self.model.num_layers
        )  # fmt: skip
        return Work(flops, weight_bytes, kv_bytes, total_wire_bytes(self.collectives(tokens, rows)))

    @functools.cached_property
    def _weights(self) -> list[_Weight]:
        """Parameters by what they are used for; those that are used alike are one."""
        sums: dict[tuple[str, ExpertsSpec | None], list[int]] = {}
        for spec in self.part.specs:
            kind, experts = self._kind(spec)
            total = sums.setdefault((kind, experts), [0, 0])
            if kind != "unused":
                total[0] += self.part.local_size(spec)
                total[1] += device_bytes(self.part.param(spec))
        return [_Weight(kind, size, bytes_, experts) for (kind, experts), (size, bytes_) in sums.items() if size]

    def _kind(self, spec: ParamSpec) -> tuple[str, ExpertsSpec | None]:
        name, programs = spec.path[0], self.part.programs
        if name in ("lm_head", "embedding"):
            is_output = name == "lm_head" or self.model.tied_embeddings
            # Of an embedding that is not the output too, a few rows are read.
            return ("row" if is_output and programs.is_last else "unused"), None
        if name != "layers":
            return "look-up", None
        if spec.axes[0] == "experts":
            return "token", self.model.layers[int(spec.path[1])].experts
        return ("token" if len(spec.shape) > 1 and not str(spec.path[-1]).endswith("_bias") else "look-up"), None

    @property
    def _local_heads(self) -> float:
        return self.model.num_heads / self.part.programs.placement.ways("heads")

    def collectives(self, tokens: float, rows: float) -> list[Collective]:
        """What follows from how weights are split: a product over a split axis is summed over its devices."""
        found: dict[str, list[tuple[float, int]]] = {"embedding": [], "layers": [], "logits": []}
        ways, itemsize = self.part.programs.placement.ways, self.part.itemsize
        hidden = self.model.hidden_size / ways("hidden")
        if self.part.programs.is_first:
            found["embedding"].append((tokens * hidden * itemsize, ways("vocab")))
        for spec in self._summed():
            group = ways(spec.axes[-1])
            if spec.path[-1] == "experts_down":
                group *= ways("experts")
            outputs = [size // ways(axis) for size, axis in zip(spec.shape[:-1], spec.axes, strict=False)]
            if spec.axes[0] == "experts":
                outputs[0] = 1  # the results of a token's experts are added up
            found["layers"].append((tokens * math.prod(outputs) * itemsize, group))
        if self.part.programs.is_last:
            vocab = self.model.vocab_size / ways("vocab")
            found["logits"].append((rows * vocab * itemsize, ways("hidden")))
        return [total for where, sums in found.items() if (total := _all_reduces(where, sums, self.model.num_layers))]

    def _summed(self) -> Iterator[ParamSpec]:
        for spec in self.part.specs:
            if spec.path[0] == "layers" and spec.is_linear:
                yield spec


def _all_reduces(where: str, sums: list[tuple[float, int]], num_layers: int) -> Collective | None:
    sums = [(size, group) for size, group in sums if group > 1]
    if not sums:
        return None
    return Collective(
        where,
        "all-reduce",
        len(sums),
        sum(size for size, _ in sums),
        sum(wire_bytes("all-reduce", size, group) for size, group in sums),
        -(-len(sums) // num_layers) if where == "layers" else 0,
    )
