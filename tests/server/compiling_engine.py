"""The fake engine with the real one's check of grammars."""

from __future__ import annotations

from collections.abc import Sequence

from fake_engine import FakeEngine, Params

from jaxpage.grammar import ConstraintBuilder
from jaxpage.params import SamplingParams
from jaxpage.tokenizer import Tokenizer


class CompilingEngine(FakeEngine):
    """Compiles grammars as the real engine's ``check`` does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, [65])
        self._constraints = ConstraintBuilder(tokenizer, self.vocab_size, [257])

    def check(self, prompt_token_ids: Sequence[int], params: Params, priority: int = 0) -> None:
        super().check(prompt_token_ids, params, priority)
        if isinstance(params, SamplingParams):
            self._constraints.check(params)
