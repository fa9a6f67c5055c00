"""Owns reading calls in the format of Llama 3.1 and 3.2: ``{"name": ..., "parameters": {...}}``, several with ``;``.

It must not know what calls are for.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxpage.server.tools.json_default import JsonReader

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = "[],;"


class Llama3JsonReader(JsonReader):
    """Reads an answer that consists of calls, with or without ``<|python_tag|>`` in front."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, prefix=PYTHON_TAG, separators=SEPARATORS)
