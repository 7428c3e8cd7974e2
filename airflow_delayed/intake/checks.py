"""The rules for rows, applied to whole columns of Arrow: at a fiftieth of what they cost row by row.

What is wrong or unusual in a batch is not named here: then nothing is returned, and the batch is read row by row, which
finds the row and says what is the matter. So both ways say the same.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import key_digests, text_part
from airflow_delayed.intake import kinds
from airflow_delayed.intake.batch import Batch
from airflow_delayed.intake.checked import Checked
from airflow_delayed.intake.columns import RowRules
from airflow_delayed.intake.kinds import Unusual
from airflow_delayed.intake.parts import constant, entries, join, number_part, part
from airflow_delayed.intake.rows import MAX_HEADERS
from airflow_delayed.message import EPOCH, MAX_ID_LENGTH, DelayedMessage, microseconds

_PRINTABLE = bytes(range(ord("!"), ord("~") + 1))
#: What due times and delays may not have as text from a folder's name; its row says what of it is a time.
_NO_TEXT = ("value", "body", "due_at", "delay_seconds", "headers", "expires_at", "message_id")


class Checks:
    """What holds for all rows, looked at once."""

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        self._anchor = self._due = self._expires = None
        try:
            given = DelayedMessage(
                destination=rules.destination or "-",
                body=b"",
                due_at=rules.due_at or rules.anchor or EPOCH,
                message_id="-" if rules.message_id is None else rules.message_id,
                headers=rules.headers,
                tag=rules.tag,
            )
            self._anchor = None if rules.anchor is None else microseconds(rules.anchor)
            self._due = None if rules.due_at is None else microseconds(given.due_at)
            self._expires = None if rules.expires_at is None else microseconds(rules.expires_at)
        except (InvalidMessage, TypeError):
            self._usual = False
        else:
            self._usual = True
        self._utc = rules.zone is not None and rules.zone.key == "UTC"

    def check(self, batch: Batch) -> Checked | None:
        """Return a batch's rows, or None if they have to be read one by one."""
        records = batch.records
        if records is None or not batch.size or not self._usual or batch.broken:
            return None
        try:
            return self._check(records, batch)
        except (Unusual, pa.ArrowException, InvalidMessage, UnicodeEncodeError):
            # such as text that is not UTF-8, also in a folder's name, or a time that no year has
            return None

    def _check(self, records: pa.RecordBatch, batch: Batch) -> Checked:
        columns = {name: records.column(index) for index, name in enumerate(records.schema.names)}
        if len(columns) < records.num_columns:
            raise Unusual
        for name, value in batch.partition.items():
            if name not in columns and value is not None and name in _NO_TEXT:
                raise Unusual
            columns.setdefault(name, pa.nulls(batch.size) if value is None else pa.repeat(value, batch.size))
        # a column without a type has no values
        columns = {name: column for name, column in columns.items() if name not in _OPTIONAL or not _empty(column)}
        due = self._dues(columns)
        return Checked(
            size=batch.size,
            destinations=self._destinations(columns),
            bodies=_bodies(columns),
            due_us=due,
            ids=self._ids(columns, batch.size),
            headers=_headers(columns),
            given=self._rules.headers,
            tags=self._tags(columns),
            expires_us=self._expiries(columns, due),
            scope=self._rules.scope,
        )

    def _destinations(self, columns: dict[str, Any]) -> pa.Array | str:
        given = self._rules.destination
        if "destination" not in columns:
            if not given:
                raise Unusual
            return given
        texts = kinds.texts(columns["destination"])
        if texts.null_count:
            if not given:
                raise Unusual
            texts = pc.fill_null(texts, given)
        kinds.none_empty(texts)
        return texts

    def _tags(self, columns: dict[str, Any]) -> pa.Array | str | None:
        given = self._rules.tag
        if "tag" not in columns:
            return given
        texts = kinds.texts(columns["tag"])
        kinds.none_empty(texts)
        return texts if given is None or not texts.null_count else pc.fill_null(texts, given)

    def _dues(self, columns: dict[str, Any]) -> pa.Array:
        due = kinds.microseconds(columns["due_at"], naive_is_utc=self._utc) if "due_at" in columns else None
        if "delay_seconds" in columns:
            delays = columns["delay_seconds"]
            if self._anchor is None:
                raise Unusual
            if due is not None and pc.any(pc.and_(due.is_valid(), delays.is_valid())).as_py():
                raise Unusual
            if self._anchor is None:
                raise Unusual
            after = pc.add(kinds.delays(delays), self._anchor)
            kinds.in_calendar(after)
            due = after if due is None else pc.coalesce(due, after)
        if due is None or due.null_count:
            if self._due is None:
                raise Unusual
            size = len(next(iter(columns.values())))
            due = pa.repeat(pa.scalar(self._due, pa.int64()), size) if due is None else pc.fill_null(due, self._due)
        return due

    def _expiries(self, columns: dict[str, Any], due: pa.Array) -> pa.Array | None:
        if "expires_at" in columns:
            expires = kinds.microseconds(columns["expires_at"], naive_is_utc=self._utc)
            if self._expires is not None:
                expires = pc.fill_null(expires, self._expires)
        elif self._expires is not None:
            expires = pa.repeat(pa.scalar(self._expires, pa.int64()), len(due))
        else:
            return None
        if pc.any(pc.less_equal(expires, due)).as_py():
            raise Unusual
        return expires

    def _ids(self, columns: dict[str, Any], size: int) -> pa.Array | str | None:
        if self._rules.id_columns:
            if "message_id" in columns:
                raise Unusual
            return _key_ids(self._rules.id_columns, columns, size)
        if "message_id" not in columns:
            return self._rules.message_id
        ids = kinds.texts(columns["message_id"])
        if ids.null_count:
            raise Unusual
        kinds.none_empty(ids)
        if pc.max(pc.binary_length(ids)).as_py() > MAX_ID_LENGTH or kinds.content(ids).translate(None, _PRINTABLE):
            raise Unusual
        return ids


#: Columns that may as well be missing.
_OPTIONAL = ("destination", "due_at", "delay_seconds", "headers", "tag", "expires_at")


def _empty(column: pa.Array) -> bool:
    return bool(pa.types.is_null(column.type))


def _bodies(columns: dict[str, Any]) -> pa.Array:
    if ("value" in columns) == ("body" in columns):
        raise Unusual
    bodies = kinds.contents(columns["value" if "value" in columns else "body"])
    if bodies.null_count:
        raise Unusual
    return bodies


def _headers(columns: dict[str, Any]) -> pa.MapArray | None:
    if "headers" not in columns:
        return None
    headers = columns["headers"]
    if not pa.types.is_map(headers.type):
        raise Unusual
    names, values, offsets = entries(headers)
    if pc.max(pc.subtract(offsets[1:], offsets[:-1])).as_py() > MAX_HEADERS:
        raise Unusual
    names, values = kinds.texts(names), kinds.texts(values)
    if names.null_count or values.null_count:
        raise Unusual
    kinds.none_empty(names)
    return headers


def _key_ids(names: tuple[str, ...], columns: dict[str, Any], size: int) -> pa.Array:
    pieces: list[Any] = []
    for name in names:
        column = columns[name]
        whole = pa.types.is_integer(column.type)
        if not whole:
            column = kinds.texts(column)
        if column.null_count:
            raise Unusual
        pieces.append(constant(text_part(name)))
        pieces += number_part(b"i", column) if whole else part(b"s", column)
    digests = key_digests(join(*pieces).to_pylist())
    return pa.array(map(bytes.hex, digests), pa.string(), size=size)
