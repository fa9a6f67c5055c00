"""Requests that come and go, without a scheduler: each is computed as soon as it has blocks."""

from __future__ import annotations

import itertools
from typing import Any

from jaxpage.kv.manager import KVCacheManager
from jaxpage.params import SamplingParams
from jaxpage.request import Request

IDS = itertools.count()


def manager(
    num_usable: int = 32, block_size: int = 4, enable_prefix_caching: bool = True, **more: Any
) -> KVCacheManager:
    return KVCacheManager(num_usable + 1, block_size, enable_prefix_caching, **more)


def make_request(token_ids: list[int], **fields: Any) -> Request:
    params = fields.pop("params", None) or SamplingParams()
    return Request(f"request {next(IDS)}", token_ids, params, max_tokens=16, **fields)


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None, *, being_written: bool = False) -> int:
    """Admits a request and computes its tokens; returns how many were found in the cache."""
    num_tokens = num_tokens or len(request.token_ids)
    prefix = kv.find_prefix(request)
    assert kv.allocate(request, prefix, num_tokens)
    request.num_computed_tokens = num_tokens
    kv.name_blocks(request, being_written=being_written)
    return prefix.num_tokens


def cached_tokens(kv: KVCacheManager, token_ids: list[int], **fields: Any) -> int:
    """Tokens found for a request that comes and goes."""
    request = make_request(token_ids, **fields)
    found = compute(kv, request)
    kv.free(request)
    kv.pool.check_integrity()
    return found
