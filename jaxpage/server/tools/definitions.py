"""Owns what clients say about tools: the list they offer, and whether the model may, must or must not call them.

It must not know how tools reach the model or how calls are read.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from jaxpage.checks import check_bool
from jaxpage.errors import ParameterError, shown
from jaxpage.server.fields import Body, check_list, check_object, check_str, field

MAX_TOOLS = 1024
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Forced calls always follow the schema of their tool, whether it says ``strict`` or not. Where the model chooses,
    calls of strict tools do; if none is strict, it writes freely, and its arguments are passed on as they are.

    Attributes:
        definitions: as the client sent them, without nulls.
        choice: none, auto (the model decides), required (at least one call), named (exactly a call of ``forced_name``).
        parallel: several calls are welcome.
    """

    definitions: tuple[dict[str, Any], ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    forced_name: str | None = None
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the client's order."""
        return [tool["function"]["name"] for tool in self.definitions]

    @property
    def strict_schemas(self) -> dict[str, dict[str, Any]]:
        """By name, the parameters of the tools that say ``strict``."""
        functions = [tool["function"] for tool in self.definitions]
        return {each["name"]: parameters_of(each) for each in functions if each.get("strict")}

    @property
    def is_forced(self) -> bool:
        """True when the answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """What the prompt says about tools: nothing if none may be called."""
        return None if self.choice == "none" else list(self.definitions)


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; one that says nothing of them takes none."""
    return function.get("parameters", _NO_PARAMETERS)


def check_tools(body: Body) -> Tools:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Raises:
        ParameterError: with the dotted path of what is wrong, such as ``tools.0.function.name``.
    """
    definitions = field(body, "tools", _check_definitions, ())
    names = [tool["function"]["name"] for tool in definitions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ParameterError(f"tools.{index}.function.name", f"{shown(name)} is the name of an earlier tool, too")
    parallel = field(body, "parallel_tool_calls", check_bool, True)
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto" if definitions else "none"
    if choice != "none" and not definitions:
        raise ParameterError("tool_choice", f"needs tools, got {shown(choice)} without any")
    if isinstance(choice, dict):
        return Tools(definitions, "named", _forced_name(choice, names), parallel)
    if choice not in ("none", "auto", "required"):
        raise ParameterError(
            "tool_choice", f'must be "none", "auto", "required" or an object that names a function, got {shown(choice)}'
        )
    return Tools(definitions, choice, None, parallel)


def _forced_name(choice: dict[str, Any], names: list[str]) -> str:
    if choice.get("type") != "function":
        raise ParameterError("tool_choice.type", f'must be "function", got {shown(choice.get("type"))}')
    function = check_object("tool_choice.function", choice.get("function"))
    name = check_str("tool_choice.function.name", function.get("name"))
    if name not in names:
        raise ParameterError("tool_choice.function.name", f"must be the name of one of the tools, got {shown(name)}")
    return name


def _check_definitions(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    tools = check_list(name, value)
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise ParameterError(name, f"must hold 1 to {MAX_TOOLS} tools, got {len(tools)}")
    return tuple(_check_definition(f"{name}.{index}", tool) for index, tool in enumerate(tools))


def _check_definition(path: str, value: Any) -> dict[str, Any]:
    tool = check_object(path, value)
    if tool.get("type", "function") != "function":
        raise ParameterError(f"{path}.type", f'only "function" is supported, got {shown(tool["type"])}')
    path = f"{path}.function"
    function = {key: value for key, value in check_object(path, tool.get("function")).items() if value is not None}
    if not _NAME.fullmatch(check_str(f"{path}.name", function.get("name"))):
        raise ParameterError(f"{path}.name", f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {shown(function['name'])}")
    field(function, "description", lambda _, text: check_str(f"{path}.description", text))
    field(function, "parameters", lambda _, schema: check_object(f"{path}.parameters", schema))
    field(function, "strict", lambda _, flag: check_bool(f"{path}.strict", flag))
    return {**{key: value for key, value in tool.items() if value is not None}, "type": "function"} | {
        "function": function
    }
