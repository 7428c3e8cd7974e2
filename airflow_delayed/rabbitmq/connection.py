"""Why a connection to RabbitMQ failed, in plain words."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator


def explain(error: BaseException) -> str:
    """Say what kept a connection from being opened, or ended it, and what to look at.

    pika wraps the cause several times over; it is found among the wrapped ones. Names no secret.
    """
    from pika import exceptions

    causes = list(_causes(error))
    for cause in causes:
        for kind, text in _KNOWN:
            if isinstance(cause, kind):
                return text
        if isinstance(cause, exceptions.ProbableAuthenticationError | exceptions.AuthenticationError):
            return "login refused; check user and password (RabbitMQ lets the user 'guest' in from localhost only)"
        if isinstance(cause, exceptions.ProbableAccessDeniedError):
            return "the virtual host does not exist, or the user has no rights in it; check the connection's schema"
        if isinstance(cause, exceptions.IncompatibleProtocolError):
            return "what listens there does not speak AMQP 0-9-1; check the port, and whether it wants ssl"
        if isinstance(cause, exceptions.ConnectionClosed):
            return _closed(cause.reply_code, cause.reply_text)
        if isinstance(cause, exceptions.AMQPHeartbeatTimeout):
            return "the broker sent no heartbeat"
        if isinstance(cause, exceptions.ConnectionBlockedTimeout):
            return "the broker blocked the connection for too long; it is short of memory or disk"
        if isinstance(cause, exceptions.StreamLostError):
            return "the connection was lost"
    last = causes[-1]
    return str(last) or type(last).__name__


_KNOWN: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the host's name cannot be resolved"),
    (ConnectionRefusedError, "nothing listens on that host and port"),
    (ssl.SSLCertVerificationError, "the broker's TLS certificate is not trusted"),
    (ssl.SSLError, "the TLS handshake failed; check the port (usually 5671 with ssl, 5672 without)"),
    (TimeoutError, "no answer in time; check host, port and firewall"),
    (ConnectionResetError, "the connection was cut; check the port, and whether it wants ssl"),
)


def _closed(code: int, text: str) -> str:
    if code == 403:
        return "login refused; check user and password (RabbitMQ lets the user 'guest' in from localhost only)"
    if code == 530:
        return f"the virtual host cannot be used; check the connection's schema ({text})"
    return f"the broker closed the connection: {code} {text}"


def _causes(error: object, depth: int = 0) -> Iterator[BaseException]:
    """Yield what an error wraps, the innermost first, then the error."""
    if not isinstance(error, BaseException) or depth > 8:
        return
    for inner in (*getattr(error, "exceptions", ())[-1:], getattr(error, "exception", None), *error.args):
        yield from _causes(inner, depth + 1)
    yield error
