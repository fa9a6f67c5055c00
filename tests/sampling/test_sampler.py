"""Drawing tokens: temperature, seeds, ties, and that a row never notices its neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import draw, settings, state

from jaxpage.params import GREEDY_TEMPERATURE
from jaxpage.sampling.sampler import no_scores, score

NUM_DRAWS = 4000
IMPOSSIBLE = -np.inf
V = 40


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, V)).astype(np.float32) * 3


def histogram(logits: list[float], **fields: float) -> np.ndarray:
    """How often each token is drawn with NUM_DRAWS different seeds; ten ids, those without logits impossible."""
    row = np.full(10, IMPOSSIBLE)
    row[: len(logits)] = logits
    tokens = draw(np.tile(row, (NUM_DRAWS, 1)), settings(NUM_DRAWS, seeds=np.arange(NUM_DRAWS), **fields))
    return np.bincount(tokens, minlength=10)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities / probabilities.sum() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


class TestTemperature:
    @pytest.mark.parametrize(
        ("temperature", "probabilities"),
        [
            (0.5, [0.865, 0.117, 0.016, 0.002]),
            (1.0, [0.644, 0.237, 0.087, 0.032]),
            (2.0, [0.455, 0.276, 0.167, 0.102]),
        ],
    )
    def test_sam_1c_draws_follow_the_softmax(self, temperature: float, probabilities: list[float]) -> None:
        counts = histogram([2, 1, 0, -1], temperature=temperature)
        assert counts[4:].sum() == 0
        assert np.abs(counts[:4] / NUM_DRAWS - probabilities).max() < 0.03
        assert chi_square(counts[:4], np.exp(np.array([2, 1, 0, -1]) / temperature)) < 21

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
    def test_sam_1_a_small_temperature_is_greedy(self, dtype: type) -> None:
        """Logits up to 60 whose maximum leads by 1, as a model of a narrow type gives them."""
        temperatures = [0, 1e-9, 1e-7, 1e-5, 5e-5, 1e-4, 1e-3, 5e-3, 1e-2]
        logits = np.random.default_rng(1).uniform(-60, 59, (50, V))
        best = np.arange(50) % V
        logits[np.arange(50), best] = 60
        logits = np.repeat(logits, len(temperatures), axis=0).astype(dtype).astype(np.float32)
        rows = settings(len(logits), seeds=np.arange(len(logits)), temperature=temperatures * 50)
        np.testing.assert_array_equal(draw(logits, rows), np.repeat(best, len(temperatures)))

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
    def test_sam_1a_very_large_logits(self, dtype: type) -> None:
        logits = np.array([-3e4, 3e4, 2.99e4, -3e4]).astype(dtype).astype(np.float32)
        best = np.flatnonzero(logits == logits.max()).tolist()  # bfloat16 does not tell 2.99e4 from 3e4
        assert best == ([1, 2] if dtype is jnp.bfloat16 else [1])
        assert histogram(logits.tolist(), temperature=1.0).nonzero()[0].tolist() == best
        assert histogram(logits.tolist()).nonzero()[0].tolist() == best[:1]
        assert (histogram([1e4] * 10, temperature=1.0) > NUM_DRAWS / 20).all()

    def test_logits_at_the_ends_of_float32(self) -> None:
        assert histogram([3e38, -3e38], temperature=1e-3)[0] == NUM_DRAWS
        assert histogram([-3e38, -3e38, -np.inf], temperature=1e-3)[:2].min() > NUM_DRAWS / 3

    def test_greedy_and_random_rows_in_one_batch(self) -> None:
        logits = random_logits(6)
        rows = settings(6, seeds=3, temperature=[0, 1.5, 0, GREEDY_TEMPERATURE / 2, 1.5, 0], positions=range(6))
        tokens = draw(logits, rows)
        for row in (0, 2, 3, 5):
            assert tokens[row] == logits[row].argmax()

    def test_the_flags_skip_work_and_change_nothing(self) -> None:
        logits = random_logits(6)
        greedy, warm = settings(6), settings(6, seeds=range(6), temperature=1.0)
        expected = draw(logits, greedy)
        np.testing.assert_array_equal(expected, logits.argmax(axis=1))
        none = {"has_edits": False, "has_randomness": False, "has_filters": False}
        np.testing.assert_array_equal(draw(logits, greedy, **none), expected)
        np.testing.assert_array_equal(draw(logits, greedy, has_edits=False), expected)
        np.testing.assert_array_equal(draw(logits, warm, has_edits=False), draw(logits, warm))
        np.testing.assert_array_equal(draw(logits, warm, has_filters=False), draw(logits, warm))


class TestTies:
    @pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
    def test_sam_1b_greedy_takes_the_lowest_id(self, num_rows: int) -> None:
        logits = np.zeros((num_rows, 300))
        logits[:, [97, 98]] = 5
        assert draw(logits, settings(num_rows)).tolist() == [97] * num_rows
        without = {"has_edits": False, "has_randomness": False}
        assert draw(logits, settings(num_rows), **without).tolist() == [97] * num_rows

    def test_equal_logits(self) -> None:
        assert draw(np.full((2, V), 1e4), settings(2)).tolist() == [0, 0]

    @pytest.mark.parametrize("has_filters", [False, True])
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_a_row_with_a_nan_has_no_next_token_and_the_others_do_not_mind(
        self, temperature: float, has_filters: bool
    ) -> None:
        logits = random_logits(4)
        rows = settings(4, temperature=temperature, top_k=5)
        expected = draw(logits, rows, has_filters=has_filters)
        logits[1, 7] = logits[2] = np.nan
        assert draw(logits, rows, has_filters=has_filters).tolist() == [expected[0], -1, -1, expected[3]]


class TestTopK:
    LOGITS = tuple(index / 10 for index in range(8))

    @pytest.mark.parametrize("top_k", [-1, 0, 8, 10, 11, 10**9])
    def test_sam_2_off_or_at_least_the_vocabulary_takes_all(self, top_k: int) -> None:
        counts = histogram(list(self.LOGITS), temperature=1.0, top_k=top_k)
        assert counts[8:].sum() == 0
        assert chi_square(counts[:8], np.exp(self.LOGITS)) < 30

    @pytest.mark.parametrize("top_k", [1, 5])
    def test_sam_2_only_the_best_are_candidates(self, top_k: int) -> None:
        counts = histogram(list(self.LOGITS), temperature=1.0, top_k=top_k)
        assert counts.nonzero()[0].tolist() == list(range(8 - top_k, 8))
        assert chi_square(counts[8 - top_k : 8], np.exp(self.LOGITS[8 - top_k :])) < 30

    def test_sam_2_tokens_that_tie_with_the_last_candidate_are_candidates(self) -> None:
        assert histogram([0.5] * 8, temperature=1.0, top_k=5).nonzero()[0].tolist() == list(range(8))


class TestSeeds:
    def test_seed_1a_all_bits_count(self) -> None:
        seeds = [7, 7 + 2**32, 7 + 2**62, -7, 2**63 - 1, -(2**63), 0, 1]
        streams = np.stack(
            [
                draw(np.zeros((8, V)), settings(8, seeds=seeds, temperature=1.0, positions=position))
                for position in range(16)
            ]
        ).T
        assert len({tuple(stream) for stream in streams}) == len(seeds)

    def test_sample_index_and_position_give_other_noise(self) -> None:
        logits = np.zeros((64, V))
        base = draw(logits, settings(64, seeds=range(64), temperature=1.0))
        for other in ({"sample_index": 1}, {"positions": 1}):
            assert (draw(logits, settings(64, seeds=range(64), temperature=1.0, **other)) == base).mean() < 0.2
        assert (draw(logits, settings(64, seeds=range(64), temperature=1.0)) == base).all()

    def test_sample_index_and_position_do_not_stand_for_each_other(self) -> None:
        logits = np.zeros((64, V))
        first = draw(logits, settings(64, seeds=range(64), sample_index=1, positions=2, temperature=1.0))
        second = draw(logits, settings(64, seeds=range(64), sample_index=2, positions=1, temperature=1.0))
        assert (first == second).mean() < 0.2


FIELDS = {
    "seeds": [5, 6, 7, 8, 9, 10, 11, 12],
    "sample_index": [0, 1, 0, 2, 0, 0, 3, 0],
    "positions": [3, 100, 7, 0, 31, 5, 6, 7],
    "temperature": [0, 0.7, 1.0, 2.0, 1.0, 1.3, 0, 0.9],
    "top_k": [0, 5, 9999999, 0, 2, 0, 1, -1],
    "top_p": [1, 0.9, 1, 0.5, 1, 0.3, 0.2, 1],
    "min_p": [0, 0, 0.1, 0, 0, 0.05, 0.5, 0],
}
"""Eight rows that differ in everything."""


class TestRowsAreIndependent:
    """The same row gives the same token in any place of any batch."""

    def test_in_any_order(self) -> None:
        logits = random_logits(8, seed=2)
        fields = {name: np.array(values) for name, values in FIELDS.items()}
        expected = draw(logits, settings(8, **fields))
        for shift in range(1, 8):
            order = np.roll(np.arange(8), shift)
            moved = draw(logits[order], settings(8, **{name: values[order] for name, values in fields.items()}))
            np.testing.assert_array_equal(moved, expected[order])

    def test_sam_3_alone_and_in_larger_batches(self) -> None:
        logits = random_logits(8, seed=2)
        fields = {name: np.array(values) for name, values in FIELDS.items()}
        expected = draw(logits, settings(8, **fields))
        for row in range(8):
            alone = draw(logits[row : row + 1], settings(1, **{name: values[row] for name, values in fields.items()}))
            assert alone[0] == expected[row]
        doubled = settings(16, **{name: np.tile(values, 2) for name, values in fields.items()})
        np.testing.assert_array_equal(draw(np.tile(logits, (2, 1)), doubled), np.tile(expected, 2))

    def test_sam_2b_filters_of_neighbours_do_not_matter(self) -> None:
        """300 seeds; top_k differs by row, and the row with 1 takes the last token always."""
        logits = np.tile(np.array([index / 10 for index in range(8)] + [IMPOSSIBLE] * 2), (8, 1))
        top_k = np.array([1, 0, 5, 2, -1, 8, 3, 1])
        every = np.tile(logits, (300, 1))
        seeds = np.repeat(np.arange(300), 8)
        together = draw(every, settings(2400, seeds=seeds, temperature=1.0, top_k=np.tile(top_k, 300))).reshape(300, 8)
        for row, value in enumerate(top_k):
            uniform = draw(every, settings(2400, seeds=seeds, temperature=1.0, top_k=value)).reshape(300, 8)
            np.testing.assert_array_equal(together[:, row], uniform[:, row])
        assert (together[:, [0, 7]] == 7).all()

    def test_min_1c_masks_of_end_ids_stay_in_their_row(self) -> None:
        logits = random_logits(8)
        logits[:, 7] = 50
        device_state = state(9, V)
        device_state.stop_ids[:8, 0] = 7
        masked = np.arange(8) % 2 == 1
        order = np.array([3, 0, 1, 2, 5, 4, 7, 6])
        for rows in (np.arange(8), order):
            tokens = draw(logits[rows], settings(8, slots=rows, suppress_stop=masked[rows]), device_state)
            np.testing.assert_array_equal(tokens == 7, ~masked[rows])
        second_best = np.where(np.arange(V) == 7, -np.inf, logits).argmax(axis=1)
        tokens = draw(logits, settings(8, slots=range(8), suppress_stop=masked), device_state)
        np.testing.assert_array_equal(tokens, np.where(masked, second_best, 7))


class TestScore:
    @staticmethod
    @functools.cache
    def compiled():
        return jax.jit(score, static_argnums=2)

    def test_against_log_softmax(self) -> None:
        logits = random_logits(6)
        logits[1] += 1e4
        logits[2, 5:] = -np.inf
        token_ids = np.array([3, 0, 2, 39, 7, 8], np.int32)
        scores = self.compiled()(jnp.asarray(logits), jnp.asarray(token_ids), 5)
        wide = logits.astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        rows = np.arange(6)
        np.testing.assert_allclose(scores.logprob, expected[rows, token_ids], rtol=1e-5, atol=2e-3)
        np.testing.assert_allclose(scores.logprob[2:], expected[rows, token_ids][2:], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(scores.rank, 1 + (logits > logits[rows, token_ids][:, None]).sum(axis=1))
        best = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        np.testing.assert_array_equal(scores.top_ids, best)
        np.testing.assert_allclose(scores.top_logprobs, np.take_along_axis(expected, best, 1), rtol=1e-5, atol=2e-3)

    def test_the_best_token_has_exactly_the_best_logprob(self) -> None:
        logits = random_logits(6)
        scores = self.compiled()(jnp.asarray(logits), jnp.asarray(logits.argmax(axis=1)), 5)
        np.testing.assert_array_equal(scores.logprob, scores.top_logprobs[:, 0])
        np.testing.assert_array_equal(scores.rank, 1)

    def test_sam_1a_very_large_logits(self) -> None:
        logits = np.full((2, V), -3e4, np.float32)
        logits[0, :2] = 3e4, 2.99e4
        logits[1] = 1e4
        scores = self.compiled()(jnp.asarray(logits), jnp.asarray([0, 3]), 5)
        np.testing.assert_allclose(scores.logprob, [0, -np.log(V)], atol=1e-3)
        assert np.isfinite(scores.top_logprobs).all()

    def test_no_scores_has_the_same_form(self) -> None:
        scores = jax.eval_shape(lambda logits, ids: score(logits, ids, 5), jnp.zeros((6, V)), jnp.zeros(6, jnp.int32))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), no_scores(6, 5)) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), scores
        )
