"""Beam search on hand-made tables, against exhaustive search, and against Hugging Face's runs."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from golden_data import DATA

from jaxpage.params import BeamSearchParams
from jaxpage.request import FinishReason
from jaxpage.scheduler.beam import Beam, BeamSearch

Model = Callable[[Sequence[int]], Sequence[float]]
"""Gives the log probability of every token id after the generated ones."""

GOLDEN = json.loads((DATA / "golden" / "beam" / "tables.json").read_text())
A, B, C, D = range(97, 101)


def log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def candidates_of(search: BeamSearch, model: Model) -> list[list[tuple[int, float]]]:
    rows = [sorted(enumerate(model(beam.token_ids)), key=lambda pair: -pair[1]) for beam in search.beams]
    return [row[: search.num_candidates] for row in rows]


def run(model: Model, width: int, max_tokens: int, ends: Iterable[int] = (), **params: Any) -> BeamSearch:
    """Searches to the end; the returned moves must describe the running beams."""
    vocab_size = len(model([]))
    settings = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **params)
    search = BeamSearch(settings, max_tokens, frozenset(ends), vocab_size)
    for _ in range(max_tokens):
        before = [beam.token_ids for beam in search.beams]
        moves = search.advance(candidates_of(search, model))
        assert [[*before[parent], token_id] for parent, token_id in moves] == [beam.token_ids for beam in search.beams]
        if search.is_over:
            break
    assert search.is_over
    assert search.beams == []
    return search


def table_model(table: dict[int | None, dict[int, float]], vocab_size: int = 256) -> Model:
    """Probabilities by last token (None: the first one); what the table does not name is impossible."""

    def model(token_ids: Sequence[int]) -> list[float]:
        row = table[token_ids[-1] if token_ids else None]
        return [log(row.get(token_id, 0.0)) for token_id in range(vocab_size)]

    return model


def letter_model(names: Sequence[int] = (A, B, C, D)) -> Model:
    rows = {
        None: (0.5, 0.4, 0.06, 0.04),
        names[0]: (0.28, 0.26, 0.24, 0.22),
        names[1]: (0.02, 0.03, 0.05, 0.90),
        names[2]: (0.70, 0.12, 0.10, 0.08),
        names[3]: (0.05, 0.05, 0.85, 0.05),
    }
    return table_model({last: dict(zip(names, row, strict=True)) for last, row in rows.items()})


def random_model(seed: int, vocab_size: int, sharpness: float = 2.0) -> Model:
    """Log probabilities that depend on all tokens so far."""

    def model(token_ids: Sequence[int]) -> list[float]:
        noise = random.Random(f"{seed} {list(token_ids)}")
        logits = [noise.gauss(0, sharpness) for _ in range(vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return model


def texts(beams: Sequence[Beam]) -> list[str]:
    return ["".join(map(chr, beam.token_ids)) for beam in beams]


def ids(beams: Sequence[Beam]) -> list[list[int]]:
    return [beam.token_ids for beam in beams]


class TestLetters:
    @pytest.mark.parametrize(
        ("width", "expected"),
        [
            (1, [("aaaa", -4.512)]),
            (2, [("bdca", -1.541), ("bdcb", -3.304)]),
            (3, [("bdca", -1.541), ("abdc", -2.308), ("bdcb", -3.304)]),
        ],
    )
    def test_beam_1_hand_made_table(self, width: int, expected: list[tuple[str, float]]) -> None:
        ended = run(letter_model(), width, 4).ended
        assert texts(ended) == [text for text, _ in expected]
        assert [beam.cumulative_logprob for beam in ended] == pytest.approx([value for _, value in expected], abs=1e-3)
        assert [beam.score for beam in ended] == pytest.approx([value / 4 for _, value in expected], abs=1e-3)
        assert {beam.finish_reason for beam in ended} == {"length"}

    def test_beam_1_wide_equals_exhaustive_search(self) -> None:
        model = letter_model()
        ended = run(model, 64, 4).ended
        assert texts(ended)[:3] == ["bdca", "abdc", "adca"]
        assert ended[2].cumulative_logprob == pytest.approx(-2.727, abs=1e-3)
        sums = {
            path: sum(model(path[:place])[token] for place, token in enumerate(path))
            for path in itertools.product((A, B, C, D), repeat=4)
        }
        assert len(ended) == 64
        expected = sorted(sums.values(), reverse=True)[:64]
        assert [beam.cumulative_logprob for beam in ended] == pytest.approx(expected)
        assert all(sums[tuple(beam.token_ids)] == pytest.approx(beam.cumulative_logprob) for beam in ended)

    def test_beam_1_prompts_do_not_mix(self) -> None:
        models = [letter_model(), letter_model((C, A, D, B))]
        searches = [BeamSearch(BeamSearchParams(beam_width=3), 4, frozenset()) for _ in models]
        while not all(search.is_over for search in searches):
            for search, model in zip(searches, models, strict=True):
                search.advance(candidates_of(search, model))
        assert texts(searches[0].ended) == ["bdca", "abdc", "bdcb"]
        permuted = [text.translate(str.maketrans("abcd", "cadb")) for text in texts(searches[0].ended)]
        assert texts(searches[1].ended) == permuted

    @pytest.mark.parametrize("count", [4, 5, 9, 256])
    def test_beam_1_longer_candidate_lists_change_nothing(self, count: int) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2), 4, frozenset(), vocab_size=256)
        search.num_candidates = count
        while not search.is_over:
            search.advance(candidates_of(search, letter_model()))
        assert texts(search.ended) == ["bdca", "bdcb"]


class TestScores:
    @pytest.mark.parametrize("seed", range(5))
    def test_beam_1a_scores_add_up(self, seed: int) -> None:
        model = random_model(seed, 20)
        ended = run(model, 4, 10, [3], logprobs=0).ended
        for beam in ended:
            values = [model(beam.token_ids[:place])[token] for place, token in enumerate(beam.token_ids)]
            assert beam.cumulative_logprob == pytest.approx(sum(values))
            assert beam.score == pytest.approx(sum(values) / len(values))
            assert [(token_id, value) for token_id, value, _, _ in beam.scores] == list(
                zip(beam.token_ids, values, strict=True)
            )
        assert len({tuple(beam.token_ids) for beam in ended}) == len(ended) == 4
        assert [beam.score for beam in ended] == sorted((beam.score for beam in ended), reverse=True)

    @pytest.mark.parametrize("early_stopping", [False, True, "never"])
    @pytest.mark.parametrize("seed", range(8))
    def test_beam_1a_width_1_is_greedy(self, seed: int, early_stopping: bool | str) -> None:
        model, ends = random_model(seed, 6), {1, 2}
        greedy: list[int] = []
        while len(greedy) < 10 and not ends & set(greedy):
            row = model(greedy)
            greedy.append(row.index(max(row)))
        assert ids(run(model, 1, 10, ends, early_stopping=early_stopping).ended) == [greedy]

    def test_beam_1a_wider_than_the_vocabulary(self) -> None:
        search = run(random_model(0, 294), 300, 3, [5])
        assert search.num_candidates == 294
        assert len({tuple(beam.token_ids) for beam in search.ended}) == 300

    @pytest.mark.parametrize("width", [0, -1, 1.5, "2", True, None, 513, 1_000_000])
    def test_beam_1a_bad_width(self, width: Any) -> None:
        with pytest.raises(ValueError, match=f"^beam_width: .*{width}"):
            BeamSearchParams(beam_width=width)

    def test_rank_and_alternatives(self) -> None:
        ended = run(letter_model(), 3, 4, logprobs=2).ended
        (first, *_, last) = ended[2].scores  # of bdcb
        assert first == (B, log(0.4), 2, [(A, log(0.5)), (B, log(0.4))])
        assert last == (B, log(0.12), 2, [(A, log(0.7)), (B, log(0.12))])
        assert run(letter_model(), 3, 4).ended[2].scores == []


class TestEndedBeams:
    END = 1
    MODEL = staticmethod(table_model({None: {0: 0.6, 1: 0.4}, 0: {0: 0.45, 1: 0.55}}, vocab_size=2))

    @pytest.mark.parametrize(
        ("length_penalty", "token_ids", "score"),
        [(0, [1], -0.916), (1, [0, 1], -1.109 / 2), (2, [0, 0, 1], -1.907 / 9)],
    )
    def test_beam_1b_length_penalty(self, length_penalty: float, token_ids: list[int], score: float) -> None:
        best = run(self.MODEL, 2, 3, [self.END], length_penalty=length_penalty).ended[0]
        assert best.token_ids == token_ids
        assert best.score == pytest.approx(score, abs=1e-3)
        assert (best.finish_reason, best.stop_reason) == ("stop", None)

    def test_beam_1b_ended_beams_are_left_alone(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2), 3, frozenset([self.END]))
        search.advance(candidates_of(search, self.MODEL))
        assert ids(search.ended) == [[1]]
        assert ids(search.beams) == [[0]]
        score = search.ended[0].score
        search.advance(candidates_of(search, self.MODEL))
        assert ids(search.ended) == [[0, 1], [1]]
        assert search.ended[1].score == score

    def test_stop_reason_is_a_named_end_token(self) -> None:
        search = run(self.MODEL, 2, 3, [self.END], stop_token_ids=[self.END])
        assert {beam.stop_reason for beam in search.ended} == {self.END}

    def test_an_end_token_in_the_last_step_is_a_stop(self) -> None:
        assert {(tuple(b.token_ids), b.finish_reason) for b in run(self.MODEL, 2, 1, [self.END]).ended} == {
            ((0,), "length"),
            ((1,), "stop"),
        }

    def test_only_the_first_beam_width_may_end(self) -> None:
        model = table_model({None: {0: 0.5, 1: 0.3, 2: 0.2}, 0: {0: 1.0}, 1: {1: 1.0}}, vocab_size=3)
        search = BeamSearch(BeamSearchParams(beam_width=2), 4, frozenset([2]))
        assert search.advance(candidates_of(search, model)) == [(0, 0), (0, 1)]
        assert search.ended == []

    def test_end_tokens_leave_the_running_beams_full(self) -> None:
        model = table_model({None: {0: 0.05, 1: 0.05, 2: 0.5, 3: 0.4}}, vocab_size=4)
        search = BeamSearch(BeamSearchParams(beam_width=2, early_stopping="never"), 4, frozenset([2, 3]))
        assert search.num_candidates == 4
        assert search.advance(candidates_of(search, model)) == [(0, 0), (0, 1)]
        assert ids(search.ended) == [[2], [3]]

    def test_cut_ends_what_runs(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2), 9, frozenset([self.END]))
        search.advance(candidates_of(search, self.MODEL))
        search.cut()
        assert search.is_over
        assert [(beam.token_ids, beam.finish_reason) for beam in search.ended] == [([0], "length"), ([1], "stop")]
        search.cut()
        assert len(search.ended) == 2

    def test_cut_before_the_first_token(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2, length_penalty=-1), 9, frozenset())
        search.cut()
        assert search.ended == [Beam(finish_reason=FinishReason.LENGTH)]


class TestCandidates:
    def test_of_equals_the_earlier_parent_then_the_lower_id(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=3), 5, frozenset())
        even = [(token_id, log(0.25)) for token_id in range(4)]
        assert search.advance([even]) == [(0, 0), (0, 1), (0, 2)]
        assert search.advance([even[2:], even, even]) == [(0, 2), (0, 3), (1, 0)]

    def test_fewer_possible_tokens_than_beams(self) -> None:
        model = table_model({None: {0: 1.0}, 0: {0: 0.9, 1: 0.1}, 1: {0: 1.0}}, vocab_size=5)
        search = BeamSearch(BeamSearchParams(beam_width=4), 3, frozenset())
        assert search.advance(candidates_of(search, model)) == [(0, 0)]
        assert search.advance(candidates_of(search, model)) == [(0, 0), (0, 1)]
        assert search.advance(candidates_of(search, model)) == []
        assert ids(search.ended) == [[0, 0, 0], [0, 1, 0], [0, 0, 1]]

    def test_no_possible_token_ends_what_there_is(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2), 3, frozenset())
        search.advance([[(7, -0.5), (8, -1.0)]])
        assert search.advance([[(1, -math.inf)], []]) == []
        assert [(beam.token_ids, beam.score) for beam in search.ended] == [([7], -0.5), ([8], -1.0)]
        assert search.is_over

    def test_only_end_tokens_possible(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=4), 9, frozenset([1, 2]))
        assert search.advance([[(1, -0.5), (2, -1.0), (0, -math.inf)]]) == []
        assert search.is_over
        assert ids(search.ended) == [[1], [2]]

    def test_one_list_for_each_beam(self) -> None:
        search = BeamSearch(BeamSearchParams(beam_width=2), 3, frozenset())
        with pytest.raises(ValueError, match="zip"):
            search.advance([[(0, -1.0)], [(0, -1.0)]])

    @pytest.mark.parametrize(
        ("ends", "logprobs", "vocab_size", "expected"),
        [((), None, None, 3), ((1,), None, 99, 4), ((1, 2, 3), None, None, 6), ((1,), None, 2, 2), ((), 9, None, 9)],
    )
    def test_num_candidates(
        self, ends: tuple[int, ...], logprobs: int | None, vocab_size: int | None, expected: int
    ) -> None:
        params = BeamSearchParams(beam_width=3, logprobs=logprobs)
        assert BeamSearch(params, 4, frozenset(ends), vocab_size).num_candidates == expected


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(GOLDEN["cases"].index(case)))
def test_equals_hugging_face(case: dict[str, Any]) -> None:
    def model(token_ids: Sequence[int]) -> list[float]:
        logits = GOLDEN["tables"][case["table"]][len(token_ids) % case["max_tokens"]][token_ids[-1] if token_ids else 0]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    settings = {name: case[name] for name in ("length_penalty", "early_stopping")}
    params = BeamSearchParams(beam_width=case["beam_width"], **settings)
    search = BeamSearch(params, case["max_tokens"], frozenset(case["eos_token_ids"]))
    num_steps = 0
    while not search.is_over:
        search.advance(candidates_of(search, model))
        num_steps += 1
    assert num_steps == case["num_steps"]
    assert ids(search.ended) == [beam["token_ids"] for beam in case["beams"]]
    assert [beam.score for beam in search.ended] == pytest.approx([beam["score"] for beam in case["beams"]], abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length_penalty", [-1, 0, 0.5, 3])
def test_wide_beams_equal_exhaustive_search_with_ends(seed: int, length_penalty: float) -> None:
    model, end, length = random_model(seed, 4), 3, 4
    scores: dict[tuple[int, ...], float] = {}
    for count in range(1, length + 1):
        for stem in itertools.product(range(3), repeat=count - 1):
            for last in range(4) if count == length else [end]:
                path = (*stem, last)
                total = sum(model(path[:place])[token] for place, token in enumerate(path))
                scores[path] = total / count**length_penalty
    best = sorted(scores, key=lambda path: -scores[path])
    ended = run(model, 256, length, [end], length_penalty=length_penalty, early_stopping="never").ended
    assert [tuple(beam.token_ids) for beam in ended] == best


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 400, -400, 1e-308])
def test_extreme_length_penalties(length_penalty: float) -> None:
    ended = run(random_model(1, 6), 3, 8, [2], length_penalty=length_penalty).ended
    assert len(ended) == 3
    assert not any(math.isnan(beam.score) for beam in ended)


class TestBeamSearchParams:
    def test_defaults(self) -> None:
        params = BeamSearchParams(beam_width=4)
        assert (params.max_tokens, params.length_penalty, params.early_stopping) == (16, 1.0, False)
        assert (params.stop_token_ids, params.logprobs, params.ignore_eos) == ([], None, False)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", 0),
            ("max_tokens", "3"),
            ("length_penalty", math.inf),
            ("length_penalty", math.nan),
            ("length_penalty", "1"),
            ("early_stopping", "always"),
            ("early_stopping", 1),
            ("early_stopping", None),
            ("ignore_eos", 1),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [1] * 129),
            ("stop_token_ids", "12"),
            ("logprobs", -1),
            ("logprobs", True),
            ("include_stop_str_in_output", None),
            ("skip_special_tokens", "yes"),
            ("detokenize", 0),
        ],
    )
    def test_a_bad_value_is_named(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"^{name}") as caught:
            BeamSearchParams(beam_width=2, **{name: value})
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize("value", [True, False, "never"])
    def test_early_stopping(self, value: bool | str) -> None:
        assert BeamSearchParams(beam_width=2, early_stopping=value).early_stopping == value

    def test_a_search_needs_room_for_a_token(self) -> None:
        with pytest.raises(ValueError, match="max_tokens"):
            BeamSearch(BeamSearchParams(beam_width=2), 0, frozenset())
