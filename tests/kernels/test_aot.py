"""Ahead-of-time compiling, but for the compilers: what is compiled, what is read from their output, how it is shown."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch, targets
from pallas_kernels.aot import __main__ as command
from pallas_kernels.aot import child, compiler, matrix, report, supervisor
from pallas_kernels.aot.matrix import Selection
from pallas_kernels.aot.report import FAILED, OK, REFUSED, Row
from pallas_kernels.geometries import GEOMETRIES, find_geometry
from pallas_kernels.targets import TARGETS, find_target


def make_row(**changes: Any) -> Row:
    fields = {
        "target": "h100",
        "operation": "ragged_paged_attention",
        "implementation": "triton",
        "model": "SmolLM2-135M",
        "size": "9/3x64",
        "shape": "decode 32 x 8192",
        "dtype": "bfloat16",
    }
    return Row(**{**fields, **changes})


class TestNames:
    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("SmolLM2-135M", "SmolLM2-135M"),
            ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M"),
            ("gemma_3_270M", "Gemma-3-270m"),
            ("llama 3.3", "Llama-3.3-70B/TP8"),
            ("mixtral", "Mixtral-8x7B/TP8"),
            ("QWEN3", "Qwen3-8B"),
        ],
    )
    def test_a_model_is_found_by_what_people_type(self, name: str, found: str) -> None:
        assert find_geometry(name).name == found

    @pytest.mark.parametrize("name", ["llama", "qwen", "gpt2", "", "-"])
    def test_another_model_is_refused_with_the_names(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"choose one of .*B"):
            find_geometry(name)

    def test_each_chip_has_what_its_compiler_wants(self) -> None:
        assert {"v4", "v5e", "v5p", "v6e", "v7x", "a100", "l4", "h100", "h200", "b200"} == set(TARGETS)
        capabilities = {name: target.compute_capability for name, target in TARGETS.items() if target.platform == "gpu"}
        assert capabilities == {"a100": 8.0, "l4": 8.9, "h100": 9.0, "h200": 9.0, "b200": 10.0}
        assert all(target.topology for target in TARGETS.values() if target.platform == "tpu")
        assert find_target("H100").device_kind == "NVIDIA H100 80GB HBM3"

    def test_a_kernel_learns_the_capability_of_the_chip_compiled_for(self) -> None:
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA L4", num_cores=58, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)):
            assert targets.compute_capability() == 8.9
            dispatch._check_device("triton", "gpu")
            with pytest.raises(NotImplementedError, match=r"needs compute capability 9\.0, the device has 8\.9"):
                dispatch._check_device("mosaic_gpu", "gpu")
        assert targets.compute_capability() is None
        dispatch._check_device("mosaic_gpu", "gpu")


class TestMatrix:
    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_every_model_is_in_every_operation_it_has(self, platform: str) -> None:
        cases = matrix.cases(Selection(), platform)
        assert len({case.identity for case in cases}) == len(cases)
        for operations in matrix.OPERATIONS.values():
            for operation in operations:
                models = {name for case in cases if case.operation == operation for name in case.model.split(", ")}
                assert models == {geometry.name for geometry in GEOMETRIES}, operation

    def test_models_of_equal_sizes_share_their_cases(self) -> None:
        cases = matrix.cases(Selection(operations=("ragged_paged_attention",), kv_dtypes=("bf16",)), "gpu")
        assert "Llama-3.1-8B, Qwen3-8B" in {case.model for case in cases}

    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_decode_moves_little_more_than_it_has_to(self, platform: str) -> None:
        decode = [case for case in matrix.cases(Selection(("ragged_paged_attention",)), platform) if case.minimum_bytes]
        kernels = {"mosaic_tpu"} if platform == "tpu" else {"mosaic_gpu", "triton"}
        assert decode
        for case in decode:
            for name in kernels:
                # Scales lie in rows of 128 lanes on a TPU, which costs more where heads are few and small.
                most = 1.15 if "dynamic" in case.dtype else 1.1
                assert case.minimum_bytes and case.moved_bytes[name] < most * case.minimum_bytes, (case, name)

    @pytest.mark.parametrize("model", ["SmolLM2-135M", "Mixtral-8x7B/TP8"])
    def test_cases_are_calls_that_their_operation_takes(self, model: str) -> None:
        for case in matrix.cases(Selection(models=(model,)), "gpu"):
            options = dict(case.options) | ({"implementation": "xla"} if case.implementations else {})

            def call(case: matrix.Case = case, options: dict[str, Any] = options, **arguments: Any) -> Any:
                return case.function(**arguments, **options)

            assert jax.tree.leaves(jax.eval_shape(call, **case.arguments)), case
            assert set(case.donated) <= set(case.arguments)

    def test_the_short_matrix_is_what_is_listed(self) -> None:
        cases = matrix.cases(Selection(is_short=True), "tpu")
        listed = [(case.operation, case.model.split(", ")[0], case.shape.split()[0], case.dtype) for case in cases]
        assert sorted(listed) == sorted(matrix.SHORT)

    def test_names_narrow_it(self) -> None:
        chosen = Selection(operations=("write_kv",), models=("smol",), kv_dtypes=("fp8", "int8"))
        cases = matrix.cases(chosen, "gpu")
        assert {(case.operation, case.model) for case in cases} == {("write_kv", "SmolLM2-135M")}
        assert {case.dtype for case in cases} == {"float8_e4m3fn", "int8"}

    @pytest.mark.parametrize(
        ("selection", "message"),
        [
            (Selection(operations=("attention",)), "op must be one of ragged_paged_attention"),
            (Selection(implementations=("cuda",)), "implementation must be one of mosaic_tpu"),
            (Selection(models=("gpt2",)), "model 'gpt2' is not known"),
            (Selection(kv_dtypes=("int4",)), "kv-dtype must be one of bfloat16"),
        ],
    )
    def test_unknown_names_are_refused(self, selection: Selection, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            selection.check()

    def test_a_chip_gets_the_kernels_it_can_have_and_a_way_out(self) -> None:
        chosen = Selection(operations=("ragged_paged_attention",), models=("smol",), kv_dtypes=("bf16",))
        entries, notes = matrix.plan(chosen, find_target("a100"))
        first = [(entry.implementation, entry.is_fallback) for entry in entries if entry.case is entries[0].case]
        assert first == [("triton", False), ("xla", True)]
        assert any("no mosaic_gpu: it needs compute capability 9.0, a100 has 8.0" in note for note in notes)
        entries, _ = matrix.plan(chosen, find_target("v6e"))
        assert {entry.implementation for entry in entries} == {"mosaic_tpu", "xla"}

    def test_an_implementation_that_is_named_is_the_only_one(self) -> None:
        chosen = Selection(models=("smol",), implementations=("xla",))
        entries, _ = matrix.plan(chosen, find_target("v6e"))
        assert {(entry.implementation, entry.is_fallback) for entry in entries} == {("xla", False)}

    def test_one_that_this_jax_lacks_is_left_out_with_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pallas_kernels.ragged_paged_attention.triton", None)
        chosen = Selection(operations=("ragged_paged_attention",), models=("smol",))
        entries, notes = matrix.plan(chosen, find_target("l4"))
        assert {(entry.implementation, entry.is_fallback) for entry in entries} == {("xla", False)}
        assert any("no triton: this JAX lacks what it needs" in note for note in notes)


class TestChild:
    def run(self, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, str], first: int = 0) -> list[dict[str, Any]]:
        class Compiler:
            def __init__(self, target: object, dump: Path) -> None: ...

            def compile(self, case: matrix.Case, implementation: str) -> Row:
                return make_row(implementation=implementation, status=statuses[implementation])

        monkeypatch.setattr(child, "Compiler", Compiler)
        monkeypatch.setitem(dispatch.MIN_CAPABILITY, "mosaic_gpu", 99.0)
        lines = io.StringIO()
        chosen = Selection(("ragged_paged_attention",), ("smol",), ("float32",))
        child.run(lines, "h100", chosen, Path(), first)
        return [json.loads(line) for line in lines.getvalue().splitlines()]

    def test_xla_takes_what_all_kernels_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        messages = self.run(monkeypatch, {"triton": REFUSED, "xla": OK})
        rows = [message["end"] for message in messages if "end" in message]
        assert [(row["implementation"], row["status"]) for row in rows] == [("triton", REFUSED), ("xla", OK)]
        assert messages[-1] == {"finished": 2}

    @pytest.mark.parametrize("status", [OK, FAILED])
    def test_and_nothing_else(self, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
        messages = self.run(monkeypatch, {"triton": status})
        assert [message["end"]["status"] for message in messages if "end" in message] == [status]

    def test_behind_an_entry_that_ended_the_process_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(monkeypatch, {}, first=1) == [{"finished": 2}]


FAKE_CHILD = """
import json, os, sys, time
first = int(sys.argv[1])
row = json.loads(sys.argv[2])
behaviours = json.loads(sys.argv[3])
def say(**message):
    print(json.dumps(message), flush=True)
if first == 0:
    say(note="a remark")
for index, behaviour in enumerate(behaviours):
    if index < first:
        continue
    if behaviour == "die early":
        sys.exit("libtpu is of the wrong version")
    say(start={**row, "shape": str(index)}, index=index)
    if behaviour == "abort":
        print("LLVM ERROR: Cannot select: fp8", file=sys.stderr, flush=True)
        os.abort()
    if behaviour == "exit":
        sys.exit(3)
    if behaviour == "hang":
        time.sleep(60)
    say(end={**row, "shape": str(index), "status": behaviour}, index=index)
say(finished=len(behaviours))
"""


class TestSupervisor:
    def supervise(self, *behaviours: str, **options: Any) -> tuple[list[Row], list[str]]:
        def fake(first: int) -> list[str]:
            fields = json.dumps(vars(make_row()))
            return [sys.executable, "-S", "-c", FAKE_CHILD, str(first), fields, json.dumps(behaviours)]

        return supervisor.supervise(fake, os.environ, **options)

    def test_an_abort_is_the_failure_of_its_case_alone(self) -> None:
        rows, notes = self.supervise("ok", "abort", "ok", "exit", "refused")
        assert [row.shape for row in rows] == ["0", "1", "2", "3", "4"]
        assert [row.status for row in rows] == [OK, FAILED, OK, FAILED, REFUSED]
        assert rows[1].reason == "LLVM ERROR: Cannot select: fp8 (the compiler ended by signal 6)"
        assert rows[3].reason == "the compiler ended with status 3"
        assert notes == ["a remark"]

    def test_the_last_case_may_abort(self) -> None:
        rows, _ = self.supervise("ok", "abort")
        assert [row.status for row in rows] == [OK, FAILED]

    def test_a_case_that_never_ends_is_ended(self) -> None:
        rows, _ = self.supervise("ok", "hang", "ok", case_seconds=2.0)
        assert [row.status for row in rows] == [OK, FAILED, OK]
        assert rows[1].reason == "more than 2 s"

    def test_a_process_that_does_not_get_to_work_is_an_error(self) -> None:
        with pytest.raises(supervisor.TargetError, match="libtpu is of the wrong version"):
            self.supervise("die early")

    def test_rows_are_shown_as_they_come(self) -> None:
        seen: list[Row] = []
        rows, _ = self.supervise("ok", "abort", progress=seen.append)
        assert seen == rows


class TestReport:
    def test_a_table_is_aligned_and_leaves_out_what_nobody_has(self) -> None:
        kernels = [
            {"name": "ragged_paged_attention_tile_kernel", "registers": 255, "spill_bytes": 36, "shared_bytes": 40960},
            {"name": "ragged_paged_attention_split_kernel", "registers": 128, "spill_bytes": 0},
        ]
        rows = [
            make_row(status=OK, kernels=kernels, temp_bytes=2**20, minimum_bytes=1000, moved_bytes=1100, seconds=1.25),
            make_row(status=REFUSED, reason="a KV cache of dtype int8", dtype="int8"),
        ]
        heads, first, second = report.table(rows, is_gpu=True).splitlines()
        assert heads.split()[6:] == [
            "registers",
            "spills",
            "shared",
            "temp",
            "minimum",
            "moved",
            "ratio",
            "s",
            "result",
        ]
        assert first.split()[-9:] == ["255", "tile:36", "40.0K", "1.0M", "1000", "1.1K", "1.10", "1.2", "ok"]
        assert second.endswith("refused: a KV cache of dtype int8")
        assert heads.index("result") == first.index("ok") == second.index("refused")
        assert "spills" not in report.table(rows[1:], is_gpu=True)

    def test_no_spills_are_a_zero_and_unknown_ones_a_dash(self) -> None:
        rows = [make_row(status=OK, kernels=[{"name": "k", "spill_bytes": 0}]), make_row(status=OK)]
        _, first, second = report.table(rows, is_gpu=True).splitlines()
        assert first.split()[-3] == "0" and second.split()[-3] == "-"

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ("JaxRuntimeError: INTERNAL: ptxas exited with error\nmore", "ptxas exited with error"),
            ("ValueError: \n  Mosaic failed to compile /a/b/kernel.py:3", "Mosaic failed to compile kernel.py:3"),
            ("", "no reason given"),
            ("x" * 500, "x" * 97 + "..."),
        ],
    )
    def test_reasons_are_condensed(self, message: str, words: str) -> None:
        assert report.condensed(message) == words

    def test_json_has_everything(self) -> None:
        content = json.loads(report.as_json([make_row(status=OK)], ["a remark"]))
        assert content["rows"][0]["status"] == OK and content["notes"] == ["a remark"]
        assert Row(**content["rows"][0]) == make_row(status=OK)

    def test_summary(self) -> None:
        rows = [make_row(status=OK), make_row(status=OK), make_row()]
        assert report.summary(rows) == "2 ok, 1 failed"
        assert report.summary([]) == "no cases"


PTXAS = """ptxas info    : Compiling entry function 'walk_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for walk_mosaic_gpu_kernel
    0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 151 registers, used 16 barriers, 1 bytes smem
"""


class TestDumps:
    def test_ptxas(self) -> None:
        assert compiler.ptxas_kernels(PTXAS) == [
            {"name": "walk_mosaic_gpu_kernel", "registers": 151, "spill_bytes": 20}
        ]

    def test_mosaic_gpu(self) -> None:
        printed = "Resources(smem_scratch_bytes=1000, x=1)\nResources(smem_scratch_bytes=2000, x=1)\n" + PTXAS
        assert compiler.mosaic_gpu_kernels(printed) == [
            {"name": "walk", "registers": 151, "spill_bytes": 20, "shared_bytes": 2000}
        ]

    def test_names_of_triton_kernels(self) -> None:
        hlo = (
            '  %a = f32[2] custom-call(%b), custom_call_target="__gpu$xla.gpu.triton", '
            'backend_config={grid_x = 56 : i32, ir = "name", name = "split_kernel", num_stages = 3 : i32}\n'
            '  %c = f32[2] custom-call(%b), custom_call_target="other", backend_config={name = "no"}\n'
        )
        assert compiler.triton_names(hlo) == {"split_kernel"}

    def test_kernels_of_a_tpu(self) -> None:
        hlo = (
            '  ROOT %walk.3 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={'
            '"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"999"}],'
            '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"10174464"}],"x":1}\n'
        )
        assert compiler.tpu_kernels(hlo, {"walk": 2048}) == [
            {"name": "walk", "vmem_bytes": 10174464, "smem_bytes": 2048}
        ]

    @pytest.mark.parametrize(
        ("shape", "size"),
        [((), 512), ((1,), 512), ((129,), 1024), ((4, 8), 2048), ((11, 200), 16 * 256 * 4), ((2, 3, 8), 2 * 4 * 512)],
    )
    def test_smem_is_padded(self, shape: tuple[int, ...], size: int) -> None:
        assert compiler.tiled_bytes(shape, jnp.int32) == size

    def test_smem_of_a_kernel_is_its_scalars_and_scratch(self) -> None:
        def kernel(scalars: Any, x: Any, out: Any, scratch: Any) -> None:
            scratch[0] = scalars[0]
            out[...] = x[...]

        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec((8, 128), lambda step, scalars: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda step, scalars: (0, 0)),
            scratch_shapes=[pltpu.SMEM((4,), jnp.int32)],
        )

        @jax.jit
        def program(scalars: jax.Array, x: jax.Array) -> jax.Array:
            shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
            return pl.pallas_call(kernel, out_shape=shape, grid_spec=grid_spec, name="copy")(scalars, x)

        structs = jax.ShapeDtypeStruct((1000,), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.float32)
        assert compiler.smem_bytes(program.trace(*structs).jaxpr.jaxpr) == {"copy": 1024 * 4 + 512}

    def test_a_process_starts_no_device_of_this_machine(self, tmp_path: Path) -> None:
        for target in TARGETS.values():
            variables = compiler.environment(target, tmp_path)
            assert variables["JAX_PLATFORMS"] == "cpu" and variables["CUDA_VISIBLE_DEVICES"] == "-1"
            assert (f"--xla_dump_to={tmp_path}" in variables.get("XLA_FLAGS", "")) == (target.platform == "gpu")


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "--target"),
            (["--target", "h300"], "target must be one of a100"),
            (["--target", "h100", "--model", "gpt2"], "is not known: choose one of SmolLM2-135M"),
            (["--target", "h100", "--op", "softmax"], "op must be one of"),
            (["--target", "h100", "--kv-dtype", "int3"], "kv-dtype must be one of"),
            (["--target", "h100", "--jobs", "0"], "jobs must be at least 1"),
        ],
    )
    def test_bad_arguments(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as error:
            command.main(arguments)
        assert error.value.code == 2
        assert message in capsys.readouterr().err

    def test_what_is_not_installed_is_one_line_a_target(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(compiler, "ptxas", lambda: None)
        assert command.main(["--target", "v6e", "h100"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            "compiling for v6e needs libtpu, which is not installed here: pip install 'jaxpage[plan]'",
            "compiling for h100 needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 (ptxas), "
            "which is not installed here: pip install 'jaxpage[plan]'",
        ]

    @pytest.mark.parametrize(("statuses", "code"), [((OK, REFUSED), 0), ((OK, FAILED), 1), ((), 2)])
    def test_the_exit_status_says_whether_any_failed(
        self,
        statuses: tuple[str, ...],
        code: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        def fake(*arguments: object) -> tuple[list[Row], list[str]]:
            return [make_row(status=status) for status in statuses], ["a remark"]

        self.pretend(monkeypatch, fake)
        file = tmp_path / "rows.json"
        assert command.main(["--target", "all", "--jobs", "2", "--json", str(file)]) == code
        assert len(json.loads(file.read_text())["rows"]) == len(TARGETS) * len(statuses)
        assert "h100: " in (out := capsys.readouterr().out) and "(a remark)" in out

    def test_a_target_that_cannot_be_compiled_for_does_not_stop_the_others(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fake(make: Callable[[int], list[str]], *arguments: object) -> tuple[list[Row], list[str]]:
            if "v4" in make(0):
                raise supervisor.TargetError("no such topology")
            return [make_row(status=OK)], []

        self.pretend(monkeypatch, fake)
        assert command.main(["--target", "v4", "h100", "--quiet"]) == 2
        output = capsys.readouterr()
        assert output.err == "v4: nothing could be compiled: no such topology\n" and "h100: 1 ok" in output.out

    def pretend(self, monkeypatch: pytest.MonkeyPatch, supervise: Callable[..., Any]) -> None:
        monkeypatch.setattr(compiler, "missing", lambda target: None)
        monkeypatch.setattr(command, "supervise", supervise)
