"""docs/development/provenance.md: each name of another project that the code has, and the files that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PAGE = (TOP / "docs/development/provenance.md").read_text()
_FOREIGN = re.compile(r"NServiceBus\.\w[\w.]*|nsb\.[\w.-]+|celery_\w+|x-delay\S*|S3BodyKey|MessageTypeFullName")


def test_each_foreign_name_in_the_code_is_on_the_page():
    names = {
        node.value.rstrip(".-_")
        for file in (TOP / "airflow_delayed").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FOREIGN.fullmatch(node.value)
    }
    assert len(names) > 20
    assert sorted(name for name in names if name not in PAGE) == []


def test_the_files_that_use_them_are_there():
    used = set(re.findall(r"`((?:rabbitmq|sqs|store)/[\w/]+\.py)`", PAGE))
    assert len(used) > 10
    assert sorted(name for name in used if not (TOP / "airflow_delayed" / name).exists()) == []
