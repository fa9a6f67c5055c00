"""Penalties, biases, masks and filters against plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import draw, settings, state

from jaxpage.batch import SamplingState, SamplingTensors
from jaxpage.sampling.logits import PROMPT_FLAG, edit_logits, filter_logits

V = 24
ROWS = 8
_edit = jax.jit(edit_logits)
_filter = jax.jit(filter_logits)


def random_logits(seed: int = 0, vocab_size: int = V) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, vocab_size)).astype(np.float32) * 3


def edited(logits: np.ndarray, rows: SamplingTensors, device_state: SamplingState) -> np.ndarray:
    return np.asarray(_edit(jnp.asarray(logits), *jax.tree.map(jnp.asarray, (rows, device_state))))


def filtered(logits: np.ndarray, **fields: object) -> np.ndarray:
    return np.asarray(_filter(jnp.asarray(logits), jax.tree.map(jnp.asarray, settings(ROWS, **fields))))


class TestEdits:
    def test_neutral_rows_pass_bit_for_bit(self) -> None:
        logits = random_logits()
        logits[0, :3] = -0.0, np.inf, -np.inf
        device_state = state(3, V)
        device_state.token_counts[:] = 5 + PROMPT_FLAG
        device_state.stop_ids[:] = 1
        out = edited(logits, settings(ROWS), device_state)
        np.testing.assert_array_equal(out.view(np.uint32), logits.view(np.uint32))

    def test_penalties(self) -> None:
        random = np.random.default_rng(3)
        logits = random_logits(1)
        device_state = state(ROWS + 1, V)
        generated = random.integers(0, 4, (ROWS + 1, V))
        in_prompt = random.integers(0, 2, (ROWS + 1, V)).astype(bool)
        device_state.token_counts[:] = generated + PROMPT_FLAG * in_prompt
        slots = random.permutation(ROWS + 1)[:ROWS]
        presence = np.array([0, 1.5, 0, 0, -2, 1, 0.5, 0], np.float32)
        frequency = np.array([0, 0, 0.7, 0, 2, -0.3, 0.1, 0], np.float32)
        repetition = np.array([1, 1, 1, 1.7, 1, 0.6, 1.2, 2], np.float32)
        out = edited(
            logits,
            settings(
                ROWS,
                slots=slots,
                presence_penalty=presence,
                frequency_penalty=frequency,
                repetition_penalty=repetition,
            ),
            device_state,
        )
        for row, slot in enumerate(slots):
            for token in range(V):
                value = float(logits[row, token])
                if generated[slot, token] or in_prompt[slot, token]:
                    value = value / repetition[row] if value > 0 else value * repetition[row]
                if generated[slot, token]:
                    value -= presence[row] + frequency[row] * generated[slot, token]
                assert out[row, token] == pytest.approx(value, rel=1e-5, abs=1e-5), (row, token)

    def test_bias_only_where_asked_for(self) -> None:
        logits = random_logits(2)
        device_state = state(3, V)
        device_state.logit_bias[1] = np.arange(V)
        slots = np.array([0, 1] * 4)
        out = edited(logits, settings(ROWS, slots=slots, has_bias=slots == 1), device_state)
        np.testing.assert_array_equal(out[::2], logits[::2])
        np.testing.assert_allclose(out[1::2], logits[1::2] + np.arange(V), rtol=1e-6)

    @pytest.mark.parametrize("allowed", [[17], [17, 3], [0, 23]])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_bias_of_minus_infinity_forbids(self, allowed: list[int], temperature: float) -> None:
        device_state = state(2, V)
        device_state.logit_bias[0] = -np.inf
        device_state.logit_bias[0, allowed] = 0
        for seed in range(5):
            rows = settings(ROWS, seeds=range(seed * ROWS, seed * ROWS + ROWS), has_bias=True, temperature=temperature)
            assert set(draw(random_logits(seed), rows, device_state)) <= set(allowed)
            limited = rows._replace(top_k=np.full(ROWS, 5, np.int32), top_p=np.full(ROWS, 0.9, np.float32))
            assert set(draw(random_logits(seed), limited, device_state)) <= set(allowed)

    def test_end_ids_are_masked_in_their_rows_only(self) -> None:
        logits = random_logits(4)
        device_state = state(3, V)
        device_state.stop_ids[0, :2] = 5, 9
        device_state.stop_ids[1, :1] = 23
        slots = np.array([0, 0, 1, 1, 2, 2, 0, 1])
        suppress = np.array([True, False, True, False, True, False, True, True])
        out = edited(logits, settings(ROWS, slots=slots, suppress_stop=suppress), device_state)
        expected = logits.copy()
        for row in np.flatnonzero(suppress):
            expected[row, [[5, 9], [23], []][slots[row]]] = -np.inf
        np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize("vocab_size", [24, 32, 33, 100])
    def test_masks_of_tokens_hold_in_their_rows_only(self, vocab_size: int) -> None:
        generator = np.random.default_rng(vocab_size)
        logits = generator.normal(size=(ROWS, vocab_size)).astype(np.float32)
        allowed = generator.random((3, vocab_size)) < 0.5
        device_state = state(3, vocab_size)
        bits = np.zeros((3, 32 * device_state.token_mask.shape[1]), bool)
        bits[:, :vocab_size] = allowed
        device_state.token_mask[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        slots = np.array([0, 1, 2, 0, 1, 2, 0, 1])
        has_mask = np.array([True, True, True, False, True, False, True, True])
        out = edited(logits, settings(ROWS, slots=slots, has_mask=has_mask), device_state)
        forbidden = has_mask[:, None] & ~allowed[slots]
        np.testing.assert_array_equal(out, np.where(forbidden, -np.inf, logits))

    def test_a_mask_is_stronger_than_a_bias(self) -> None:
        device_state = state(2, V)
        device_state.logit_bias[0] = 0
        device_state.logit_bias[0, 5] = 100
        device_state.stop_ids[0, 0] = 5
        out = edited(random_logits(5), settings(ROWS, has_bias=True, suppress_stop=True), device_state)
        assert np.isneginf(out[:, 5]).all()


def kept_by_sorting(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """Ids that must be kept and ids that may be: top_p's border is uncertain by the rounding of a float32 sum."""
    order = np.argsort(-row.astype(np.float64), kind="stable")
    last = row[order[min(top_k if top_k > 0 else len(row), len(row)) - 1]]
    kept = [token for token in order if row[token] >= last]
    weights = np.exp(row[kept].astype(np.float64) - row.max())
    share = np.cumsum(weights) / weights.sum()

    def above(wanted: float) -> set[int]:
        border = row[kept[int(np.searchsorted(share, wanted).clip(0, len(kept) - 1))]] if wanted < 1 else -np.inf
        return {token for token, weight in zip(kept, weights, strict=True) if row[token] >= border and weight >= min_p}

    return above(top_p - 1e-6), above(top_p + 1e-6 if top_p < 1 else 1)


class TestFilters:
    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("kind", ["normal", "ties", "forbidden", "flat", "peaked"])
    def test_against_sorting(self, seed: int, kind: str) -> None:
        random = np.random.default_rng(seed)
        logits = random_logits(seed)
        if kind == "ties":
            logits = np.round(logits)
        elif kind == "forbidden":
            logits[random.random(logits.shape) < 0.5] = -np.inf
            logits[:, 0] = 1
        elif kind == "flat":
            logits[:] = 2.5
        elif kind == "peaked":
            logits[:, 3] += 1000
        top_k = random.choice([0, -1, 1, 2, 3, 7, V - 1, V, V + 1, 10**9], ROWS)
        top_p = random.choice([1, 1e-6, 0.1, 0.37, 0.5, 0.8, 0.95, 0.999], ROWS).astype(np.float32)
        min_p = random.choice([0, 0, 0.013, 0.2, 0.71, 1], ROWS).astype(np.float32)
        out = filtered(logits, top_k=top_k, top_p=top_p, min_p=min_p)
        for row in range(ROWS):
            finite = set(np.flatnonzero(np.isfinite(out[row])))
            must, may = kept_by_sorting(logits[row], top_k[row], float(top_p[row]), float(min_p[row]))
            may_finite = {token for token in may if np.isfinite(logits[row, token])}
            must_finite = {token for token in must if np.isfinite(logits[row, token])}
            assert must_finite <= finite <= may_finite
            np.testing.assert_array_equal(out[row, list(finite)], logits[row, list(finite)])
            assert logits[row].argmax() in finite

    def test_off_values_pass_bit_for_bit(self) -> None:
        logits = random_logits()
        np.testing.assert_array_equal(filtered(logits), logits)
        np.testing.assert_array_equal(filtered(logits, top_k=V), logits)

    def test_exact_neighbours_in_float32_are_told_apart(self) -> None:
        value = np.float32(1.5)
        logits = np.full((ROWS, V), -5, np.float32)
        logits[:, 4], logits[:, 6] = value, np.nextafter(value, np.float32(2))
        out = filtered(logits, top_k=1)
        assert np.isfinite(out).nonzero()[1].tolist() == [6] * ROWS

    def test_the_two_zeros_tie(self) -> None:
        logits = np.full((ROWS, V), -5, np.float32)
        logits[:, 4], logits[:, 6] = 0.0, -0.0
        assert np.isfinite(filtered(logits, top_k=1)).nonzero()[1].tolist() == [4, 6] * ROWS

    def test_top_p_is_applied_among_the_candidates_of_top_k(self) -> None:
        logits = np.log(np.array([0.3, 0.25, 0.2, 0.15] + [0.1 / (V - 4)] * (V - 4), np.float32))
        # Of the best two 0.3 is a share of 0.545.
        out = filtered(np.tile(logits, (ROWS, 1)), top_k=2, top_p=0.5)
        assert np.isfinite(out).sum(axis=1).tolist() == [1] * ROWS
        out = filtered(np.tile(logits, (ROWS, 1)), top_p=0.5)
        assert np.isfinite(out).sum(axis=1).tolist() == [2] * ROWS

    def test_a_large_vocabulary(self) -> None:
        logits = np.random.default_rng(0).standard_normal((ROWS, 50_000)).astype(np.float32)
        out = filtered(logits, top_k=[1, 10, 1000, 49_999, 50_000, 0, 3, 7])
        assert np.isfinite(out).sum(axis=1).tolist() == [1, 10, 1000, 49_999, 50_000, 50_000, 3, 7]
        out = filtered(logits, top_p=0.9)
        weights = np.sort(np.exp(logits.astype(np.float64)), axis=1)[:, ::-1]
        shares = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
        exact = 1 + (shares < 0.9).sum(axis=1)
        np.testing.assert_allclose(np.isfinite(out).sum(axis=1), exact, atol=3)
