"""How much of a GPU jax sets aside, who decides that, and what an engine makes of it."""

from __future__ import annotations

import dataclasses
import logging

import jax
import pytest

from jaxpage.errors import StartupError
from jaxpage.runner import gpu_pool
from jaxpage.runner.gpu_pool import VARIABLES, ask_for_pool, pool_share, tell_of_pool
from jaxpage.runner.memory import free_bytes

NEW, OLD = VARIABLES
GPU_BYTES = 80 * 10**9


@dataclasses.dataclass
class FakeGpu:
    """A GPU of which jax has ``limit_bytes``, and none is in use."""

    limit_bytes: float
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(self.limit_bytes), "bytes_in_use": 0}


@pytest.fixture
def jax_has_begun(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(gpu_pool, "_jax_has_begun", lambda: request.param)


def asked(utilization: float, platforms: str | None = None, **environment: str) -> dict[str, str]:
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", platforms)
    try:
        ask_for_pool(utilization, environment)
    finally:
        jax.config.update("jax_platforms", before)
    return environment


@pytest.mark.parametrize("jax_has_begun", [False], indirect=True)
@pytest.mark.usefixtures("jax_has_begun")
def test_jax_is_asked_for_what_the_engine_may_use_and_a_little_more() -> None:
    assert asked(0.9) == {NEW: "0.93"}
    assert asked(0.45, "cuda,cpu") == {NEW: "0.48"}
    assert asked(1.0, "gpu") == {NEW: "1.0"}
    assert asked(0.9, "cpu") == {}


@pytest.mark.parametrize("jax_has_begun", [False], indirect=True)
@pytest.mark.usefixtures("jax_has_begun")
def test_the_user_decides_under_either_name() -> None:
    # jax refuses to begin if both are there.
    assert asked(0.9, **{NEW: "0.5"}) == {NEW: "0.5"}
    assert asked(0.9, **{OLD: "0.5"}) == {OLD: "0.5"}
    assert asked(0.9, **{OLD: ""}) == {OLD: "", NEW: "0.93"}


@pytest.mark.parametrize("jax_has_begun", [True], indirect=True)
@pytest.mark.usefixtures("jax_has_begun")
def test_what_jax_has_begun_with_stays() -> None:
    assert asked(0.9) == {}
    assert pool_share({}) == 0.75


def test_whether_jax_has_begun_is_known() -> None:
    jax.local_devices()
    assert gpu_pool._jax_has_begun()


@pytest.mark.parametrize(
    ("share", "utilization", "usable"),
    [
        (0.93, 0.9, 0.9),  # as jaxpage asks
        (1.0, 0.9, 0.9),
        (0.75, 0.9, 0.72),  # jax had begun: all of its pool but the holes
        (0.75, 0.5, 0.5),
    ],
)
def test_an_engine_takes_its_share_of_the_gpu_and_no_more_than_jax_has(
    share: float, utilization: float, usable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OLD, raising=False)
    monkeypatch.setenv(NEW, str(share))
    device = FakeGpu(share * GPU_BYTES)
    assert free_bytes(device, utilization) == pytest.approx(usable * GPU_BYTES, rel=1e-6)  # type: ignore[arg-type]
    device = FakeGpu(share * GPU_BYTES, platform="tpu")
    assert free_bytes(device, utilization) == int(utilization * share * GPU_BYTES)  # type: ignore[arg-type]


def test_the_log_says_what_jax_has_and_how_it_would_have_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxpage"):
        tell_of_pool(0.9, {NEW: "0.93"})
        tell_of_pool(0.9, {})
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages == [
        "jax sets 93 % of the GPU's memory aside (XLA_CLIENT_MEM_FRACTION)",
        "jax has 75 % of the GPU's memory, less than gpu_memory_utilization 0.9: "
        "set XLA_CLIENT_MEM_FRACTION=0.93 before jax is used",
    ]


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan", "inf"])
def test_a_variable_that_is_no_share_is_named(text: str) -> None:
    with pytest.raises(StartupError, match=f"{OLD} must be a share of the GPU's memory such as 0.9, got '{text}'"):
        pool_share({OLD: text})
