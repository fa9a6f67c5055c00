"""A server process with the fake engine, for tests of signals: ``python serve_fake.py TOKENIZER [serve options]``."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_engine import FakeEngine

from jaxpage import serve
from jaxpage.server import cli
from jaxpage.tokenizer import Tokenizer

if __name__ == "__main__":
    parser = serve.build_parser()
    options = parser.parse_args(sys.argv[2:])
    cli.check_cli_args(parser, options)
    engine = FakeEngine(Tokenizer.from_directory(Path(sys.argv[1])), [120] * 5000, max_model_len=5000)
    engine.step_s = 0.01
    with serve.open_listener(options) as listener:
        serve.serve(engine, listener, options)
    print(f"shut down: {engine.was_shut_down}")
