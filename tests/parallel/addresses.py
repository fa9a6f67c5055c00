"""What addresses the machine that runs the tests has."""

from __future__ import annotations

import socket

import pytest


def _has_address(family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


needs_ipv6 = pytest.mark.skipif(
    not (socket.has_ipv6 and _has_address(socket.AF_INET6, "::1")), reason="this machine has no IPv6 address"
)
