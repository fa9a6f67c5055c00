"""Owns how a process that serves collects garbage: seldom, and without a look at what is there to stay.

It must not know what is served.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""By how many objects there are more when young ones are looked at again. With Python's own 700 that is twice a step of
some hundred requests, and what it finds are their outputs, which wait to be sent: they are no garbage, and once sent
they go without a collection."""


def settle() -> None:
    """To be called once all is loaded.

    That is a million objects or so, and a collection that looks at them stops engine and event loop for half a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
