"""Constraints on tokens in a real engine: masks follow each sample's own tokens, whatever happens around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy_reference
import pytest
from driving import ask, ids_of, preempt_at, run

from jaxpage import SamplingParams
from jaxpage.grammar.bad_words import forbid

if TYPE_CHECKING:
    from numpy_reference import RandomModel

    from jaxpage import LLM

V = 294


def allowed_after(token_ids: list[int]) -> list[int]:
    """A rule that depends on all tokens so far: the next one leaves this rest when divided by 7."""
    return [token for token in range(V) if token % 7 == (sum(token_ids) + len(token_ids)) % 7]


@dataclasses.dataclass
class Rule:
    """The rule as a constraint; fails when asked after ``fails_after`` tokens."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    fails_after: int = 10**9

    def mask(self, allowed: np.ndarray) -> None:
        if len(self.token_ids) >= self.fails_after:
            raise RuntimeError("the grammar is broken")
        forbid(allowed, set(range(V)).difference(allowed_after(self.token_ids)))

    def accept(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def fork(self) -> Rule:
        return dataclasses.replace(self, token_ids=list(self.token_ids))


@pytest.fixture
def llm(llm_for: Callable[..., LLM], random_model: Callable[..., RandomModel], monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Requests with a bad word have the rule as their constraint."""
    llm = llm_for(random_model().directory)
    rule = Rule()

    def build(params: SamplingParams) -> Any:
        return (
            dataclasses.replace(rule, fails_after=3 if params.bad_words == ["fail"] else 10**9)
            if params.bad_words
            else None
        )

    monkeypatch.setattr(llm.engine.intake.constraints, "build", build)
    return llm


@pytest.fixture
def expected(random_model: Callable[..., RandomModel]) -> Callable[[list[int], int], list[int]]:
    """The greedy tokens under the rule, from the reference."""
    model = random_model()

    def generate(prompt: list[int], count: int) -> list[int]:
        made: list[int] = []
        for _ in range(count):
            logits = numpy_reference.logits(model.config, model.tensors, prompt + made)[-1]
            choices = allowed_after(made)
            made.append(choices[int(np.argmax(logits[choices]))])
        return made

    return generate


def test_every_token_obeys_and_is_the_best_that_does(
    llm: LLM, random_ids: Callable[..., list[int]], expected: Callable[..., list[int]]
) -> None:
    prompt = random_ids(21)  # two chunks
    output = run(llm, [ask(prompt, max_tokens=12, bad_words=["x"])])[0]
    assert ids_of(output) == [expected(prompt, 12)]


def test_neighbours_are_free(
    llm: LLM, random_ids: Callable[..., list[int]], expected: Callable[..., list[int]]
) -> None:
    prompts = [random_ids(9, seed) for seed in range(4)]
    free = [ids_of(run(llm, [ask(prompt, max_tokens=10)])[0]) for prompt in prompts]
    asks = [ask(prompt, max_tokens=10, arrives_at=2 * place) for place, prompt in enumerate(prompts)]
    asks += [ask(prompt, max_tokens=10, arrives_at=place, bad_words=["x"]) for place, prompt in enumerate(prompts)]
    outputs = run(llm, asks)
    assert [ids_of(each) for each in outputs[:4]] == free
    assert [ids_of(each) for each in outputs[4:]] == [[expected(prompt, 10)] for prompt in prompts]


def test_samples_follow_their_own_tokens(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    output = run(llm, [ask(random_ids(9), max_tokens=12, n=4, temperature=1.5, seed=3, bad_words=["x"])])[0]
    samples = ids_of(output)
    assert len({tuple(sample) for sample in samples}) == 4
    for sample in samples:
        for place, token in enumerate(sample):
            assert token in allowed_after(sample[:place])


def test_bad_1b_preemption_keeps_the_state(
    llm: LLM, random_ids: Callable[..., list[int]], expected: Callable[..., list[int]]
) -> None:
    prompt = random_ids(11)
    output = run(llm, [ask(prompt, max_tokens=12, bad_words=["x"])], preempt_at(5, 14, 17))[0]
    assert ids_of(output) == [expected(prompt, 12)]


def test_a_constraint_that_fails_ends_its_request_alone(
    llm: LLM, random_ids: Callable[..., list[int]], expected: Callable[..., list[int]]
) -> None:
    prompt = random_ids(8)
    failing, fine = run(
        llm, [ask(prompt, max_tokens=9, bad_words=["fail"]), ask(prompt, max_tokens=9, bad_words=["x"])]
    )
    assert failing.outputs[0].finish_reason == "error"
    assert failing.outputs[0].token_ids == expected(prompt, 3)
    assert ids_of(fine) == [expected(prompt, 9)]


def test_a_solitary_request_loses_no_step(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    steps = 0

    def count(engine: object) -> None:
        nonlocal steps
        steps += 1

    run(llm, [ask(random_ids(5), max_tokens=10, bad_words=["x"])], count)
    assert steps == 11  # the last one takes in the last token


def test_more_masks_than_are_sent_at_a_time(
    llm: LLM, random_ids: Callable[..., list[int]], expected: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpage.runner.stage.MASK_ROWS", 3)
    prompts = [random_ids(6, seed) for seed in range(8)]
    outputs = run(llm, [ask(prompt, max_tokens=6, bad_words=["x"]) for prompt in prompts])
    assert [ids_of(each) for each in outputs] == [[expected(prompt, 6)] for prompt in prompts]
