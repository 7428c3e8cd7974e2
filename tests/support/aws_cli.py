"""Stands in for the AWS CLI, as far as the documentation uses it: aws sqs create-queue --queue-name ...

Commands, options and their values are checked by botocore's model of the service, which is the CLI's own. The program
``aws`` is a few lines of bash that ask this process, for to start Python with boto3 takes a second each time.
"""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import jmespath
from botocore import xform_name


def value_of(text: str, kind: str) -> object:
    """Read an option's value as the CLI does: file://, JSON, or its shorthand for maps."""
    if text.startswith("file://"):
        text = Path(text.removeprefix("file://")).read_text()
    if kind == "list":
        return text.split()
    if kind != "map":
        return text
    if text.lstrip().startswith("{"):
        return json.loads(text)
    return dict(pair.split("=", 1) for pair in text.split(","))


def answer(service: str, command: str, *options: str) -> str:
    """Return what the CLI would print."""
    client = boto3.client(service)
    (operation,) = (name for name in client.meta.service_model.operation_names if xform_name(name, "-") == command)
    members = client.meta.service_model.operation_model(operation).input_shape.members
    known = {xform_name(name, "-"): name for name in members}
    arguments = {name.removeprefix("--"): text for name, text in zip(options[::2], options[1::2], strict=True)}
    query, output = arguments.pop("query", None), arguments.pop("output", "json")
    wanted = {known[name]: value_of(text, members[known[name]].type_name) for name, text in arguments.items()}
    result = getattr(client, re.sub("-", "_", command))(**wanted)
    result.pop("ResponseMetadata")
    found = jmespath.search(query, result) if query else result
    return str(found) if output == "text" else json.dumps(found)


#: Sends its arguments, each with its length before it, and prints what comes back after the exit code.
_PROGRAM = """#!/usr/bin/env bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\n' "$#" >&3
for word in "$@"; do LC_ALL=C printf '%s\\n%s' "$(LC_ALL=C; printf '%s' "${{#word}}")" "$word" >&3; done
read -r code <&3
if [[ $code -eq 0 ]]; then cat <&3; else cat <&3 >&2; fi
exit "$code"
"""


class _Request(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        words = [self._word() for _ in range(int(self.rfile.readline()))]
        try:
            code, text = 0, answer(*words)
        except Exception as error:
            code, text = 254, f"{type(error).__name__}: {error}"
        self.wfile.write(f"{code}\n{text}\n".encode())

    def _word(self) -> str:
        return self.rfile.read(int(self.rfile.readline())).decode()


@contextlib.contextmanager
def program(folder: Path) -> Iterator[None]:
    """Let there be a program ``aws`` in a folder until the block ends."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Request) as server:
        path = folder / "aws"
        path.write_text(_PROGRAM.format(port=server.server_address[1]))
        path.chmod(0o755)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
