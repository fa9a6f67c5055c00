"""Owns /tokenize, /detokenize and /tokenizer_info: what they take and what they answer.

It must not know generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxpage.checks import check_bool, check_token_ids
from jaxpage.errors import ParameterError
from jaxpage.server.chat_protocol import check_template_options
from jaxpage.server.fields import Body, Limits, check_str, field
from jaxpage.server.messages import check_messages
from jaxpage.server.prompts import PromptBuilder
from jaxpage.server.state import ApiServer

CheckModel = Callable[[str | None], str]
Answer = Callable[[Body, Limits, PromptBuilder, CheckModel], dict[str, Any]]


def routes(server: ApiServer) -> list[Route]:
    """The endpoints, open to everybody: benchmarks send no key to /tokenize."""

    def post(path: str, answer: Answer) -> Route:
        async def handle(request: Request) -> Response:
            body = await server.checked_body(request, lambda body: body)
            work = server.in_thread(lambda: answer(body, server.limits, server.prompts, server.check_model))
            return JSONResponse(await work)

        return Route(path, handle, methods=["POST"])

    async def info(request: Request) -> Response:
        return JSONResponse(tokenizer_info(server.engine.tokenizer, server.chat.template(None)))

    return [post("/tokenize", tokenize), post("/detokenize", detokenize), Route("/tokenizer_info", info)]


def tokenize(body: Body, limits: Limits, prompts: PromptBuilder, check_model: CheckModel) -> dict[str, Any]:
    """The ids of a text or of rendered messages.

    Raises:
        ParameterError: for a wrong field, neither or both of prompt and messages, or a refusal of the template.
    """
    name, other = ("messages", "prompt") if body.get("messages") is not None else ("prompt", "messages")
    if body.get(name) is None:
        raise ParameterError("prompt", "either prompt or messages is required")
    if body.get(other) is not None:
        raise ParameterError(other, "prompt and messages cannot be combined")
    wants_strings = field(body, "return_token_strs", check_bool, False)
    add_special_tokens = field(body, "add_special_tokens", check_bool, name == "prompt")
    check_model(field(body, "model", check_str))
    if name == "prompt":
        token_ids = prompts.tokenizer.encode(check_str(name, body[name]), add_special_tokens=add_special_tokens)
    else:
        messages, options = check_messages(body[name]), check_template_options(body, prompts.chat_setup)
        token_ids = prompts.encode_chat(messages, options, add_special_tokens)
    strings = [prompts.tokenizer.token_string(token_id) for token_id in token_ids] if wants_strings else None
    return {
        "count": len(token_ids),
        "max_model_len": limits.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def detokenize(body: Body, limits: Limits, prompts: PromptBuilder, check_model: CheckModel) -> dict[str, Any]:
    """The text of ids, special tokens included.

    Raises:
        ParameterError: for anything but a list of ids of the model's vocabulary.
    """
    token_ids = check_token_ids("tokens", body.get("tokens"), limits.vocab_size)
    check_model(field(body, "model", check_str))
    return {"prompt": prompts.tokenizer.decode(token_ids, skip_special_tokens=False)}


def tokenizer_info(tokenizer: Any, chat_template: str | None) -> dict[str, Any]:
    """What remote evaluation needs to know, with the template that the server uses; no file paths."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id")
    info = {name: getattr(tokenizer, name) for name in names} | {"chat_template": chat_template}
    return {"tokenizer_class": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size} | info
