"""Where the load generator gets token ids and texts from: the server's own tokenizer, or one on this machine."""

from __future__ import annotations

import http.client
import json
import ssl
import string
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxpage.client.http import error_message, ssl_context
from jaxpage.errors import ParameterError, shown
from jaxpage.tokenizer import Tokenizer


class TokenSource(Protocol):
    """Ids to make prompts of, and the way between ids and text."""

    name: str
    ids: list[int]
    """Ordinary tokens to draw from, no special ones."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def close(self) -> None: ...


class LocalTokens:
    """A tokenizer of ours."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        special = tokenizer.decoder.special_ids
        self.ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in special]

    @classmethod
    def load(cls, name: str) -> LocalTokens:
        """From a tokenizer's directory, or whatever ``--model`` takes.

        Raises:
            ValueError: there is none.
        """
        from jaxpage.weights.source import open_checkpoint, resolve_model

        path = Path(name)
        if (path / "tokenizer.json").exists():
            return cls(Tokenizer.from_directory(path), name)
        return cls(open_checkpoint(resolve_model(name), needs_weights=False).load_tokenizer(), name)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def close(self) -> None:
        """Nothing to do."""


class ServerTokens:
    """The server's ``/tokenize`` and ``/detokenize``, as jaxpage and vLLM have them. Blocks: for before the run."""

    def __init__(self, url: str, headers: dict[str, str], insecure: bool = False) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ParameterError("tokenizer", f"must be given where the server is not at http:// or https://: {url}")
        host = parts.hostname or "localhost"
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context: ssl.SSLContext = ssl_context(insecure)
            self._connection = http.client.HTTPSConnection(host, parts.port, context=context, timeout=60)
        else:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=60)
        self._prefix = parts.path.rstrip("/")
        self._headers = {**headers, "content-type": "application/json"}
        self.name = "the server's"
        self.ids = self._some_ids()

    def encode(self, text: str) -> list[int]:
        """Raises ParameterError if the server has no such route."""
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def decode(self, ids: Sequence[int]) -> str:
        """Raises ParameterError if the server has no such route."""
        return self._post("/detokenize", {"tokens": list(ids)})["prompt"]

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _some_ids(self) -> list[int]:
        """Ids of words of two letters: some hundred in most tokenizers. No route says how many ids there are."""
        letters = string.ascii_lowercase
        texts = (" " + " ".join(first + second for second in letters) for first in letters + letters.upper())
        return sorted({token_id for text in texts for token_id in self.encode(text)})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            self._connection.request("POST", self._prefix + path, json.dumps(body), self._headers)
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ParameterError("tokenizer", f"the server's {path} cannot be reached: {error}") from None
        if response.status != 200:
            self.close()
            reason = f"HTTP {response.status}: {shown(error_message(content))}"
            raise ParameterError("tokenizer", f"the server's {path} does not work ({reason}); name a local one")
        return json.loads(content)
