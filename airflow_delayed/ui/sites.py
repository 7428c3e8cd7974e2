"""Whether a request that changes something comes from the page itself. No web framework here."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit


def problem(fetch_site: str | None, origin: str | None, own: Sequence[str]) -> str | None:
    """Return why a request is refused; None: it comes from the page, or from a program that is no browser.

    :param fetch_site: the header Sec-Fetch-Site, which a page cannot forge
        (https://www.w3.org/TR/fetch-metadata/#sec-fetch-site-header).
    :param origin: the header Origin, which browsers send with each POST.
    :param own: names and ports at which this server is reached.
    """
    if fetch_site is not None:
        # a proxy may have changed our name, so the origin is not compared then
        return None if fetch_site == "same-origin" else "requests that change something are refused from other sites"
    if origin is not None and (not urlsplit(origin).netloc or urlsplit(origin).netloc not in own):
        return "the header Origin names another site than this one; set [api] base_url to the address of Airflow"
    return None
