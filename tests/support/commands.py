"""``airflow delayed ...`` in the process of the test, from the parser on."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def airflow_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The commands; ``answer`` is what a user types."""
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    parser = cli_parser.get_parser()

    def run(*words: str, answer: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        capsys.readouterr()
        code = 0
        try:
            args = parser.parse_args(["delayed", *words])
            args.func(args)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            if code != end.code:
                print(end, file=sys.stderr)
        return Done(code, *capsys.readouterr())

    return run
