"""Asset URIs of queues: ``delayed://conn_id/queue``, both names percent-encoded.

Airflow finds the functions by ``asset-uris`` of the provider's metadata, and calls :func:`sanitize_uri` for each
``Asset`` of this scheme, wherever it is made.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote

if TYPE_CHECKING:
    from airflow.sdk import Asset

SCHEME = "delayed"
#: What Airflow allows in the name of a connection (``RE_SANITIZE_CONN_ID`` in ``airflow/models/connection.py``).
_CONN_ID = re.compile(r"[\w#!()\-.:/\\]{1,250}", re.ASCII)
_BROKEN = re.compile("%(?![0-9A-Fa-f]{2})")


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check a URI, and return its one form, so that a queue is one asset however its name was encoded.

    :param uri: without a fragment and trailing slashes, which Airflow has removed.
    :raises ValueError: it names no connection, no queue, or anything else.
    """
    conn_id = _decoded(uri, "connection", uri.netloc)
    queue = _decoded(uri, "queue", uri.path.removeprefix("/"))
    if not _CONN_ID.fullmatch(conn_id):
        raise _wrong(uri, f"{conn_id!r} is no name of a connection")
    if not queue:
        raise _wrong(uri, "it names no queue")
    if "/" in uri.path.removeprefix("/"):
        raise _wrong(uri, "a slash in the name of a queue is written as %2F")
    if not queue.isprintable():
        raise _wrong(uri, "the name of the queue has unprintable characters")
    if uri.query:
        raise _wrong(uri, "it has a query; a question mark in a name is written as %3F")
    return uri._replace(scheme=SCHEME, netloc=quote(conn_id, safe=""), path="/" + quote(queue, safe=""), fragment="")


def create_asset(*, conn_id: str, queue: str, scheme: str = SCHEME, extra: dict[str, Any] | None = None) -> Asset:
    """Return the asset of a queue.

    :param conn_id: the connection that delivers to it.
    :param queue: as messages name it as their destination, not encoded.
    :raises ValueError: a name is empty, or no such name.
    """
    from airflow.sdk import Asset

    return Asset(uri=f"{scheme}://{quote(conn_id, safe='')}/{quote(queue, safe='')}", extra=extra)


def _decoded(uri: SplitResult, what: str, text: str) -> str:
    try:
        if _BROKEN.search(text):
            raise ValueError
        return unquote(text, errors="strict")
    except ValueError:
        raise _wrong(uri, f"the name of the {what} is not percent-encoded UTF-8; a % is written as %25") from None


def _wrong(uri: SplitResult, why: str) -> ValueError:
    return ValueError(
        f"asset URI {uri.geturl()!r}: {why}; write it as delayed://conn_id/queue, each name encoded by"
        " urllib.parse.quote(name, safe=''), or call airflow_delayed.assets.create_asset(conn_id=..., queue=...)"
    )
