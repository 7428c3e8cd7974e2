"""The optional fields of a message: one description of each, from which columns, options, tables and digests follow.

A further optional field is a line in :data:`FIELDS`, and what the line cannot say: an attribute of
:class:`airflow_delayed.message.DelayedMessage` and of :class:`airflow_delayed.store.records.StoredMessage`, a parameter
of the send operators, and the next version of a store's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

#: Most characters of a tag.
MAX_TAG = 250


@dataclass(frozen=True, slots=True)
class MessageField:
    """An optional field.

    :param name: of the attribute of a message, of the column of a source, of the parameter of an operator, and of
        Spark's option.
    :param type: of its value: ``str``, ``int``, or ``datetime``, which is aware.
    :param column: its column in the tables of messages.
    :param mark: a letter that begins its part of the digest, and never changes; a message without a value has no part.
    :param length: the most characters that a store keeps of a text.
    """

    name: str
    type: type
    column: str
    mark: bytes
    length: int = 0

    @property
    def wanted(self) -> str:
        """What the column of a source must be."""
        return {str: "text", int: "a whole number", datetime: "a timestamp"}[self.type]


#: In the order of their parts in the digest: a new field comes last.
FIELDS = (
    MessageField("tag", str, "Tag", b"g", length=MAX_TAG),
    MessageField("expires_at", datetime, "ExpiresAt", b"e"),
)
FIELD_NAMES = tuple(field.name for field in FIELDS)
#: By name.
FIELD_COLUMNS = {field.name: field.column for field in FIELDS}
#: The names of the fields that are times.
FIELD_MOMENTS = tuple(field.name for field in FIELDS if field.type is datetime)
