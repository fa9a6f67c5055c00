"""Owns the way from a request's text or messages to prompt ids: templates, truncation, length checks.

It must not know HTTP; its functions take a while and run outside the event loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxpage.errors import ParameterError
from jaxpage.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, too_long
from jaxpage.tokenizer import ChatTemplateError, IncrementalDetokenizer


@dataclasses.dataclass(slots=True)
class PreparedPrompt:
    """A prompt that fits the model.

    Attributes:
        echo_text: what ``echo`` puts before the generated text, "" without echo.
        text_offsets: per token, the characters of ``echo_text`` before it; only if the prompt's scores are shown.
    """

    token_ids: list[int]
    echo_text: str = ""
    text_offsets: list[int] = dataclasses.field(default_factory=list)


class PromptBuilder:
    """Makes prompts for one model.

    Args:
        tokenizer: encodes, decodes and applies the chat template.
        max_model_len: tokens of prompt and answer together.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._longest_token_bytes = max(
            (len(tokenizer.token_bytes(token_id) or b"") for token_id in range(tokenizer.vocab_size)), default=1
        )

    def completion(self, request: CompletionRequest) -> list[PreparedPrompt]:
        """The prompts of a completions request.

        Raises:
            ParameterError: for a prompt that is empty or leaves no room; the message names its index.
        """
        many = len(request.prompts) > 1
        return [
            self._prepare(f"prompt[{number}]" if many else "prompt", prompt, request)
            for number, prompt in enumerate(request.prompts)
        ]

    def chat(self, request: ChatRequest) -> PreparedPrompt:
        """The prompt of a chat request.

        Raises:
            ParameterError: for messages that the template refuses, or that are too long.
        """
        size = sum(len(text.encode()) for message in request.messages for text in _texts(message))
        self._check_size("messages", size, request)
        token_ids = self.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        prompt = PreparedPrompt(self._fitted("messages", token_ids, request))
        if request.echo and request.continue_final_message:
            prompt.echo_text = "\n".join(_texts(request.messages[-1]))
        return prompt

    def encode_chat(self, messages: list[dict[str, Any]], *, add_special_tokens: bool, **options: Any) -> list[int]:
        """Ids of the rendered messages, with the tokenizer's own special tokens around them only if asked for.

        Raises:
            ParameterError: with the template's own words if it refuses.
        """
        try:
            if not add_special_tokens:
                return self.tokenizer.encode_chat(messages, **options)
            return self.tokenizer.encode(self.tokenizer.render_chat(messages, **options), add_special_tokens=True)
        except ChatTemplateError as error:
            raise ParameterError("messages", str(error)) from None

    def _prepare(self, name: str, prompt: str | list[int], request: CompletionRequest) -> PreparedPrompt:
        if isinstance(prompt, str):
            self._check_size(name, len(prompt.encode()), request)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        else:
            token_ids = prompt
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

    def _fitted(self, name: str, token_ids: list[int], request: GenerationRequest) -> list[int]:
        limit = request.truncate_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            token_ids = token_ids[-limit:] if request.truncation_side == "left" else token_ids[:limit]
        if not token_ids:
            raise ParameterError(name, "the prompt is empty: it has no tokens")
        if len(token_ids) >= self._max_model_len:
            raise too_long(name, str(len(token_ids)), self._max_model_len)
        return token_ids

    def _check_size(self, name: str, num_bytes: int, request: GenerationRequest) -> None:
        """Refuses text that is too long whatever its tokens are: tokenizing megabytes takes seconds."""
        at_least = num_bytes // max(self._longest_token_bytes, 1)
        if request.truncate_prompt_tokens is None and at_least >= self._max_model_len:
            raise too_long(name, f"at least {at_least}", self._max_model_len)


def _texts(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]
