"""Owns the tokenizer of a model: text to ids and back, single tokens, special ids and the chat template.

Must not know of requests, models or devices; incremental text is detokenizer.py's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.errors import shown
from jaxpage.tokenizer import chat_template as chat
from jaxpage.tokenizer.token_bytes import TokenDecoder

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A tokenizer with everything that serving needs; all methods may be called from several threads.

    Attributes:
        vocab_size: highest token id + 1. A model's own vocabulary may be larger (padding); such ids render as nothing.
        bos_token, eos_token, pad_token, unk_token: text of the special tokens, None if there is none.
        bos_token_id, eos_token_id, pad_token_id: their ids.
        chat_template: the Jinja template, None if there is none.
        adds_bos: whether encode() puts BOS in front.
        decoder: bytes and text of token ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str | None],
        adds_bos: bool | None = None,
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
    ) -> None:
        """Wraps `backend`, which must not be changed afterwards.

        Args:
            backend: does the encoding.
            special_tokens: text by name (`bos_token`, `eos_token`, `pad_token`, `unk_token`).
            adds_bos: whether encode() puts BOS in front; None: as the backend's post-processor does.
            chat_template: Jinja source.
            tool_chat_template: used instead of `chat_template` when tools are given.
        """
        from tokenizers import AddedToken

        backend.no_truncation()
        backend.no_padding()
        named = [token for token in special_tokens.values() if token is not None]
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        missing = [token for token in named if token not in known and backend.token_to_id(token) is not None]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
        self._backend = backend
        self.decoder = TokenDecoder(backend)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (special_tokens.get(name) for name in _NAMES)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            None if token is None else backend.token_to_id(token)
            for token in (self.bos_token, self.eos_token, self.pad_token)
        )
        self.chat_template = chat_template
        self._tool_chat_template = tool_chat_template
        self._prefix_ids = self._find_prefix(adds_bos)
        self.adds_bos = self.bos_token_id is not None and self.bos_token_id in self._prefix_ids

    def _find_prefix(self, adds_bos: bool | None) -> list[int]:
        """Returns the ids that go before every text; what the post-processor puts behind it is left out."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
        prefix = full[: starts[0]] if starts else []
        if adds_bos is None or self.bos_token_id is None:
            return prefix
        return [self.bos_token_id] * adds_bos + [i for i in prefix if i != self.bos_token_id]

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Loads from a Hugging Face directory: tokenizer.json, or else tokenizer.model (SentencePiece BPE).

        The chat template comes from chat_template.jinja, chat_template.json or tokenizer_config.json, in this order.
        `add_bos_token` of tokenizer_config.json, where it is given, overrides the post-processor.

        Raises:
            ValueError: there is no tokenizer in the directory or it is not supported.
        """
        path = Path(path)
        config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
        special_tokens = {name: _token_text(config.get(name)) for name in _NAMES}
        adds_bos = config.get("add_bos_token")
        if (path / "tokenizer.json").is_file():
            backend = _load_backend(path / "tokenizer.json")
        elif (path / "tokenizer.model").is_file():
            from jaxpage.tokenizer import spm

            backend, found = spm.load_model_file(path / "tokenizer.model")
            special_tokens = {name: special_tokens[name] or found[name] for name in _NAMES}
            adds_bos = True if adds_bos is None else adds_bos
        else:
            raise ValueError(f"path: no tokenizer.json or tokenizer.model in {shown(str(path))}")
        _add_configured_tokens(backend, config)
        templates = _read_chat_templates(path, config)
        return cls(
            backend,
            special_tokens=special_tokens,
            adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
            chat_template=templates.get("default"),
            tool_chat_template=templates.get("tool_use"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds from GGUF metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`) as plain Python values.

        Raises:
            ValueError: a key is missing, malformed, or names something that is not supported.
        """
        from jaxpage.tokenizer import gguf

        parts = gguf.build(metadata)
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            adds_bos=parts.adds_bos,
            chat_template=parts.chat_template,
        )

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json that other programs read; without the chat template."""
        self._backend.save(str(path))

    def save_directory(self, path: Path) -> None:
        """Writes the files from which ``from_directory`` makes a tokenizer that is equal to this one."""
        self.save(path / "tokenizer.json")
        config: dict[str, Any] = {name: getattr(self, name) for name in _NAMES} | {"add_bos_token": self.adds_bos}
        if self._tool_chat_template is not None:
            named = {"default": self.chat_template, "tool_use": self._tool_chat_template}
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in named.items() if template is not None
            ]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`; the text of special tokens becomes those tokens.

        With `add_special_tokens` the tokenizer's prefix (BOS) goes in front, unless the text starts with BOS itself.
        An end token that the tokenizer would append is left out: a prompt that is to be continued has not ended.

        Raises:
            ValueError: the text holds half of a surrogate pair, which no UTF-8 text can.
        """
        try:
            # The batch call without offsets takes a third of encode()'s time and leaves the interpreter free.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise ValueError(f"text: expected valid Unicode text, got {ascii(text)[:200]}") from error
        if not add_special_tokens or (ids and ids[0] == self.bos_token_id):
            return ids
        return self._prefix_ids + ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of `ids`. Blanks are never tidied; bytes that form no character become U+FFFD."""
        return self.decoder.decode(ids, skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """Returns the name of a token for lists of logprobs: its text as in the middle of a text.

        A special token's own text, whatever the rendering options; U+FFFD for parts of characters.
        """
        return self.decoder.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds in the middle of a text, also for parts of characters."""
        return self.decoder.token_bytes(token_id)

    def chat_template_for(self, tools: Sequence[Any] | None) -> str | None:
        """Returns the template that chats with or without `tools` use, None if there is none."""
        return (self._tool_chat_template if tools else None) or self.chat_template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: chat.ContentFormat | None = None,
    ) -> str:
        """Returns the prompt text of a chat; `chat_template` replaces the tokenizer's own.

        `content_format` says how the template reads content where it does not show it.

        Raises:
            ChatTemplateError: there is no template, or it refuses or fails.
            ParameterError: messages or chat_template_kwargs are malformed, or both flags are set.
        """
        source = chat_template or self.chat_template_for(tools)
        if source is None:
            raise chat.ChatTemplateError("this model's tokenizer has no chat template; give one in chat_template")
        special = {name: getattr(self, name) for name in _NAMES}
        return chat.render(
            source,
            messages,
            special_tokens={name: token for name, token in special.items() if token is not None},
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
            content_format=content_format,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids of render_chat()'s text, encoded without adding special tokens.

        The template alone decides on BOS: where it writes none there is none, even if plain encode() adds it.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"path: {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"path: {path.name} holds no JSON object")
    return value


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise ValueError(f"path: {path.name} cannot be read: {str(error)[:200]}") from error


def _token_text(entry: Any) -> str | None:
    """Special tokens stand in configuration as a string or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens that tokenizer_config.json lists and tokenizer.json lacks, in the order of their ids."""
    from tokenizers import AddedToken

    entries = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {
                name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([AddedToken(entry["content"], **flags)])
    extra = [*(config.get("additional_special_tokens") or []), *(config.get("extra_special_tokens") or [])]
    texts = [text for text in map(_token_text, extra) if text is not None and backend.token_to_id(text) is not None]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in texts if text not in known]
    )


def _read_chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates by name; a single one is `default`."""
    file = path / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else None
    source = source or _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return {"default": source} if isinstance(source, str) else {}
