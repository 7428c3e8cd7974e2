"""From the fields of an Airflow connection to pika's parameters, one set for each host.

What else there is to say stands in the connection's extra, under the names of RabbitMQ's own URIs
(rabbitmq.com/docs/uri-query-parameters), since Airflow makes a URI's query the extra.
"""

from __future__ import annotations

import ipaddress
import math
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pika import ConnectionParameters, PlainCredentials, SSLOptions
from pika.credentials import ExternalCredentials

from airflow_delayed.errors import TransportUnavailable

#: Milliseconds to connect to a host and log in, unless the extra ``connection_timeout`` says otherwise.
CONNECTION_TIMEOUT = 15_000
#: Seconds that a broker may block the connection, unless the extra ``blocked_timeout`` says otherwise.
BLOCKED_TIMEOUT = 300.0
#: Extras that mean something with TLS only; without it they are refused, since who gives them relies on it.
_TLS_EXTRAS = ("cacertfile", "certfile", "keyfile", "verify", "server_name_indication")


def parameters(
    conn_id: str,
    *,
    conn_type: str | None = None,
    host: str | None = None,
    port: int | None = None,
    login: str | None = None,
    password: str | None = None,
    schema: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[ConnectionParameters]:
    """Return what pika needs to connect, for each host in the order given.

    :param conn_id: names the connection in errors and to the broker.
    :param conn_type: ``amqps`` turns TLS on, as the extra ``ssl`` does.
    :param host: one or several, separated by commas, each with a port of its own or without:
        ``rabbit1,rabbit2:5673,[::1]:5672``; none means localhost.
    :param port: of the hosts without one; none means 5672, with TLS 5671.
    :param schema: the virtual host as it is, not encoded; none means ``/``.
    :param extra: ``ssl``, ``cacertfile``, ``certfile``, ``keyfile``, ``verify``, ``server_name_indication``,
        ``auth_mechanism``, ``heartbeat`` (seconds), ``connection_timeout`` (milliseconds), ``blocked_timeout``
        (seconds); text, as a URI has it, or JSON's own types. What is empty counts as not given.
    :raises ValueError: a field cannot be read; it is named, its value is not shown.
    :raises TransportUnavailable: a certificate file cannot be read; it is named.
    """
    given = _Extras(conn_id, extra)
    context = ssl_context(conn_id, conn_type=conn_type, extra=extra)
    # a float as pika has it, and the same for all that comes before the login
    timeout = given.number("connection_timeout", "a whole number of milliseconds, 1 or more", 1, whole=True)
    timeout = (timeout or CONNECTION_TIMEOUT) / 1000
    heartbeat = given.number("heartbeat", "a whole number of seconds from 0 to 65535", 0, 65_535, whole=True)
    blocked = given.number("blocked_timeout", "a number of seconds, more than 0", math.ulp(0.0))
    credentials: PlainCredentials | ExternalCredentials
    if given.one_of("auth_mechanism", "plain", "external") == "external":
        if context is None or not given.text("certfile"):
            raise given.error("auth_mechanism", "can be external only with TLS and a client's certfile")
        credentials = ExternalCredentials()
    else:
        credentials = PlainCredentials(login or "guest", password or "guest", erase_on_connect=False)
    name = given.text("server_name_indication")
    return [
        ConnectionParameters(
            host=one,
            port=own_port or port or (5671 if context else 5672),
            virtual_host=schema or "/",
            credentials=credentials,
            ssl_options=SSLOptions(context, name or one) if context else None,
            heartbeat=None if heartbeat is None else int(heartbeat),
            socket_timeout=timeout,
            stack_timeout=timeout,
            blocked_connection_timeout=blocked or BLOCKED_TIMEOUT,
            client_properties={"connection_name": f"airflow-delayed {conn_id}"},
        )
        for one, own_port in hosts(conn_id, host)
    ]


def hosts(conn_id: str, host: str | None) -> list[tuple[str, int | None]]:
    """Return each host of a connection's field and its own port, if it has one.

    :raises ValueError: one cannot be read.
    """
    if not host or not host.strip():
        return [("localhost", None)]
    found = [_host(part.strip()) for part in host.split(",")]
    if None in found:
        raise ValueError(
            f"connection {conn_id!r}: host must be a name or an address, or several separated by commas, each with"
            " or without a port (rabbit1,rabbit2:5673,[::1]:5672); user and password have fields of their own"
        )
    return [each for each in found if each is not None]


def _host(part: str) -> tuple[str, int | None] | None:
    name, port = part, None
    if part.startswith("["):
        name, bracket, rest = part[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":") or ":" not in name:
            return None
        port = rest[1:] if rest else None
    elif part.count(":") == 1:
        name, _, port = part.partition(":")
    if ":" in name:
        # Airflow takes the brackets off the address in a URI
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            return None
    if not name or any(character.isspace() or character in "/@?#" for character in name):
        return None
    if port is None:
        return name, None
    return (name, int(port)) if port.isascii() and port.isdigit() and 0 < int(port) < 65_536 else None


def ssl_context(
    conn_id: str, *, conn_type: str | None = None, extra: Mapping[str, Any] | None = None
) -> ssl.SSLContext | None:
    """Return how to verify the broker and to show who the client is; None without TLS.

    Verified is against ``cacertfile``, or the system's store. For the management API of the same broker too.

    :raises ValueError: an extra cannot be read.
    :raises TransportUnavailable: a certificate file cannot be read.
    """
    given = _Extras(conn_id, extra)
    if not (given.flag("ssl") or conn_type == "amqps"):
        for name in _TLS_EXTRAS:
            if given.text(name):
                raise given.error(name, "needs TLS: set the extra ssl to true, or use the connection type amqps")
        return None
    verify = given.one_of("verify", "verify_peer", "verify_none")
    authorities, certificate, key = (given.text(name) for name in ("cacertfile", "certfile", "keyfile"))
    if key and not certificate:
        raise given.error("keyfile", "needs the certfile that it belongs to")
    for name in ("cacertfile", "certfile", "keyfile"):
        given.check_file(name)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except ssl.SSLError as error:
        raise given.unreadable("cacertfile", "it has no certificate in PEM format") from error
    if certificate:
        try:
            # an empty passphrase: without one, OpenSSL would ask for it on the terminal, and wait
            context.load_cert_chain(certificate, key, password="")
        except (ssl.SSLError, ValueError) as error:
            why = "certificate and private key have to belong together, in PEM format, the key without a passphrase"
            raise given.unreadable("certfile", f"with {f'keyfile {key!r}' if key else 'no keyfile'}: {why}") from error
    if verify == "verify_none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Extras:
    """Reads extras, which are text if they come from a URI or a form."""

    def __init__(self, conn_id: str, extra: Mapping[str, Any] | None) -> None:
        self._conn_id = conn_id
        self._extra = extra or {}

    def error(self, name: str, rule: str) -> ValueError:
        return ValueError(f"connection {self._conn_id!r}: the extra {name!r} {rule}")

    def unreadable(self, name: str, why: str) -> TransportUnavailable:
        return TransportUnavailable(
            f"connection {self._conn_id!r}: {name} {self.text(name)!r} cannot be used: {why}. It has to lie on every"
            " machine that sends, readable for Airflow's user"
        )

    def text(self, name: str) -> str | None:
        value = self._extra.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise self.error(name, "must be text")
        return value

    def check_file(self, name: str) -> None:
        path = self.text(name)
        if path:
            try:
                Path(path).read_bytes()
            except (OSError, ValueError) as error:
                raise self.unreadable(name, getattr(error, "strerror", None) or "not a path") from error

    def flag(self, name: str) -> bool:
        value = str(self._extra.get(name, "")).strip().lower()
        if value in ("true", "1", "yes", "on"):
            return True
        if value in ("false", "0", "no", "off", "", "none"):
            return False
        raise self.error(name, "must be true or false")

    def one_of(self, name: str, default: str, *others: str) -> str:
        value = (self.text(name) or default).strip().lower()
        if value not in (default, *others):
            raise self.error(name, f"must be {' or '.join((default, *others))}; without it, it is {default}")
        return value

    def number(
        self, name: str, rule: str, least: float, most: float = math.inf, *, whole: bool = False
    ) -> float | None:
        value = self._extra.get(name)
        if value is None or value == "":
            return None
        kind: Callable[[Any], float] = int if whole else float
        try:
            # a whole number as JSON may have it, 30.0, and no true, which Python takes for 1
            found = kind(value) if isinstance(value, str) else float(value)
            readable = not isinstance(value, bool) and math.isfinite(found) and (not whole or found == int(found))
        except (TypeError, ValueError, OverflowError):
            readable, found = False, 0.0
        if not readable or not least <= found <= most:
            raise self.error(name, f"must be {rule}")
        return found
