"""The rows of a stream that could not be sent: files of attempts, and the manifest that says which of them count.

``<rejects>/<query>/<batch>/<partition>-<attempt>-<suffix>.jsonl`` has a row as JSON in each line, with its problem in
``rejected``; once corrected, it can be a source itself. ``manifest.json`` beside it names the files of the attempts
that succeeded. A batch without rejected rows has no folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from airflow_delayed.addresses import shown
from airflow_delayed.errors import DelayedError, some
from airflow_delayed.intake.rows import Problem
from airflow_delayed.intake.sources import rejected_line
from airflow_delayed.spark.reporting import SharedFolder

_MANIFEST = "manifest.json"


class RejectFile:
    """The rejected rows of one attempt at one partition; without any there is no file.

    :param folder: of the batch.
    :param attempt: names partition and attempt; another driver may make an attempt of the same name.
    :param run: names query and batch; it stands in each row.
    """

    def __init__(self, folder: SharedFolder, attempt: str, run: str) -> None:
        self._folder = folder
        self._attempt = attempt
        self._run = run
        self._file: Any = None
        #: The name of the file in its folder, once there is one.
        self.name: str | None = None

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            self.name = f"{self._attempt}-{uuid4().hex[:8]}.jsonl"
            self._file = self._folder.child(self.name).create()
        self._file.write(rejected_line(problem, self._run).encode())

    def close(self) -> None:
        """End the file, which the commit may name from then on."""
        if self._file is not None:
            self._file.close()


def commit_rejects(folder: SharedFolder, names: Sequence[str], rows: int) -> None:
    """Write the manifest of a batch, and remove the files of attempts that do not count.

    A replay may have other partitions, so that its files do not replace those of the batch's first run.

    :raises DelayedError: a file is gone that counts; the batch is not committed then.
    """
    if not names:
        folder.remove()
        return
    there = folder.names()
    if gone := sorted({*names} - {*there}):
        raise DelayedError(
            f"files of rejected rows are gone from {shown(folder.url)}: {some(gone, separator=', ')}. Does another"
            " driver run this stream? The batch is not committed, so that the next run sends it again"
        )
    folder.child(_MANIFEST).write({"files": sorted(names), "rows": rows})
    for name in there:
        if name not in {*names, _MANIFEST}:
            folder.child(name).remove()
