"""``--config FILE``: a YAML file whose keys are a command's flags, read as if they stood on the command line.

It must not know any command's flags: the parser does.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxpage.errors import shown

_NOT_KEYS = ("help", "version", "config")


class ConfigFileError(ValueError):
    """A configuration file cannot be used; the message is one line that names the file and the key."""


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config FILE``; ``expand_config`` gives it its effect."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options: flags without dashes in front; flags given here win"
    )


def expand_config(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> list[str]:
    """``argv`` with the options of the file that its ``--config`` names, less those it gives itself.

    Keys are flags without the leading dashes, with dashes or underscores. A flag without a value takes true or false,
    one that may be repeated or takes several values a list, one that takes JSON any value. There are no sections.
    A file that cannot be used ends the program with exit code 2 and one line on stderr.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    given = _given_options(parser, argv)
    if given.get("config") is None:
        return argv
    path = given["config"]
    try:
        added = _arguments(parser, path, _read(path), given)
    except ConfigFileError as error:
        parser.exit(2, f"jaxpage: error: --config: {' '.join(str(error).split())}\n")
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end] + added + argv[end:]


def arguments(parser: argparse.ArgumentParser, source: str, content: dict[str, Any]) -> list[str]:
    """The options in ``content``, from a file that ``source`` names, as they would stand on the command line.

    Raises:
        ConfigFileError: for what is no option, or a value that it does not take.
    """
    return _arguments(parser, source, content, {})


def _given_options(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Values of the options that ``argv`` itself gives. What is required may still come from the file."""
    actions = parser._actions
    required = [action for action in actions if action.required and action.option_strings]
    defaults = {action.dest: action.default for action in actions}
    absent = object()
    # argparse leaves attributes alone that are there already. Options that collect values begin with what is there.
    collecting = {action.dest for action in actions if isinstance(action, argparse._AppendAction)}
    start = {name: None if name in collecting else absent for name in defaults}
    for action in required:
        action.required = False
    try:
        parsed = vars(parser.parse_args(argv, argparse.Namespace(**start)))
    finally:
        for action in required:
            action.required = True
    given = {name: value for name, value in parsed.items() if value is not absent}
    return {name: value for name, value in given.items() if not (name in collecting and value is None)}


class StrictLoader(yaml.SafeLoader):
    """YAML lets a later key replace an earlier one without a word; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ConfigFileError(f"{key}: is given twice")
        return super().construct_mapping(node, deep)


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        content = yaml.load(text, StrictLoader)
    except ConfigFileError as error:
        raise ConfigFileError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date can be none, a number too long
        raise ConfigFileError(f"{path}: is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path}: must hold keys and values, not a {type(content).__name__}")
    return content


def _arguments(parser: argparse.ArgumentParser, path: str, content: dict[str, Any], given: dict[str, Any]) -> list[str]:
    options = _options(parser)
    # MODEL in front of serve's options says the same as --model.
    taken = set(given) | ({"model"} if given.get("model_name") is not None else set())
    seen: dict[str, str] = {}
    arguments = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            if isinstance(value, dict):
                hint += "; options stand at the top level, not in sections"
            raise ConfigFileError(f"{path}: {shown(str(key))} is no option of {parser.prog}{hint}")
        action = options[name]
        if action.dest in seen:
            raise ConfigFileError(f"{path}: {key}: is given twice, as {seen[action.dest]} too")
        seen[action.dest] = str(key)
        try:
            found = _as_arguments(action, name, value)
        except ConfigFileError as error:
            raise ConfigFileError(f"{path}: {key}: {error}") from None
        if action.dest not in taken:
            arguments += found
    return arguments


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    names = {}
    for action in parser._actions:
        for flag in action.option_strings:
            # A --no-flag is said with false.
            negative = isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-")
            if flag.startswith("--") and not negative and action.dest not in _NOT_KEYS:
                names[flag[2:]] = action
    return names


def _as_arguments(action: argparse.Action, name: str, value: Any) -> list[str]:
    """A value of the file as command line arguments, checked as the parser will check them."""
    flag = f"--{name}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigFileError(f"must be true or false, got {shown(value)}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{name}"]
        return [flag] if value else []
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        values = [_text(action, item) for item in (value if isinstance(value, list) else [value])]
        if not values and action.nargs == "+":
            raise ConfigFileError("must not be an empty list")
        if isinstance(action, argparse._AppendAction):
            return [f"{flag}={text}" for text in values]
        return [flag, *values]
    return [f"{flag}={_text(action, value)}"]


def _text(action: argparse.Action, value: Any) -> str:
    if value is None:
        raise ConfigFileError("has no value")
    is_plain = action.type in (None, str, int, float)
    if isinstance(value, dict | list) and is_plain:
        raise ConfigFileError(f"must be a single value, got {shown(value)}")
    if action.type in (None, str) and not isinstance(value, str):
        raise ConfigFileError(f"must be a string, got {shown(value)}; put it into quotes if it is one")
    # inf has no other spelling than a string that float reads; all other numbers have their own.
    if action.type in (int, float) and isinstance(value, str) and (action.type, value) != (float, "inf"):
        raise ConfigFileError(f"must be a number, got {shown(value)}")
    # Flags that take more than that take JSON on the command line.
    text = json.dumps(value) if isinstance(value, dict | list) or action.type is json.loads else str(value)
    try:
        converted = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise ConfigFileError(str(error)) from None
    except (TypeError, ValueError):
        kind = getattr(action.type, "__name__", "value")
        raise ConfigFileError(f"must be {'an' if kind[0] in 'aeiou' else 'a'} {kind}, got {shown(value)}") from None
    if action.choices is not None and converted not in action.choices:
        raise ConfigFileError(f"must be one of {', '.join(map(str, action.choices))}, got {shown(value)}")
    return text
