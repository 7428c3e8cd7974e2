"""Addresses of files as logs, errors and lineage may show them: without logins, queries and fragments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

#: The words of names whose values are secrets.
_SECRET = re.compile(
    r"pass(word|wd|phrase|code)?|pwd|secrets?|tokens?|keys?|apikey|accesskey|secretkey|credentials?|authorization|bearer"
    r"|sig|signature|sas|dsn|jaas"
)
#: A name with one of these ends describes a secret, such as its place or kind, or has another kind of key.
_HARMLESS = {
    *("file", "path", "location", "provider", "type", "class", "name"),
    *("column", "columns", "field", "fields", "serializer", "deserializer"),
}
_LOGIN_OF_ORACLE = re.compile("jdbc:[^@]*:[^/@:]*/([^@]+)@")
#: Between the addresses that fsspec chains, as in ``simplecache::https://...``.
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*:)")
#: Schemes where a user without a password may be a token. Elsewhere it names an Airflow connection.
_TOKENS = ("http", "https", "ftp", "ftps", "git", "webdav", "webdavs")
#: Schemes where a container stands in the place of the user.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")


class UrlParts(NamedTuple):
    """The parts of one address; ``user`` is everything before the host, ``query`` everything after the path."""

    scheme: str
    user: str
    host: str
    path: str
    query: str


def shown(url: str) -> str:
    """Return a path or URL as logs and errors may show it. A path without a scheme is shown as it is."""
    return "::".join(_shown(one) for one in _CHAIN.split(url))


def parse(url: str) -> UrlParts | None:
    """Return the parts of an address, or None of a path. A password may have a slash, an @ or a question mark."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    before = authority.partition("@")[0]
    # after a colon is a port, or a password that may go on: up to the last @ that there is
    end = rest.rfind("@") if ":" in before else authority.rfind("@")
    user, rest = rest[: max(end, 0)], rest[end + 1 :]
    if user and scheme.lower() in _CONTAINERS and ":" not in user:
        user, rest = "", f"{user}@{rest}"
    cut = re.search(r"[?#;]" if scheme.startswith("jdbc:") else r"[?#]", rest)
    rest, query = (rest[: cut.start()], rest[cut.end() :]) if cut else (rest, "")
    host, slash, path = rest.partition("/")
    return UrlParts(scheme, user, host, slash + path, query)


def secrets_of(url: str) -> list[str]:
    """Return the secrets in a path or URL: a password, a token, and values of a query with the names of secrets.

    The name of an Airflow connection, as in ``s3://conn_id@bucket``, is no secret.
    """
    return [secret for one in _CHAIN.split(url) for secret in _secrets(one) if secret]


def is_secret(name: str) -> bool:
    """Return whether an option or a parameter of this name has a secret as its value, as far as names go."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    if not words or words[-1].lower() in _HARMLESS:
        return False
    return any(_SECRET.fullmatch(word.lower()) for word in words)


def without_secrets(text: str, url: str) -> str:
    """Return the text of another library's error without the secrets of an address in it."""
    text = text.replace(url, shown(url))
    for secret in sorted(secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _shown(url: str) -> str:
    address = parse(url)
    if address is None:
        return "jdbc:***" if url.startswith("jdbc:") else url
    return f"{address.scheme}://{address.host}{address.path}"


def _secrets(url: str) -> Iterator[str]:
    address = parse(url)
    if address is None:
        yield from _LOGIN_OF_ORACLE.findall(url)
        return
    user, colon, password = address.user.partition(":")
    found = [password if colon else user if address.scheme.lower() in _TOKENS else ""]
    for part in re.split("[&;#]", address.query):
        name, _, value = part.partition("=")
        if is_secret(name):
            found.append(value)
    for secret in found:
        yield from dict.fromkeys((secret, unquote(secret)))
