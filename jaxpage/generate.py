"""``python -m jaxpage.generate``: the same as ``jaxpage generate``."""

from __future__ import annotations

import sys

from jaxpage.commands.generate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
