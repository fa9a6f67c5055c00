"""``python -m jaxpage.plan``."""

from __future__ import annotations

import sys

import jax

from jaxpage.plan.cli import main

if __name__ == "__main__":
    # This process has shapes only, and must not take the TPU or GPU of this machine from one that runs.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
