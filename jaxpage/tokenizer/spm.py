"""Owns building a `tokenizers` BPE from SentencePiece pieces and scores, and reading tokenizer.model files.

Must not know of GGUF, Hugging Face configuration or chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

MARK = "\u2581"
_BPE_MODEL_TYPE = 2


class PieceType(IntEnum):
    """SentencePiece's kinds of pieces; GGUF's token_type uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def derive_merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Returns BPE merges, best first: every way to cut a piece in two pieces, in the order of the pieces' scores.

    SentencePiece joins the neighbours whose joined piece scores highest, so all cuts of one piece share its rank.
    """
    joinable = [i for i, kind in enumerate(types) if kind in (PieceType.NORMAL, PieceType.UNUSED)]
    known = {pieces[i] for i in joinable}
    joinable.sort(key=lambda i: -scores[i])  # stable: equal scores keep the order of their ids
    merges = []
    for i in joinable:
        piece = pieces[i]
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in known and piece[cut:] in known:
                merges.append((left, piece[cut:]))
    return merges


def added_tokens(pieces: Sequence[str], types: Sequence[int]) -> list[tokenizers.AddedToken]:
    """Returns the pieces that are found in raw text before any merging: control (special) and user-defined ones."""
    from tokenizers import AddedToken

    special = (PieceType.UNKNOWN, PieceType.CONTROL)
    return [
        AddedToken(piece, special=kind in special, normalized=False)
        for piece, kind in zip(pieces, types, strict=True)
        if piece and kind in (*special, PieceType.USER_DEFINED)
    ]


def build_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unk_token: str | None,
    add_space_prefix: bool,
    charsmap: bytes = b"",
    collapse_blanks: bool = False,
) -> tokenizers.Tokenizer:
    """Builds the tokenizer; it adds no BOS or EOS.

    Args:
        pieces: text of each piece, the index is the token id. Of equal pieces the first one is used.
        scores: higher is merged first.
        types: PieceType numbers.
        unk_token: piece for characters that neither pieces nor bytes can write.
        add_space_prefix: whether a text, and a text after a special token, gets a blank in front.
        charsmap: SentencePiece's compiled normalisation; empty for none.
        collapse_blanks: whether blanks at both ends are removed and runs of blanks become one.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    vocab: dict[str, int] = {}
    for token_id, piece in enumerate(pieces):
        vocab.setdefault(piece, token_id)
    byte_fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    merges = derive_merges(pieces, scores, types)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback)
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if collapse_blanks:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if add_space_prefix:
        steps.append(normalizers.Prepend(MARK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", MARK)])
    decoder_steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        decoder_steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(decoder_steps)
    backend.add_tokens(added_tokens(pieces, types))
    return backend


def load_model_file(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """Reads a tokenizer.model file.

    Returns:
        The tokenizer, and the special tokens by name (`bos_token`, `eos_token`, `pad_token`, `unk_token`).

    Raises:
        ValueError: the file is no SentencePiece model, or not one of the BPE kind.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"path: {path.name} is not a SentencePiece model: {error}") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != _BPE_MODEL_TYPE:
        raise ValueError(f"path: {path.name} has SentencePiece model type {trainer.model_type}, only BPE (2) is read")
    pieces = [piece.piece for piece in model.pieces]
    ids = {
        "bos_token": trainer.bos_id,
        "eos_token": trainer.eos_id,
        "pad_token": trainer.pad_id,
        "unk_token": trainer.unk_id,
    }
    names = {name: pieces[i] if 0 <= i < len(pieces) else None for name, i in ids.items()}
    backend = build_bpe(
        pieces,
        [piece.score for piece in model.pieces],
        [piece.type for piece in model.pieces],
        unk_token=names["unk_token"],
        add_space_prefix=normalizer.add_dummy_prefix,
        charsmap=normalizer.precompiled_charsmap,
        collapse_blanks=normalizer.remove_extra_whitespaces,
    )
    return backend, names
