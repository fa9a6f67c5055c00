"""Owns forced calls: the schema that makes a model write nothing else, and reading what it wrote.

It must not know how grammars work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpage.errors import ParameterError
from jaxpage.params import StructuredOutputsParams
from jaxpage.server.tools.definitions import Tools, parameters_of
from jaxpage.server.tools.json_default import JsonReader
from jaxpage.server.tools.parts import AnswerReader, CallArguments, Part, new_call

_DATA_KEYWORDS = ("const", "enum", "default", "examples")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def forced_constraint(tools: Tools) -> StructuredOutputsParams:
    """What the text has to be: the arguments of the named tool, or calls of any tools as ``JsonReader`` takes them."""
    if tools.choice == "named":
        return StructuredOutputsParams(json=_parameters(tools, tools.names.index(tools.forced_name or "")))
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, name in enumerate(tools.names)
    ]
    call: dict[str, Any] = {"anyOf": options}
    shape = {"type": "array", "items": call, "minItems": 1} if tools.parallel else call
    # References inside a tool's schema start at its own root, which is now one of the definitions.
    definitions = {
        str(index): _moved(_parameters(tools, index), f"#/$defs/{index}") for index in range(len(tools.definitions))
    }
    return StructuredOutputsParams(json=shape | {"$defs": definitions})


def forced_reader(tools: Tools) -> AnswerReader:
    """Reads what ``forced_constraint`` allows."""
    return NamedCallReader(tools.forced_name) if tools.forced_name is not None else JsonReader(tools.names)


def schema_error(
    tools: Tools, error: ParameterError, check: Callable[[StructuredOutputsParams], None]
) -> ParameterError:
    """``error`` about the grammar of all tools as one about the tool whose own schema does not compile.

    Args:
        check: raises ParameterError for a constraint that does not compile.
    """
    for index, name in enumerate(tools.names):
        if tools.forced_name not in (None, name) or not (tools.is_forced or name in tools.strict_schemas):
            continue
        try:
            check(StructuredOutputsParams(json=_parameters(tools, index)))
        except ParameterError as own:
            return ParameterError(f"tools.{index}.function.parameters", own.reason)
    return ParameterError("tools", error.reason)


class NamedCallReader:
    """Reads the whole text as the arguments of one call of ``name``."""

    has_open_call = True  # only the end of the text ends it

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Part]:
        """The next piece of the arguments; the first begins the call."""
        if not text:
            return []
        return [*self._begin(), CallArguments(0, text)]

    def finish(self) -> list[Part]:
        """The call, if there was no text at all."""
        return self._begin()

    def _begin(self) -> list[Part]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [new_call(0, self._name)]


def _parameters(tools: Tools, index: int) -> dict[str, Any]:
    return parameters_of(tools.definitions[index]["function"])


def _moved(schema: Any, root: str) -> Any:
    """``schema`` with its local references as they have to be when it stands at ``root``."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = root + value[1:]
        elif key in _DATA_KEYWORDS:
            moved[key] = value
        elif key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        else:
            moved[key] = _moved(value, root)
    return moved
