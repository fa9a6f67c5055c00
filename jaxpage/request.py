"""What a user asks for and what comes back: sampling parameters, requests and their outputs, as plain data.

Nothing here knows about jax, devices, blocks or text decoding.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Protocol, Self, TypedDict

import numpy as np

from jaxpage.errors import ParameterError, shown

MAX_N = 128
MAX_BEAM_WIDTH = 512
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 1024
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one are treated as 0."""


class TextPrompt(TypedDict):
    """A prompt given as text; with a ``cache_salt`` it shares cached blocks only with prompts of the same one."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt given as token ids; ``cache_salt`` as in ``TextPrompt``."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds: all so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int within [low, high]. Integral floats pass, booleans and strings do not.

    Raises:
        ParameterError: naming the parameter and the value.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {shown(value)}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ParameterError(name, f"must be {_range_text(low, high)}, got {value}")
    return value


def check_float(name: str, value: Any, low: float | None = None, high: float | None = None) -> float:
    """``value`` as a finite float within [low, high]; raises ParameterError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(name, f"must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ParameterError(name, f"must be finite, got {shown(value)}")
    if (low is not None and number < low) or (high is not None and number > high):
        raise ParameterError(name, f"must be {_range_text(low, high)}, got {shown(value)}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is a boolean; raises ParameterError otherwise."""
    if not isinstance(value, bool):
        raise ParameterError(name, f"must be true or false, got {shown(value)}")
    return value


def check_cache_salt(name: str, value: Any) -> str:
    """``value`` if it is a string of 1 to 128 characters, none a control character; raises ParameterError otherwise."""
    is_text = isinstance(value, str) and 1 <= len(value) <= 128
    if not is_text or any(not character.isprintable() and ord(character) < 0xA0 for character in value):
        raise ParameterError(name, f"must have 1 to 128 characters and no control characters, got {shown(value)}")
    return value


def check_token_ids(name: str, value: Any, vocab_size: int | None = None) -> list[int]:
    """``value`` as a list of token ids, each in [0, vocab_size); raises ParameterError naming the bad index."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ParameterError(name, f"must be a list of token ids, got {shown(value)}")
    high = None if vocab_size is None else vocab_size - 1
    # The common case (thousands of plain ints in range) must not pay for one call per token.
    if all(type(token) is int for token in value) and (
        not value or (min(value) >= 0 and max(value) <= (high or 2**31))
    ):
        return list(value)
    return [check_int(f"{name}[{index}]", token, 0, high) for index, token in enumerate(value)]


def _range_text(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"in [{low}, {high}]"
    return f"at least {low}" if low is not None else f"at most {high}"


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


@dataclasses.dataclass(kw_only=True)
class StructuredOutputsParams:
    """What the text has to be; exactly one field is set. vLLM's class of this name.

    Attributes:
        json: a JSON schema, as an object or as its text: the answer is a JSON value that it accepts.
        regex: the whole answer matches it.
        choice: the answer is one of these strings.
        grammar: a context-free grammar in llguidance's dialect of Lark or in GBNF; the start rule is start or root.
        json_object: True: the answer is any JSON object.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    compiled: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)
    """What a ``ConstraintBuilder`` made of it, so that nothing is compiled twice between check and use."""

    def __post_init__(self) -> None:
        if self.json_object is not None and not check_bool("json_object", self.json_object):
            self.json_object = None
        kinds = [each.name for each in dataclasses.fields(self) if each.init]
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(kinds)
            raise ParameterError(
                "structured_outputs", f"needs exactly one of {names}, got {', '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ParameterError(f"structured_outputs.{name}", f"must be a non-empty string, got {shown(value)}")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            if not is_list or not self.choice or not all(isinstance(each, str) and each for each in self.choice):
                raise ParameterError(
                    "structured_outputs.choice", f"must be a list of non-empty strings, got {shown(self.choice)}"
                )
            self.choice = list(self.choice)


@dataclasses.dataclass(kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector.

    Attributes:
        pooling: "last" takes the state of the last token, "mean" the mean over all tokens.
        normalize: scale the vector to length 1.
        dimensions: keep only this many leading numbers (before scaling), for models trained that way; None: all.
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise ParameterError("pooling", f'must be "last" or "mean", got {shown(self.pooling)}')
        check_bool("normalize", self.normalize)
        if self.dimensions is not None:
            self.dimensions = check_int("dimensions", self.dimensions, 1)


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """How to generate: the names, defaults and meaning of vLLM's class of this name.

    Attributes:
        n: samples per prompt, 1 to 128. Sample i depends on (seed, i) only.
        presence_penalty, frequency_penalty: in [-2, 2]; they count generated tokens only.
        repetition_penalty: above 0; counts prompt and generated tokens.
        temperature: 0 (greedy, lowest id among ties) to 2; below 1e-5 means 0.
        top_p: in (0, 1]. top_k: 0 or -1 is off. Tokens that tie with the last one kept are kept too.
        min_p: in [0, 1], relative to the largest probability.
        seed: any 64-bit signed integer; None draws a fresh one.
        stop: strings that end a sample; they are cut from the text unless include_stop_str_in_output.
        stop_token_ids: ids that end a sample, even with ignore_eos.
        max_tokens: None means up to max_model_len.
        min_tokens: end ids are masked, and stop strings not looked for, until this many tokens exist.
        logprobs, prompt_logprobs: None, or how many alternatives to list beside the chosen token (-1: all).
        logit_bias: token id -> value in [-100, 100], added to the logit.
        allowed_token_ids: only these ids may be generated.
        bad_words: up to 128 words that are never spelt by whole generated tokens, whichever tokens these are; neither
            as they stand nor after a blank. A longer token that merely contains the word is no offence.
        structured_outputs: what the text has to be. Not together with what could leave no token over: ``ignore_eos``,
            ``min_tokens``, ``allowed_token_ids`` and ``bad_words``.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.n = check_int("n", self.n, 1, MAX_N)
        if self.best_of is not None and check_int("best_of", self.best_of) != self.n:
            raise ParameterError("best_of", f"is only supported equal to n ({self.n}), got {self.best_of}")
        self.presence_penalty = check_float("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = check_float("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            raise ParameterError("repetition_penalty", f"must be above 0, got {self.repetition_penalty}")
        self.temperature = check_float("temperature", self.temperature, 0, 2)
        self.top_p = check_float("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be in (0, 1], got {self.top_p:g}")
        self.top_k = check_int("top_k", self.top_k, -1)
        self.min_p = check_float("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self.stop = _checked_stop(self.stop)
        self.stop_token_ids = _checked_stop_ids(self.stop_token_ids)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"):
            check_bool(name, getattr(self, name))
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 0)
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, check_int(name, getattr(self, name), -1))
        self.logit_bias = _checked_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", "must not be empty")
        self.bad_words = _checked_bad_words(self.bad_words)
        given = self.structured_outputs
        if given is not None and not isinstance(given, StructuredOutputsParams):
            raise ParameterError("structured_outputs", f"must be StructuredOutputsParams, got {shown(given)}")
        if not self.detokenize and self.stop:
            raise ParameterError("stop", "needs detokenize=True")

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True when the logits depend on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def validate_for(self, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
        """Checks what depends on the model served: ids, max_tokens, the number of logprobs.

        Raises:
            ParameterError: naming parameter, value and limit.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids or [], vocab_size)
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for token_id in self.logit_bias or {}:
            if not 0 <= token_id < vocab_size:
                raise ParameterError("logit_bias", f"token id {token_id} is not in [0, {vocab_size - 1}]")
        if self.max_tokens is not None and self.max_tokens > max_model_len:
            raise ParameterError("max_tokens", f"{self.max_tokens} is above max_model_len {max_model_len}")
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (value > limit or (value == -1 and max_logprobs != -1)):
                raise ParameterError(name, f"must be in [0, {limit}], got {value}")


@dataclasses.dataclass(kw_only=True)
class BeamSearchParams:
    """How to search for the most likely continuations; the outcome is that of Hugging Face transformers.

    Attributes:
        beam_width: beams kept, and samples returned, per prompt: 1 to 512. Width 1 is greedy.
        max_tokens: None means up to max_model_len.
        length_penalty: beams are ranked by cumulative logprob / length**length_penalty, where the length counts the
            generated tokens, the end token included. Above 0 favours long beams.
        early_stopping: when beam_width beams have ended: True stops; False stops unless the best running beam, at its
            present length, beats the worst ended one; "never" judges it at max_tokens if length_penalty is above 0.
        stop_token_ids: ids that end a beam, even with ignore_eos.
        logprobs: None, or how many alternatives to list beside each token.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.beam_width = check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1)
        self.length_penalty = check_float("length_penalty", self.length_penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ParameterError("early_stopping", f'must be true, false or "never", got {shown(self.early_stopping)}')
        self.stop_token_ids = _checked_stop_ids(self.stop_token_ids)
        if self.logprobs is not None:
            self.logprobs = check_int("logprobs", self.logprobs, 0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            check_bool(name, getattr(self, name))

    def validate_for(self, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
        """Checks what depends on the model served: ids, max_tokens, the number of logprobs.

        Raises:
            ParameterError: naming parameter, value and limit.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids or [], vocab_size)
        if self.max_tokens is not None and self.max_tokens > max_model_len:
            raise ParameterError("max_tokens", f"{self.max_tokens} is above max_model_len {max_model_len}")
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        if self.logprobs is not None and self.logprobs > limit:
            raise ParameterError("logprobs", f"must be in [0, {limit}], got {self.logprobs}")


def _checked_stop_ids(token_ids: Any) -> list[int]:
    checked = check_token_ids("stop_token_ids", token_ids or [])
    if len(checked) > MAX_STOP_TOKEN_IDS:
        raise ParameterError("stop_token_ids", f"holds {len(checked)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
    return checked


def _checked_stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    values = [stop] if isinstance(stop, str) else stop
    if isinstance(values, Mapping) or not isinstance(values, Sequence):
        raise ParameterError("stop", f"must be a string or a list of strings, got {shown(stop)}")
    if len(values) > MAX_STOP_STRINGS:
        raise ParameterError("stop", f"holds {len(values)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for value in values:
        if not isinstance(value, str):
            raise ParameterError("stop", f"must be a string or a list of strings, got {shown(value)}")
        if not value:
            raise ParameterError("stop", "an empty string is in every text and cannot be a stop string")
        if len(value) > MAX_STOP_STRING_LENGTH:
            raise ParameterError(
                "stop", f"a string has {len(value)} characters, at most {MAX_STOP_STRING_LENGTH} are allowed"
            )
    return list(values)


def _checked_bad_words(words: Any) -> list[str]:
    if words is None:
        return []
    if not isinstance(words, Sequence) or isinstance(words, str):
        raise ParameterError("bad_words", f"must be a list of strings, got {shown(words)}")
    if len(words) > MAX_BAD_WORDS:
        raise ParameterError("bad_words", f"holds {len(words)} words, at most {MAX_BAD_WORDS} are allowed")
    for word in words:
        if not isinstance(word, str) or not word or len(word) > MAX_BAD_WORD_LENGTH:
            raise ParameterError(
                "bad_words", f"each must be a string of 1 to {MAX_BAD_WORD_LENGTH} characters, got {shown(word)}"
            )
    return list(words)


def _checked_bias(bias: Any) -> dict[int, float]:
    if not bias:
        if bias is None or isinstance(bias, Mapping):
            return {}
        raise ParameterError("logit_bias", f"must map token ids to numbers, got {shown(bias)}")
    if not isinstance(bias, Mapping):
        raise ParameterError("logit_bias", f"must map token ids to numbers, got {shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ParameterError("logit_bias", f"holds {len(bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON keys are strings: only plain decimal digits count as an id.
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        try:
            checked[check_int("logit_bias", key, 0)] = check_float("logit_bias", value, -100, 100)
        except ParameterError as error:
            raise ParameterError("logit_bias", f"entry {shown(key)}: {shown(value)} {error.reason}") from None
    return checked


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
        finished: there is but one output.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: np.ndarray
    num_cached_tokens: int = 0
    finished: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
