"""Errors that reach a user; every layer may raise them.

This file knows nothing about HTTP: the server maps these classes to status codes.
"""

from __future__ import annotations


def shown(value: object) -> str:
    """A user's value as it appears in messages: at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


class ParameterError(ValueError):
    """A value a user gave is wrong: its (dotted) name is ``parameter``, and ``reason`` the message without the name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter
        self.reason = message


def unusable_file(parameter: str, path: object, error: Exception) -> ParameterError:
    """The error for a file, named by ``parameter``, that cannot be opened, read or written."""
    return ParameterError(parameter, f"{shown(str(path))}: {getattr(error, 'strerror', None) or error}")


class ConflictError(ParameterError):
    """A value cannot be had together with the parameter ``other``."""

    def __init__(self, parameter: str, value: object, other: str) -> None:
        super().__init__(parameter, f"cannot be combined with {other}, got {shown(value)}")
        self.value = value
        self.other = other


class StartupError(RuntimeError):
    """The engine cannot start; the message is one line that a person can act on."""


class EngineDeadError(RuntimeError):
    """The engine has stopped and takes no more requests."""
