"""Talks to an OpenAI-compatible server: ours or another one. Knows nothing of the engine.

It is small for a reason: a load generator that shares a machine with the server must not take its cores. A token costs
it a fraction of what a general HTTP library needs (``benchmarks/client_cost.py`` measures both).
"""

from jaxpage.client.events import EventParser, stream_events
from jaxpage.client.http import HttpClient, Response, ServerError, run

__all__ = ["EventParser", "HttpClient", "Response", "ServerError", "run", "stream_events"]
