"""Owns which of several engines a prompt goes to: one that has its prefix cached, unless it is busy; else an idle one.

It must not know engines: it remembers what it sent where, and trusts that their caches forget in the same order.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence

from jaxpage.kv.block_hash import block_hash, root_hash

MAX_LOAD_RATIO = 1.5
MAX_LOAD_DISTANCE = 8
"""An engine with more samples than this ratio of the least busy one's and this many more is too busy to be preferred:
waiting there would cost more than to compute a prefix again."""


@dataclasses.dataclass(slots=True)
class Load:
    """What an engine has to do, by the front end's own books, which are up to date as engines' counters are not.

    Attributes:
        num_samples: running and waiting, beams counted like samples. num_tokens: their prompts, and what they may
            generate. num_routed: prompts ever sent there.
    """

    num_samples: int = 0
    num_tokens: int = 0
    num_routed: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """The smaller, the less to do."""
        return self.num_samples, self.num_tokens, self.num_routed


class Router:
    """Chooses among engines. Callable from any thread.

    Args:
        capacity_blocks: prefix blocks remembered an engine, about as many as its cache has.
    """

    def __init__(self, num_engines: int, block_size: int, capacity_blocks: int) -> None:
        self.loads = [Load() for _ in range(num_engines)]
        self._block_size = block_size
        self._capacity_blocks = capacity_blocks
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]
        self._lock = threading.Lock()

    def names(self, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
        """The names of a prompt's full blocks, one after the other. About a microsecond a block."""
        name = root_hash(cache_salt=cache_salt)
        names: list[bytes] = []
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            name = block_hash(name, token_ids[end - self._block_size : end])
            names.append(name)
        return names

    def choose(self, names: Sequence[bytes], num_samples: int, num_tokens: int, living: Sequence[int]) -> int:
        """The engine for a prompt with these blocks; it counts as busy with it until ``done``.

        Args:
            living: the engines to choose from; not empty.
        """
        with self._lock:
            least = min(living, key=lambda engine: self.loads[engine].rank)
            known = {engine: self._num_known(engine, names) for engine in living}
            best = min(living, key=lambda engine: (-known[engine], self.loads[engine].rank))
            fewest = self.loads[least].num_samples
            limit = max(MAX_LOAD_RATIO * fewest, fewest + MAX_LOAD_DISTANCE)
            chosen = best if known[best] and self.loads[best].num_samples <= limit else least
            self._remember(chosen, names)
            load = self.loads[chosen]
            load.num_samples += num_samples
            load.num_tokens += num_tokens
            load.num_routed += 1
            return chosen

    def done(self, engine: int, num_samples: int, num_tokens: int) -> None:
        """A prompt that ``choose`` sent to ``engine`` has ended."""
        with self._lock:
            self.loads[engine].num_samples -= num_samples
            self.loads[engine].num_tokens -= num_tokens

    def forget(self, engine: int) -> None:
        """The cache of ``engine`` is empty."""
        with self._lock:
            self._known[engine].clear()

    def _num_known(self, engine: int, names: Sequence[bytes]) -> int:
        """Leading blocks that the engine had before."""
        known = self._known[engine]
        return next((place for place, name in enumerate(names) if name not in known), len(names))

    def _remember(self, engine: int, names: Sequence[bytes]) -> None:
        known = self._known[engine]
        for name in reversed(names):  # the first block is the last to be forgotten: without it the others are no use
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._capacity_blocks:
            known.popitem(last=False)
