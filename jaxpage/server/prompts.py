"""Owns the way from a request's text or messages to prompt ids: templates, truncation, length checks.

It must not know HTTP; its functions take a while and run outside the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxpage.errors import ParameterError, shown
from jaxpage.server.chat_protocol import ChatRequest, TemplateOptions
from jaxpage.server.chat_setup import ChatSetup, template_variables
from jaxpage.server.messages import texts
from jaxpage.server.prompt_fields import PromptOptions, Prompts, too_long
from jaxpage.server.protocol import CompletionRequest
from jaxpage.server.tools.prompt import with_tools
from jaxpage.tokenizer import ChatTemplateError, IncrementalDetokenizer


@dataclasses.dataclass(slots=True)
class PreparedPrompt:
    """A prompt that fits the model.

    Attributes:
        echo_text: what ``echo`` puts before the generated text, "" without echo.
        text_offsets: per token, the characters of ``echo_text`` before it; only if the prompt's scores are shown.
        opens_thoughts: what is generated, or ``echo_text`` before it, starts with the model's thoughts.
    """

    token_ids: list[int]
    echo_text: str = ""
    text_offsets: list[int] = dataclasses.field(default_factory=list)
    opens_thoughts: bool = False


class PromptBuilder:
    """Makes prompts for one model.

    Args:
        tokenizer: encodes, decodes and applies the chat template.
        max_model_len: tokens of prompt and answer together.
        chat_setup: how the model chats.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, chat_setup: ChatSetup) -> None:
        self.tokenizer = tokenizer
        self.chat_setup = chat_setup
        self._max_model_len = max_model_len
        self._longest_token_bytes = max(
            (len(tokenizer.token_bytes(token_id) or b"") for token_id in range(tokenizer.vocab_size)), default=1
        )

    def completion(self, request: CompletionRequest) -> list[PreparedPrompt]:
        """The prompts of a completions request.

        Raises:
            ParameterError: for a prompt that is empty or leaves no room; the message names its index.
        """
        return [self._prepare(name, prompt, request) for name, prompt in _named("prompt", request.prompts)]

    def encode_all(self, field: str, prompts: Prompts, options: PromptOptions) -> list[list[int]]:
        """Ids of the prompts that ``field`` holds; errors as in ``completion``."""
        return [
            self._fitted(name, self._encode(name, prompt, options), options) for name, prompt in _named(field, prompts)
        ]

    def chat(self, request: ChatRequest) -> PreparedPrompt:
        """The prompt of a chat request.

        Raises:
            ParameterError: for messages that the template refuses, or that are too long.
        """
        size = sum(len(text.encode()) for message in request.messages for text in texts(message))
        self._check_size("messages", size, request)
        text = self.render_chat(request.messages, request.template)
        self._check_size("messages", len(text.encode()), request)  # tools and templates may add a lot
        token_ids = self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
        prompt = PreparedPrompt(self._fitted("messages", token_ids, request))
        continued = "\n".join(texts(request.messages[-1])) if request.template.continue_final_message else ""
        if request.echo and continued:
            prompt.echo_text = continued
        else:
            prompt.opens_thoughts = self.chat_setup.opens_thoughts(text, continued)
        return prompt

    def encode_chat(
        self, messages: list[dict[str, Any]], options: TemplateOptions, add_special_tokens: bool
    ) -> list[int]:
        """Ids of the rendered messages, with the tokenizer's own special tokens around them only if asked for.

        Raises:
            ParameterError: as ``render_chat``.
        """
        return self.tokenizer.encode(self.render_chat(messages, options), add_special_tokens=add_special_tokens)

    def render_chat(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        """The prompt's text.

        Raises:
            ParameterError: with the template's own words if it refuses, or for a field that it has no use for.
        """
        tools = options.tools.for_template
        template = options.chat_template or self.chat_setup.template(tools)
        variables = dict(options.chat_template_kwargs)
        for name, value in options.needed_variables.items():
            if name not in template_variables(template):
                raise ParameterError(name, f"the chat template has no use for it, got {shown(value)}")
            variables.setdefault(name, value)
        if tools and self.chat_setup.explains_tools(template):
            messages, tools = with_tools(messages, tools), None
        try:
            return self.tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                chat_template=template,
                chat_template_kwargs=variables,
                content_format=self.chat_setup.content_format,
            )
        except ChatTemplateError as error:
            raise ParameterError("messages", str(error)) from None

    def _encode(self, name: str, prompt: str | list[int], options: PromptOptions) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        self._check_size(name, len(prompt.encode()), options)
        return self.tokenizer.encode(prompt, add_special_tokens=options.add_special_tokens)

    def _prepare(self, name: str, prompt: str | list[int], request: CompletionRequest) -> PreparedPrompt:
        token_ids = self._encode(name, prompt, request)
        kept = self._fitted(name, token_ids, request)
        if not request.echo:
            return PreparedPrompt(kept)
        num_added = 0
        skip_special_tokens = request.params.skip_special_tokens
        if isinstance(prompt, str) and len(kept) == len(token_ids):
            # A text comes back as it was sent; only what the tokenizer put in front of it is not part of it.
            text, skip_special_tokens = prompt, False
            num_added = len(kept) - len(self.tokenizer.encode(prompt, add_special_tokens=False))
        else:
            text = self.tokenizer.decode(kept, skip_special_tokens)
        if request.num_logprobs is None:
            return PreparedPrompt(kept, text)
        characters = IncrementalDetokenizer(self.tokenizer, [], skip_special_tokens=skip_special_tokens)
        characters.append(kept[num_added:])
        # Where the vocabulary lacks a character the tokens tell less, or more, than the text has.
        offsets = [min(offset, len(text)) for offset in [0] * num_added + characters.token_offsets]
        return PreparedPrompt(kept, text, offsets)

    def _fitted(self, name: str, token_ids: list[int], options: PromptOptions) -> list[int]:
        limit = options.truncate_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            token_ids = token_ids[-limit:] if options.truncation_side == "left" else token_ids[:limit]
        if not token_ids:
            raise ParameterError(name, "the prompt is empty: it has no tokens")
        if len(token_ids) + options.num_reserved > self._max_model_len:
            raise too_long(name, str(len(token_ids)), self._max_model_len, options.num_reserved)
        return token_ids

    def _check_size(self, name: str, num_bytes: int, options: PromptOptions) -> None:
        """Refuses text that is too long whatever its tokens are: tokenizing megabytes takes seconds."""
        at_least = num_bytes // max(self._longest_token_bytes, 1)
        if options.truncate_prompt_tokens is None and at_least + options.num_reserved > self._max_model_len:
            raise too_long(name, f"at least {at_least}", self._max_model_len, options.num_reserved)


def _named(field: str, prompts: Prompts) -> Iterator[tuple[str, str | list[int]]]:
    """The prompts with the names that error messages give them."""
    for number, prompt in enumerate(prompts):
        yield f"{field}[{number}]" if len(prompts) > 1 else field, prompt
