"""Owns grammars compiled for one model, the cache of them, and the matchers that follow samples.

It must not know requests, steps or devices.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import llguidance
import numpy as np

from jaxpage.errors import ParameterError
from jaxpage.grammar import vocabulary
from jaxpage.grammar.grammar_text import grammar_text, name_of, reason_of, source_of
from jaxpage.grammar.trial import LIMITS, tried
from jaxpage.params import StructuredOutputsParams
from jaxpage.tokenizer import Tokenizer

CACHE_SIZE = 256
"""Grammars kept, refused ones included."""
COMPILE_TIMEOUT_S = 20.0
"""Most of it is for those who wait before it; see ``trial`` for the limit of one grammar."""
_THREADS = 2


class GrammarError(RuntimeError):
    """A grammar failed while it was followed: it became too complex, or got a token that it forbids."""


class GrammarCompiler:
    """Compiles grammars for one model; every method may be called from several threads.

    Each grammar is compiled once, on threads of our own: who waits for it gives up after ``timeout_s``, and finds the
    outcome there when it asks again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        cache_size: int = CACHE_SIZE,
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        """
        Args:
            tokenizer: gives the bytes of tokens.
            vocab_size: of the model, which may have ids that the tokenizer does not know; these are never allowed.
            end_token_ids: what ends a text; allowed exactly where the grammar may end.
            cache_size: grammars kept, the least recently used goes first.
            timeout_s: longest wait for one grammar.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(dict.fromkeys(each for each in end_token_ids if 0 <= each < vocab_size))
        self._cache_size = cache_size
        self._timeout_s = timeout_s
        self._cache: OrderedDict[tuple[str, str], Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar that ``params`` asks for.

        Raises:
            ParameterError: naming the field ("structured_outputs.regex") with the reason in one line.
        """
        if not self._end_token_ids:
            raise ParameterError("structured_outputs", "needs a model with an end token")
        kind, text = source = source_of(params)
        with self._lock:
            future = self._cache.get(source)
            if future is None:
                future = self._cache[source] = self._threads.submit(self._build, kind, text)
            self._cache.move_to_end(source)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        try:
            return future.result(self._timeout_s)
        except ParameterError as error:
            # The one in the cache must not gather the traces of all who get it.
            raise ParameterError(error.parameter, error.reason) from None
        except FutureTimeoutError:
            raise ParameterError(name_of(kind), f"takes more than {self._timeout_s:g} s to compile") from None

    def _build(self, kind: str, text: str) -> CompiledGrammar:
        grammar = grammar_text(kind, text) if kind == "json_object" else tried(kind, text)
        matcher = llguidance.LLMatcher(self._shared_vocabulary(), grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            # Builds what the first step would have to wait for; and a grammar without any text has no first token.
            first = matcher.deep_copy()
            allowed = np.frombuffer(first.compute_bitmask(), np.int32)
            if not first.is_error() and not allowed.any():
                raise ParameterError(name_of(kind), "no text of this model's tokens matches it")
            matcher = first
        if matcher.is_error():
            raise ParameterError(name_of(kind), reason_of(matcher.get_error()))
        return CompiledGrammar(matcher, self._vocab_size, self._end_token_ids)

    def _shared_vocabulary(self) -> llguidance.LLTokenizer:
        """Made at first use, once: most servers never see a grammar."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary.build(self._tokenizer, self._vocab_size, self._end_token_ids)
            return self._vocabulary


class CompiledGrammar:
    """A grammar at its beginning."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._end_token_ids = frozenset(end_token_ids)

    def matcher(self) -> GrammarMatcher:
        """What follows one sample."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_words, self._end_token_ids)


class GrammarMatcher:
    """Follows one sample's tokens: a ``jaxpage.request.TokenConstraint``."""

    __slots__ = ("_end_token_ids", "_matcher", "_words")

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._words = np.empty(num_words, np.int32)
        self._end_token_ids = end_token_ids

    def mask(self, allowed: np.ndarray) -> None:
        """Clears the bits of the tokens that the grammar forbids now.

        Raises:
            GrammarError: if the grammar can no longer be followed.
        """
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher.get_error()))
        np.bitwise_and(allowed[: words.size], words, out=allowed[: words.size])
        allowed[words.size :] = 0

    def accept(self, token_id: int) -> None:
        """The sample got this token. One that is forbidden shows at the next ``mask``."""
        if token_id not in self._end_token_ids:
            self._matcher.consume_token(token_id)

    def fork(self) -> GrammarMatcher:
        """An independent matcher in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self._words.size, self._end_token_ids)
