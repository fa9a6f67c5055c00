"""``python -m jaxpage.generate``: the prompt, the stream to the terminal, exit codes."""

from __future__ import annotations

import io
import subprocess
import sys
import types

import pytest
from fake_engine import FakeEngine

from jaxpage import generate


@pytest.fixture
def engine(bytes_tokenizer, monkeypatch):
    """What ``from_engine_args`` gives in these tests."""
    engine = FakeEngine(bytes_tokenizer, [268, 269, 274])
    module = types.ModuleType("jaxpage.engine.async_engine")
    module.AsyncLLMEngine = types.SimpleNamespace(from_engine_args=lambda args: engine)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0])


def test_prints_the_answer_and_uses_the_chat_template(engine, capsys):
    assert generate.main(["Hi"]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    assert prompt_of(engine) == "[user]Hi<|end|>[assistant]"
    assert engine.was_shut_down


def test_no_chat_and_models_without_template(engine, capsys, monkeypatch):
    assert generate.main(["Hi", "--no-chat"]) == 0
    assert prompt_of(engine) == "Hi"
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    engine.is_dead = False
    assert generate.main(["Hi"]) == 0
    assert prompt_of(engine) == "Hi"
    assert generate.main(["Hi", "--chat"]) == 1
    assert "no chat template" in capsys.readouterr().err


def test_reads_the_prompt_from_standard_input(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\nstdin"))
    assert generate.main(["-"]) == 0
    assert "from\nstdin" in prompt_of(engine)


def test_sampling_flags_come_before_the_models_values(engine):
    engine.generation_config = {"temperature": 0.6, "top_k": 7}
    flags = ["--temperature", "0", "--top-p", "0.5", "--max-tokens", "3", "--stop", "x", "--stop", "y", "--ignore-eos"]
    assert generate.main(["Hi", *flags]) == 0
    params = engine.seen[-1][1]
    shown = (params.temperature, params.top_k, params.top_p, params.max_tokens, params.stop, params.ignore_eos)
    assert shown == (0, 7, 0.5, 3, ["x", "y"], True)


def test_usage_errors_exit_with_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main(["Hi", "--max-tokens", "x"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--temperature", "3"], ["--stop", ""], ["--max-model-len", "0"]])
def test_bad_values_are_one_line(flags, capsys):
    assert generate.main(["Hi", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jaxpage: error: {flags[0]}: ") and error.count("\n") == 1


def test_prompts_that_are_too_long_or_empty_are_one_line(engine, capsys):
    for prompt in ("c" * 100, ""):
        assert generate.main([prompt, "--no-chat"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("jaxpage: error: prompt")
        assert error.count("\n") == 1
        engine.is_dead = False


def test_ctrl_c_aborts_cleanly(engine, capsys):
    def interrupted(prompt, sample):
        raise KeyboardInterrupt

    engine.script = interrupted
    assert generate.main(["Hi"]) == 130
    assert capsys.readouterr().err == ""
    assert engine.was_shut_down


def test_help_needs_no_jax():
    result = subprocess.run([sys.executable, "-m", "jaxpage.generate", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "--no-chat" in result.stdout
