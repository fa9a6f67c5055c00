"""The C++ kernels as a library: made once, for the CPU at hand, and done without where it cannot be had."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp import needs_compiler

from pallas_kernels import AttentionMetadata, matmul, native, ragged_paged_attention
from pallas_kernels.matmul import block_weight

SAY = """
import jax.numpy as jnp
from pallas_kernels.matmul import explain, multiplies_blocks
choice = explain(jnp.ones((2, 64)), jnp.ones((3, 64)))
assert multiplies_blocks() == (choice.implementation == "native")
print(choice)
"""
CONTRACTS = """
import sys; sys.path.insert(0, "tests/kernels")
import attention_contract, quantized_matmul_contract
from pallas_kernels.ragged_paged_attention.native import ragged_paged_attention
from pallas_kernels.quantized_matmul.native import quantized_matmul
for name in ("decodes", "mixed 9/3x64 bf16", "long prompts bf16", "int8 dynamic all", "e4m3 static", "e5m2 dynamic"):
    attention_contract.check_contract(ragged_paged_attention, attention_contract.CASES[name])
for name in ("int8", "fp8 f32", "int4 groups of 32", "int8 many tokens"):
    quantized_matmul_contract.check_contract(quantized_matmul, quantized_matmul_contract.CASES[name])

import numpy as np
from pallas_kernels.matmul import block_weight, dequantize, matmul
random = np.random.default_rng(0)
values = random.integers(-128, 128, (83, 160), dtype=np.int8)
scales, offsets = random.standard_normal((2, 83, 10)).astype(np.float32)
for weight in (block_weight(values, scales, offsets), block_weight(values, scales[:, :5])):
    for num_tokens in (1, 3, 13, 40):
        x = random.standard_normal((num_tokens, 160)).astype(np.float32)
        expected = x.astype(np.float64) @ np.asarray(dequantize(weight), np.float64).T
        y = matmul(x, weight, implementation="native")
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
"""
pytestmark = needs_compiler
ROOT = Path(__file__).parents[2]


def python(program: str, tmp_path: Path, **environment: str) -> str:
    """What a process of its own prints, with a cache of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAXPAGE_CACHE": str(tmp_path)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_library_is_made_once(tmp_path: Path) -> None:
    compiler = native.find_compiler()
    assert compiler is not None
    library = native.build(compiler, tmp_path)
    made_at = library.stat().st_mtime_ns
    assert native.build(compiler, tmp_path) == library and library.stat().st_mtime_ns == made_at
    assert list(tmp_path.iterdir()) == [library], "nothing else stays behind"


def test_another_compiler_makes_another_library(tmp_path: Path) -> None:
    compiler = native.find_compiler()
    assert compiler is not None
    assert native.build(compiler, tmp_path) != native.build([*compiler, "-DANYTHING"], tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the compiler makes code for this kind of CPU only")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_code_for_cpus_with_shorter_vectors(tmp_path: Path, level: str) -> None:
    """Vectors of 4 and of 8 numbers, on whatever this machine has."""
    compiler = tmp_path / "compiler"
    real = shutil.which("c++")
    script = f"""#!/bin/sh
for word; do shift; [ "$word" = -march=native ] && word=-march={level}; set -- "$@" "$word"; done
exec {real} "$@"
"""
    compiler.write_text(script)
    compiler.chmod(0o755)
    python(CONTRACTS, tmp_path, CXX=str(compiler))
    assert len(list((tmp_path / "native").glob("*.so"))) == 1


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"JAXPAGE_NATIVE": "0"}, "JAXPAGE_NATIVE=0 is set"),
        ({"CXX": "no-such-compiler"}, "no C.. compiler here"),
        ({"CXX": "'"}, "the C.. kernels cannot be compiled or loaded: No closing quotation"),
        ({"CXX": "false"}, "the C.. kernels cannot be compiled or loaded"),
        ({"JAXPAGE_CACHE": "/dev/null"}, "the C.. kernels cannot be compiled or loaded: .*/dev/null"),
    ],
    ids=str,
)
def test_without_the_library_xla_does_the_work(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    said = python(SAY, tmp_path, **({"JAXPAGE_CACHE": str(tmp_path)} | environment))
    assert "xla; not native: " in said
    assert re.search(reason, said)


def test_processes_may_make_it_at_the_same_time(tmp_path: Path) -> None:
    environment = os.environ | {"JAXPAGE_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", SAY], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["native"] * 3
    assert len(list((tmp_path / "native").iterdir())) == 1


def test_a_damaged_library_is_made_again(tmp_path: Path) -> None:
    python(SAY, tmp_path)
    [library] = (tmp_path / "native").iterdir()
    library.write_bytes(b"")
    assert python(SAY, tmp_path).strip() == "native"
    assert library.stat().st_size > 10_000


def test_vmap_is_one_call_after_the_other() -> None:
    x, weight = jax.random.normal(jax.random.key(0), (3, 5, 64)), jax.random.normal(jax.random.key(1), (7, 64))
    both = jax.jit(jax.vmap(lambda x: matmul(x, weight, implementation="native")))(x)
    np.testing.assert_allclose(both, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_threads_may_call_at_the_same_time() -> None:
    random = np.random.default_rng(0)
    weight = jnp.asarray(random.standard_normal((700, 512)), jnp.float32)
    blocks = block_weight(np.ones((300, 512), np.int8), random.standard_normal((300, 16)).astype(np.float32))
    inputs = [jnp.asarray(random.standard_normal((n, 512)), jnp.float32) for n in (1, 8, 33, 64)]
    call = jax.jit(lambda x: jnp.hstack([matmul(x, one, implementation="native") for one in (weight, blocks)]))
    expected = [np.asarray(call(x)) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not np.array_equal(call(inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_piece_of_work_is_done_once(tmp_path: Path) -> None:
    """Of the threads alone, over a pool that stands for XLA's; with the compiler's look-out for races if it has one."""
    compiler = native.find_compiler()
    assert compiler is not None
    here, program = Path(__file__).parent / "threads", tmp_path / "stress"
    command = [*compiler, "-std=c++17", "-O1", "-g", "-pthread", f"-I{here}", f"-I{native.FOLDER}", "-o", str(program)]
    for flags in (["-fsanitize=thread"], []):
        made = subprocess.run([*command, *flags, str(here / "stress.cc")], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            break
    assert made.returncode == 0, made.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    if "FATAL: ThreadSanitizer" in done.stderr:  # it cannot have the addresses it needs on this kernel
        subprocess.run([*command, str(here / "stress.cc")], check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "24000\n", "")


class TestAttention:
    Q, CACHE = jnp.ones((4, 4, 16)), jnp.ones((8, 2, 4, 32))

    def attend(self, tables: Any, lens: Any, starts: Any) -> np.ndarray:
        metadata = AttentionMetadata(jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(starts))
        return np.asarray(ragged_paged_attention(self.Q, self.CACHE, metadata, scale=1.0, implementation="native"))

    def test_ids_out_of_range_are_no_crash(self) -> None:
        for tables in ([[1, 2**30]], [[-(2**31), -1]]):
            assert np.isfinite(self.attend(tables, [8], [0, 1])).all()
        assert np.isfinite(self.attend([[1, 2]], [10_000], [0, 1])).all(), "more keys than the table has blocks"

    @pytest.mark.parametrize("starts", [[0, 5], [3, 2], [-1, 2], [2, 4]])
    def test_queries_that_are_not_there_are_an_error(self, starts: list[int]) -> None:
        with pytest.raises(Exception, match="cu_seqlens_q must go from 0 up and end within the queries"):
            self.attend([[1, 2]], [8], starts)

    @pytest.mark.parametrize("soft_cap", [None, 5.0])
    @pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0x7FC00000])
    def test_a_nan_of_its_own_stays_one(self, bits: int, soft_cap: float | None) -> None:
        metadata = AttentionMetadata(jnp.ones((1, 1), jnp.int32), jnp.full(1, 3), jnp.arange(2))
        nan = np.array(bits, np.uint32).view(np.float32)
        out = ragged_paged_attention(
            self.Q, self.CACHE.at[1, :, 1, 3].set(nan), metadata, scale=1.0, soft_cap=soft_cap, implementation="native"
        )
        assert np.isnan(out[0]).all()

    def test_what_it_refuses_says_why(self) -> None:
        metadata = AttentionMetadata(jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32), jnp.arange(2))
        for q, cache, message in (
            (self.Q[..., :8], self.CACHE[..., :16], "a head_dim that is a multiple of 16, got 8"),
            (self.Q, self.CACHE.astype(jnp.float16), "takes no float16"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                ragged_paged_attention(q, cache, metadata, scale=1.0, implementation="native")
            assert np.isfinite(ragged_paged_attention(q, cache, metadata, scale=1.0)).all()
