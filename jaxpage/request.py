"""What runs for a user and what comes back: requests and their outputs, as plain data.

Nothing here knows about jax, devices, blocks or text decoding.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import Protocol, Self

import numpy as np

from jaxpage.params import (
    BeamSearchParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "Logprob",
    "LogprobDict",
    "PoolingParams",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenConstraint",
    "TokensPrompt",
]
"""What stands in ``jaxpage.params`` can be had here, too: it is where users of the library look for it."""


class TokenConstraint(Protocol):
    """Which tokens one sample may take next: a matcher that follows its tokens on the host.

    A step's mask depends on the token before, so a sample with a constraint is scheduled only when its last token is
    known to the host (see ``EngineCore.step``).
    """

    def mask(self, allowed: np.ndarray) -> None:
        """Clears the bits of the tokens that are forbidden now. An exception ends the request with an error.

        Args:
            allowed: int32 words ``[ceil(vocab_size / 32)]``; bit ``i % 32`` of word ``i // 32`` stands for token i.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The sample got this token, which the mask allowed. Never raises: ``mask`` says what is wrong."""
        ...

    def fork(self) -> Self:
        """An independent matcher in the same state."""
        ...


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request is: waiting for room, holding blocks, or over."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One sequence being generated, as the scheduler sees it. Changed only by ``jaxpage.scheduler`` and ``jaxpage.kv``.

    A step makes ``num_computed_tokens`` catch up with ``num_tokens``; there is no other notion of prefill or decode.

    Attributes:
        request_id: unique inside the engine.
        token_ids: prompt and accepted output tokens.
        num_computed_tokens: tokens whose keys and values are (or will be, once steps in flight end) in the cache.
        num_pending_tokens: tokens sampled on the device in steps in flight, whose ids the host does not know yet.
        sampled_in: the ``Schedule.call`` of the step that samples its newest token; -1 before it.
        seed: 64-bit seed of the noise; with ``sample_index`` and the position it determines every sample.
        end_token_ids: ids that end the sample by themselves (model's end ids unless ignored, and stop ids).
        constraint: follows the sample's tokens and masks the next; None leaves all tokens open.
        pooling: how the prompt's hidden states are pooled instead of sampling; such a request has max_tokens 0.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission; -1 before it.
        num_prefill_tokens: tokens that count as prefill and not as decode: the prompt, and what a preemption lost.
        num_lost_tokens: leading tokens that a preemption made to be computed again; 0 without one.
        num_named_blocks: leading blocks that can be found in the prefix cache.
        slot: row of the per-request device state while running, else -1.
        is_beam: its next token is chosen by a beam search and not by sampling.
        order: (priority, arrival, place in its group): the smaller, the sooner served and the later preempted.
        max_total_tokens: prompt and output tokens together at which it ends; set when it is queued.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    sample_index: int = 0
    end_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    constraint: TokenConstraint | None = None
    pooling: str | None = None
    arrival_time_s: float = dataclasses.field(default_factory=time.monotonic)
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    sampled_in: int = -1
    num_cached_tokens: int = -1
    num_prefill_tokens: int = 0
    num_lost_tokens: int = 0
    num_preemptions: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    num_named_blocks: int = 0
    slot: int = -1
    is_beam: bool = False
    order: tuple[int, int, int] = (0, 0, 0)
    max_total_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_scored_tokens: int = 0
    """Prompt tokens whose prompt_logprobs were delivered; a recomputed prompt is not scored twice."""
    pooled: np.ndarray | None = None
    """float32 [D]: what ``pooling`` has gathered so far: a sum over tokens, or the last token's state."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids or self.prompt_token_ids)
        self.num_prompt_tokens = self.num_prefill_tokens = len(self.prompt_token_ids)

    @property
    def needs_whole_prompt(self) -> bool:
        """The hidden states of all prompt tokens are wanted, so none of them may come from the prefix cache."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those still on the device included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_known_output_tokens(self) -> int:
        """Generated tokens whose ids the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclasses.dataclass(slots=True)
class Logprob:
    """One alternative: log-softmax of the model's raw output, its rank (1 is the best) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobDict = dict[int, Logprob]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. In DELTA streams text, token_ids and logprobs hold only what is new.

    Attributes:
        text_offsets: for each token, the characters of the sample's text before it.
        score: of a beam: cumulative_logprob / length**length_penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] = dataclasses.field(default_factory=list)
    score: float | None = None

    def finished(self) -> bool:
        """True when this sample has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened to a prompt and its samples, in seconds since the epoch; None: not yet, or never."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """What a user gets for one prompt: its samples so far.

    Attributes:
        prompt_logprobs: one entry a prompt token, the first None; only when asked for.
        num_cached_tokens: prompt tokens not computed thanks to the prefix cache.
        outputs: of a beam search: its beams, best first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobDict | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """A prompt as a vector.

    Attributes:
        embedding: float32 [hidden_size], or [dimensions] if these were asked for.
        finish_reason: "error" if its step failed; ``embedding`` is then empty.
        finished: there is but one output.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: np.ndarray
    num_cached_tokens: int = 0
    finish_reason: str = FinishReason.STOP.value
    finished: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
