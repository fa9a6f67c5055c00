"""Owns building a `tokenizers` tokenizer from the tokenizer keys of a GGUF file's metadata.

Must not know how GGUF files are read: it gets a mapping of plain Python values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpage.tokenizer import pretokenizers, spm

if TYPE_CHECKING:
    import tokenizers

_PREFIX = "tokenizer.ggml."
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}


class GgufTokenizer(NamedTuple):
    """What GGUF metadata says about a tokenizer; `special_tokens` by name such as `bos_token`."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str | None]
    adds_bos: bool
    chat_template: str | None


def build(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Builds the tokenizer that `metadata` describes.

    Raises:
        ValueError: a key is missing or malformed, or names a tokenizer model or pre-tokenizer that is not known.
    """
    model = metadata.get(_PREFIX + "model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{_PREFIX}model: {str(model)[:200]!r} is not supported; supported: gpt2, llama")
    tokens = _list(metadata, "tokens", None)
    types = _list(metadata, "token_type", [spm.PieceType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{_PREFIX}token_type: {len(types)} entries for {len(tokens)} tokens")
    special = {name: _token_at(tokens, metadata.get(_PREFIX + key), key) for name, key in _SPECIAL_KEYS.items()}
    types = list(types)
    for token in filter(None, special.values()):
        types[tokens.index(token)] = spm.PieceType.CONTROL
    if model == "llama":
        backend, adds_bos = _build_llama(metadata, tokens, types, special["unk_token"]), True
    else:
        pre = pretokenizers.find_pre_tokenizer(str(metadata.get(_PREFIX + "pre", "default")))
        backend, adds_bos = _build_gpt2(metadata, tokens, types, pre), pre.adds_bos
    return GgufTokenizer(
        backend=backend,
        special_tokens=special,
        adds_bos=bool(metadata.get(_PREFIX + "add_bos_token", adds_bos)) and special["bos_token"] is not None,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _build_llama(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], unk_token: str | None
) -> tokenizers.Tokenizer:
    scores = _list(metadata, "scores", None)
    if len(scores) != len(tokens):
        raise ValueError(f"{_PREFIX}scores: {len(scores)} entries for {len(tokens)} tokens")
    add_space_prefix = bool(metadata.get(_PREFIX + "add_space_prefix", True))
    return spm.build_bpe(tokens, scores, types, unk_token=unk_token, add_space_prefix=add_space_prefix)


def _build_gpt2(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], pre: pretokenizers.PreTokenizer
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    merges = []
    for merge in _list(metadata, "merges", None):
        left, blank, right = merge.partition(" ")
        if not (blank and left in vocab and right in vocab and left + right in vocab):
            raise ValueError(f"{_PREFIX}merges: {merge[:200]!r} does not join two tokens to a third")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pretokenizers.byte_level(pre.splits)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(spm.added_tokens(tokens, types))
    return backend


def _list(metadata: Mapping[str, Any], key: str, default: list[Any] | None) -> list[Any]:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, list):
        raise ValueError(f"{_PREFIX}{key}: expected a list, got {str(value)[:200]}")
    return value


def _token_at(tokens: Sequence[str], token_id: Any, key: str) -> str | None:
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ValueError(f"{_PREFIX}{key}: {str(token_id)[:200]} is not an id below {len(tokens)}")
    return tokens[token_id]
