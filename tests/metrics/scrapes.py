"""Reads pages of metrics as Prometheus does: every sample by its name and labels, and what must hold on any page."""

from __future__ import annotations

import re
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

CONSTANT = ("model_name", "engine")
"""Labels that are the same everywhere and left out of keys."""


class Scrape(dict[str, float]):
    """Samples by ``name`` or ``name{label="value"}``, without ``jaxpage:`` and constant labels."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.types: dict[str, str] = {}
        for family in text_string_to_metric_families(page.decode()):
            self.types[family.name] = family.type
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in CONSTANT}
                text = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
                key = sample.name.removeprefix("jaxpage:") + (f"{{{text}}}" if text else "")
                assert key not in self, f"{key} is there twice"
                self[key] = sample.value
        check_always(self)

    def since(self, before: Scrape) -> dict[str, float]:
        """What has moved between two pages; gauges left out."""
        assert self.keys() >= before.keys(), "a series has disappeared"
        changes = {key: value - before.get(key, 0) for key, value in self.items() if not _is_gauge(self, key)}
        assert min(changes.values()) >= 0, "a counter fell"
        return {key: change for key, change in changes.items() if change and "_bucket" not in key}


def _is_gauge(scrape: Scrape, key: str) -> bool:
    name = key.partition("{")[0]
    return scrape.types.get(f"jaxpage:{name}") == "gauge"


def by_label(scrape: Scrape, name: str) -> dict[str, float]:
    """The samples of a series with one label, by its value."""
    pattern = re.compile(re.escape(name) + r'\{\w+="([^"]*)"\}')
    return {found[1]: value for key, value in scrape.items() if (found := pattern.fullmatch(key))}


def check_always(page: Scrape) -> None:
    """The section "Always" of the specification, as far as one page can show it."""
    sources = by_label(page, "prompt_tokens_by_source_total")
    assert sum(sources.values()) == page["prompt_tokens_total"]
    assert page["prompt_tokens_cached_total"] == sources["local_cache_hit"] + sources["external_kv_transfer"]
    assert page["prefix_cache_hits_total"] <= page["prefix_cache_queries_total"]
    assert page["generation_tokens_total"] >= page["request_generation_tokens_sum"]
    waiting = by_label(page, "num_requests_waiting_by_reason")
    assert page["num_requests_waiting"] == sum(waiting.values()) >= page["num_requests_swapped"]
    assert min(waiting.values()) >= 0 and page["num_requests_swapped"] >= 0 and page["num_requests_running"] >= 0
    assert 0 <= page["kv_cache_usage_perc"] <= 1 and 0 <= page["host_cache_usage_perc"] <= 1
    buckets: dict[str, list[float]] = defaultdict(list)
    for key, value in page.items():
        if "_bucket{" in key:
            buckets[re.sub(r',?le="[^"]*"', "", key)].append(value)
    for key, counts in buckets.items():
        assert counts == sorted(counts), f"{key} falls"
        name = key.replace("_bucket", "_count").replace("{}", "").replace("{,", "{")
        assert counts[-1] == page[name]


def check_idle(page: Scrape) -> None:
    """Nobody is there."""
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc")
    assert [page[name] for name in (*names, "host_cache_usage_perc")] == [0, 0, 0, 0, 0]
    assert page["generation_tokens_total"] >= page["request_generation_tokens_sum"]
