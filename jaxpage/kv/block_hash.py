"""Names the content of a full block: a chained hash of its tokens, everything before it, and who may share it."""

from __future__ import annotations

import array
import hashlib
import os
from collections.abc import Sequence

# A key of this process alone: nobody outside can search for prompts whose blocks collide.
_KEY = os.urandom(32)


def root_hash(*, model: str = "", adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    """The parent of a request's first block. Requests that differ in any of these share nothing.

    Each key goes in with its tag and length, so values of different keys cannot be taken for each other.
    """
    content = b""
    for tag, value in (("model", model), ("adapter", adapter), ("cache_salt", cache_salt)):
        if value is not None:
            text = value.encode("utf-8", "surrogatepass")
            content += f"{tag}:{len(text)}:".encode() + text
    return _digest(b"root", content)


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a block with these tokens after ``parent``. Ids are hashed at fixed width: borders cannot shift."""
    return _digest(b"block", parent + array.array("q", token_ids).tobytes())


def _digest(tag: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16, key=_KEY, person=tag).digest()
