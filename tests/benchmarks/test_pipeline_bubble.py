"""The pipeline benchmark: what a timeline says, and that equal stages have no bubble in steady decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpage.benchmarks.pipeline import Simulation, StageRun, idle_share, main, read_timeline


def test_filling_and_draining_do_not_count() -> None:
    full = [StageRun(call, stage, call + stage, call + stage + 1) for call in range(5) for stage in range(3)]
    assert idle_share(full) == 0
    assert idle_share([]) == 0
    gap = [run for run in full if run.call != 2]
    assert idle_share(gap) == pytest.approx(1 / 5)


def test_stages_of_unequal_time_wait_for_the_slowest() -> None:
    runs, _ = Simulation(8, [1.0, 2.0], 0.0).run(100)
    assert idle_share(runs) == pytest.approx(1 / 4, abs=0.01)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("num_requests", [8, 13, 64])
@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_the_bubble_of_steady_decode_is_below_5_percent(
    num_stages: int, num_requests: int, comes_and_goes: bool
) -> None:
    runs, schedules = Simulation(num_requests, [1.0] * num_stages, 0.1, comes_and_goes).run(200)
    assert idle_share(runs) < (0.05 if comes_and_goes else 1e-9)
    mean = sum(len(schedule.requests) for schedule in schedules) / len(schedules)
    assert mean > 0.95 * num_requests / num_stages


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_request_alone_waits_for_nothing_but_its_own_steps(num_stages: int) -> None:
    runs, schedules = Simulation(1, [1.0] * num_stages, 0.0).run(100)
    span_s = max(run.end_s for run in runs) - runs[0].start_s
    assert span_s == pytest.approx(len(schedules) * num_stages)


def test_the_command_simulates_and_reads_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    main(["--stages", "2", "--requests", "4", "--calls", "20", "--json", str(result)])
    written = json.loads(result.read_text())
    assert written["rows"][0]["requests a step"] == "2-2"
    assert written["rows"][0]["idle %"] == 0

    timeline = tmp_path / "timeline.json"
    timeline.write_text(json.dumps([{"call": n, "stage": 0, "start_s": 2 * n, "end_s": 2 * n + 1} for n in range(3)]))
    main(["--timeline", str(timeline), "--json", str(result)])
    assert json.loads(result.read_text())["rows"] == [{"stages": 1, "steps": 3, "idle %": pytest.approx(40)}]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no runs"),
        ('[{"call": 0}]', "is no list of call, stage, start_s, end_s"),
        ("{", "is no list of call, stage, start_s, end_s"),
        (
            '[{"call": 0, "stage": 1, "start_s": 0, "end_s": 2}, {"call": 1, "stage": 1, "start_s": 1, "end_s": 3}]',
            "stage 1 begins call 1 before it ends call 0",
        ),
    ],
)
def test_a_timeline_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_timeline(str(path))


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--stages", "0"], ["--requests", "0"], ["--calls", "1"], ["--host", "-1"]):
        with pytest.raises(SystemExit):
            main(arguments)
    assert "must be at least" in capsys.readouterr().err
