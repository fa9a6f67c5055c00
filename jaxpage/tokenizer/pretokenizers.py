"""Owns the table of byte-level pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

Must not know of vocabularies or files: a name goes in, a `tokenizers` pre-tokenizer comes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
# Words with at most one change from capitals to small letters, as in "JsonValue" -> "Json" "Value".
_CAPITALS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CAMEL: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+CONTRACTION|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*CONTRACTION"
)
_TEKKEN: Final = _CAMEL.replace("CONTRACTION", "") + r"|\p{N}" + _PUNCTUATION + _TAIL
_GPT4O: Final = _CAMEL.replace("CONTRACTION", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _PUNCTUATION + _TAIL
_DEEPSEEK_V3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _TAIL
)


class PreTokenizer(NamedTuple):
    """How text is cut before byte-level BPE.

    Attributes:
        splits: regular expressions, applied one after the other to what the ones before left in pieces.
        ignore_merges: whether a piece that is a whole token is taken without looking at merges.
        adds_bos: whether BOS is added where the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_gpt2 = PreTokenizer((_GPT2,))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_llama3_plain = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))
# Every numeric character stands alone, also circled digits and fractions (U+2460, U+00BD).
_single_digits = PreTokenizer((r"\p{N}", _GPT2))
_gpt4o = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "olmo": _gpt2,
    "mpt": _gpt2,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "pixtral": _llama3,
    "dbrx": _llama3_plain,
    "smaug-bpe": _llama3_plain,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "stablelm2": _qwen2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "codeshell": _single_digits,
    "exaone": _single_digits,
    "gpt-4o": _gpt4o,
    "llama4": _gpt4o,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Returns the entry for a GGUF pre-tokenizer name.

    Raises:
        ValueError: the name is unknown; another split would silently give wrong ids.
    """
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: {name[:200]!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def byte_level(splits: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Builds the pre-tokenizer that cuts by `splits` and then writes each piece in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
