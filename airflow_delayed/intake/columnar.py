"""ColumnarReader: a whole Arrow batch becomes messages at once, at a fiftieth of the cost of row by row.

A batch with anything wrong or unusual is not read here: it is read row by row, which finds the row and reports the
problem. So both ways have the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import islice, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.delivery import BatchBounds
from airflow_delayed.errors import InvalidMessage
from airflow_delayed.fields import FIELD_MOMENTS, FIELD_NAMES
from airflow_delayed.identity import (
    content_digest,
    content_digests,
    headers_part,
    key_digests,
    spread_id,
    spread_offset,
    text_part,
)
from airflow_delayed.intake import arrow
from airflow_delayed.intake.arrow import (
    Unusual,
    constant,
    entries,
    header_parts,
    join,
    moments,
    number_part,
    part,
    text_parts,
)
from airflow_delayed.intake.columns import MAX_HEADERS, RowBatch, RowRules, names_of
from airflow_delayed.message import (
    EPOCH,
    MAX_ID_LENGTH,
    DelayedMessage,
    from_microseconds,
    microseconds,
    unchecked,
)

_PRINTABLE = bytes(range(ord("!"), ord("~") + 1))
#: Columns that are not read by columns when they come from a folder's name, and so as text.
_NO_TEXT = ("value", "body", "due_at", "delay_seconds", "spread_seconds", "headers", "message_id", *FIELD_MOMENTS)
#: Optional fields that are not read by columns.
_BY_ROW = {*FIELD_NAMES} - {"tag", "expires_at"}


class ColumnarReader:
    """Reads batches by their columns. The rules that hold for all rows are checked once."""

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        self._names = names_of(rules.columns)
        self._anchor = self._due = self._expires = None
        try:
            given = DelayedMessage(
                destination=rules.destination or "-",
                body=b"",
                due_at=rules.due_at or rules.anchor or EPOCH,
                message_id="-" if rules.message_id is None else rules.message_id,
                headers=rules.headers,
                tag=rules.optional.get("tag"),
            )
            self._anchor = None if rules.anchor is None else microseconds(rules.anchor)
            self._due = None if rules.due_at is None else microseconds(given.due_at)
            self._spread = rules.spread // timedelta(microseconds=1)
            expires_at = rules.optional.get("expires_at")
            self._expires = None if expires_at is None else microseconds(expires_at)
        except (InvalidMessage, TypeError):
            self._usual = False
        else:
            self._usual = all(rules.optional.get(name) is None for name in _BY_ROW)
        self._zone_is_utc = rules.zone is not None and rules.zone.key == "UTC"

    def check(self, batch: RowBatch) -> ColumnarRows | None:
        """Return a batch's rows, or None if they have to be read one by one."""
        records = batch.records
        if records is None or not batch.size or not self._usual or batch.broken:
            return None
        try:
            return self._check(records, batch)
        except (Unusual, pa.ArrowException, InvalidMessage, UnicodeEncodeError):
            # such as text that is not UTF-8, also in a folder's name, or a time that no year has
            return None

    def _check(self, records: pa.RecordBatch, batch: RowBatch) -> ColumnarRows:
        given = {name: records.column(index) for index, name in enumerate(records.schema.names)}
        if len(given) < records.num_columns:
            raise Unusual
        folders = {name: value for name, value in batch.partition.items() if name not in given}
        if any(folders.get(self._names.get(name, "")) is not None for name in _NO_TEXT):
            raise Unusual
        for name, value in folders.items():
            given[name] = pa.nulls(batch.size) if value is None else pa.repeat(value, batch.size)
        columns = {name: given[source] for name, source in self._names.items() if source in given}
        # a column without a type has no values
        columns = {name: column for name, column in columns.items() if name not in _OPTIONAL or not _empty(column)}
        if _BY_ROW & columns.keys():
            raise Unusual
        due = self._dues(columns, batch.size)
        rows = ColumnarRows(
            size=batch.size,
            destinations=self._destinations(columns),
            bodies=_bodies(columns),
            due_us=due,
            ids=self._ids(columns, given, batch.size),
            headers=_headers(columns),
            given=self._rules.headers,
            tags=self._tags(columns),
            expires_us=self._expiries(columns, due),
            scope=self._rules.scope,
        )
        return self._moved(rows, columns)

    def _moved(self, rows: ColumnarRows, columns: dict[str, Any]) -> ColumnarRows:
        """Return rows, each at its place within its span after its due time."""
        if "spread_seconds" in columns:
            spans = pc.fill_null(arrow.delays(columns["spread_seconds"]), self._spread)
        elif self._spread:
            spans = pa.repeat(pa.scalar(self._spread, pa.int64()), rows.size)
        else:
            return rows
        ends = pc.add(rows.due_us, spans)
        arrow.in_calendar(ends)
        if rows.expires_us is not None and pc.any(pc.less(rows.expires_us, ends)).as_py():
            raise Unusual
        each: list[int] = spans.to_pylist()
        if rows.ids is None:
            digests = zip(rows.digests(rows.scope), each, strict=True)
            ids: Sequence[str] = [spread_id(digest, span) if span else digest.hex() for digest, span in digests]
        else:
            ids = rows.message_ids()
        offsets = pa.array(map(spread_offset, ids, each), pa.int64(), size=rows.size)
        return replace(rows, ids=pa.array(ids, pa.string()), due_us=pc.add(rows.due_us, offsets))

    def _destinations(self, columns: dict[str, Any]) -> pa.Array | str:
        given = self._rules.destination
        if "destination" not in columns:
            if not given:
                raise Unusual
            return given
        texts = arrow.texts(columns["destination"])
        if texts.null_count:
            if not given:
                raise Unusual
            texts = pc.fill_null(texts, given)
        arrow.none_empty(texts)
        return texts

    def _tags(self, columns: dict[str, Any]) -> pa.Array | str | None:
        given = self._rules.optional.get("tag")
        if "tag" not in columns:
            return given
        texts = arrow.texts(columns["tag"])
        arrow.none_empty(texts)
        return texts if given is None or not texts.null_count else pc.fill_null(texts, given)

    def _dues(self, columns: dict[str, Any], size: int) -> pa.Array:
        due = self._moments(columns, columns["due_at"]) if "due_at" in columns else None
        if "delay_seconds" in columns:
            delays = columns["delay_seconds"]
            if self._anchor is None:
                raise Unusual
            if due is not None and pc.any(pc.and_(due.is_valid(), delays.is_valid())).as_py():
                raise Unusual
            after = pc.add(arrow.delays(delays), self._anchor)
            arrow.in_calendar(after)
            due = after if due is None else pc.coalesce(due, after)
        if due is None or due.null_count:
            if self._due is None:
                raise Unusual
            due = pa.repeat(pa.scalar(self._due, pa.int64()), size) if due is None else pc.fill_null(due, self._due)
        return due

    def _moments(self, columns: dict[str, Any], column: Any) -> pa.Array:
        # a row's own zone takes part in reading a time without an offset alone, which is done row by row
        return arrow.microseconds(column, naive_is_utc=self._zone_is_utc and "timezone" not in columns)

    def _expiries(self, columns: dict[str, Any], due: pa.Array) -> pa.Array | None:
        if "expires_at" in columns:
            expires = self._moments(columns, columns["expires_at"])
            if self._expires is not None:
                expires = pc.fill_null(expires, self._expires)
        elif self._expires is not None:
            expires = pa.repeat(pa.scalar(self._expires, pa.int64()), len(due))
        else:
            return None
        if pc.any(pc.less_equal(expires, due)).as_py():
            raise Unusual
        return expires

    def _ids(self, columns: dict[str, Any], given: dict[str, Any], size: int) -> pa.Array | str | None:
        if self._rules.id_columns:
            if "message_id" in columns:
                raise Unusual
            return _key_ids(self._rules.id_columns, given, size)
        if "message_id" not in columns:
            return self._rules.message_id
        ids = arrow.texts(columns["message_id"])
        if ids.null_count:
            raise Unusual
        arrow.none_empty(ids)
        if pc.max(pc.binary_length(ids)).as_py() > MAX_ID_LENGTH or arrow.content(ids).translate(None, _PRINTABLE):
            raise Unusual
        return ids


#: Columns that may as well be missing.
_OPTIONAL = ("destination", "due_at", "delay_seconds", "spread_seconds", "headers", "timezone", *FIELD_NAMES)


def _empty(column: pa.Array) -> bool:
    return bool(pa.types.is_null(column.type))


def _bodies(columns: dict[str, Any]) -> pa.Array:
    if ("value" in columns) == ("body" in columns):
        raise Unusual
    bodies = arrow.contents(columns["value" if "value" in columns else "body"])
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
    names, values = arrow.texts(names), arrow.texts(values)
    if names.null_count or values.null_count:
        raise Unusual
    arrow.none_empty(names)
    return headers


def _key_ids(names: tuple[str, ...], columns: dict[str, Any], size: int) -> pa.Array:
    pieces: list[Any] = []
    for name in names:
        column = columns[name]
        whole = pa.types.is_integer(column.type)
        if not whole:
            column = arrow.texts(column)
        if column.null_count:
            raise Unusual
        pieces.append(constant(text_part(name)))
        pieces += number_part(b"i", column) if whole else part(b"s", column)
    digests = key_digests(join(*pieces).to_pylist())
    return pa.array(map(bytes.hex, digests), pa.string(), size=size)


#: Messages made at a time: so few that Python's garbage collector, which counts live objects, does not run for messages
#: that are freed soon. It would take more time than all the rest.
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnarRows:
    """At least one row, in columns: Arrow's arrays where rows differ, and otherwise the value of all rows.

    :param due_us: microseconds since 1970, without a null; ``expires_us`` alike, where null is never.
    """

    size: int
    destinations: pa.Array | str
    bodies: pa.Array = field(repr=False)
    due_us: pa.Array
    ids: pa.Array | str | None
    headers: pa.MapArray | None = field(repr=False)
    given: Mapping[str, str] = field(repr=False)
    tags: pa.Array | str | None
    expires_us: pa.Array | None
    scope: bytes

    def messages(self) -> Iterator[DelayedMessage]:
        """Yield the rows as messages, in their order."""
        for block in self.blocks():
            yield from block

    def blocks(self) -> Iterator[list[DelayedMessage]]:
        """Yield the rows as messages, in their order, some hundred at a time."""
        columns = {
            "destination": iter(self._destinations()),
            "body": iter(self.bodies.to_pylist()),
            "due_at": iter(moments(self.due_us)),
            "message_id": iter(self.message_ids()),
            "headers": iter(self._headers()),
            "tag": iter(_values(self.tags, self.size)),
            "expires_at": iter(self._expiries()),
        }
        for start in range(0, self.size, _BLOCK):
            yield unchecked(min(_BLOCK, self.size - start), **columns)

    def message_ids(self) -> Sequence[str]:
        """Return the ids, made if they have to be."""
        if self.ids is None:
            return list(map(bytes.hex, self.digests(self.scope)))
        return list(_values(self.ids, self.size))

    def digests(self, scope: bytes = b"") -> list[bytes]:
        """Return :func:`airflow_delayed.identity.content_digest` of each row."""
        tails = self._tails()
        if tails is not None:
            return content_digests(tails, scope)
        columns = (
            self._destinations(),
            self.due_us.to_pylist(),
            self._headers(),
            self.bodies.to_pylist(),
            zip(_values(self.tags, self.size), self._expiries(), strict=True),
            repeat(scope),
        )
        return list(map(content_digest, *columns))

    def first(self, count: int) -> ColumnarRows:
        """Return the first few rows."""
        cut = {one.name: getattr(self, one.name)[:count] for one in fields(self) if self._differs(one.name)}
        return replace(self, size=min(count, self.size), **cut)

    def due_counts(self) -> DueCounts:
        """Return the destinations and due times, to count the rows by."""
        return DueCounts(destinations=self.destinations, due_us=self.due_us)

    def _differs(self, name: str) -> bool:
        return isinstance(getattr(self, name), pa.Array)

    def bounds(self) -> BatchBounds:
        """Return the worst-case bounds of all rows."""
        dues = pc.min_max(self.due_us).as_py()
        bodies = pc.min_max(pc.binary_length(self.bodies)).as_py()
        tags = pa.array([self.tags], pa.string()) if not self._differs("tags") else self.tags
        names, values, most = set(self.given), [len(value.encode()) for value in self.given.values()], len(self.given)
        if self.headers is not None:
            own, contents, offsets = entries(self.headers)
            names.update(pc.unique(own).to_pylist())
            values.append(pc.max(pc.binary_length(contents)).as_py() or 0)
            most += pc.max(pc.subtract(offsets[1:], offsets[:-1])).as_py()
        return BatchBounds(
            destinations=set(pc.unique(self.destinations).to_pylist())
            if self._differs("destinations")
            else {self.destinations},
            first_due=from_microseconds(dues["min"]),
            last_due=from_microseconds(dues["max"]),
            shortest_body=bodies["min"],
            longest_body=bodies["max"],
            header_names=names,
            longest_value=max(values, default=0),
            most_headers=most,
            longest_tag=pc.max(pc.utf8_length(tags)).as_py() or 0,
            null_in_tag=bool(pc.any(pc.match_substring(tags, "\0")).as_py()),
        )

    def _destinations(self) -> Iterable[str]:
        if isinstance(self.destinations, str):
            return repeat(self.destinations, self.size)
        # there are few, and one text for all that are alike is hashed and compared faster than many
        codes = self.destinations.dictionary_encode()
        return map(codes.dictionary.to_pylist().__getitem__, codes.indices.to_pylist())

    def _headers(self) -> Iterable[Mapping[str, str]]:
        if self.headers is None:
            return repeat(self.given, self.size)
        names, values, offsets = entries(self.headers)
        codes = names.dictionary_encode()
        shared = map(codes.dictionary.to_pylist().__getitem__, codes.indices.to_pylist())
        # one stream of pairs, of which each row takes its own: no list and no pair is made in between
        pairs = zip(shared, values.to_pylist(), strict=True)
        counts = pc.subtract(offsets[1:], offsets[:-1]).to_pylist()
        found: Iterable[Mapping[str, str]] = map(dict, map(islice, repeat(pairs), counts))
        if self.given:
            found = ({**self.given, **own} for own in found)
        if self.headers.null_count:
            valid = self.headers.is_valid().to_pylist()
            found = (own if there else self.given for own, there in zip(found, valid, strict=True))
        return found

    def _expiries(self) -> Iterable[datetime | None]:
        if self.expires_us is None:
            return repeat(None, self.size)
        if self.expires_us.null_count:
            return [None if value is None else from_microseconds(value) for value in self.expires_us.to_pylist()]
        return moments(self.expires_us)

    def _tails(self) -> list[bytes] | None:
        """Return the bytes to hash of each row; None if they have to be made row by row."""
        pieces: list[Any] = []
        if isinstance(self.destinations, str):
            pieces.append(constant(text_part(self.destinations)))
        else:
            pieces.append(text_parts(self.destinations.dictionary_encode()))
        pieces += *number_part(b"t", self.due_us), *part(b"b", self.bodies)
        if self.headers is None:
            pieces.append(constant(headers_part(self.given)))
        elif self.given or (own := header_parts(self.headers)) is None:
            return None
        else:
            pieces += own
        if self._differs("tags"):
            pieces.append(pc.coalesce(join(constant(b"g"), *part(b"s", self.tags)), constant(b"")))
        elif self.tags is not None:
            pieces.append(constant(b"g" + text_part(self.tags)))
        if self.expires_us is not None:
            pieces.append(pc.coalesce(join(constant(b"e"), *number_part(b"t", self.expires_us)), constant(b"")))
        tails: list[bytes] = join(*pieces).to_pylist()
        return tails


def _values(column: Any, size: int) -> Iterable[Any]:
    return column.to_pylist() if isinstance(column, pa.Array) else repeat(column, size)


#: A bound for moments that no row can have: far beyond the year 9999.
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class DueCounts:
    """The destinations and due times of :class:`ColumnarRows`, to count the rows by."""

    destinations: pa.Array | str
    due_us: pa.Array

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.due_us)

    @property
    def first_due(self) -> datetime:
        """When the first is due; there must be one."""
        return from_microseconds(pc.min(self.due_us).as_py())

    @property
    def last_due(self) -> datetime:
        """When the last is due; there must be one."""
        return from_microseconds(pc.max(self.due_us).as_py())

    def by_destination(self) -> dict[str, int]:
        """Count the rows of each destination."""
        if isinstance(self.destinations, str):
            return {self.destinations: self.size}
        return {entry["values"]: entry["counts"] for entry in pc.value_counts(self.destinations).to_pylist()}

    def split(self, moment_us: int) -> tuple[DueCounts, DueCounts]:
        """Return the rows due up to a moment, in microseconds since 1970, and the rows due later."""
        later = pc.greater(self.due_us, min(moment_us, _NEVER))
        return self._where(pc.invert(later)), self._where(later)

    def _where(self, mask: pa.Array) -> DueCounts:
        destinations = self.destinations
        return DueCounts(
            destinations=destinations if isinstance(destinations, str) else destinations.filter(mask),
            due_us=self.due_us.filter(mask),
        )

    def total_us(self) -> int:
        """Add up all due times: microseconds since 1970."""
        # by their halves, since the sum of many is more than 64 bits hold
        high = pc.shift_right(self.due_us, 32)
        low = pc.bit_wise_and(self.due_us, (1 << 32) - 1)
        return int(pc.sum(high, min_count=0).as_py() << 32) + int(pc.sum(low, min_count=0).as_py())
