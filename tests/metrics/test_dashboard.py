"""The dashboard and Prometheus' configuration ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scrapes import Scrape

from jaxpage.metrics import EngineMetrics, ServerMetrics
from jaxpage.metrics.prometheus import Exporter

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana" / "jaxpage.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"\b(?:jaxpage:|http_)\w+")
WINDOW = "$__rate_interval"


@pytest.fixture(scope="module")
def page() -> str:
    server = ServerMetrics()
    server.expect("POST", ["/v1/completions"])
    text = Exporter("m", [EngineMetrics()], server).text()
    Scrape(text)
    return text.decode()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_series_exists_with_the_labels_asked_for(page: str, expression: str) -> None:
    names = NAME.findall(expression)
    assert names
    for name in names:
        [first, *_] = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        labels = set(re.findall(r'(\w+)="', first))
        wanted = re.findall(rf"{name}{{([^}}]*)}}", expression)
        assert {label for each in wanted for label in re.findall(r"(\w+)=", each)} <= labels, name
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", grouped)) <= labels, name


def test_what_the_dashboard_has_to_show() -> None:
    asked = " ".join(EXPRESSIONS)
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "generation_tokens_total", "prompt_tokens_total",
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total",
        "num_preemptions_total", "http_requests_total", "http_request_duration_seconds",
    ):  # fmt: skip
        assert name in asked


def test_panels_are_well_formed() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(EXPRESSIONS))) - {"__rate_interval"} <= variables


def test_prometheus_takes_the_queries_and_the_configuration(tmp_path: Path) -> None:
    """With promtool on PATH; without it the files are only known to be well-formed YAML and JSON."""
    config = CONFIGS / "prometheus" / "prometheus.yml"
    assert yaml.safe_load(config.read_text(encoding="utf-8"))["scrape_configs"][0]["job_name"] == "jaxpage"
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    rules = [{"record": f"check:{n}", "expr": each.replace(WINDOW, "1m")} for n, each in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for command in (["config", str(config)], ["rules", str(tmp_path / "rules.yml")]):
        done = subprocess.run([promtool, "check", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
