"""Moving blocks: any list of operations means what it says, one after the other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.config import EngineArgs, resolve
from jaxpage.errors import StartupError
from jaxpage.kv.block_ops import BlockOp, BlockOpKind
from jaxpage.models.registry import build_config
from jaxpage.parallel.placement import Placement
from jaxpage.runner.block_ops import LARGE_BATCH, SMALL_BATCH, BlockMover, batches
from jaxpage.runner.programs import StagePrograms
from jaxpage.runner.runner import Runner
from jaxpage.runner.stage import StageWorker
from jaxpage.runner.worker import Worker
from jaxpage.scheduler.schedule import Schedule
from jaxpage.weights.loader import dummy_params

COPY, SWAP_OUT, SWAP_IN = BlockOpKind.COPY, BlockOpKind.SWAP_OUT, BlockOpKind.SWAP_IN
NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS = 2, 40, 24
BLOCK_SHAPE = (1, 2, 8)
SHAPES = [jax.ShapeDtypeStruct((NUM_BLOCKS, *BLOCK_SHAPE), jnp.float32)] * NUM_LAYERS


@functools.cache
def programs() -> dict[Any, Any]:
    """Compiled once and given to every mover: they depend on the shapes alone."""
    return {}


def new_mover(num_host_blocks: int = NUM_HOST_BLOCKS) -> BlockMover:
    mover = BlockMover(SHAPES, num_host_blocks, jax.devices()[0])
    mover._programs = programs()
    return mover


def new_cache() -> list[np.ndarray]:
    """Every block of every layer has a value of its own."""
    ids = np.arange(NUM_LAYERS * NUM_BLOCKS, dtype=np.float32).reshape(NUM_LAYERS, NUM_BLOCKS, 1, 1, 1)
    return list(np.broadcast_to(ids, (NUM_LAYERS, NUM_BLOCKS, *BLOCK_SHAPE)).copy())


def on_device(cache: list[np.ndarray]) -> list[jax.Array]:
    return [jnp.array(layer) for layer in cache]


class SequentialModel:
    """The meaning of block operations, in numpy."""

    def __init__(self) -> None:
        self.cache = new_cache()
        self.host = [np.zeros((NUM_HOST_BLOCKS, *BLOCK_SHAPE), np.float32) for _ in range(NUM_LAYERS)]

    def run(self, ops: list[BlockOp]) -> None:
        for kind, source, destination in ops:
            for cache, host in zip(self.cache, self.host, strict=True):
                if kind is COPY:
                    cache[destination] = cache[source]
                elif kind is SWAP_OUT:
                    host[destination] = cache[source]
                else:
                    cache[destination] = host[source]


def some_ops(few_blocks: int = 6) -> st.SearchStrategy[list[BlockOp]]:
    """Operations that keep meeting the same blocks, and runs long enough for large batches."""
    block, host_block = st.integers(1, few_blocks), st.integers(0, few_blocks - 1)
    single = st.one_of(
        st.builds(BlockOp, st.just(COPY), block, block),
        st.builds(BlockOp, st.just(SWAP_OUT), block, host_block),
        st.builds(BlockOp, st.just(SWAP_IN), host_block, block),
    )
    run = st.builds(
        lambda kind, length, source, destination: [
            BlockOp(kind, source + index, destination + index) for index in range(length)
        ],
        st.sampled_from(BlockOpKind), st.integers(1, 20), st.integers(1, 4), st.integers(1, 4),
    )  # fmt: skip
    return st.lists(st.one_of(single.map(lambda op: [op]), run), max_size=12).map(
        lambda parts: list(itertools.chain(*parts))
    )


@given(st.lists(some_ops(), min_size=1, max_size=3))
def test_any_operations_equal_one_after_the_other(calls: list[list[BlockOp]]) -> None:
    mover, model = new_mover(), SequentialModel()
    cache = on_device(new_cache())
    for ops in calls:
        model.run(ops)
        cache = mover.run(cache, ops)
    for layer, expected in zip(cache, model.cache, strict=True):
        np.testing.assert_array_equal(np.asarray(layer)[1:], expected[1:])
    # What lies in the host's memory, seen through the cache.
    cache = mover.run(cache, [BlockOp(SWAP_IN, block, block + 1) for block in range(NUM_HOST_BLOCKS)])
    for layer, expected in zip(cache, model.host, strict=True):
        np.testing.assert_array_equal(np.asarray(layer)[1 : NUM_HOST_BLOCKS + 1], expected)


@given(some_ops())
def test_batches_keep_order_and_can_be_done_at_once(ops: list[BlockOp]) -> None:
    cut = list(batches(ops))
    assert [op for batch in cut for op in batch] == ops
    for batch in cut:
        assert len({op.kind for op in batch}) == 1
        assert len(batch) == LARGE_BATCH or 0 < len(batch) <= SMALL_BATCH
        destinations = [op.destination for op in batch]
        assert len(set(destinations)) == len(batch)
        if batch[0].kind is COPY:
            assert all(op.source not in destinations[:index] for index, op in enumerate(batch))


def test_batches_are_as_large_as_may_be() -> None:
    def sizes(ops: list[BlockOp]) -> list[int]:
        return [len(batch) for batch in batches(ops)]

    assert sizes([]) == []
    assert sizes([BlockOp(SWAP_OUT, 1, index) for index in range(38)]) == [16, 16, 4, 2]
    # Reading a block that is written later is no reason to cut, reading one that was written is.
    assert sizes([BlockOp(COPY, 1, 2), BlockOp(COPY, 3, 1)]) == [2]
    assert sizes([BlockOp(COPY, 1, 2), BlockOp(COPY, 2, 3)]) == [1, 1]
    # Host block 2 is not block 2 of the device.
    assert sizes([BlockOp(SWAP_IN, 1, 2), BlockOp(SWAP_IN, 2, 3)]) == [2]


def test_a_host_block_used_again_holds_the_later_block() -> None:
    mover, start = new_mover(), new_cache()
    cache = on_device(start)
    cache = mover.run(cache, [BlockOp(SWAP_OUT, 7, 3), BlockOp(SWAP_IN, 3, 8)])
    cache = mover.run(cache, [BlockOp(SWAP_OUT, 9, 3)])
    cache = mover.run(cache, [BlockOp(SWAP_IN, 3, 10)])
    for layer, before in zip(cache, start, strict=True):
        np.testing.assert_array_equal(np.asarray(layer)[[8, 10]], before[[7, 9]])


def test_swapped_blocks_lie_in_pinned_memory_and_come_back_as_they_were() -> None:
    shapes = [jax.ShapeDtypeStruct((NUM_BLOCKS, *BLOCK_SHAPE), jnp.bfloat16)] * NUM_LAYERS
    mover = BlockMover(shapes, 1, jax.devices()[0])
    values = np.random.default_rng(0).standard_normal((NUM_BLOCKS, *BLOCK_SHAPE)).astype(jnp.bfloat16)
    values[5, 0, :, :4] = [np.nan, np.inf, -np.inf, -0.0]
    cache = [jnp.asarray(values) for _ in shapes]
    cache = mover.run(cache, [BlockOp(SWAP_OUT, 5, 0)])
    assert {block.sharding.memory_kind for block in mover._host_blocks} == {"pinned_host"}
    for layer in mover.run(cache, [BlockOp(SWAP_IN, 0, 6)]):
        np.testing.assert_array_equal(np.asarray(layer, np.float32)[6], values[5].astype(np.float32))


def test_a_warm_mover_compiles_nothing_and_keeps_the_cache_in_place() -> None:
    mover, start = BlockMover(SHAPES, NUM_HOST_BLOCKS, jax.devices()[0]), new_cache()
    cache = on_device(start)
    addresses = [layer.unsafe_buffer_pointer() for layer in cache]
    cache = mover.warm_up(cache)
    for layer, before in zip(cache, start, strict=True):
        np.testing.assert_array_equal(np.asarray(layer)[1:], before[1:])
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for count in (1, SMALL_BATCH, LARGE_BATCH, LARGE_BATCH + 1):
            cache = mover.run(cache, [BlockOp(COPY, 1, 2 + index) for index in range(count)])
            cache = mover.run(cache, [BlockOp(SWAP_OUT, 1 + index, index) for index in range(count)])
            cache = mover.run(cache, [BlockOp(SWAP_IN, index, 1 + index) for index in range(count)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert [layer.unsafe_buffer_pointer() for layer in cache] == addresses


def test_without_host_blocks_only_copies_are_compiled() -> None:
    mover = new_mover(0)
    mover._programs = {}
    cache = mover.warm_up(on_device(new_cache()))
    assert {kind for kind, _ in mover._programs} == {COPY}
    assert mover.run(cache, []) is cache


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_host_blocks: must be at least 0, got -1"):
        new_mover(-1)
    other = jax.ShapeDtypeStruct((NUM_BLOCKS, 1, 2, 16), jnp.float32)
    with pytest.raises(ValueError, match="cache_shapes: layers must have one shape"):
        BlockMover([SHAPES[0], other], 0, jax.devices()[0])


def test_swapping_that_cannot_work_is_said_in_one_line() -> None:
    @dataclasses.dataclass
    class Memoryless:
        device_kind: str = "a fake device"

        def addressable_memories(self) -> list[Any]:
            return []

    with pytest.raises(StartupError, match="a fake device reaches no pinned host memory; start with swap_space 0"):
        BlockMover(SHAPES, 1, Memoryless())

    def fail(*arguments: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more memory\nand more")

    mover = new_mover()
    mover._programs = {**programs(), (SWAP_OUT, LARGE_BATCH): fail}
    with pytest.raises(StartupError, match=r"host memory \(RESOURCE_EXHAUSTED: no more memory\); start with swap_sp"):
        mover.warm_up(on_device(new_cache()))


HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def new_runner(**options: Any) -> Runner:
    """A runner of the smallest size, warm."""
    model, specs = build_config(HF_CONFIG)
    args = EngineArgs(max_num_batched_tokens=1, max_model_len=8, block_size=2, num_gpu_blocks_override=5, **options)
    config = resolve(args, model_max_len=8, vocab_size=64, platform="cpu")
    device = jax.devices()[0]
    placement = Placement(device=device)
    params = dummy_params(model, specs, "float32", placement, 0)
    return Runner(Worker(args, config, [StageWorker(StagePrograms(model, config, placement), params)]), model, config)


@pytest.mark.parametrize(("kv_cache_dtype", "arrays_a_layer"), [("auto", 1), ("int8", 2), ("fp8", 2)])
def test_a_schedule_without_requests_only_moves_blocks(kv_cache_dtype: str, arrays_a_layer: int) -> None:
    """Scales move with what they scale."""
    runner = new_runner(preemption_mode="swap", kv_cache_dtype=kv_cache_dtype)
    # One request of four blocks can run: no more are ever swapped out.
    assert runner.num_host_blocks == 4
    runner.worker.stages[0].kv_cache = jax.tree.map(lambda array: array.at[1].set(7), runner.worker.stages[0].kv_cache)
    ops = [BlockOp(SWAP_OUT, 1, 3), BlockOp(COPY, 2, 1), BlockOp(SWAP_IN, 3, 4)]
    assert runner.dispatch(Schedule([], 0, block_ops=ops)) is None
    arrays = jax.tree.leaves(runner.worker.stages[0].kv_cache)
    assert len(arrays) == arrays_a_layer * runner.model.num_layers
    for layer in arrays:
        assert np.asarray(layer, np.float32)[1:, 0, 0, 0].tolist() == [0, 0, 0, 7, 0]


def test_a_runner_starts_without_swapping_where_it_fails_unless_told_to_swap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_batch = BlockMover._run_batch

    def fail(self: BlockMover, kv_cache: list[jax.Array], batch: list[BlockOp]) -> list[jax.Array]:
        if batch[0].kind is SWAP_OUT:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: host memory")
        return run_batch(self, kv_cache, batch)

    monkeypatch.setattr(BlockMover, "_run_batch", fail)
    assert new_runner(swap_space=1).num_host_blocks == 0
    assert "(UNIMPLEMENTED: host memory); start with swap_space 0; preempted requests will be" in caplog.text
    with pytest.raises(StartupError, match="UNIMPLEMENTED: host memory"):
        new_runner(preemption_mode="swap")
