"""Stands in for the AWS CLI, as far as the documentation uses it: python aws_cli.py sqs create-queue --queue-name ...

Commands, options and their values are checked by botocore's model of the service, which is the CLI's own.
"""

from __future__ import annotations

import json
import re
import sys
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


def main(service: str, command: str, *options: str) -> None:
    client = boto3.client(service)
    (operation,) = (name for name in client.meta.service_model.operation_names if xform_name(name, "-") == command)
    members = client.meta.service_model.operation_model(operation).input_shape.members
    known = {xform_name(name, "-"): name for name in members}
    given = {name.removeprefix("--"): text for name, text in zip(options[::2], options[1::2], strict=True)}
    query, output = given.pop("query", None), given.pop("output", "json")
    wanted = {known[name]: value_of(text, members[known[name]].type_name) for name, text in given.items()}
    answer = getattr(client, re.sub("-", "_", command))(**wanted)
    answer.pop("ResponseMetadata")
    found = jmespath.search(query, answer) if query else answer
    print(found if output == "text" else json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
