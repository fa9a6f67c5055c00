"""The ``jaxpage`` command: finds a subcommand and hands it the rest of the line.

It must not know any subcommand's options; a subcommand is imported when it is called, so that help is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import jaxpage

COMMANDS = {
    "serve": ("jaxpage.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("jaxpage.commands.chat", "chat in the terminal, with a server or a local model"),
    "generate": ("jaxpage.commands.generate", "generate text from one prompt"),
    "run-batch": ("jaxpage.commands.run_batch", "answer a file of requests in OpenAI's batch format"),
    "bench": ("", "measure: serve (a running server), throughput, latency"),
    "models": ("jaxpage.commands.models", "list, pull and remove models on this machine"),
    "checkpoint": ("jaxpage.checkpoint", "convert a model to shards that load straight onto devices; inspect, verify"),
    "collect-env": ("jaxpage.commands.collect_env", "describe this machine for a bug report"),
}
BENCHMARKS = {
    "serve": ("jaxpage.benchmarks.serving.main", "load on a running OpenAI-compatible server"),
    "throughput": ("jaxpage.benchmarks.throughput", "tokens a second, with the engine in process"),
    "latency": ("jaxpage.benchmarks.latency", "time to the first token and between tokens, likewise"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        Its exit code; 2 for an unknown one, 130 after a Ctrl-C that it leaves to others.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:  # also while a subcommand is still imported
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter would complain while flushing at exit.
        sys.stdout = None
        return 1


def _run(words: list[str]) -> int:
    if words[:1] in (["--version"], ["-V"]):
        print(f"jaxpage {jaxpage.__version__}")
        return 0
    found = _choose("jaxpage", COMMANDS, words)
    if isinstance(found, int):
        return found
    if found == "bench":
        benchmark = _choose("jaxpage bench", BENCHMARKS, words[1:])
        if isinstance(benchmark, int):
            return benchmark
        return _load(BENCHMARKS[benchmark][0])(words[2:], prog=f"jaxpage bench {benchmark}") or 0
    return _load(COMMANDS[found][0])(words[1:], prog=f"jaxpage {found}") or 0


def _choose(prog: str, commands: dict[str, tuple[str, str]], words: list[str]) -> str | int:
    """The command that ``words`` begin with, or an exit code once help or an error is shown."""
    if words and words[0] in commands:
        return words[0]
    lines = [f"usage: {prog} COMMAND [options]", ""]
    lines += [f"  {name:<12} {meaning}" for name, (_, meaning) in commands.items()]
    lines += ["", f"{prog} COMMAND --help lists the options of a command."]
    if words and words[0] in ("-h", "--help", "help"):
        print("\n".join(lines))
        return 0
    if words:
        print(f"{prog}: no such command: {words[0][:200]} ({', '.join(commands)})", file=sys.stderr)
    else:
        print("\n".join(lines), file=sys.stderr)
    return 2


def _load(module: str) -> Callable[..., int | None]:
    return importlib.import_module(module).main


if __name__ == "__main__":
    sys.exit(main())
