"""Beam search over one prompt: which continuations of which beams live on, which have ended, and when it is over.

It works on (token id, log probability) pairs only and knows nothing about requests, blocks, steps or text.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

from jaxpage.errors import ParameterError
from jaxpage.params import BeamSearchParams
from jaxpage.request import FinishReason

TokenScore = tuple[int, float, int, list[tuple[int, float]]]
"""Token id, its log probability, its rank (1 is the most likely), and the alternatives, most likely first."""


@dataclasses.dataclass(slots=True)
class Beam:
    """A running beam, or an ended one.

    Attributes:
        token_ids: generated tokens only, the end token included.
        cumulative_logprob: sum of the log probabilities of ``token_ids``.
        scores: one entry a token if ``logprobs`` was asked for, else empty.
        score: ``cumulative_logprob / length**length_penalty``, the end token counted in the length; 0 while running.
        finish_reason: STOP at an end token, LENGTH where the beam could not go on; None while running.
        stop_reason: the end token if the user named it in ``stop_token_ids``, else None.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    scores: list[TokenScore] = dataclasses.field(default_factory=list)
    score: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclasses.dataclass(slots=True)
class _Option:
    """One token more for one running beam."""

    cumulative_logprob: float
    parent: int
    rank: int
    token_id: int
    logprob: float


class BeamSearch:
    """The search for one prompt; gives the beams and scores of Hugging Face transformers' ``generate``.

    A step looks at all continuations of all running beams, most likely first. Of the first ``beam_width``, those that
    end go to ``ended``; the first ``beam_width`` of those that do not end run on. A full ``ended`` list closes the
    search once, by the rule of ``early_stopping``, no running beam is expected to enter it.

    Attributes:
        num_candidates: most likely tokens needed of each running beam, at most ``vocab_size``.
        beams: the running ones, best first; none once the search is over.
        ended: best first, at most ``beam_width``. Of equal scores the one that ended first comes first.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        max_tokens: int,
        end_token_ids: frozenset[int],
        vocab_size: int | None = None,
    ) -> None:
        """Starts with one empty beam.

        Args:
            params: how to search; its ``max_tokens``, ``ignore_eos`` and ``stop_token_ids`` count only through the
                arguments below (and ``stop_token_ids`` for ``Beam.stop_reason``).
            max_tokens: tokens a beam may grow to, at least 1.
            end_token_ids: every id that ends a beam.
            vocab_size: bound of ``num_candidates``.

        Raises:
            ParameterError: max_tokens is below 1.
        """
        if max_tokens < 1:
            raise ParameterError("max_tokens", f"must be at least 1, got {max_tokens}")
        self.params = params
        self.max_tokens = max_tokens
        self.end_token_ids = end_token_ids
        # Even if a beam's likeliest tokens are the end ids, beam_width others remain among that many.
        needed = max(params.beam_width + len(end_token_ids), params.logprobs or 0)
        self.num_candidates = needed if vocab_size is None else min(needed, vocab_size)
        self.beams = [Beam()]
        self.ended: list[Beam] = []
        self._num_tokens = 0

    @property
    def is_over(self) -> bool:
        """True when no beam runs any more."""
        return not self.beams

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """Moves every beam one token on.

        Args:
            candidates: for each running beam its ``num_candidates`` most likely (token id, log-softmax) pairs, most
                likely first, the lower id first among equals. Tokens at -inf are impossible and never chosen. Equal
                beams are ordered by parent, then by place in its list.

        Returns:
            (index of the beam it continues, token id) of each new running beam, best first. Fewer than ``beam_width``
            if there are no more possible tokens; none once the search is over.

        Raises:
            ValueError: not one list for each running beam.
        """
        width = self.params.beam_width
        self._num_tokens += 1
        is_last = self._num_tokens == self.max_tokens
        running: list[Beam] = []
        ended: list[Beam] = []
        moves: list[tuple[int, int]] = []
        place = -1
        for place, option in enumerate(self._options(candidates)):
            if place >= width and (is_last or len(running) == width):
                break
            if option.token_id not in self.end_token_ids and not is_last:
                running.append(self._extended(option, candidates))
                moves.append((option.parent, option.token_id))
            elif place < width:  # beams that end further down are less likely than beam_width others
                ended.append(self._finished(self._extended(option, candidates)))
        if place < 0:
            # No token is possible anywhere: what there is is all there can be.
            self.cut()
            return []
        self._keep_best(ended)
        self.beams = [] if self._is_decided(running) else running
        return moves if self.beams else []

    def cut(self) -> None:
        """Ends the search where it stands, for want of room: running beams end with LENGTH."""
        self._keep_best([self._finished(beam) for beam in self.beams])
        self.beams = []

    def _options(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> Iterator[_Option]:
        """All continuations, most likely first, made only as far as they are read: each beam's are in order already."""

        def continued(parent: int, beam: Beam, pairs: Sequence[tuple[int, float]]) -> Iterator[_Option]:
            for rank, (token_id, logprob) in enumerate(pairs, start=1):
                if logprob > -math.inf:
                    yield _Option(beam.cumulative_logprob + logprob, parent, rank, token_id, logprob)

        rows = zip(self.beams, candidates, strict=True)
        streams = [continued(parent, beam, pairs) for parent, (beam, pairs) in enumerate(rows)]
        return heapq.merge(*streams, key=lambda option: -option.cumulative_logprob)  # equals: earlier stream first

    def _extended(self, option: _Option, candidates: Sequence[Sequence[tuple[int, float]]]) -> Beam:
        parent = self.beams[option.parent]
        scores: list[TokenScore] = []
        if self.params.logprobs is not None:
            alternatives = list(candidates[option.parent][: self.params.logprobs])
            scores = [*parent.scores, (option.token_id, option.logprob, option.rank, alternatives)]
        return Beam([*parent.token_ids, option.token_id], option.cumulative_logprob, scores)

    def _finished(self, beam: Beam) -> Beam:
        beam.score = self._normalised(beam.cumulative_logprob, len(beam.token_ids))
        beam.finish_reason = FinishReason.LENGTH
        if beam.token_ids and beam.token_ids[-1] in self.end_token_ids:
            beam.finish_reason = FinishReason.STOP
            beam.stop_reason = beam.token_ids[-1] if beam.token_ids[-1] in (self.params.stop_token_ids or ()) else None
        return beam

    def _keep_best(self, ended: list[Beam]) -> None:
        # Sorting is stable, so a later beam must be better to push out an earlier one.
        self.ended = sorted([*self.ended, *ended], key=lambda beam: -beam.score)[: self.params.beam_width]

    def _is_decided(self, running: list[Beam]) -> bool:
        """Whether the running beams can be given up. False and "never" differ in the length a beam is judged at."""
        if not running:
            return True
        if len(self.ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True or self.params.beam_width == 1:
            return True  # the one beam of width 1 is the greedy one, which ends at its first end token
        is_longest_best = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.max_tokens if is_longest_best else self._num_tokens
        return self._normalised(running[0].cumulative_logprob, length) <= self.ended[-1].score

    def _normalised(self, cumulative_logprob: float, length: int) -> float:
        """The score of a sum over ``length`` tokens; extreme penalties give 0 or -inf, as in IEEE arithmetic."""
        try:
            return cumulative_logprob / length**self.params.length_penalty
        except OverflowError:
            return 0.0
        except ZeroDivisionError:  # the power is too small for a float, or there are no tokens at all
            return -math.inf if cumulative_logprob < 0 else 0.0
