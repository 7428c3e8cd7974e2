"""What a store can do with an id that it knows with other content."""

from __future__ import annotations

from typing import Literal, get_args

OnConflict = Literal["error", "keep", "replace"]


def check_on_conflict(value: str) -> OnConflict:
    """Return the value if it is one of those that there are.

    :raises ValueError: it is not.
    """
    if value not in get_args(OnConflict):
        raise ValueError(f"on_conflict={value!r} is none of {', '.join(map(repr, get_args(OnConflict)))}")
    return value  # type: ignore[return-value]
