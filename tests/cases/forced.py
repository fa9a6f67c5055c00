"""A real engine whose model says what a test wants: its logits are a function of the tokens in the KV cache.

The forward pass is replaced by one that writes token ids where keys belong and reads each row's history back through
its block table. So chunks, prefix hits, copies, swaps and preemptions all stay real, and a mistake in one of them shows
as a history that is not the request's. It must not know what is asserted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from api_client import Api

from jaxpage import LLM, AsyncLLMEngine
from jaxpage.batch import ModelInputs
from jaxpage.layers.kv_cache import KVCache
from jaxpage.models.config import ModelConfig
from jaxpage.runner import step as step_module

BEST, IMPOSSIBLE = 20.0, -1e9
Scores = Mapping[int, float] | np.ndarray
"""Logits: all of them, or those of some ids where the others have 0."""
Rule = Callable[[list[int], list[int], int], Scores]
"""Logits from the prompt's ids, the ids generated so far and the number of the sample."""
Script = Callable[[list[int], int], Sequence[int]]
"""What a sample is to say, from the prompt's ids and the number of the sample."""


class Seen(NamedTuple):
    """What the model was asked for once."""

    prompt: list[int]
    output: list[int]
    sample: int


class ForcedModel:
    """The engine of ``llm`` with its model replaced.

    Attributes:
        rule: what it says; see ``says`` and ``scores``.
        seen: every prompt, output so far and sample that a token was drawn for. Fails a test where the cache is wrong.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.vocab_size = llm.engine.model.vocab_size
        self.end_id = min(llm.engine.model.end_token_ids)
        self._prompts: set[tuple[int, ...]] = set()
        self._sample_indices: jax.Array | None = None
        self._replace_the_model()
        self.reset()

    def reset(self) -> None:
        """Forgets what the last test has set."""
        self._prompts.clear()
        self.seen: list[Seen] = []
        self.says([])

    def says(self, forced: Sequence[int] | Script) -> None:
        """At output position i the i-th id gets 20 and all others 0; after the list the end id."""
        self.rule = lambda prompt, output, sample: {self.next_of(forced, prompt, output, sample): BEST}

    def next_of(self, forced: Sequence[int] | Script, prompt: list[int], output: list[int], sample: int) -> int:
        """The id that a script has next."""
        ids = forced(prompt, sample) if callable(forced) else forced
        return ids[len(output)] if len(output) < len(ids) else self.end_id

    def scores(self, rule: Rule | Scores) -> None:
        """Logits by a function, or the same ones at every position."""
        self.rule = rule if callable(rule) else lambda prompt, output, sample: rule

    def only(self, scores: Mapping[int, float]) -> np.ndarray:
        """Logits with every other id impossible."""
        logits = np.full(self.vocab_size, IMPOSSIBLE, np.float32)
        logits[list(scores)] = list(scores.values())
        return logits

    @contextlib.asynccontextmanager
    async def serving(self, **options: Any) -> AsyncGenerator[Api]:
        """The HTTP app over this engine, which until the end belongs to the app's thread."""
        front = AsyncLLMEngine(self.llm.engine)
        api = Api(front, **options)  # pyright: ignore[reportArgumentType]
        try:
            yield api
        finally:
            await api.client.aclose()
            front.shutdown(drain_timeout_s=5)
            for _ in range(3):  # what a step in flight has left
                if self.llm.engine.has_work:
                    self.llm.engine.step()

    # How it gets into the engine: prompts are noted when they arrive, and every step is traced with the parts below.

    def _replace_the_model(self) -> None:
        engine, runner = self.llm.engine, self.llm.engine.core.runner
        stage = runner.worker.stages[0]
        add, lower = engine.add, stage.programs.lower

        def noting(request_id: str, prompt_token_ids: list[int], *args: Any, **options: Any) -> None:
            self._prompts.add(tuple(prompt_token_ids))
            add(request_id, prompt_token_ids, *args, **options)

        def lower_forced(*args: Any) -> jax.stages.Lowered:
            parts = {"embed": _ids, "apply_layers": _write_and_read, "final_norm": _as_it_is}
            parts |= {"unembed": self._unembed, "model_inputs": self._model_inputs}
            parts |= {"pool": functools.partial(_no_vectors, engine.model)}
            with mock.patch.multiple(step_module, **parts):
                return lower(*args)

        engine.add = noting
        stage.programs.lower = lower_forced  # pyright: ignore[reportAttributeAccessIssue]
        stage.steps.clear()
        # Programs that call back are in no cache on disk, so there is one for all steps.
        runner.worker.buckets = runner.worker.buckets[-1:]

    def _model_inputs(self, fields: dict[str, jax.Array], last_token: jax.Array, block_size: int) -> ModelInputs:
        # A forked row samples from its parent's token: only the row knows whose sample it is.
        self._sample_indices = fields["seeds"][:, 2].astype(jnp.int32)
        return _model_inputs(fields, last_token, block_size)

    def _unembed(
        self, params: Any, config: Any, histories: jax.Array, layout: None = None, num_rows: jax.Array | None = None
    ) -> jax.Array:
        samples, self._sample_indices = self._sample_indices, None
        is_drawing = samples is not None
        if samples is None:  # a prompt is scored
            samples = jnp.zeros(len(histories), jnp.int32)
        shape = jax.ShapeDtypeStruct((len(histories), self.vocab_size), jnp.float32)
        return jax.pure_callback(functools.partial(self._logits, is_drawing), shape, histories, samples)

    def _logits(self, is_drawing: bool, histories: jax.Array, samples: jax.Array) -> np.ndarray:
        rows = np.zeros((len(histories), self.vocab_size), np.float32)
        for row, history, sample in zip(rows, np.asarray(histories), np.asarray(samples).tolist(), strict=True):
            length = int(history[0])
            ids = history[1 : 1 + length].astype(int).tolist()
            cut = self._prompt_length(ids)
            if cut is None and is_drawing:
                continue  # padding, or a part of a prompt
            prompt, output = ids[:cut], ids[cut:] if cut is not None else []
            if is_drawing:
                self.seen.append(Seen(prompt, output, sample))
            scores = self.rule(prompt, output, sample)
            if isinstance(scores, np.ndarray):
                row[:] = scores
            else:
                row[list(scores)] = list(scores.values())
        return rows

    def _prompt_length(self, ids: list[int]) -> int | None:
        """How much of a history is its prompt: the longest that a request has come with."""
        fitting = [len(prompt) for prompt in list(self._prompts) if tuple(ids[: len(prompt)]) == prompt]
        return max(fitting, default=None)


_model_inputs = step_module.model_inputs


def _ids(params: Any, config: Any, token_ids: jax.Array, layout: None) -> jax.Array:
    """In place of embeddings."""
    return token_ids


def _as_it_is(params: Any, config: Any, x: jax.Array, layout: None) -> jax.Array:
    return x


def _write_and_read(
    params: Any, config: Any, kv_cache: KVCache, ids: jax.Array, inputs: ModelInputs, implementation: str, layout: None
) -> tuple[KVCache, jax.Array]:
    """Writes ids as keys and values; in place of hidden states, [T, 1 + L]: the length of each history, and its ids."""
    layer, metadata = kv_cache[0], inputs.attention
    num_kv_heads, head_dim = layer.kv.shape[1], layer.kv.shape[3] // 2
    ids = ids.astype(layer.kv.dtype)
    rows_of_ids = jnp.broadcast_to(ids[:, None, None], (len(ids), num_kv_heads, head_dim))
    layer = layer.write(rows_of_ids, rows_of_ids, inputs.slot_mapping)
    tokens, ends = jnp.arange(len(ids)), metadata.cu_seqlens_q
    rows = jnp.minimum(jnp.searchsorted(ends, tokens, side="right") - 1, len(metadata.seq_lens) - 1)
    histories = layer.kv[metadata.block_tables[rows], 0, :, 0].reshape(len(ids), -1)
    lengths = jnp.where(tokens < ends[-1], inputs.positions + 1, 0)
    return [layer, *kv_cache[1:]], jnp.concatenate([lengths[:, None].astype(ids.dtype), histories], axis=1)


def _no_vectors(config: ModelConfig, histories: jax.Array, ends: jax.Array, *args: jax.Array) -> jax.Array:
    """In place of pooled hidden states, which this model does not have."""
    return jnp.zeros((len(ends) - 1, config.hidden_size), jnp.float32)
