"""``--config``: what a file may say, who wins, and that mistakes are one line with file and key."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpage import serve
from jaxpage.config import AsyncEngineArgs
from jaxpage.config_file import add_config_flag, expand_config
from jaxpage.server.options import ServerOptions

EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "serve").glob("*.yaml"))
Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Every kind of flag there is."""
    parser = argparse.ArgumentParser(prog="prog")
    add_config_flag(parser)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--long-name", default="none")
    parser.add_argument("--kind", choices=("a", "b"))
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--many", nargs="+", type=int)
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--body", type=json.loads)
    return parser


@pytest.fixture
def parse(parser: argparse.ArgumentParser, tmp_path: Path) -> Parse:
    """Parses a command line whose ``--config`` is a file with the given text."""

    def run(text: str, *argv: str) -> argparse.Namespace:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return parser.parse_args(expand_config(parser, ["--config", str(file), *argv]))

    return run


def test_every_kind_of_value(parse: Parse) -> None:
    found = parse(
        "count: 7\nshare: 0.25\nlong_name: text\nkind: b\nkey: [x, y]\nmany: [1, -2]\nflag: true\nboth: false\n"
        "body: {a: [1, null]}\n",
        "left",
        "over",
    )
    assert (found.count, found.share, found.long_name, found.kind) == (7, 0.25, "text", "b")
    assert (found.key, found.many, found.flag, found.both) == (["x", "y"], [1, -2], True, False)
    assert found.body == {"a": [1, None]}
    assert found.rest == ["left", "over"]


def test_dashes_and_underscores_and_single_values_of_lists(parse: Parse) -> None:
    found = parse("long-name: '7'\nkey: x\nmany: 3\nflag: false\nshare: 1\n")
    assert (found.long_name, found.key, found.many, found.flag, found.share) == ("7", ["x"], [3], False, 1.0)


def test_the_command_line_wins(parse: Parse) -> None:
    text = "count: 7\nkey: [file]\nmany: [1]\nflag: true\nboth: false\nlong-name: file\n"
    found = parse(text, "--count", "8", "--key", "line", "--many", "2", "3", "--both", "--long-n=line")
    assert (found.count, found.key, found.many, found.both, found.long_name) == (8, ["line"], [2, 3], True, "line")
    assert found.flag is True, "what the line does not mention comes from the file"


def test_a_value_equal_to_the_default_wins_too(parse: Parse) -> None:
    assert parse("count: 7\n", "--count", "1").count == 1


def test_what_stands_behind_two_dashes_stays_there(parse: Parse) -> None:
    assert parse("count: 7\n", "--", "--count").rest == ["--count"]


def test_empty_files_and_no_file(parse: Parse, parser: argparse.ArgumentParser) -> None:
    assert parse("# nothing\n").count == 1
    assert expand_config(parser, ["--count", "3"]) == ["--count", "3"]


def test_required_options_may_come_from_the_file(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    parser.add_argument("--needed", required=True)
    file = tmp_path / "c.yaml"
    file.write_text("needed: here\n")
    assert parser.parse_args(expand_config(parser, [f"--config={file}"])).needed == "here"
    file.write_text("")
    with pytest.raises(SystemExit):
        parser.parse_args(expand_config(parser, [f"--config={file}"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont: 7", "'cuont' is no option of prog, did you mean count?"),
        ("server:\n  count: 7", "'server' is no option of prog; options stand at the top level, not in sections"),
        ("config: other.yaml", "'config' is no option of prog"),
        ("help: true", "'help' is no option of prog"),
        ("no-both: true", "'no-both' is no option of prog"),
        ("count: seven", "count: must be a number, got 'seven'"),
        ("count: '7'", "count: must be a number, got '7'"),
        ("count: 7.5", "count: must be an int, got 7.5"),
        ("count: true", "count: must be an int, got True"),
        ("count: [7]", "count: must be a single value, got [7]"),
        ("count:", "count: has no value"),
        ("long-name: 7", "long-name: must be a string, got 7; put it into quotes if it is one"),
        ("kind: c", "kind: must be one of a, b, got 'c'"),
        ("flag: 1", "flag: must be true or false, got 1"),
        ("both: 'yes'", "both: must be true or false, got 'yes'"),
        ("many: []", "many: must not be an empty list"),
        ("many: [1, x]", "many: must be a number, got 'x'"),
        ("count: 1\ncount: 2", "count: is given twice"),
        ("long-name: a\nlong_name: b", "long_name: is given twice, as long-name too"),
        ("- count", "must hold keys and values, not a list"),
        ("count: [1", "is not valid YAML: "),
        ("count: !!python/object:os.system 7", "is not valid YAML: "),
    ],
)
def test_mistakes_are_one_line(
    parse: Parse, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(text)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jaxpage: error: --config: {tmp_path / 'c.yaml'}: ") and error.count("\n") == 1
    assert message in error


def test_a_file_that_is_not_there(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        expand_config(parser, ["--config", "no/such.yaml"])
    assert capsys.readouterr().err == "jaxpage: error: --config: no/such.yaml: No such file or directory\n"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_good(file: Path) -> None:
    parser = serve.build_parser()
    options = parser.parse_args(expand_config(parser, ["--config", str(file)]))
    assert AsyncEngineArgs.from_cli_args(options).model != ""
    assert ServerOptions.from_cli_args(options).max_num_queued_reqs is not None
    assert file.read_text().count("jaxpage serve --config configs/serve/") == 1


def test_there_are_examples() -> None:
    assert [file.stem for file in EXAMPLES] == ["cpu-small", "gpu", "tpu"]


def test_serves_model_in_front_goes_before_the_files(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: from-file\nallowed-origins: ['https://a.example']\nport: 9\n")
    parser = serve.build_parser()
    options = parser.parse_args(expand_config(parser, ["positional", "--config", str(file)]))
    assert (options.model_name, options.model) == ("positional", AsyncEngineArgs.model)
    assert (options.port, options.allowed_origins) == (9, ("https://a.example",))


def test_serve_reads_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-model-len: 0\n")
    assert serve.main(["--config", str(file)]) == 1
    assert capsys.readouterr().err == "jaxpage: error: --max-model-len: must be at least 1, got 0\n"
    file.write_text("port: 65536\n")
    with pytest.raises(SystemExit):
        serve.main(["--config", str(file)])
    assert f"{file}: port: must be a number in [0, 65535]" in capsys.readouterr().err
