"""The utmost of many messages: if a message with all of it is within the limits, each of them is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    """What bounds many messages. Lengths are bytes in UTF-8 unless told otherwise; none may be less than it is.

    :param destinations: all of them.
    :param shortest_body: in bytes, as is ``longest_body``.
    :param header_names: all of them.
    :param longest_value: of a header.
    :param most_headers: that one message has.
    :param longest_tag: in characters; 0 if there are none.
    :param null_in_tag: a tag has a null character.
    """

    destinations: Collection[str]
    first_due: datetime
    last_due: datetime
    shortest_body: int
    longest_body: int
    header_names: Collection[str]
    longest_value: int
    most_headers: int
    longest_tag: int
    null_in_tag: bool
