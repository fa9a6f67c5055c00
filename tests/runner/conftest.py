"""Loads the profile of the property tests."""

from __future__ import annotations

import hypothesis_profiles  # noqa: F401
