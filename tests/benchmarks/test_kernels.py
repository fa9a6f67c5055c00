"""The kernel benchmark on shapes of a few tokens: that every path of it runs, on this machine and as on a GPU."""

from __future__ import annotations

import json
import stat
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpp import HAS_COMPILER, ON_CPU

from jaxpage.benchmarks import attention_rivals, device_rates, kernels
from jaxpage.benchmarks.attention_peers import Peer
from pallas_kernels.geometries import Geometry
from pallas_kernels.workload import attention_case, relative_error

TINY = Geometry("Tiny", 4, 2, 16, 32, 64)
DECODE = kernels.Shape(TINY, "float32", requests=2, queries=1, context=20, block_size=8)
PREFILL = kernels.Shape(TINY, "float32", requests=1, queries=20, context=20, block_size=8)
RATES = {"copy": 1e9, "float32": 1e9}

FAKE_TORCH = """
import contextlib, types
import numpy as np
__version__ = "0.fake"
float32 = np.float32
class Tensor(np.ndarray):
    def repeat_interleave(self, count, dim):
        return np.repeat(self, count, axis=dim)
def randn(*shape, dtype, device):
    return np.ones(shape, dtype).view(Tensor)
def scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=False):
    if enable_gqa:
        raise RuntimeError("enable_gqa is not known")
    return np.einsum("bhqs,bhsd->bhqd", np.einsum("bhqd,bhsd->bhqs", q, k), v)
nn = types.ModuleType("torch.nn")
nn.functional = types.ModuleType("torch.nn.functional")
nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
import sys
sys.modules |= {"torch.nn": nn, "torch.nn.functional": nn.functional}
cuda = types.SimpleNamespace(is_available=lambda: False)
inference_mode = contextlib.nullcontext
threads = 0
def set_num_threads(count):
    global threads
    threads = count
def get_num_threads():
    return threads
def manual_seed(seed):
    pass
"""


@pytest.fixture
def peer_python(tmp_path: Path) -> str:
    """An interpreter whose torch is a few lines of numpy."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_rates.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(device_rates.MATMUL_SIZE, "cpu", 64)


class TestShape:
    def test_decode(self) -> None:
        assert DECODE.minimum_bytes == 2 * 2 * 16 * 4 * 40
        assert DECODE.operations == 4 * 4 * 16 * 40
        assert DECODE.moved_bytes("triton") >= DECODE.minimum_bytes

    def test_prefill(self) -> None:
        assert PREFILL.operations == 4 * 4 * 16 * 210
        assert PREFILL._replace(context=120).operations == 4 * 4 * 16 * (20 * 100 + 210)


class TestMeasure:
    @pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
    def test_rows(self, shape: kernels.Shape) -> None:
        rows = {row["by"]: row for row in kernels.measure(shape, "cpu", None, None, 2, RATES)}
        assert list(rows) == ["native", "xla", "jax dense xla"]
        for name, row in rows.items():
            if name == "native" and not HAS_COMPILER:
                assert "no C++ compiler" in row["note"]
                continue
            assert row["ms"] >= row["least ms"] > 0
            assert float(row["error"]) < 1e-5
            assert not row["note"]
        if shape.is_decode:
            assert rows["xla"]["of copy"] == pytest.approx(rows["xla"]["GB/s"])
            assert rows["xla"]["bytes / least"] > rows["native"]["bytes / least"] > 1
            assert rows["jax dense xla"]["bytes / least"] is None
        else:
            assert rows["xla"]["of matmul"] == pytest.approx(1e3 * rows["xla"]["TFLOP/s"])

    def test_on_a_gpu_what_this_machine_lacks_is_a_note(self) -> None:
        rows = {row["by"]: row for row in kernels.measure(DECODE, "gpu", None, None, 1, RATES)}
        assert set(rows) == {
            "mosaic_gpu", "triton", "xla", "jax dense xla", "jax dense cudnn", "jax paged_attention"
        }  # fmt: skip
        for name in ("mosaic_gpu", "triton", "jax dense cudnn", "jax paged_attention"):
            assert rows[name]["ms"] is None
            assert rows[name]["note"], name
        assert rows["xla"]["ms"] > 0
        assert rows["jax dense xla"]["ms"] > 0

    def test_a_wrong_result_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {"wrong": lambda: lambda: jnp.zeros((2, 4, 16)), "nan": lambda: lambda: jnp.full((2, 4, 16), jnp.nan)}
        monkeypatch.setattr(kernels, "rivals", lambda *arguments, **options: wrong)
        rows = {row["by"]: row for row in kernels.measure(DECODE, "cpu", ["xla"], None, 1, RATES)}
        assert rows["xla"]["ms"] > 0
        for name in wrong:
            assert rows[name]["ms"] is None
            assert rows[name]["note"] == "wrong result, not timed"

    def test_without_a_result_to_compare_with_there_is_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(**arguments: Any) -> Any:
            raise MemoryError("no\nmemory")

        case, arguments = attention_case(TINY, num_requests=2, num_queries=1, context=20, block_size=8, dtype="float32")
        monkeypatch.setattr(kernels, "attention_case", lambda *_, **__: (case._replace(function=fails), arguments))
        (row,) = kernels.measure(DECODE, "cpu", None, None, 1, RATES)
        assert row["note"] == "MemoryError: no memory"
        assert row["ms"] is None


def test_jax_paged_attention_is_called_right() -> None:
    case, arguments = attention_case(TINY, num_requests=2, num_queries=1, context=64, block_size=8, dtype="float32")
    lens = jnp.array([64, 21], jnp.int32)
    arguments["metadata"] = arguments["metadata"]._replace(seq_lens=lens)
    expected = case.function(**arguments, **case.options)
    run = attention_rivals.jax_paged(**arguments, scale=case.options["scale"], interpret=True, k_splits=4)
    assert relative_error(run(), expected) < 1e-5


def test_dense_attention_wants_whole_prompts() -> None:
    _, arguments = attention_case(TINY, num_requests=1, num_queries=4, context=20, block_size=8, dtype="float32")
    found = attention_rivals.rivals("cpu", **arguments, context=20, scale=1.0)
    with pytest.raises(NotImplementedError, match="queries from position 0"):
        found["jax dense xla"]()


class TestDevice:
    def test_facts_of_a_gpu(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        device = types.SimpleNamespace(
            platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", memory_stats=lambda: {"bytes_limit": 7}
        )
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho '570.1, 700 W, 1980 MHz, 3201 MHz'\n")
        program.chmod(0o755)
        monkeypatch.setattr(device_rates, "NVIDIA_SMI", (str(program),))
        facts = device_rates.device_facts()
        assert facts["device"] == "NVIDIA H200"
        assert facts["compute_capability"] == "9.0"
        assert facts["memory_bytes"] == 7
        assert facts["driver"] == "570.1, 700 W, 1980 MHz, 3201 MHz"

    @pytest.mark.parametrize("program", ["does-not-exist", "false"])
    def test_facts_without_a_driver_program(self, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        def fails() -> None:
            raise RuntimeError("not implemented")

        device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA L4", memory_stats=fails)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(device_rates, "NVIDIA_SMI", (program,))
        facts = device_rates.device_facts()
        assert facts["device"] == "NVIDIA L4"
        assert not {"driver", "memory_bytes", "compute_capability"} & set(facts)

    def test_facts_and_rates_here(self) -> None:
        assert device_rates.device_facts()["device"] == jax.local_devices()[0].device_kind
        assert device_rates.copy_bandwidth() > 0
        assert device_rates.matmul_rate("float32") > 0


class TestPeer:
    def test_ways_and_reasons(self, peer_python: str) -> None:
        with Peer(peer_python, 3) as peer:
            assert peer.facts() == {"torch": "0.fake", "threads": 3}
            state = peer.prepare(DECODE.for_peer())
            assert state.pop("vLLM CPU", "").startswith("ModuleNotFoundError")  # type: ignore[union-attr]
            assert state == {
                "torch SDPA, gqa": "RuntimeError: enable_gqa is not known",
                "torch SDPA, repeated": None,
                "torch SDPA, stacked": None,
            }
            assert peer.measure("torch SDPA, stacked") > 0
            assert list(peer.prepare(PREFILL.for_peer()))[:2] == ["torch SDPA, gqa", "torch SDPA, repeated"]

    def test_an_environment_without_torch(self) -> None:
        with pytest.raises(RuntimeError, match="the peer ended with status 1"), Peer(sys.executable, 1) as peer:
            peer.facts()


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer_python: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "find_geometry", lambda name: TINY)
    sizes = ["--requests=2", "--context=20", "--prefill=20", "--block-size=8", "--rounds=2"]
    path = tmp_path / "result.json"
    kernels.main(["--model=tiny", *sizes, f"--peer-python={peer_python}", f"--json={path}"])
    shown = capsys.readouterr().out
    assert "decode 2 x 20" in shown
    assert "prefill 20" in shown
    assert "copy rate: " in shown
    assert "peer torch: 0.fake" in shown
    result = json.loads(path.read_text())
    assert result["settings"]["peer"]["torch"] == "0.fake"
    assert {row["by"] for row in result["rows"] if row["ms"] is not None} == {
        ON_CPU, "xla", "jax dense xla", "torch SDPA, repeated", "torch SDPA, stacked"
    }  # fmt: skip
    assert all(np.isfinite(row["ms"]) for row in result["rows"] if row["ms"] is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model=unheard-of"], "is not known"), (["--peer-python=/does/not/exist"], "cannot be started")],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(options)
    assert message in capsys.readouterr().err
