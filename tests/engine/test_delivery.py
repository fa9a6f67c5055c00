"""Outputs on their way from the engine's thread to readers on event loops."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from jaxpage.engine import delivery
from jaxpage.engine.delivery import Outbox, Stream, joined
from jaxpage.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def delta(text: str, index: int = 0, finish_reason: str | None = None) -> RequestOutput:
    """An output with one token for each character of ``text``."""
    ids = [ord(character) for character in text]
    sample = CompletionOutput(
        index,
        text,
        ids,
        logprobs=[{each: Logprob(-1.0, 1)} for each in ids],
        finish_reason=finish_reason,
        text_offsets=list(range(len(ids))),
    )
    return RequestOutput("r", None, [1], [sample], finish_reason is not None, num_cached_tokens=3)


def test_joined_outputs_hold_all_that_was_in_them() -> None:
    first = delta("ab")
    first.prompt_logprobs = [None]
    whole = joined([first, delta("x", 1), delta("c"), delta("d", finish_reason="length")])
    assert whole.finished and whole.prompt_logprobs == [None] and whole.num_cached_tokens == 3
    one, other = whole.outputs
    assert (one.index, one.text, one.token_ids, one.finish_reason) == (0, "abcd", [97, 98, 99, 100], "length")
    assert len(one.logprobs or []) == len(one.text_offsets) == 4
    assert (other.index, other.text, other.finish_reason) == (1, "x", None)
    assert first.outputs[0].text == "ab", "what was joined is left as it was"
    assert joined([first]) is first


def test_joined_outputs_lose_no_field_of_the_last_one() -> None:
    sample = CompletionOutput(0, "b", [98], -2.0, [{98: Logprob(-1.0)}], "stop", 98, [1], 0.5)
    last = RequestOutput("r", "text", [1], [sample], True, [None], 3, RequestMetrics(1.0))
    for value in (sample, last):
        assert all(getattr(value, field.name) is not None for field in dataclasses.fields(value))
    nothing = CompletionOutput(0, "", [], logprobs=[])
    whole = joined([RequestOutput("r", "text", [1], [nothing], False), last])
    assert whole == last


@pytest.mark.parametrize("are_deltas", [True, False])
def test_a_reader_that_lags_gets_everything_in_order(are_deltas: bool) -> None:
    async def read() -> tuple[str, int]:
        stream = Stream(asyncio.get_running_loop(), are_deltas)
        outbox = Outbox()

        def produce() -> None:
            for number in range(100):
                outbox.put(stream, delta(chr(97 + number % 26), finish_reason="stop" if number == 99 else None))
                if number % 7 == 0:
                    outbox.flush()
            outbox.flush()

        thread = threading.Thread(target=produce)
        thread.start()
        text, takes = "", 0
        while True:
            for output in await stream.take():
                text += output.outputs[0].text
                if output.finished:
                    thread.join()
                    return text, takes
            takes += 1
            await asyncio.sleep(0.001)

    text, takes = asyncio.run(read())
    assert text == "".join(chr(97 + number % 26) for number in range(100))
    assert takes < 100


def test_what_came_before_a_fault_is_read_before_it() -> None:
    async def read() -> None:
        stream = Stream(asyncio.get_running_loop(), True)
        outbox = Outbox()
        for item in (delta("a"), delta("b"), ValueError("no")):
            outbox.put(stream, item)
        outbox.flush()
        (output,) = await stream.take()
        assert output.outputs[0].text == "ab"
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await stream.take()

    asyncio.run(read())


def test_a_loop_that_is_gone_holds_nobody_up() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    outbox = Outbox()
    outbox.put(Stream(loop, True), delta("a"))
    outbox.flush()


def test_cancelled_readers_can_read_again() -> None:
    async def read() -> None:
        stream = Stream(asyncio.get_running_loop(), True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.take()
        stream.receive([delta("a")])
        assert [output.outputs[0].text for output in await stream.take()] == ["a"]

    asyncio.run(read())


def test_batches_keep_their_distance_but_first_and_last_outputs_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 ms for one busy stream; another begins and ends in between."""
    monkeypatch.setattr(delivery, "LOOP_SHARE", 1e-9)
    monkeypatch.setattr(delivery, "MAX_DISTANCE_S", 60)  # the first batch forbids a second for a minute

    async def read() -> None:
        busy, other = (Stream(asyncio.get_running_loop(), True) for _ in range(2))
        outbox = Outbox()
        outbox.put(busy, delta("a"))
        outbox.flush()
        assert [output.outputs[0].text for output in await busy.take()] == ["a"]
        await asyncio.sleep(0.01)
        for text in "bcd":
            outbox.put(busy, delta(text))
            outbox.flush()
        await asyncio.sleep(0.01)
        assert not busy._unread and busy.num_unread == 3, "what waits counts as unread"
        outbox.put(other, delta("x"))
        outbox.flush()
        assert [output.outputs[0].text for output in await other.take()] == ["x"]
        assert not busy._unread
        outbox.put(busy, delta("e", finish_reason="stop"))
        outbox.flush()
        (last,) = await busy.take()
        assert last.finished and last.outputs[0].text == "bcde"

    asyncio.run(read())
