"""What the host half of a runner tells the device half, as plain data: it can be sent to other processes.

Must not know requests: slots, blocks and packed numbers are all there is.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpage.kv.block_ops import BlockOp

NO_BATCH = np.zeros(0, np.int32)


@dataclasses.dataclass(slots=True)
class StateFill:
    """What a request brings into its slot of the sampling state.

    Attributes:
        token_ids: prompt, and what was generated before a preemption; padded with the vocabulary size.
        bias: added to the logits, [V] float32.
        stop_ids: ids masked until min_tokens; padded with the vocabulary size.
    """

    slot: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    bias: np.ndarray
    stop_ids: np.ndarray


@dataclasses.dataclass(slots=True)
class Command:
    """One step, and what has to happen before it. Commands take effect in their order.

    Attributes:
        call: number of the scheduler's call that it comes from; rises, with gaps for calls that gave nothing.
        block_ops: blocks to move first.
        masks: by slot, the tokens that may be sampled there now (see ``SamplingState.token_mask``).
        num_tokens: tokens of the compiled step to run; 0: none, only state and blocks change.
        packed: the batch (see ``Packing``); empty if there is no step.
    """

    call: int
    block_ops: list[BlockOp]
    fills: list[StateFill]
    masks: dict[int, np.ndarray]
    num_tokens: int
    packed: np.ndarray
