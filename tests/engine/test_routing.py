"""Which of several engines gets a prompt."""

from __future__ import annotations

import pytest

from jaxpage.engine.replicas.devices import split_devices, visibility
from jaxpage.engine.replicas.routing import MAX_LOAD_DISTANCE, Router
from jaxpage.errors import StartupError

BLOCK = 4
SYSTEM = list(range(100, 112))
"""A prefix of three blocks."""


class Desk:
    """A router with its questions made short; prompts stay where they were sent until ``end``."""

    def __init__(self, num_engines: int = 2, capacity_blocks: int = 100) -> None:
        self.router = Router(num_engines, BLOCK, capacity_blocks)
        self.living = list(range(num_engines))

    def send(self, token_ids: list[int], salt: str | None = None, num_samples: int = 1, num_tokens: int = 10) -> int:
        return self.router.choose(self.router.names(token_ids, salt), num_samples, num_tokens, self.living)

    def send_and_end(self, token_ids: list[int], salt: str | None = None) -> int:
        engine = self.send(token_ids, salt)
        self.router.done(engine, 1, 10)
        return engine


def test_prompts_with_nothing_in_common_are_spread() -> None:
    desk = Desk(3)
    assert [desk.send([number] * 8) for number in range(9)] == [0, 1, 2] * 3


def test_idle_engines_take_turns() -> None:
    desk = Desk(3)
    assert [desk.send_and_end([number] * 8) for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_samples_and_tokens_count() -> None:
    desk = Desk()
    assert desk.send([1] * 8, num_samples=4) == 0
    assert [desk.send([2 + number] * 8) for number in range(4)] == [1, 1, 1, 1]
    long = Desk()
    assert long.send([1] * 8, num_tokens=1000) == 0
    assert [long.send([2] * 3), long.send([3] * 3), long.send([4] * 3)] == [1, 1, 0]


def test_a_prefix_goes_where_it_was_before() -> None:
    desk = Desk(4)
    first = desk.send_and_end([*SYSTEM, 1, 2, 3, 4])
    for number in range(6):
        desk.send_and_end([number] * 8)
    for number in range(5):
        assert desk.send([*SYSTEM, 50 + number, 2, 3, 4]) == first
    assert desk.send(SYSTEM[: BLOCK - 1]) != first, "less than a block is no prefix"


def test_the_longest_prefix_wins() -> None:
    desk = Desk(2)
    assert desk.send_and_end(SYSTEM[:8]) == 0
    assert desk.send([1] * 8) == 1
    assert desk.send([1] * 8) == 1
    desk.router.forget(1)
    desk.living = [1]
    desk.send(SYSTEM)  # engine 1 has more of it, and more to do
    desk.living = [0, 1]
    assert desk.send(SYSTEM) == 1
    assert desk.send(SYSTEM[:8]) == 0, "both have that much of it"


def test_a_salt_hides_a_prefix() -> None:
    desk = Desk(2)
    assert desk.send_and_end(SYSTEM, "a") == 0
    assert desk.send_and_end(SYSTEM, "b") == 1
    assert [desk.send_and_end(SYSTEM, salt) for salt in "abab"] == [0, 1, 0, 1]


def test_a_busy_engine_is_not_preferred() -> None:
    desk = Desk(2)
    chosen = [desk.send([*SYSTEM, number]) for number in range(3 * MAX_LOAD_DISTANCE)]
    assert chosen[: MAX_LOAD_DISTANCE + 1] == [0] * (MAX_LOAD_DISTANCE + 1)
    # From then on both have the prefix, and the one with less to do gets it.
    assert chosen[MAX_LOAD_DISTANCE + 1 :].count(1) > MAX_LOAD_DISTANCE
    assert abs(chosen.count(0) - chosen.count(1)) <= 1


def test_what_was_used_longest_ago_is_forgotten_from_its_end_on() -> None:
    desk = Desk(2, capacity_blocks=6)
    assert desk.send_and_end(SYSTEM) == 0
    desk.living = [0]
    desk.send_and_end([7] * 16)  # four blocks: room for two more
    desk.living = [0, 1]
    known = desk.router._known[0]
    names = desk.router.names(SYSTEM, None)
    assert len(known) == 6 and [name in known for name in names] == [True, True, False]
    assert desk.send(SYSTEM) == 0


def test_the_dead_get_nothing_and_forget_everything() -> None:
    desk = Desk(2)
    assert desk.send_and_end(SYSTEM) == 0
    desk.living = [1]
    assert desk.send_and_end(SYSTEM) == 1
    desk.router.forget(0)
    desk.living = [0, 1]
    assert [desk.send_and_end(SYSTEM) for _ in range(3)] == [1, 1, 1]


class FakeDevice:
    platform = "cpu"


def test_devices_of_a_process_are_split_in_order() -> None:
    devices = [FakeDevice() for _ in range(7)]
    assert split_devices(devices, 3, 2) == [devices[0:2], devices[2:4], devices[4:6]]
    with pytest.raises(
        StartupError, match=r"needs 8 devices, 2 for each engine; this process has 7 .cpu.; XLA_FLAGS=.*=8"
    ):
        split_devices(devices, 4, 2)


def test_processes_see_their_own_devices_only() -> None:
    variables = visibility(1, 2, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == variables["HIP_VISIBLE_DEVICES"] == "2,3"
    assert variables["TPU_VISIBLE_CHIPS"] == "2,3"
    assert variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1" and variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert variables["TPU_PROCESS_ADDRESSES"] == f"localhost:{variables['TPU_PROCESS_PORT']}"
    assert visibility(0, 2, {})["TPU_PROCESS_PORT"] != variables["TPU_PROCESS_PORT"]


def test_processes_share_what_this_one_may_see() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,5", "HIP_VISIBLE_DEVICES": "", "TPU_VISIBLE_CHIPS": "-1"}
    variables = visibility(2, 1, environment)
    assert variables["CUDA_VISIBLE_DEVICES"] == "5"
    assert variables["HIP_VISIBLE_DEVICES"] == "" and variables["TPU_VISIBLE_CHIPS"] == "-1"
    with pytest.raises(StartupError, match="engines 0 to 3 need 4 devices, 1 each; CUDA_VISIBLE_DEVICES names 3"):
        visibility(3, 1, environment)
