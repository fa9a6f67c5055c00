"""What may come into the engine: prompts as ids, and the checks of all that a user says.

It changes nothing, and its methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.checks import check_cache_salt, check_int, check_token_ids
from jaxpage.config import RECOMMENDED_VALUES
from jaxpage.engine.facts import EngineFacts
from jaxpage.errors import ParameterError, shown
from jaxpage.grammar import ConstraintBuilder
from jaxpage.params import BeamSearchParams, PoolingParams, SamplingParams, TextPrompt, TokensPrompt
from jaxpage.tokenizer import Tokenizer

Prompt = str | list[int] | TextPrompt | TokensPrompt
Params = SamplingParams | BeamSearchParams | PoolingParams


class Intake:
    """Checks requests for one model.

    Attributes:
        constraints: compiles grammars and banned words; given where several engines have the same model.
    """

    def __init__(self, tokenizer: Tokenizer, facts: EngineFacts, constraints: ConstraintBuilder | None = None) -> None:
        self.tokenizer, self.facts, self._config = tokenizer, facts, facts.config
        self.constraints = constraints or ConstraintBuilder(tokenizer, facts.vocab_size, facts.end_token_ids)

    def default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own recommendation, with the usual defaults for what it leaves open."""
        recommended = self.facts.generation_config
        return SamplingParams(**{name: recommended[name] for name in RECOMMENDED_VALUES if name in recommended})

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the ids of a prompt."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict) and ("prompt" in prompt or "prompt_token_ids" in prompt):
            for name in prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise ParameterError("prompt", f"the key {shown(name)} is not supported")
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            ids = check_token_ids("prompt_token_ids", prompt["prompt_token_ids"], self.facts.vocab_size)
            text = prompt.get("prompt")
            return text if isinstance(text, str) else None, ids
        if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
        if isinstance(prompt, list):
            return None, check_token_ids("prompt", prompt, self.facts.vocab_size)
        raise ParameterError("prompt", f"must be text, token ids or a dict of either, got {shown(prompt)}")

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: Params,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Raises ParameterError, with the numbers, if the engine cannot serve this. Changes nothing.

        Callable from any thread. Compiles the grammar of a structured output, which may take a while the first time.
        """
        if cache_salt is not None:
            check_cache_salt("cache_salt", cache_salt)
        if not isinstance(params, Params):
            raise ParameterError("sampling_params", f"must be SamplingParams or BeamSearchParams, got {shown(params)}")
        if check_int("priority", priority, -(2**63), 2**63 - 1) and self._config.scheduling_policy != "priority":
            raise ParameterError("priority", f'needs scheduling_policy "priority", got {priority}')
        config, length = self._config, len(prompt_token_ids)
        if length == 0:
            raise ParameterError("prompt", "has no tokens")
        check_token_ids("prompt_token_ids", prompt_token_ids, self.facts.vocab_size)
        generates = not isinstance(params, PoolingParams) and params.max_tokens != 0
        if length + generates > config.max_model_len:
            rest = " and one token must be left to generate" if generates else ""
            raise ParameterError("prompt", f"has {length} tokens; max_model_len is {config.max_model_len}{rest}")
        if self.facts.blocks_for(length) > self.facts.num_usable_blocks:
            raise ParameterError(
                "prompt",
                f"has {length} tokens and needs {self.facts.blocks_for(length)} KV blocks of {config.block_size}; "
                f"the whole KV cache has {self.facts.num_usable_blocks}",
            )
        if isinstance(params, PoolingParams):
            if params.dimensions is not None and params.dimensions > self.facts.hidden_size:
                raise ParameterError("dimensions", f"{params.dimensions} is above the model's {self.facts.hidden_size}")
            return
        params.validate_for(self.facts.vocab_size, config.max_model_len, self.facts.max_logprobs)
        if isinstance(params, BeamSearchParams):
            self._check_width(params)
            return
        masked = {*self.facts.end_token_ids, *(params.stop_token_ids or ())}
        if params.min_tokens and params.allowed_token_ids is not None and masked.issuperset(params.allowed_token_ids):
            raise ParameterError(
                "allowed_token_ids", "holds nothing but end and stop ids, which min_tokens forbids at the beginning"
            )
        self.constraints.check(params)

    def end_ids(self, params: SamplingParams | BeamSearchParams) -> frozenset[int]:
        """Ids that end a sample by themselves."""
        own = () if params.ignore_eos else self.facts.end_token_ids
        return frozenset((*own, *(params.stop_token_ids or ())))

    def _check_width(self, params: BeamSearchParams) -> None:
        if params.beam_width > self._config.max_num_seqs:
            raise ParameterError(
                "beam_width",
                f"{params.beam_width} is above max_num_seqs {self._config.max_num_seqs}, the rows of a step",
            )
        needed = params.beam_width + len(self.end_ids(params))
        if min(needed, self.facts.vocab_size) > self._config.num_logprobs:
            raise ParameterError(
                "beam_width",
                f"{params.beam_width} with {needed - params.beam_width} end ids needs max_logprobs {needed} or more, "
                f"it is {self._config.num_logprobs}",
            )


def salt_of(prompt: Prompt) -> str | None:
    """The ``cache_salt`` that comes with a prompt."""
    return prompt.get("cache_salt") if isinstance(prompt, dict) else None
