"""Steps on their way through the stages: what each hands to the next, and the tokens, which go back to the first.

Stages run at the same time: the first one is given the next step while the last one still computes those before. So
with S stages a step reads the tokens that were sampled S calls of the scheduler before.

Where the first and the last stage are in different processes, the way back is a program that both run, and devices run
their programs in the order in which they are given. The last stage's process gives it right after the step. The first
stage's process must not: its devices would wait for the step to come through, and stand idle. It gives it S - 1 steps
later, when those devices have computed all that they can without the tokens. Not later than that, and before it hands
on the step it has just computed: each stage waits for the one after it to take what it hands over, so if all of them
had something to hand over, none would go on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxpage.batch import StepOutput
from jaxpage.runner.commands import Command
from jaxpage.runner.hand_over import HandOver
from jaxpage.runner.stage import StageWorker, zeros

Results = Future[StepOutput]
"""Of a step. They come, from wherever they are computed, when it is their turn or they are asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Debt:
    """Results that this process is to get from another one."""

    command: Command
    results: Results


def between(one: StageWorker, other: StageWorker) -> HandOver:
    """The way from one stage's devices to another's."""
    source, target = (stage.programs.first_stage_tokens.sharding for stage in (one, other))
    return HandOver(source, target)


class StagePipeline:
    """All stages of an engine, in their order, those of other processes included."""

    def __init__(
        self,
        stages: Sequence[StageWorker],
        way: Callable[[StageWorker, StageWorker], HandOver] = between,
    ) -> None:
        """``way`` makes the way from one stage to another."""
        self.stages = stages
        self._forward = [way(one, other) for one, other in itertools.pairwise(stages)]
        self._back = way(stages[-1], stages[0]) if len(stages) > 1 else None
        self._sampled: deque[tuple[int, jax.Array | None]] = deque()
        """Call and its tokens by slot, where the first stage wants them; only with several stages."""
        self._owed: deque[_Debt] = deque()

    def run(self, command: Command) -> Results | None:
        """Starts a step on the stages that are here and returns at once.

        None if neither the first nor the last stage is here.
        """
        num_stages, first, last = len(self.stages), self.stages[0], self.stages[-1]
        self.bring_back(command.call - num_stages)
        arrived: Any = self._tokens_before(command.call) if num_stages > 1 else None
        for index, stage in enumerate(self.stages):
            if index == 1:
                self.bring_back(command.call - num_stages + 1)
            if index > 0:
                arrived = self._forward[index - 1](arrived, stage.programs.boundary_shape(command.num_tokens))
            arrived = stage.run(command.num_tokens, command.packed, arrived) if stage.is_here else None
        if not (first.is_here or last.is_here):
            return None
        results: Results = Future()
        if first.is_here and not last.is_here:
            self._owed.append(_Debt(command, results))
        else:
            _deliver(results, self._give_back(command, arrived) if num_stages > 1 else arrived)
        return results

    def owes(self, call: int) -> bool:
        """Whether the results of this call, or of one before it, have not been asked to come."""
        return bool(self._owed) and self._owed[0].command.call <= call

    def bring_back(self, call: int) -> None:
        """Asks for the results of all calls up to this one."""
        while self.owes(call):
            debt = self._owed.popleft()
            _deliver(debt.results, self._give_back(debt.command, None))

    def forget(self) -> None:
        """The next step is the first one."""
        self._sampled.clear()
        self._owed.clear()

    def _tokens_before(self, call: int) -> jax.Array | None:
        """By slot, what was sampled up to the call that is as many calls back as there are stages.

        Later ones would make the first stage wait for the last. Without any, nobody in the step has sampled yet.
        """
        latest = call - len(self.stages)
        while len(self._sampled) > 1 and self._sampled[1][0] <= latest:
            self._sampled.popleft()
        if self._sampled and self._sampled[0][0] <= latest:
            return self._sampled[0][1]
        first = self.stages[0]
        return zeros(first.programs.first_stage_tokens) if first.is_here else None

    def _give_back(self, command: Command, output: StepOutput | None) -> StepOutput:
        """Hands the tokens to the first stage; and to its process, which does not have the last one, what it reads."""
        first, last = self.stages[0], self.stages[-1]
        assert self._back is not None, "one stage has nobody to give to"
        tokens = last.state.last_token if last.state is not None else None
        self._sampled.append((command.call, self._back(tokens, first.programs.first_stage_tokens)))
        if self._back.is_local:
            assert output is not None, "the last stage is here"
            return output
        shapes = last.programs.output_shapes(command.num_tokens)
        flags = last.programs.packing(command.num_tokens).flags(command.packed)
        read = {"token_ids": True, "sampled": flags["has_logprobs"], "prompt": flags["has_prompt_logprobs"]}
        read["pooled"] = flags["has_pooling"]
        given: dict[str, Any] = {}
        for name in read:
            own, shape = getattr(output, name, None), getattr(shapes, name)
            leaves = [None] * len(jax.tree.leaves(shape)) if own is None else jax.tree.leaves(own)
            if read[name]:
                leaves = [self._back(leaf, each) for leaf, each in zip(leaves, jax.tree.leaves(shape), strict=True)]
            given[name] = jax.tree.unflatten(jax.tree.structure(shape), leaves)
        return StepOutput(**given) if output is None else output


def _deliver(results: Results, output: StepOutput) -> None:
    output.token_ids.copy_to_host_async()  # who reads them next finds them there
    results.set_result(output)
