"""Rows whose columns were checked as a whole: nothing is wrong with any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from itertools import islice, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.extremes import Extremes
from airflow_delayed.identity import content_digest, content_digests, headers_part, text_part
from airflow_delayed.intake.kinds import moments
from airflow_delayed.intake.parts import constant, entries, header_parts, join, number_part, part, text_parts
from airflow_delayed.intake.tally import Tally
from airflow_delayed.message import DelayedMessage, from_microseconds, unchecked

#: Messages made at a time: so few that Python's collector of garbage, which counts what is alive, is not called for
#: those that are let go again. It would take more time than all the rest.
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """At least one row, in columns: Arrow's arrays where rows differ, and else what all of them have.

    :param due_us: microseconds since 1970, without a null; ``expires_us`` alike, where null is never.
    :param ids: None where they are to be made from content, with ``scope``.
    :param headers: a row's own, joined with ``given``, which a row with null has alone.
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
        """Return what :func:`airflow_delayed.identity.content_digest` says of each row."""
        tails = self._tails()
        if tails is not None:
            return content_digests(tails, scope)
        columns = (
            self._destinations(),
            self.due_us.to_pylist(),
            self._headers(),
            self.bodies.to_pylist(),
            _values(self.tags, self.size),
            _values(self.expires_us, self.size),
            repeat(scope),
        )
        return list(map(content_digest, *columns))

    def first(self, count: int) -> Checked:
        """Return the first few rows."""
        cut = {one.name: getattr(self, one.name)[:count] for one in fields(self) if self._differs(one.name)}
        return replace(self, size=min(count, self.size), **cut)

    def tally(self) -> Tally:
        """Return what is counted of the rows."""
        return Tally(destinations=self.destinations, due_us=self.due_us)

    def _differs(self, name: str) -> bool:
        return isinstance(getattr(self, name), pa.Array)

    def extremes(self) -> Extremes:
        """Return what bounds all rows."""
        dues = pc.min_max(self.due_us).as_py()
        bodies = pc.min_max(pc.binary_length(self.bodies)).as_py()
        tags = pa.array([self.tags], pa.string()) if not self._differs("tags") else self.tags
        names, values, most = set(self.given), [len(value.encode()) for value in self.given.values()], len(self.given)
        if self.headers is not None:
            own, contents, offsets = entries(self.headers)
            names.update(pc.unique(own).to_pylist())
            values.append(pc.max(pc.binary_length(contents)).as_py() or 0)
            most += pc.max(pc.subtract(offsets[1:], offsets[:-1])).as_py()
        return Extremes(
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
        """Return what is hashed of each row after the scope, or None if that is to be done row by row."""
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
