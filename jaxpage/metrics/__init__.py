"""Plain counters and histograms, and how they are shown: Prometheus' text format and a status line."""

from jaxpage.metrics.engine_metrics import CacheInfo, EngineCounts, EngineMetrics, Numbers, SummedMetrics
from jaxpage.metrics.server_metrics import ServerMetrics
from jaxpage.metrics.status import StatusLine

__all__ = ["CacheInfo", "EngineCounts", "EngineMetrics", "Numbers", "ServerMetrics", "StatusLine", "SummedMetrics"]
