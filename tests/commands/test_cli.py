"""The ``jaxpage`` command itself: finding subcommands, help without jax, exit codes."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import jaxpage
from jaxpage import cli

MODULES = [name for name, _ in (cli.COMMANDS | cli.BENCHMARKS).values() if name]


def test_help_is_short_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom jaxpage import cli\n"
        "assert cli.main(['--help']) == 0\n"
        "heavy = {'jax', 'numpy', 'starlette', 'transformers', 'yaml'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 15
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)


def test_help_of_every_subcommand_needs_no_jax() -> None:
    """One process for all, since each would import the same things again."""
    program = (
        "import contextlib, importlib, io, sys\n"
        f"for name in {MODULES!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(name).main(['--help'], prog='jaxpage this')\n"
        "    assert 'usage: jaxpage this' in shown.getvalue(), name\n"
        "    assert 'jax' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "module", "rest", "prog"),
    [
        (["serve", "m", "--port", "1"], "jaxpage.serve", ["m", "--port", "1"], "jaxpage serve"),
        (["models", "list"], "jaxpage.commands.models", ["list"], "jaxpage models"),
        (["bench", "serve", "-x"], "jaxpage.benchmarks.serving.main", ["-x"], "jaxpage bench serve"),
    ],
)
def test_the_rest_of_the_line_is_handed_on(
    words: list[str], module: str, rest: list[str], prog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fake = types.ModuleType(module)
    fake.main = lambda argv, prog: calls.append((argv, prog)) or 7  # pyright: ignore
    monkeypatch.setitem(sys.modules, module, fake)
    assert cli.main(words) == 7
    assert calls == [(rest, prog)]


def test_unknown_and_missing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sevre"]) == 2
    assert capsys.readouterr().err.startswith("jaxpage: no such command: sevre (serve, chat, ")
    assert cli.main(["bench", "x"]) == 2
    assert capsys.readouterr().err == "jaxpage bench: no such command: x (serve, throughput, latency)\n"
    assert cli.main([]) == 2
    assert "usage: jaxpage COMMAND" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0
    assert "usage: jaxpage bench COMMAND" in capsys.readouterr().out


def test_ctrl_c_that_a_subcommand_leaves_to_others_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    try:
        code = cli.main(["collect-env"])
    except KeyboardInterrupt:  # would end all tests
        code = None
    assert code == 130


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpage {jaxpage.__version__}\n"


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxpage", "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no such command: nonsense" in done.stderr
