"""Settings of the property tests: few fixed examples by default, many random ones with HYPOTHESIS_PROFILE=nightly."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A shared machine may pause for long: time is no sign of a bug.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=60, derandomize=True, database=None, **_ANY_MACHINE)
settings.register_profile("nightly", max_examples=10_000, print_blob=True, **_ANY_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
is_nightly = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
"""Time does not matter: tests may take all cases where they take some otherwise."""
