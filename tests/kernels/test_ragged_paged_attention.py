"""Ragged paged attention: the portable implementations on many batches, the arguments' checks, the dispatch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend
import jax.interpreters.mlir
import jax.numpy as jnp
import numpy as np
import pytest
from attention_contract import CASES, LARGEST, arguments, check_contract, expected
from cpp import NATIVE, ON_CPU

from pallas_kernels import AttentionMetadata, dispatch, ragged_paged_attention
from pallas_kernels.ragged_paged_attention import explain, native, reference, xla
from pallas_kernels.targets import TARGETS

# One padded shape for all batches of a geometry, so that each implementation is compiled once for it.
NUM_TOKENS = 160
NUM_ROWS = 18
MAX_CONTEXT = 320
CACHE_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Geometry:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}of{self.num_kv_heads}-dim{self.head_dim}-block{self.block_size}"


SMALL = Geometry(4, 2, 16, 4)
GEOMETRIES = (
    SMALL,
    Geometry(4, 4, 24, 16),
    Geometry(4, 1, 64, 32),
    Geometry(9, 3, 64, 16),
    Geometry(5, 1, 16, 4),
    Geometry(4, 2, 24, 32),
)
EDGES = (1, 63, 64, 65, 255, 256, 257, 320)

# (query tokens, tokens in the cache with them) of each request
BATCHES: dict[str, Sequence[tuple[int, int]]] = {
    "one decode": [(1, 65)],
    "three decodes": [(1, 1), (1, 257), (1, 64)],
    "eight decodes at chunk edges": [(1, length) for length in EDGES],
    "seventeen decodes": [(1, length) for length in (*EDGES, 2, 3, 4, 5, 31, 32, 33, 100, 128)],
    "prompt of 63": [(63, 63)],
    "prompt of 64": [(64, 64)],
    "prompt of 65": [(65, 65)],
    "prompt of 130": [(130, 130)],
    "prompt that fills the batch": [(160, 160)],
    "prompts": [(2, 2), (63, 63), (65, 65), (3, 3)],
    "decodes, then prompts": [(1, 30), (1, 256), (64, 64), (7, 7)],
    "prompts, then decodes": [(64, 64), (7, 7), (1, 30), (1, 256)],
    "prompts between decodes": [(1, 257), (65, 65), (1, 1), (66, 66), (1, 64)],
    "chunks of prompts": [(1, 90), (63, 255), (5, 256), (64, 257), (2, 65)],
    "last chunk of one token": [(1, 64), (9, 64), (1, 65)],
    "nothing": [],
}


@dataclasses.dataclass
class Case:
    """A batch and, per request, the keys and values it owns in order of position."""

    q: np.ndarray
    kv_cache: np.ndarray
    metadata: AttentionMetadata
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make_case(
    geometry: Geometry,
    requests: Sequence[tuple[int, int]],
    seed: int = 0,
    num_shared_blocks: int = 0,
    num_tokens: int = NUM_TOKENS,
    num_rows: int = NUM_ROWS,
) -> Case:
    """Random requests over blocks in random order. All that nobody owns is NaN, the scratch block 0 included.

    The first ``num_shared_blocks`` blocks of all requests are the same ones. What the tables hold past a request's
    last block is any block.
    """
    random = np.random.default_rng(seed)
    size, num_blocks = geometry.block_size, CACHE_TOKENS // geometry.block_size
    shape = (num_blocks, geometry.num_kv_heads, size, 2 * geometry.head_dim)
    kv_cache = np.full(shape, np.nan, np.float32)
    free = list(random.permutation(np.arange(1, num_blocks)))
    shared = [free.pop() for _ in range(num_shared_blocks)]
    kv_cache[shared] = random.standard_normal((len(shared), *shape[1:]))
    tables = random.integers(0, num_blocks, (num_rows, MAX_CONTEXT // size)).astype(np.int32)
    keys, values = [], []
    for row, (_, length) in enumerate(requests):
        blocks = shared + [free.pop() for _ in range(-(-length // size) - num_shared_blocks)]
        tables[row, : len(blocks)] = blocks
        for position in range(num_shared_blocks * size, length):
            entry = random.standard_normal((geometry.num_kv_heads, 2 * geometry.head_dim))
            kv_cache[blocks[position // size], :, position % size] = entry
        own = np.moveaxis(kv_cache[blocks], 2, 1).reshape(-1, *shape[1:2], shape[3])[:length]
        keys.append(own[..., : geometry.head_dim])
        values.append(own[..., geometry.head_dim :])
    lengths = np.zeros(num_rows, np.int32)
    lengths[: len(requests)] = [length for _, length in requests]
    starts = np.full(num_rows + 1, sum(count for count, _ in requests), np.int32)
    starts[: len(requests) + 1] = np.cumsum([0] + [count for count, _ in requests])
    q = random.standard_normal((num_tokens, geometry.num_heads, geometry.head_dim)).astype(np.float32)
    return Case(q, kv_cache, AttentionMetadata(tables, lengths, starts), keys, values)


def oracle(
    case: Case,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention request by request in float64, without blocks or batches."""
    out = np.zeros_like(case.q)
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first, last = case.metadata.cu_seqlens_q[row : row + 2]
        group = case.q.shape[1] // keys.shape[1]
        keys, values = np.repeat(keys, group, axis=1).astype(float), np.repeat(values, group, axis=1).astype(float)
        for token in range(first, last):
            position = len(keys) - (last - token)
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            scores = np.einsum("nh,snh->ns", case.q[token].astype(float), keys[low : position + 1]) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:
                scores = np.concatenate([scores, sinks.astype(float)[:, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            weights = weights[:, : position + 1 - low]
            out[token] = np.einsum("ns,snh->nh", weights, values[low : position + 1])
    return out


@functools.cache
def compiled(implementation: str, **options: Any) -> Any:
    return jax.jit(functools.partial(ragged_paged_attention, implementation=implementation, **options))


def attend(implementation: str, case: Case, dtype: Any = np.float32, **options: Any) -> np.ndarray:
    q, kv_cache = jnp.asarray(case.q, dtype), jnp.asarray(case.kv_cache, dtype)
    out = compiled(implementation, **options)(q, kv_cache, AttentionMetadata(*map(jnp.asarray, case.metadata)))
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def check(implementation: str, case: Case, **options: Any) -> None:
    """The reference agrees with the oracle, the others with the reference; padding is zero."""
    options.setdefault("scale", case.q.shape[2] ** -0.5)
    expected = oracle(case, **options) if implementation == "reference" else attend("reference", case, **options)
    out = attend(implementation, case, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert not out[case.metadata.cu_seqlens_q[-1] :].any(), "padding tokens must be zero"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", [NATIVE, "xla"])
def test_the_contract(implementation: str, name: str) -> None:
    check_contract({"native": native, "xla": xla}[implementation].ragged_paged_attention, CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sinks or case.kv_dtype in LARGEST])
def test_reference_agrees_with_the_oracle_on_sinks_and_scales(name: str) -> None:
    """The oracle gets what the cache stands for, request by request."""
    spec = CASES[name]
    (q, kv_cache, tables, seq_lens, cu_seqlens_q), keywords = arguments(spec)
    scales = keywords["kv_scales"]
    if scales is None:
        scales = np.ones((len(kv_cache), 2, *kv_cache.shape[1:3]))
        scales *= np.array([keywords["k_scale"] or 1.0, keywords["v_scale"] or 1.0])[:, None, None]
    stored = np.stack(np.split(kv_cache.astype(float), 2, axis=-1), axis=1)
    real = np.moveaxis(stored * scales[..., None], 3, 1)  # [num_blocks, block_size, 2, K, H]
    owned = [
        real[table].reshape(-1, *real.shape[2:])[:length]
        for table, length in zip(tables[: len(spec.requests)], seq_lens, strict=False)
    ]
    case = Case(
        q.astype(np.float32),
        kv_cache,
        AttentionMetadata(tables, seq_lens, cu_seqlens_q),
        [both[:, 0] for both in owned],
        [both[:, 1] for both in owned],
    )
    exact = oracle(case, spec.options["scale"], spec.sliding_window, spec.soft_cap, keywords["sinks"])
    np.testing.assert_allclose(expected(spec), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [*dispatch.PORTABLE, NATIVE])
class TestContract:
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
    def test_batches(self, implementation: str, geometry: Geometry, batch: str) -> None:
        if implementation == "native" and geometry.head_dim % native.HEAD_DIM_MULTIPLE:
            implementation = "auto"  # it refuses, which must lead to one that does not
        check(implementation, make_case(geometry, BATCHES[batch], seed=len(batch)))

    @pytest.mark.parametrize("geometry", [SMALL, Geometry(9, 3, 64, 16)], ids=str)
    def test_requests_share_the_blocks_of_a_common_prefix(self, implementation: str, geometry: Geometry) -> None:
        num_shared = 64 // geometry.block_size
        case = make_case(geometry, [(1, 65), (20, 84), (1, 200), (70, 134)], num_shared_blocks=num_shared)
        check(implementation, case)

    @pytest.mark.parametrize("sliding_window", [1, 5, 32, 1000])
    def test_sliding_window(self, implementation: str, sliding_window: int) -> None:
        for batch in ("seventeen decodes", "prompt of 130", "chunks of prompts", "prompts between decodes"):
            check(implementation, make_case(SMALL, BATCHES[batch], seed=1), sliding_window=sliding_window)

    def test_window_of_one_returns_the_value_of_the_query_itself(self, implementation: str) -> None:
        case = make_case(SMALL, [(1, 100), (3, 3)])
        out = attend(implementation, case, scale=0.25, sliding_window=1)
        own = np.concatenate([case.values[0][-1:], case.values[1]])
        np.testing.assert_allclose(out[:4], np.repeat(own, 2, axis=1), rtol=1e-6)

    def test_scale_and_soft_cap(self, implementation: str) -> None:
        for batch in ("eight decodes at chunk edges", "prompts between decodes"):
            check(implementation, make_case(SMALL, BATCHES[batch], seed=2), scale=2.0, soft_cap=3.0)

    def test_soft_cap_with_sliding_window(self, implementation: str) -> None:
        case = make_case(SMALL, BATCHES["chunks of prompts"], seed=3)
        check(implementation, case, scale=1.0, soft_cap=2.0, sliding_window=40)

    @pytest.mark.parametrize("requests", [[(1, 70)], [(1, 3), (1, 64), (1, 65)], [(66, 67), (2, 2)]], ids=str)
    def test_shapes_without_padding(self, implementation: str, requests: list[tuple[int, int]]) -> None:
        num_tokens = sum(count for count, _ in requests)
        check(implementation, make_case(SMALL, requests, num_tokens=num_tokens, num_rows=len(requests)))

    def test_large_scores_do_not_overflow(self, implementation: str) -> None:
        case = make_case(SMALL, BATCHES["prompts between decodes"], seed=5)
        out = attend(implementation, case, scale=1e4)
        assert np.isfinite(out).all()
        assert np.abs(out).max() <= np.nanmax(np.abs(case.kv_cache)) * (1 + 1e-6)

    def test_where_the_blocks_lie_does_not_change_a_bit(self, implementation: str) -> None:
        case = make_case(SMALL, BATCHES["prompts between decodes"], seed=7)
        order = np.random.default_rng(0).permutation(len(case.kv_cache))
        moved = dataclasses.replace(
            case,
            kv_cache=case.kv_cache[order],
            metadata=case.metadata._replace(block_tables=np.argsort(order).astype(np.int32)[case.metadata[0]]),
        )
        np.testing.assert_array_equal(
            attend(implementation, moved, scale=0.25), attend(implementation, case, scale=0.25)
        )

    @pytest.mark.parametrize("row", [0, 3, 7])
    def test_a_decode_does_not_notice_its_neighbours(self, implementation: str, row: int) -> None:
        first = make_case(SMALL, [(1, 100)] * 8, seed=8)
        alone = attend(implementation, first, scale=0.25)[row]
        for seed, lengths in enumerate([[5] * 8, [240] * 8, [64, 1, 300, 2, 65, 255, 30, 129]]):
            lengths[row] = 100
            second = make_case(SMALL, [(1, length) for length in lengths], seed=100 + seed)
            second.q[row] = first.q[row]
            for position in range(100):
                block, offset = divmod(position, SMALL.block_size)
                source = first.kv_cache[first.metadata.block_tables[row, block], :, offset]
                second.kv_cache[second.metadata.block_tables[row, block], :, offset] = source
            np.testing.assert_array_equal(attend(implementation, second, scale=0.25)[row], alone)

    def test_growing_contexts_do_not_compile_again(self, implementation: str) -> None:
        attend(implementation, make_case(SMALL, [(1, 1)]), scale=0.25)
        function = compiled(implementation, scale=0.25)
        num_programs = function._cache_size()
        for requests in ([(1, 320)], [(160, 160)], [(1, 9), (20, 300)], []):
            attend(implementation, make_case(SMALL, requests), scale=0.25)
        assert function._cache_size() == num_programs


class TestArguments:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
            ({"soft_cap": 0.0}, "soft_cap must be above 0, got 0.0"),
            ({"sinks": np.zeros(3)}, r"sinks must have shape \(4,\), got \(3,\)"),
            ({"kv_scales": np.zeros((512, 2, 2))}, r"kv_scales must have shape \(512, 2, 2, 4\), got \(512, 2, 2\)"),
            ({"kv_scales": np.zeros((512, 2, 2, 4)), "k_scale": 2.0}, "kv_scales exclude k_scale and v_scale, got 2.0"),
            ({"implementation": "fastest"}, r"implementation must be auto or one of .*'fastest'"),
            ({"platform": "abacus"}, r"platform must be one of tpu, gpu, cpu, got 'abacus'"),
        ],
    )
    def test_wrong_options(self, wrong: dict[str, Any], message: str) -> None:
        case = make_case(SMALL, [(1, 1)])
        with pytest.raises(ValueError, match=message):
            ragged_paged_attention(case.q, case.kv_cache, case.metadata, scale=1.0, **wrong)

    @pytest.mark.parametrize("wrong", [(0, (18, 0)), (0, (17, 8)), (1, (17,)), (2, (18,))], ids=str)
    def test_tables_that_do_not_fit_each_other(self, wrong: tuple[int, tuple[int, ...]]) -> None:
        case = make_case(SMALL, [(1, 1)])
        metadata = list(case.metadata)
        metadata[wrong[0]] = np.zeros(wrong[1], np.int32)
        with pytest.raises(ValueError, match=r"must have shapes \[B, max_blocks\], \[B\] and \[B \+ 1\], got"):
            ragged_paged_attention(case.q, case.kv_cache, AttentionMetadata(*metadata), scale=1.0)

    def test_heads_that_cannot_be_grouped(self) -> None:
        case = make_case(SMALL, [(1, 1)])
        with pytest.raises(ValueError, match="num_heads 3 is not a multiple of num_kv_heads 2"):
            ragged_paged_attention(case.q[:, :3], case.kv_cache, case.metadata, scale=1.0)

    def test_heads_of_another_size(self) -> None:
        case = make_case(SMALL, [(1, 1)])
        with pytest.raises(
            ValueError, match="head_dim of q is 8, rows of kv_cache have 32 columns and not twice as many"
        ):
            ragged_paged_attention(case.q[:, :, :8], case.kv_cache, case.metadata, scale=1.0)

    def test_cache_of_a_type_that_means_nothing(self) -> None:
        case = make_case(SMALL, [(1, 1)])
        with pytest.raises(ValueError, match=r"kv_cache must be of one of float32.*, got int32"):
            ragged_paged_attention(case.q, case.kv_cache.view(np.int32), case.metadata, scale=1.0)


SMALL_CALL: tuple[Any, ...] = (
    jax.ShapeDtypeStruct((2, 4, 16), jnp.float32),
    jax.ShapeDtypeStruct((8, 2, 16, 32), jnp.bfloat16),
    AttentionMetadata(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,), (3,)))),  # type: ignore[arg-type]
)


def mesh_of(target: str) -> jax.sharding.AbstractMesh:
    """Of one device of a kind that need not be here."""
    device = jax.sharding.AbstractDevice(TARGETS[target].device_kind, None, "gpu")
    return jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)


class TestDispatch:
    """With a kernel of our own, preferred on the platform under test."""

    @pytest.fixture
    def prefer(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        def install(kernel: Any, platform: str = "cpu") -> None:
            module = types.ModuleType("pallas_kernels.ragged_paged_attention.kernel")
            kernel.__module__ = module.__name__
            module.ragged_paged_attention = kernel  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
            contract = sys.modules["pallas_kernels.ragged_paged_attention"]
            monkeypatch.setattr(contract, "IMPLEMENTATIONS", ("kernel", "xla"))
            monkeypatch.setitem(dispatch.ORDER, platform, ("kernel", "xla"))

        yield install
        dispatch._say_once.cache_clear()

    def test_cpu_takes_cpp_or_else_xla(self) -> None:
        case = make_case(SMALL, BATCHES["decodes, then prompts"])
        np.testing.assert_array_equal(attend("auto", case, scale=0.25), attend(ON_CPU, case, scale=0.25))
        case = make_case(GEOMETRIES[1], BATCHES["decodes, then prompts"])
        np.testing.assert_array_equal(attend("auto", case, scale=0.25), attend("xla", case, scale=0.25))

    def test_a_kernel_that_compiles_is_taken(self, prefer: Any) -> None:
        prefer(lambda q, **rest: q * 2)
        case = make_case(SMALL, [(1, 1)])
        out = ragged_paged_attention(case.q, case.kv_cache, case.metadata, scale=1.0)
        np.testing.assert_array_equal(out, case.q * 2)
        assert str(explain(case.q, case.kv_cache, case.metadata, scale=1.0)) == "kernel"

    def test_the_choice_is_made_inside_a_traced_program(self, prefer: Any) -> None:
        prefer(lambda q, **rest: q * 2)
        case = make_case(SMALL, [(1, 1)])
        out = jax.jit(functools.partial(ragged_paged_attention, scale=1.0))(case.q, case.kv_cache, case.metadata)
        np.testing.assert_array_equal(out, case.q * 2)

    def test_a_kernel_that_refuses_is_passed_over(self, prefer: Any, caplog: pytest.LogCaptureFixture) -> None:
        def refuses(**arguments: Any) -> Any:
            raise NotImplementedError("not this case")

        prefer(refuses)
        with caplog.at_level(logging.INFO, "pallas_kernels"):
            choice = explain(*SMALL_CALL, scale=1.0)
            explain(*SMALL_CALL, scale=1.0)
        assert choice == ("xla", xla.ragged_paged_attention, {"kernel": "not this case"})
        assert len(caplog.messages) == 1, "each choice is said once"
        assert "q float32[2, 4, 16]" in caplog.text
        assert "on cpu: xla; not kernel: not this case" in caplog.text

    def test_a_kernel_that_does_not_lower_breaks_nothing(self, prefer: Any, caplog: pytest.LogCaptureFixture) -> None:
        """Where there is a device of the platform that is worth a warning."""

        def fails(context: Any, x: Any) -> Any:
            raise RuntimeError("out of registers")

        primitive = jax.extend.core.Primitive("fails_to_lower")
        primitive.def_abstract_eval(lambda x: x)
        jax.interpreters.mlir.register_lowering(primitive, fails)
        prefer(lambda q, **rest: primitive.bind(q))
        choice = explain(*SMALL_CALL, scale=1.0)
        assert choice.implementation == "xla"
        assert choice.refusals["kernel"].startswith("does not compile: RuntimeError: out of registers")
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_a_kernel_is_lowered_for_the_platform_asked_for(self, prefer: Any) -> None:
        primitive = jax.extend.core.Primitive("lowers_for_tpu_only")
        primitive.def_abstract_eval(lambda x: x)
        jax.interpreters.mlir.register_lowering(primitive, lambda context, x: [x], platform="tpu")
        kernel = lambda q, **rest: primitive.bind(q)  # noqa: E731
        prefer(kernel, "tpu")
        prefer(kernel, "gpu")
        assert explain(*SMALL_CALL, scale=1.0, platform="tpu").implementation == "kernel"
        assert explain(*SMALL_CALL, scale=1.0, platform="gpu").implementation == "xla"
        assert explain(*SMALL_CALL, scale=1.0).implementation == "xla", "the default device's is the CPU"
        with jax.default_device("tpu"):
            assert explain(*SMALL_CALL, scale=1.0).implementation == "kernel"

    def test_a_gpu_that_is_not_here_is_an_h100_or_what_a_mesh_names(self, prefer: Any) -> None:
        kinds: list[str] = []

        def kernel(q: Any, **rest: Any) -> Any:
            kinds.append(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
            return q

        prefer(kernel, "gpu")
        assert explain(*SMALL_CALL, scale=1.0, platform="gpu").implementation == "kernel"
        with jax.sharding.use_abstract_mesh(mesh_of("b200")):
            explain(*SMALL_CALL, scale=1.0, platform="gpu")
        assert kinds == ["NVIDIA H100 80GB HBM3", "NVIDIA B200"]

    def test_triton_is_taken_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """JAX from 0.11 on lowers it for a device that it is told of only, and says that it is deprecated."""
        monkeypatch.setitem(sys.modules, "pallas_kernels.ragged_paged_attention.mosaic_gpu", None)
        q, kv_cache, metadata = SMALL_CALL
        for kv_dtype in ("bfloat16", "int8"):
            call = q, kv_cache.update(dtype=kv_dtype), metadata
            choice = explain(*call, scale=1.0, platform="gpu")
            assert choice.implementation == "triton", choice
            assert list(choice.refusals) == ["mosaic_gpu"]
        # A program inside such a mesh is lowered with the kernel in it.
        function = jax.jit(functools.partial(ragged_paged_attention, scale=1.0, platform="gpu"))
        with jax.sharding.use_abstract_mesh(mesh_of("l4")):
            lowered = function.trace(*SMALL_CALL).lower(lowering_platforms=("cuda",))
        assert "xla.gpu.triton" in lowered.as_text()

    def test_a_kernel_too_new_for_the_gpu_of_the_mesh(self) -> None:
        with jax.sharding.use_abstract_mesh(mesh_of("a100")):
            choice = explain(*SMALL_CALL, scale=1.0, platform="gpu")
        assert choice.implementation == "triton", choice
        assert list(choice.refusals) == ["mosaic_gpu"]
        if jax.__version_info__ >= (0, 12):
            assert choice.refusals["mosaic_gpu"] == "needs compute capability 9.0, the device has 8.0"

    def test_a_kernel_whose_backend_is_missing_is_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pallas_kernels.ragged_paged_attention.triton", None)
        choice = explain(*SMALL_CALL, scale=1.0, platform="gpu")
        assert choice.implementation == "xla"
        assert choice.refusals["triton"].startswith("cannot be imported: ")
        with pytest.raises(NotImplementedError, match="cannot be imported"):
            explain(*SMALL_CALL, scale=1.0, implementation="triton")

    @pytest.mark.parametrize(
        ("capability", "implementation"), [("7.5", "xla"), ("8.0", "kernel"), ("12.0", "kernel"), ("gfx942", "xla")]
    )
    def test_an_old_or_foreign_gpu(
        self, prefer: Any, monkeypatch: pytest.MonkeyPatch, capability: str, implementation: str
    ) -> None:
        prefer(lambda q, **rest: q, "gpu")
        monkeypatch.setitem(dispatch.MIN_CAPABILITY, "kernel", 8.0)
        monkeypatch.setattr(
            jax, "devices", lambda: [types.SimpleNamespace(platform="gpu", compute_capability=capability)]
        )
        choice = explain(*SMALL_CALL, scale=1.0, platform="gpu")
        assert choice.implementation == implementation
        if implementation == "xla":
            assert choice.refusals["kernel"] == f"needs compute capability 8.0, the device has {capability}"

    def test_the_default_device_sets_the_platform(self) -> None:
        assert dispatch.default_platform() == "cpu"
        for platform in ("gpu", "tpu"):
            with jax.default_device(platform):
                assert dispatch.default_platform() == platform
        with jax.default_device(jax.devices()[0]):
            assert dispatch.default_platform() == "cpu"

    def test_what_is_asked_for_is_taken(self) -> None:
        choice = explain(*SMALL_CALL, scale=1.0, implementation="reference")
        assert choice == ("reference", reference.ragged_paged_attention, {})

    @pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
    def test_every_platform_gets_something(self, platform: str) -> None:
        choice = explain(*SMALL_CALL, scale=1.0, platform=platform)
        assert choice.implementation in dispatch.ORDER[platform]

    def test_the_environment_shows_the_choices(self) -> None:
        program = (
            "import jax, jax.numpy as jnp; from pallas_kernels.ragged_paged_attention import *;"
            "explain(jnp.zeros((1, 1, 64)), jnp.zeros((2, 1, 8, 128)), "
            "AttentionMetadata(jnp.zeros((1, 1), int), jnp.zeros(1, int), jnp.zeros(2, int)), scale=1.0)"
        )
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"JAXPAGE_LOG": "scheduler,kernels"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "pallas_kernels: ragged_paged_attention q float32[1, 1, 64]" in result.stderr
        assert f"on cpu: {ON_CPU}" in result.stderr
