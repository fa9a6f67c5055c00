"""Turns a schedule into the packed int32 array of one step."""

from __future__ import annotations

import numpy as np

from jaxpage.runner.packing import Packing
from jaxpage.runner.slots import SETTINGS, SlotTable
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest


def pack_schedule(schedule: Schedule, packing: Packing, slots: SlotTable) -> tuple[np.ndarray, dict[str, bool]]:
    """The packed batch, and its flags (see ``Packing.FLAGS``)."""
    packed, fields = packing.allocate()
    fields["prompt_targets"].fill(-1)
    items = schedule.requests
    position, has_logprobs, has_prompt_logprobs = 0, False, False
    poolings = [item.request.pooling for item in items]
    for item in items:
        _write_tokens(item, fields, position)
        has_prompt_logprobs |= _write_targets(item, fields, position)
        has_logprobs |= item.samples and (item.request.is_beam or item.request.params.logprobs is not None)
        position += item.num_tokens

    rows = slice(0, len(items))
    row_slots = np.full(packing.num_rows, slots.spare, np.int32)
    row_slots[rows] = [item.request.slot for item in items]
    lengths = np.array([item.num_tokens for item in items], np.int32)
    fields["cu_seqlens_q"][1:] = position
    fields["cu_seqlens_q"][1 : len(items) + 1] = np.cumsum(lengths)
    positions = [item.start + item.num_tokens for item in items]
    fields["sample_positions"][rows] = positions
    fields["seq_lens"][rows] = positions
    fields["logits_indices"][:] = np.maximum(fields["cu_seqlens_q"][1:] - 1, 0)
    _write_forks(items, fields)
    fields["samples"][rows] = [item.samples for item in items]
    fields["slots"][:] = row_slots
    fields["block_tables"][rows] = slots.block_tables[row_slots[rows]]
    fields["seeds"][:] = slots.seeds[row_slots]
    for name in SETTINGS:
        fields[name][:] = slots.settings[name][row_slots]
    fields["has_bias"][:] = slots.has_bias[row_slots]
    fields["has_mask"][:] = slots.has_mask[row_slots]
    fields["pools_mean"][rows] = [pooling == "mean" for pooling in poolings]
    output_index = np.array([item.output_index for item in items], np.int32)
    fields["suppress_stop"][rows] = output_index < slots.min_tokens[row_slots[rows]]

    flags = {
        "has_edits": bool(
            fields["suppress_stop"].any()
            or fields["has_bias"].any()
            or fields["has_mask"].any()
            or slots.has_penalties[row_slots].any()
        ),
        "has_randomness": bool(fields["temperature"].any()),
        "has_filters": bool(slots.has_filters[row_slots].any()),
        "has_logprobs": has_logprobs,
        "has_prompt_logprobs": has_prompt_logprobs,
        "has_pooling": any(poolings),
    }
    fields["flags"][:] = [flags[name] for name in Packing.FLAGS]
    return packed, flags


def _write_tokens(item: ScheduledRequest, fields: dict[str, np.ndarray], position: int) -> None:
    known = item.request.token_ids
    if item.num_tokens == 0:
        return
    if item.num_tokens == 1:
        # -1: sampled by a step still in flight; the device has it.
        fields["token_ids"][position] = known[item.start] if item.start < len(known) else -1
        return
    end = item.start + item.num_tokens
    part = known[item.start : end]
    fields["token_ids"][position : position + len(part)] = part
    fields["token_ids"][position + len(part) : position + item.num_tokens] = -1


def _write_forks(items: list[ScheduledRequest], fields: dict[str, np.ndarray]) -> None:
    """Forked rows come last: they attend to nothing and sample where their parent does."""
    row_of: dict[int, int] = {}
    for row in range(len(items) - 1, -1, -1):
        if items[row].parent is None:
            break
        if not row_of:
            row_of = {id(item): place for place, item in enumerate(items)}
        fields["seq_lens"][row] = 0
        fields["logits_indices"][row] = fields["logits_indices"][row_of[id(items[row].parent)]]


def _write_targets(item: ScheduledRequest, fields: dict[str, np.ndarray], position: int) -> bool:
    """Asks for scores of the prompt tokens after this item's positions that were not delivered before."""
    request = item.request
    if request.params.prompt_logprobs is None:
        return False
    first, last = scored_range(item)
    if first >= last:
        return False
    offset = position + first - 1 - item.start
    fields["prompt_targets"][offset : offset + last - first] = request.prompt_token_ids[first:last]
    return True


def scored_range(item: ScheduledRequest) -> tuple[int, int]:
    """The prompt positions [first, last) whose tokens are scored by this item: position i by the logits of i - 1."""
    request = item.request
    first = max(item.start + 1, request.num_scored_tokens, 1)
    return first, min(item.start + item.num_tokens + 1, request.num_prompt_tokens)
