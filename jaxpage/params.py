"""How a user wants a prompt to be answered: sampling, a beam search, pooling, and what the text has to be.

Nothing here knows requests, devices or text decoding: it is plain data that has been checked.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from jaxpage.checks import check_bool, check_float, check_int, check_token_ids
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemaGrammar:
    """What a text with JSON values in it has to be.

    Attributes:
        grammar: in llguidance's dialect of Lark; its rules may name ``schema_0``, ``schema_1`` and so on.
        schemas: JSON schemas of the values at these names.
    """

    grammar: str
    schemas: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(kw_only=True)
class StructuredOutputsParams:
    """What the text has to be; exactly one field is set. vLLM's class of this name.

    Attributes:
        json: a JSON schema, as an object or as its text: the answer is a JSON value that it accepts.
        regex: the whole answer matches it.
        choice: the answer is one of these strings.
        grammar: a context-free grammar in llguidance's dialect of Lark or in GBNF; the start rule is start or root.
        json_object: True: the answer is any JSON object.
        schema_grammar: a text that is free in parts and holds JSON values in others.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    schema_grammar: SchemaGrammar | None = None
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
            self.choice = _checked_texts("structured_outputs.choice", self.choice)
            if not self.choice:
                raise ParameterError("structured_outputs.choice", "must be a list of non-empty strings, got []")
        if self.schema_grammar is not None and not isinstance(self.schema_grammar, SchemaGrammar):
            raise ParameterError(
                "structured_outputs.schema_grammar", f"must be a SchemaGrammar, got {shown(self.schema_grammar)}"
            )


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
        if self.bad_words is None:
            self.bad_words = []
        else:
            self.bad_words = _checked_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
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
    checked = check_token_ids("stop_token_ids", [] if token_ids is None else token_ids)
    if len(checked) > MAX_STOP_TOKEN_IDS:
        raise ParameterError("stop_token_ids", f"holds {len(checked)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
    return checked


def _checked_text(name: str, text: Any, max_length: int | None) -> str:
    if not isinstance(text, str):
        raise ParameterError(name, f"must be a string, got {shown(text)}")
    if not text:
        raise ParameterError(name, "must not be empty")
    if max_length is not None and len(text) > max_length:
        raise ParameterError(name, f"has {len(text)} characters, at most {max_length} are allowed")
    return text


def _checked_texts(name: str, texts: Any, max_count: int | None = None, max_length: int | None = None) -> list[str]:
    """A list of strings that are not empty, nor longer than ``max_length`` characters."""
    if not isinstance(texts, Sequence) or isinstance(texts, (str, bytes)):
        raise ParameterError(name, f"must be a list of strings, got {shown(texts)}")
    if max_count is not None and len(texts) > max_count:
        raise ParameterError(name, f"holds {len(texts)} strings, at most {max_count} are allowed")
    return [_checked_text(f"{name}[{index}]", text, max_length) for index, text in enumerate(texts)]


def _checked_stop(stop: Any) -> list[str]:
    if stop is None:
        return []
    if isinstance(stop, str):
        return [_checked_text("stop", stop, MAX_STOP_STRING_LENGTH)]
    if isinstance(stop, bytes) or not isinstance(stop, Sequence):
        raise ParameterError("stop", f"must be a string or a list of strings, got {shown(stop)}")
    return _checked_texts("stop", stop, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)


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
