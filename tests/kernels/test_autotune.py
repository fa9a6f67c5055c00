"""The search for tiles: what it tries, what it trusts, and what it writes."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis_profiles import is_nightly

from pallas_kernels import autotune, tiles
from pallas_kernels.case import Case, struct
from pallas_kernels.geometries import Geometry
from pallas_kernels.quantized_matmul import quantize
from pallas_kernels.workload import attention_case, filled, relative_error, seconds

TINY = Geometry("Tiny", 2, 1, 16, 32, 64)


@pytest.fixture(autouse=True)
def no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGE_KERNEL_CONFIGS", str(tmp_path / "none"))
    tiles._table.cache_clear()


class TestSearch:
    def test_walks_to_the_best_sizes(self) -> None:
        cost = {"rows": 64, "chunk": 8}
        measure = lambda values: 1.0 + sum(abs(values[name] - cost[name]) for name in cost)  # noqa: E731
        assert autotune.search({"rows": 16, "chunk": 32}, measure, budget=100) == cost

    def test_stays_within_its_budget(self) -> None:
        asked: list[dict[str, int]] = []

        def measure(values: dict[str, int]) -> float:
            asked.append(values)
            return 1.0 / values["rows"]

        assert autotune.search({"rows": 1}, measure, budget=4) == {"rows": 16}
        assert [values["rows"] for values in asked] == [1, 2, 4, 8, 16]

    def test_passes_over_what_cannot_be_used(self) -> None:
        measure = lambda values: None if values["rows"] > 16 else 1.0 / values["rows"]  # noqa: E731
        assert autotune.search({"rows": 4}, measure, budget=100) == {"rows": 16}

    def test_sizes_do_not_fall_to_zero(self) -> None:
        assert autotune.search({"rows": 2}, lambda values: float(values["rows"]), budget=100) == {"rows": 1}

    def test_small_gains_are_noise(self) -> None:
        assert autotune.search({"rows": 4}, lambda values: 1.0 - 0.001 * values["rows"], budget=100) == {"rows": 4}


class _Tile(NamedTuple):
    rows: int


def _case(costs: dict[int, int], wrong: tuple[int, ...] = ()) -> Case:
    """An operation whose time depends on its tile: so many dependent products."""

    def operation(x: Any, implementation: str) -> Any:
        tile = tiles.pick("power", implementation, "decode T4", _Tile(16), fits=lambda tile: tile.rows <= 64)
        y = jax.lax.fori_loop(0, costs[tile.rows], lambda _, y: jnp.tanh(y @ x), x)
        return jnp.zeros_like(x) + 2.0 * (tile.rows in wrong) + 0.0 * y

    arguments = {"x": struct((64, 64), "float32")}
    return Case("power", "Tiny", "64", "decode 4", "float32", operation, arguments, {}, ("xla",))


class TestTune:
    def test_finds_faster_tiles(self) -> None:
        case = _case({4: 3000, 8: 3000, 16: 3000, 32: 500, 64: 20})
        (entry,) = autotune.tune(case, filled(case.arguments), "xla", budget=10, rounds=2)
        assert entry["tiles"] == {"rows": 64}, "128 does not fit"
        assert entry["heuristic"] == {"rows": 16}
        assert entry["us"] < entry["heuristic_us"]
        assert entry["device"] == "cpu"

    def test_does_not_trust_another_result(self, capsys: pytest.CaptureFixture[str]) -> None:
        case = _case({8: 3000, 16: 3000, 32: 20}, wrong=(32,))
        (entry,) = autotune.tune(case, filled(case.arguments), "xla", budget=2, rounds=1)
        assert entry["tiles"] != {"rows": 32}
        assert "rows=32: WRONG RESULT" in capsys.readouterr().err

    def test_keys_of_another_kind_are_left_alone(self) -> None:
        case = _case({16: 1})._replace(shape="prefill 4")
        (entry,) = autotune.tune(case, filled(case.arguments), "xla", budget=2, rounds=1)
        assert entry["error"] == "has no tiles to choose"

    def test_a_case_that_fails_says_why(self) -> None:
        def refuses(x: Any, implementation: str) -> Any:
            raise NotImplementedError("not this one")

        case = _case({16: 1})._replace(function=refuses)
        (entry,) = autotune.tune(case, filled(case.arguments), "xla", budget=2, rounds=1)
        assert entry["error"] == "NotImplementedError: not this one"


class TestSave:
    ENTRY = {"operation": "a", "implementation": "xla", "key": "decode", "tiles": {"rows": 8}}  # noqa: RUF012

    def test_entries_are_added_and_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "cpu.json"
        autotune.save(path, "cpu", self.ENTRY)
        autotune.save(path, "cpu", {**self.ENTRY, "key": "another"})
        autotune.save(path, "cpu", {**self.ENTRY, "tiles": {"rows": 4}})
        assert tiles.read_table(path) == {
            tiles.Key("a", "xla", "another"): {"rows": 8},
            tiles.Key("a", "xla", "decode"): {"rows": 4},
        }
        assert [entry["key"] for entry in json.loads(path.read_text())["entries"]] == ["another", "decode"]

    def test_a_file_that_is_no_table_is_not_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "cpu.json"
        path.write_text("[]")
        with pytest.raises(ValueError, match="not an object"):
            autotune.save(path, "cpu", self.ENTRY)
        assert path.read_text() == "[]"


def test_the_command_tunes_the_attention_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autotune, "find_geometry", lambda name: TINY)
    monkeypatch.setattr(autotune, "LEAST_GAIN", -1e6)  # everything wins, so that something is written
    kinds = ("decode", "short", "long") if is_nightly else ("decode",)
    cases = autotune._cases
    monkeypatch.setattr(autotune, "_cases", lambda *options: itertools.islice(cases(*options), len(kinds)))
    path = tmp_path / "cpu.json"
    sizes = ["--requests=2", "--context=40", "--prefill=130", "--block-size=8", "--budget=1", "--rounds=1"]
    autotune.main(["--op=ragged_paged_attention", "--model=tiny", *sizes, f"--output={path}"])
    shown = capsys.readouterr().out
    table = tiles.read_table(path)
    for kind in kinds:
        assert f"ragged_paged_attention xla {kind} K1 G2 H16 bs8 float32 float32" in shown
        assert tiles.Key("ragged_paged_attention", "xla", f"{kind} K1 G2 H16 bs8 float32 float32") in table
    # And the table is used.
    monkeypatch.setenv("JAXPAGE_KERNEL_CONFIGS", str(tmp_path))
    key = next(key for key in table if key.key.startswith("decode"))
    assert tiles.tuned(*key) == table[key]


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--model=unheard-of"], "is not known"), (["--op=nothing"], "invalid choice")):
        with pytest.raises(SystemExit):
            autotune.main(arguments)
        assert message in capsys.readouterr().err


class TestWorkload:
    def test_attention_arrays_fit_the_contract(self) -> None:
        case, arguments = attention_case(
            TINY, num_requests=3, num_queries=2, context=20, block_size=8, dtype="float32", kv_dtype="int8"
        )
        assert case.shape == "prefill 3 x 2"
        assert {
            name: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), value) for name, value in arguments.items()
        } == {
            name: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), value) for name, value in case.arguments.items()
        }
        assert sorted(arguments["metadata"].block_tables.flatten().tolist()) == list(range(1, 10))
        assert (arguments["kv_scales"] > 0).all()
        out, expected = (
            jax.jit(functools.partial(case.function, **case.options, implementation=name))(**arguments)
            for name in ("xla", "reference")
        )
        assert relative_error(out, expected) < 1e-5

    def test_other_arguments(self) -> None:
        weight = jax.eval_shape(lambda w: quantize(w, kind="int4", group_size=32), struct((8, 64), "float32"))
        made = filled({"x": struct((10, 64), "bfloat16"), "weight": weight, "group_sizes": struct((4,), "int32")})
        assert made["group_sizes"].tolist() == [3, 3, 2, 2]
        assert jax.tree.structure(made["weight"]) == jax.tree.structure(weight)
        assert (made["weight"].scales > 0).all()

    def test_nan_is_an_error(self) -> None:
        assert not relative_error(jnp.array([1.0, jnp.nan]), jnp.ones(2)) <= 1.0

    def test_timings(self) -> None:
        times = seconds({"a": lambda: jnp.ones(3), "b": lambda: jnp.zeros(3)}, rounds=3)
        assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}
        assert all(time > 0 for each in times.values() for time in each)
