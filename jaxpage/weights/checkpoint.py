"""The contract of a checkpoint: what every reader of a weight format offers to the loader.

It knows no format, and not where the files came from.
"""

from __future__ import annotations

import abc
import json
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.errors import StartupError, shown

if TYPE_CHECKING:
    from jaxpage.tokenizer import Tokenizer
    from jaxpage.weights.gguf_blocks import Blocks

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "chat_template*")
"""Names of the files in which a Hugging Face directory has its tokenizer and chat templates."""
_LFS_POINTER = b"version https://git-lfs"


class WeightsError(StartupError, ValueError):
    """A model cannot be found or read. The message is one line naming the file, and the tensor if one is at fault."""

    def __init__(self, message: str) -> None:
        # Parts of the message come from damaged files and foreign libraries: whatever they hold, it stays one line.
        super().__init__(" ".join(message.split()))


class ModelFiles(abc.ABC):
    """What belongs to a model beside its weights.

    Attributes:
        path: The directory or file that was opened.
        config: The content of Hugging Face's config.json.
        generation_config: The content of generation_config.json, or {}.
        quantization: The kind of ``QuantizedWeight`` that linear weights are stored as already; None: they are floats.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    quantization: str | None = None

    @abc.abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to these weights."""


class Checkpoint(ModelFiles):
    """A set of named tensors with the configuration that belongs to them.

    Names, orientation ([out_features, in_features]) and meaning of the tensors are those of Hugging Face whatever the
    format of the file. Opening checks the files' structure; the tensors' bytes are read by ``read`` only.
    """

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abc.abstractmethod
    def dtype(self, name: str) -> np.dtype:
        """Dtype of what ``read`` returns for a tensor."""

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """One tensor. The array may be a read-only view of the mapped file.

        Raises:
            WeightsError: there is no tensor of that name.
        """

    def read_blocks(self, name: str) -> Blocks | None:
        """What ``read`` gives as the file holds it, if that is blocks of small numbers with scales; else None."""
        del name


def map_file(path: Path) -> mmap.mmap:
    """Map a weight file into memory, read-only.

    Raises:
        WeightsError: the file is missing, unreadable, empty, or a Git LFS pointer in place of the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise WeightsError(
                    f"{path.name}: is a Git LFS pointer, not the file itself; run 'git lfs pull' in {path.parent}"
                )
            if file.seek(0, 2) == 0:
                raise WeightsError(f"{path.name}: is empty (0 bytes)")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise WeightsError(f"{path.name}: no such file in {path.parent}") from None
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        WeightsError: the file is missing, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{path.name}: no such file in {path.parent}") from None
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path.name}: is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path.name}: must hold a JSON object, got {shown(value)}")
    return value
