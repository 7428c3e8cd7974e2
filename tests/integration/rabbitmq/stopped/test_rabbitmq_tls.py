"""TLS, on a broker that demands client certificates."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from support.certificates import Authority, Files
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import rabbitmq

Connect = Callable[..., str]


@pytest.fixture(scope="module")
def client(authority: Authority) -> Files:
    return authority.sign("scheduler")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs").sign("scheduler")


@pytest.fixture
def fields(broker: rabbitmq.Broker, vhost: VirtualHost) -> dict[str, object]:
    return {**vhost.connection, "conn_type": "amqps", "host": "localhost", "port": broker.tls_port}


def extra(files: Files, *names: str, **more: object) -> dict[str, object]:
    return {**{name: str(getattr(files, name)) for name in names}, **more}


ALL = ("cacertfile", "certfile", "keyfile")


@pytest.mark.parametrize(
    "change, more",
    [
        ({}, {}),
        ({"conn_type": "rabbitmq"}, {"ssl": True}),
        # the certificate is for localhost, and verified by that name
        ({"host": "127.0.0.1"}, {"server_name_indication": "localhost"}),
        ({"host": "127.0.0.1"}, {"verify": "verify_none", "cacertfile": ""}),
    ],
)
def test_messages_arrive_over_tls(
    fields: dict[str, object],
    vhost: VirtualHost,
    client: Files,
    connect: Connect,
    change: dict[str, object],
    more: dict[str, object],
) -> None:
    hook = delivery_for(connect("secure", **{**fields, **change, "extra": extra(client, *ALL, **more)}))
    assert isinstance(hook, RabbitMQDelayHook)
    well, text = hook.test_connection()
    assert well, text
    vhost.declare("orders")
    assert hook.send(messages("orders", [0] * 20)).sent == 20
    assert len(vhost.collect("orders", enough=20, more=0.1)) == 20


def test_a_uri_has_it_all(
    broker: rabbitmq.Broker, fields: dict[str, object], vhost: VirtualHost, client: Files, connect: Connect
) -> None:
    name = vhost.name.replace("/", "%2F")
    query = "&".join(f"{key}={value}" for key, value in extra(client, *ALL, verify="verify_peer", heartbeat=30).items())
    hook = delivery_for(connect("secure", f"amqps://guest:guest@localhost:{broker.tls_port}/{name}?{query}"))
    hook.install(["orders"], create_destinations=True)
    assert hook.verify(["orders"]).ok


def test_the_certificate_may_be_the_login(
    broker: rabbitmq.Broker, fields: dict[str, object], vhost: VirtualHost, client: Files, connect: Connect
) -> None:
    nobody = {**fields, "login": "nobody", "password": "none"}
    external = extra(client, *ALL, auth_mechanism="external")
    hook = RabbitMQDelayHook(connect("secure", **{**nobody, "extra": external}))
    with pytest.raises(TransportUnavailable, match="login by certificate refused; the broker needs a user of the"):
        hook.verify([])
    vhost.manage("PUT", "users/scheduler", {"password_hash": "", "tags": ""})
    try:
        vhost.manage("PUT", "permissions/{vhost}/scheduler", {"configure": ".*", "write": ".*", "read": ".*"})
        hook.install(["orders"], create_destinations=True)
        assert hook.send(messages("orders", [0])).sent == 1
        # a login of the plain kind is not one
        hook = RabbitMQDelayHook(connect("secure", **{**nobody, "extra": extra(client, *ALL)}))
        with pytest.raises(TransportUnavailable, match="login refused; check user and password"):
            hook.verify([])
    finally:
        vhost.manage("DELETE", "users/scheduler")


def test_the_login_is_not_sent_in_the_clear(fields: dict[str, object], client: Files, connect: Connect) -> None:
    logins = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            logins.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as listener:
        Thread(target=listener.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{listener.server_port}"

        def verify(url: str) -> str:
            secured = {**fields, "extra": extra(client, *ALL, management_url=url)}
            return "; ".join(map(str, RabbitMQDelayHook(connect("secure", **secured)).verify([])))

        assert "use https, or put a login of its own into management_url" in verify(f"http://{place}")
        assert logins == []
        assert "refused the user" in verify(f"http://watcher:own-word@{place}")
        assert {b64decode(login.removeprefix("Basic ")) for login in logins} == {b"watcher:own-word"}
        listener.shutdown()


NO_CERTIFICATE = "may demand a client certificate, by an authority that it knows (certfile, keyfile)"


@pytest.mark.parametrize(
    "case, change, cause",
    [
        ("no client certificate", {}, NO_CERTIFICATE),
        ("a stranger's client certificate", {}, NO_CERTIFICATE),
        ("a stranger's authority", {}, "certificate is not trusted ("),
        ("the system's authorities", {}, "certificate is not trusted ("),
        ("another host", {"host": "127.0.0.1"}, "certificate is for another host; use a name that it is for"),
        ("another name", {}, "certificate is for another host"),
        ("no TLS", {"conn_type": "amqp"}, "does not speak AMQP 0-9-1; check the port, and whether it wants ssl"),
        ("TLS at the port without", {}, "the TLS handshake failed; check the port"),
    ],
)
def test_what_is_wrong_is_told(
    broker: rabbitmq.Broker,
    fields: dict[str, object],
    client: Files,
    stranger: Files,
    connect: Connect,
    case: str,
    change: dict[str, object],
    cause: str,
) -> None:
    extras = {
        "no client certificate": extra(client, "cacertfile"),
        "a stranger's client certificate": extra(stranger, "certfile", "keyfile", cacertfile=str(client.cacertfile)),
        "a stranger's authority": extra(client, "certfile", "keyfile", cacertfile=str(stranger.cacertfile)),
        "the system's authorities": extra(client, "certfile", "keyfile"),
        "another name": extra(client, *ALL, server_name_indication="rabbit.example"),
        "no TLS": {},
    }
    port = {"port": broker.port} if case == "TLS at the port without" else {}
    used = {**fields, **change, **port, "extra": extras.get(case, extra(client, *ALL))}
    hook = RabbitMQDelayHook(connect("secure", **used))
    name = f"{used['host']}:{used['port']}: "
    for use in (lambda: hook.verify([]), lambda: hook.send(messages("orders", [1]))):
        with pytest.raises(TransportUnavailable) as error:
            use()
        assert f"connection 'secure': {name}" in str(error.value)
        assert cause in str(error.value)
    well, text = hook.test_connection()
    assert not well
    assert name in text
    assert cause in text
