"""The checkpoint of a stream that a task runs to its end: its folder, its lease in the store, its batches' counts.

``<checkpoint>/<DAG>/<task>/<map index>/<restarts>`` has Spark's own ``checkpoint``, and beside it ``counts`` and
``attempts``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

from airflow_delayed.addresses import shown
from airflow_delayed.errors import DelayedError, InputError
from airflow_delayed.reports import largest_destinations
from airflow_delayed.sources.templated import file_system
from airflow_delayed.threads import Ticker

if TYPE_CHECKING:
    from airflow_delayed.hooks.store import DelayedStoreHook
    from airflow_delayed.identity import Origin
    from airflow_delayed.sending import Log
    from airflow_delayed.store.api import StreamRecord

#: Seconds between two renewals of a lease, which holds for 60.
RENEW_EVERY = 15.0
#: Seconds for which a lease is waited for: that of a try whose worker was killed ends in this time.
_PATIENCE = 75.0
_PAUSE = 3.0
#: Counts of batches that are added up.
_COUNTS = ("rows", "sent", "stored", "replaced", "not_replaced", "duplicates", "skipped", "rejected")


class StreamCheckpoint:
    """The checkpoint of one DAG, task and map index.

    :param folder: of all checkpoints.
    :param fingerprint: of what the query reads and does.
    :param store: where its lease is; None: there is no lease, and a lost checkpoint is not noticed.
    :param lost: called when another task has taken the lease.
    """

    def __init__(
        self,
        folder: str,
        origin: Origin,
        fingerprint: bytes,
        store: DelayedStoreHook | None,
        *,
        log: Log,
        lost: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        names = (origin.dag_id, origin.task_id, str(origin.map_index))
        self.name = "/".join([folder.rstrip("/"), *(quote(name, safe="") for name in names)])
        self._origin = origin.to_json()
        self._fingerprint = fingerprint
        self._store = store
        self._holder = uuid4().hex
        self._log = log
        self._lost = lost
        self._sleep = sleep
        self._monotonic = monotonic

    @contextmanager
    def leased(self) -> Iterator[str]:
        """Hold the lease within the block, and yield the folder of the checkpoint.

        :raises InputError: the checkpoint is missing, or it is another query's.
        :raises DelayedError: another task runs the stream.
        """
        if self._store is None:
            yield f"{self.name}/0"
            return
        record = self._take(self._store)
        folder = f"{self.name}/{record.restarts}"
        try:
            self._check(folder, record)
            try:
                with closing(Ticker("delayed-stream", RENEW_EVERY, self._renew)):
                    yield folder
            finally:
                # a try that failed may have begun the checkpoint
                query = self.query(folder) or record.query
                # until a batch is done, the query may have to be corrected
                known = record.fingerprint is not None or self._has_batches(folder)
                record = replace(record, query=query, fingerprint=self._fingerprint if known else None)
        finally:
            self._store.release_stream(self.name, self._holder, record)

    def _take(self, store: DelayedStoreHook) -> StreamRecord:
        deadline = self._monotonic() + _PATIENCE
        while (record := store.take_stream(self.name, self._holder)) is None:
            if self._monotonic() >= deadline:
                raise DelayedError(
                    f"another task runs the stream of {shown(self.name)} at this moment; nothing was read. A retry goes"
                    " on when that task has ended"
                )
            self._sleep(_PAUSE)
        return record

    def _renew(self) -> None:
        assert self._store is not None
        try:
            if self._store.renew_stream(self.name, self._holder):
                return
        except DelayedError as error:
            self._log.warning("the lease of the stream could not be renewed: %s", error)
            return
        self._log.warning("another task has taken over the stream, so this one ends it here")
        self._lost()

    def _check(self, folder: str, record: StreamRecord) -> None:
        problem = None
        if record.query is not None and record.query != (query := self.query(folder)):
            other = "is missing" if query is None else f"is that of query {query}"
            problem = f"the checkpoint {shown(folder)} {other}, and the store knows query {record.query} there"
        elif record.fingerprint not in (None, self._fingerprint):
            problem = f"the checkpoint {shown(folder)} is that of another source or query"
        if problem is None:
            return
        assert self._store is not None
        raise InputError(
            f"{problem}. Nothing was read. Restore what has changed; or let the stream begin again, with a new"
            " checkpoint: it reads its source from the start, and sends all of it again except messages whose ids are"
            " made of keys and which the store still knows: what waits, and what was dispatched or cancelled less than"
            " [delayed] remember ago, by default 14 days. That is done by: airflow delayed stream-restart"
            f" --store-conn-id {self._store.conn_id} {self.name}"
        )

    def query(self, folder: str) -> str | None:
        """Return the id of the query that the checkpoint is of; None: there is none yet."""
        fs, path = file_system(f"{folder}/checkpoint/metadata")
        try:
            with fs.open(path, "rb") as file:
                return str(json.loads(file.read())["id"])
        except FileNotFoundError:
            return None

    def _has_batches(self, folder: str) -> bool:
        """Return whether Spark has noted in the checkpoint that a batch is done, in a file with the batch's number."""
        fs, path = file_system(f"{folder}/checkpoint/commits")
        fs.invalidate_cache()
        return any(name.rpartition("/")[2].isdigit() for name in fs.find(path))

    def counts(self, folder: str) -> Mapping[str, Any]:
        """Add up the counts of the batches that this run of the task has sent, in all its tries.

        :return: ``batches``, ``summary``, ``destinations`` with the most messages, and the number of
            ``other_destinations``, which is at least so many.
        :raises DelayedError: Spark has left no checkpoint.
        """
        if (query := self.query(folder)) is None:
            raise DelayedError(
                f"Spark's job has ended, and its checkpoint is not at {shown(folder)}; give checkpoint= a URL that both"
                " can open. What was sent stays sent"
            )
        summary: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {"first_due": None, "last_due": None}
        destinations: dict[str, int] = {}
        batches = distinct = 0
        for batch in self._batches(f"{folder}/counts/{query}"):
            batches += 1
            one = batch["summary"]
            for name in _COUNTS:
                summary[name] += one.get(name, 0)
            for name, choose in (("first_due", min), ("last_due", max)):
                summary[name] = choose(filter(None, (summary[name], one[name])), default=None)
            for name, count in batch["destinations"].items():
                destinations[name] = destinations.get(name, 0) + count
            distinct = max(distinct, len(batch["destinations"]) + batch.get("other_destinations", 0))
        named = largest_destinations(destinations)["destinations"]
        others = max(distinct, len(destinations)) - len(named)
        more = {"other_destinations": others} if others else {}
        return {"batches": batches, "summary": summary, "destinations": named, **more}

    def _batches(self, folder: str) -> Iterator[Mapping[str, Any]]:
        """Yield the files of this run's batches, the last one first."""
        fs, path = file_system(folder)
        fs.invalidate_cache()
        # a writer that was killed leaves an unfinished file
        for file in sorted((name for name in fs.find(path) if name.endswith(".json")), reverse=True):
            with fs.open(file, "rb") as content:
                batch = json.loads(content.read())
            if batch["origin"] != self._origin:
                # batches are numbered, and those of earlier runs come before
                return
            yield batch
