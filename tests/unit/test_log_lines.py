"""Log lines count and name; none shows a body, a header's value or a secret."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGERS = {"log", "logger", "_log"}
#: What must not stand in a line: contents and secrets, and objects that show theirs. How many there are, or how large
#: they are, may be told, and so may what is written as a number.
HIDDEN = {
    *(
        "body",
        "bodies",
        "headers",
        "value",
        "values",
        "message",
        "messages",
        "row",
        "rows",
        "payload",
        "line",
        "record",
    ),
    *("password", "login", "extra_dejson", "secret", "token", "uri", "get_uri", "credentials", "rejects"),
    *("State", "Headers", "Body", "MessageAttributes"),
}
COUNTING = {"len", "sum", "type", "shown"}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Each call of a logger."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in LOGGERS:
                yield node


def shown_names(node: ast.AST) -> Iterator[str]:
    """The last part of each name that is put into a line, without what is only counted or is where a part is found."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in COUNTING:
            return
        # what a method returns goes by the method's name
        yield node.func.attr if isinstance(node.func, ast.Attribute) else ""
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from shown_names(part)
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Subscript):
        yield node.slice.value if isinstance(node.slice, ast.Constant) else ""
    elif isinstance(node, ast.FormattedValue) and node.format_spec and ast.unparse(node.format_spec) == "f','":
        return
    elif isinstance(node, ast.IfExp):
        yield from shown_names(node.body)
        yield from shown_names(node.orelse)
    else:
        for child in ast.iter_child_nodes(node):
            yield from shown_names(child)


def faults(tree: ast.AST) -> list[str]:
    found = []
    for call in calls(tree):
        where = f"line {call.lineno}"
        if call.func.attr == "exception" or any(keyword.arg in ("exc_info", "extra") for keyword in call.keywords):
            found.append(f"{where}: a traceback shows the texts of others")
        names = {name for argument in call.args for name in shown_names(argument)} & HIDDEN
        found += [f"{where}: shows {name}" for name in sorted(names)]
    return found


def test_no_line_of_the_package_shows_contents_or_secrets(here: Path):
    package = here / "airflow_delayed"
    lines, found = 0, {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        lines += len(list(calls(tree)))
        if problems := faults(tree):
            found[str(path.relative_to(package))] = problems
    assert found == {}
    assert lines > 60


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("log.info('%s', message.body)", ["line 1: shows body"]),
        ("self.log.info(f'{message.headers}')", ["line 1: shows headers"]),
        ("log.warning('%s', row['State'])", ["line 1: shows State"]),
        ("log.warning('%s: %s', row['Id'], message.message_id)", []),
        ("log.warning('%s', message)", ["line 1: shows message"]),
        ("log.info('%s bytes of %s', f'{len(message.body)}', f'{rows:,}')", []),
        ("log.info('%s', conn.get_uri())", ["line 1: shows get_uri"]),
        ("log.exception('failed')", ["line 1: a traceback shows the texts of others"]),
        ("log.error('failed', exc_info=True)", ["line 1: a traceback shows the texts of others"]),
        ("text = message.body", []),
    ],
)
def test_the_test_itself(line, wanted):
    assert faults(ast.parse(line)) == wanted
