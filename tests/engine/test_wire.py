"""What goes to an engine in another process and back is the same there as here."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import numpy as np
import pytest

from jaxpage import AsyncEngineArgs, BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from jaxpage.engine.replicas.rows import error_of, error_row, is_error, numbers_of, numbers_row, output_of, output_row
from jaxpage.engine.replicas.wire import Connection, decode, encode
from jaxpage.errors import EngineDeadError, ParameterError, StartupError
from jaxpage.metrics.engine_metrics import EngineMetrics, last_of, summed
from jaxpage.params import StructuredOutputsParams
from jaxpage.request import CompletionOutput, EmbeddingOutput, Logprob, RequestMetrics, RequestOutput

PARAMS = [
    SamplingParams(),
    SamplingParams(
        n=3, seed=-(2**63), stop=["a", "\ud800"], stop_token_ids=[5], logit_bias={7: -1.5}, logprobs=-1,
        max_tokens=None, allowed_token_ids=[1, 2], bad_words=["x"], output_kind=RequestOutputKind.DELTA,
        temperature=0.25,
    ),
    SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
    BeamSearchParams(beam_width=4, early_stopping="never", stop_token_ids=[9]),
    PoolingParams(pooling="mean", dimensions=8),
    AsyncEngineArgs(model="m", served_model_name=("a", "b"), override_generation_config={"top_p": 0.5}, seed=2**63 - 1),
]  # fmt: skip


@pytest.mark.parametrize("value", PARAMS, ids=lambda value: type(value).__name__)
def test_what_users_ask_for_arrives_as_it_was(value: Any) -> None:
    arrived = decode(encode(["add", 1, value]))[2]
    assert type(arrived) is type(value) and arrived == value


def test_a_schema_of_any_numbers_arrives_as_text() -> None:
    given = StructuredOutputsParams(json={"maximum": 10**40, "deep": {"a": [True, None]}})
    arrived = decode(encode(given))
    assert isinstance(arrived.json, str)
    import json

    assert json.loads(arrived.json) == given.json
    assert decode(encode(StructuredOutputsParams(json=True))).json == "true"


def test_plain_values_keep_their_types() -> None:
    value = {"tuple": (1, (2, [3])), 5: b"\x00", "text": "\ud800é", "number": 2**64 - 1, "none": None}
    assert decode(encode(value)) == value
    array = decode(encode(np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert array.dtype == np.float32 and array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_has_no_place_in_a_message_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no place in a message"):
        encode([object()])
    with pytest.raises(OverflowError):
        encode([2**64])


def output(**changes: Any) -> RequestOutput:
    scores = {3: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2, None)}
    sample = CompletionOutput(0, "ab", [3, 9], -2.0, [scores, {9: Logprob(-float("inf"))}], "stop", 9, [0, 1], 0.5)
    whole = RequestOutput("r", "p", [1, 2], [sample], True, [None, scores], 1, RequestMetrics(1.0, 2.0, None, 3.0))
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize("made", [output(), output(prompt_logprobs=None, metrics=None, outputs=[], finished=False)])
def test_outputs_arrive_as_they_were(made: RequestOutput) -> None:
    row = decode(encode(output_row(made)))
    assert not is_error(row)
    assert output_of(row, "r", "p", [1, 2]) == made


def test_vectors_arrive_as_they_were() -> None:
    vector = np.linspace(0, 1, 5, dtype=np.float32)
    made = EmbeddingOutput("r", [1], vector, 3, "error")
    arrived = output_of(decode(encode(output_row(made))), "r", None, [1])
    assert np.array_equal(arrived.embedding, vector) and arrived.num_cached_tokens == 3 and arrived.finished
    assert arrived.finish_reason == "error"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ParameterError("n", "is bad"), ParameterError, "n: is bad"),
        (EngineDeadError("gone"), EngineDeadError, "gone"),
        (StartupError("no memory"), StartupError, "no memory"),
        (FileNotFoundError(2, "no such file", "x"), OSError, "no such file"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ValueError, "bad"),
        (KeyError("k"), RuntimeError, "KeyError: 'k'"),
    ],
)
def test_errors_stay_what_callers_look_for(error: Exception, kind: type[Exception], text: str) -> None:
    row = decode(encode(error_row(error)))
    assert is_error(row)
    arrived = error_of(row)
    assert type(arrived) is kind and text in str(arrived)


def test_numbers_arrive_as_they_were_and_add_up() -> None:
    metrics = EngineMetrics()
    numbers = metrics.numbers
    numbers.counts = numbers.counts._replace(num_running=2, num_waiting=1, kv_usage=0.5, num_prompt_tokens=40)
    numbers.num_accepted, numbers.num_generation_tokens = 5, 17
    numbers.num_ended["stop"] = 2
    numbers.histograms.e2e_request_latency_seconds.observe(1.2, 3)
    arrived = numbers_of(decode(encode(numbers_row(metrics.read()))), metrics.cache.max_model_len)
    assert numbers_row(arrived) == numbers_row(numbers)
    last = last_of(arrived)
    assert (last.counts.num_running, last.counts.kv_usage, last.counts.num_prompt_tokens) == (0, 0.0, 40)
    assert last.num_ended["error"] == 3, "accepted and not ended"
    both = summed([last, arrived])
    assert (both.num_accepted, both.num_generation_tokens, both.counts.num_running) == (10, 34, 2)
    assert both.histograms.e2e_request_latency_seconds.num_observations == 6
    assert both.histograms.e2e_request_latency_seconds.total == pytest.approx(7.2)


def test_a_connection_carries_messages_in_order_until_it_ends() -> None:
    ours, theirs = (Connection(each) for each in socket.socketpair())
    for number in range(200):
        ours.post(["number", number, "x" * number * 100])
    ours.post_later(lambda: ["last"])
    assert [theirs.receive()[1] for _ in range(200)] == list(range(200))
    assert theirs.receive() == ["last"]
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.post(["nobody hears this"])
    theirs.close()
    for each in (ours, theirs):
        each.release()
