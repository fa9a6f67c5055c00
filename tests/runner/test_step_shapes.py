"""The shapes of a step, and the one array that carries all of its metadata."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.params import SamplingParams
from jaxpage.request import Request
from jaxpage.runner.batch_builder import pack_schedule, scored_range
from jaxpage.runner.buckets import bucket_for, token_buckets
from jaxpage.runner.packing import Packing
from jaxpage.runner.slots import SlotTable
from jaxpage.scheduler.schedule import Schedule, ScheduledRequest


@pytest.mark.parametrize(
    ("max_tokens", "buckets"),
    [(1, [1]), (2, [1, 2]), (8, [1, 8]), (9, [1, 8, 9]), (64, [1, 8, 16, 32, 64]), (100, [1, 8, 16, 32, 64, 100])],
)
def test_buckets_end_with_the_largest_step(max_tokens: int, buckets: list[int]) -> None:
    assert token_buckets(max_tokens) == buckets
    for size in range(1, max_tokens + 1):
        bucket = bucket_for(buckets, size)
        assert bucket >= size
        assert all(other < size for other in buckets if other < bucket)


def request(prompt: list[int], slot: int, **params: object) -> Request:
    made = Request("r", prompt, SamplingParams(**params), max_tokens=10, seed=2**40 + 5)  # type: ignore[arg-type]
    made.slot = slot
    return made


def test_a_schedule_becomes_rows_and_tokens() -> None:
    slots = SlotTable(max_num_seqs=4, max_blocks=6, block_size=4)
    decoding = request([5, 6], slot=2, temperature=0.5, top_k=7)
    decoding.block_ids = [9]
    filling = request([10, 11, 12, 13, 14], slot=0, temperature=0, prompt_logprobs=1, min_tokens=2)
    filling.block_ids = [3, 4]
    forked = request([5, 6], slot=1, temperature=1)
    forked.block_ids = [9]
    for each, start in ((decoding, 2), (filling, 1), (forked, 2)):
        slots.admit(each)
        slots.refresh_blocks(each, start)
    items = [
        ScheduledRequest(decoding, 2, 1, samples=True, output_index=1),
        ScheduledRequest(filling, 1, 3, samples=False, output_index=0),
    ]
    items.append(ScheduledRequest(forked, 2, 0, samples=True, output_index=0, parent=items[0]))
    packing = Packing(num_tokens=8, num_rows=4, max_blocks=6)
    packed, flags = pack_schedule(Schedule(items, 4), packing, slots)
    fields = {name: np.asarray(array) for name, array in packing.split(jnp.asarray(packed)).items()}
    # Position 2 of the first request was sampled on the device, which the host has not seen.
    assert fields["token_ids"].tolist() == [-1, 11, 12, 13, 0, 0, 0, 0]
    assert fields["prompt_targets"].tolist() == [-1, 12, 13, 14, -1, -1, -1, -1]
    assert fields["cu_seqlens_q"].tolist() == [0, 1, 4, 4, 4]
    assert fields["seq_lens"].tolist() == [3, 4, 0, 0]
    # The forked row has no tokens: it samples behind its parent's last one, where it has a position of its own.
    assert fields["logits_indices"].tolist()[:3] == [0, 3, 0]
    assert fields["sample_positions"].tolist()[:3] == [3, 4, 2]
    assert fields["slots"].tolist() == [2, 0, 1, 4]
    assert fields["samples"].tolist() == [1, 0, 1, 0]
    assert fields["block_tables"][:2].tolist() == [[9, 0, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0]]
    assert fields["temperature"].tolist() == [0.5, 0, 1, 0]
    assert fields["top_k"].tolist() == [7, 0, 0, 0]
    assert fields["repetition_penalty"].tolist() == [1, 1, 1, 1]
    assert fields["seeds"][0].tolist() == [2**8, 5, 0]
    assert fields["suppress_stop"].tolist() == [0, 1, 0, 0]
    assert flags == {
        "has_edits": True,
        "has_randomness": True,
        "has_filters": True,
        "has_logprobs": False,
        "has_prompt_logprobs": True,
        "has_pooling": False,
    }
    assert dict(zip(Packing.FLAGS, (fields["flags"] != 0).tolist(), strict=True)) == flags


def test_a_replaced_block_reaches_the_table() -> None:
    slots = SlotTable(max_num_seqs=1, max_blocks=4, block_size=4)
    each = request(list(range(9)), slot=0)
    each.block_ids = [3, 4]
    slots.admit(each)
    slots.refresh_blocks(each, 0)
    each.block_ids = [3, 7]  # copied before a write to position 5
    slots.refresh_blocks(each, 5)
    assert slots.block_tables[0].tolist() == [3, 7, 0, 0]
    each.block_ids = [3, 7, 8]
    slots.refresh_blocks(each, 8)
    assert slots.block_tables[0].tolist() == [3, 7, 8, 0]


def test_a_batch_without_wishes_has_no_flags() -> None:
    slots = SlotTable(max_num_seqs=2, max_blocks=2, block_size=4)
    greedy = request([5, 6], slot=1, temperature=0, top_k=3)
    slots.admit(greedy)
    item = ScheduledRequest(greedy, 0, 2, samples=True, output_index=0)
    _, flags = pack_schedule(Schedule([item], 2), Packing(8, 2, 2), slots)
    assert not any(flags.values())


@pytest.mark.parametrize(
    ("start", "count", "scored", "expected"),
    [(0, 3, 0, (1, 4)), (3, 2, 4, (4, 5)), (0, 5, 0, (1, 5)), (0, 5, 4, (4, 5)), (5, 1, 5, (6, 5))],
)
def test_every_prompt_position_is_scored_once(start: int, count: int, scored: int, expected: tuple[int, int]) -> None:
    scoring = request([1, 2, 3, 4, 5], slot=0, prompt_logprobs=0)
    scoring.num_scored_tokens = scored
    item = ScheduledRequest(scoring, start, count, samples=False, output_index=0)
    assert scored_range(item) == expected
