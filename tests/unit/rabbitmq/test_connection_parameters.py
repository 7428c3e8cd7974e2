"""What a connection's fields mean; the fields themselves are as Airflow reads them from a URI or from JSON."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import quote

import pytest
from airflow.models import Connection as StoredConnection
from airflow.sdk import Connection
from hypothesis import given
from hypothesis import strategies as st
from pika import ConnectionParameters
from pika.credentials import ExternalCredentials, PlainCredentials
from pika.exceptions import ConnectionClosedByBroker, ProbableAccessDeniedError
from support.certificates import Authority, Files

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.connection import describe_error, hosts, parameters, ssl_context


def of(connection: Connection | StoredConnection) -> list[ConnectionParameters]:
    return parameters(
        "rabbit",
        conn_type=connection.conn_type,
        host=connection.host,
        port=connection.port,
        login=connection.login,
        password=connection.password,
        schema=connection.schema,
        extra=connection.extra_dejson,
    )


def of_uri(uri: str) -> ConnectionParameters:
    """By both of Airflow's classes: the task's and that of Airflow's own database."""
    (by_task,) = of(Connection.from_uri(uri, conn_id="rabbit"))
    (by_server,) = of(StoredConnection(conn_id="rabbit", uri=uri))
    for name in ("host", "port", "virtual_host", "credentials", "heartbeat", "socket_timeout"):
        assert getattr(by_task, name) == getattr(by_server, name), name
    assert (by_task.ssl_options is None) == (by_server.ssl_options is None)
    return by_task


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.sign("client")


@pytest.mark.parametrize(
    "host, found",
    [
        (None, [("localhost", None)]),
        (" ", [("localhost", None)]),
        ("rabbit1", [("rabbit1", None)]),
        ("rabbit1:5673", [("rabbit1", 5673)]),
        ("rabbit1,rabbit2:5673,[::1]:5672", [("rabbit1", None), ("rabbit2", 5673), ("::1", 5672)]),
        (" rabbit1 , rabbit2 ", [("rabbit1", None), ("rabbit2", None)]),
        ("[::1]", [("::1", None)]),
        # as Airflow has it of amqp://[::1]
        ("::1", [("::1", None)]),
        ("fe80::1%eth0,10.0.0.1:1", [("fe80::1%eth0", None), ("10.0.0.1", 1)]),
    ],
)
def test_hosts(host: str | None, found: list[tuple[str, int | None]]) -> None:
    assert hosts("rabbit", host) == found


@pytest.mark.parametrize(
    "host",
    [
        "rabbit1,,rabbit2",
        "rabbit1,",
        ":5672",
        "rabbit1:",
        "rabbit1:0",
        "rabbit1:65536",
        "rabbit1:amqp",
        "rabbit1:56.72",
        "rabbit1:+5672",
        "rabbit1:٥٦",
        "[::1",
        "[::1]5672",
        "[rabbit1]:5672",
        "rabbit1:5672:5673",
        "rab bit",
        "amqp://rabbit1",
        "guest:hunter2@rabbit1",
        "guest%3Ahunter2@rabbit1",
        "rabbit1/vhost",
    ],
)
def test_hosts_that_cannot_be_read(host: str) -> None:
    with pytest.raises(ValueError, match=r"connection 'rabbit': host must be a name or an address") as error:
        hosts("rabbit", host)
    assert "hunter2" not in str(error.value)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z0-9]{1,5})?", fullmatch=True)
            | st.ip_addresses(v=4).map(str)
            | st.ip_addresses(v=6).map(str),
            st.none() | st.integers(1, 65_535),
        ),
        min_size=1,
    )
)
def test_hosts_are_read_as_they_were_written(given_hosts: list[tuple[str, int | None]]) -> None:
    written = [
        (f"[{name}]" if ":" in name else name) + (f":{port}" if port is not None else "") for name, port in given_hosts
    ]
    assert hosts("rabbit", ",".join(written)) == given_hosts


def test_nothing_given() -> None:
    (one,) = parameters("rabbit")
    assert (one.host, one.port, one.virtual_host) == ("localhost", 5672, "/")
    assert one.credentials == PlainCredentials("guest", "guest")
    assert (one.ssl_options, one.heartbeat) == (None, None)
    assert (one.socket_timeout, one.stack_timeout, one.blocked_connection_timeout) == (15, 15, 300)
    assert one.client_properties == {"connection_name": "airflow-delayed rabbit"}


def test_hosts_share_all_but_their_ports() -> None:
    found = parameters("rabbit", host="a,b:1,[::1]:2", port=7, login="u", password="p", schema="v", extra={"ssl": True})
    assert [(each.host, each.port) for each in found] == [("a", 7), ("b", 1), ("::1", 2)]
    assert {(each.virtual_host, each.credentials.username, each.credentials.password) for each in found} == {
        ("v", "u", "p")
    }
    # each is verified by its own name
    assert [each.ssl_options.server_hostname for each in found] == ["a", "b", "::1"]


@pytest.mark.parametrize(
    "path, virtual_host",
    [
        ("", "/"),
        ("/", "/"),
        ("/%2F", "/"),
        ("/%2f", "/"),
        ("//", "/"),
        ("/orders", "orders"),
        ("/a%2Fb", "a/b"),
        ("/%2Fteam", "/team"),
        # decoded once
        ("/a%252Fb", "a%2Fb"),
        ("/%C3%A6%20x", "æ x"),
        ("/a+b", "a+b"),
    ],
)
def test_the_virtual_host_of_a_uri(path: str, virtual_host: str) -> None:
    assert of_uri(f"amqp://user:pw@host:5672{path}").virtual_host == virtual_host
    assert of_uri(f"amqp://user:pw@host:5672{path}?heartbeat=30").virtual_host == virtual_host


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20))
def test_any_virtual_host_and_password_survive_a_uri(text: str) -> None:
    found = of_uri(f"amqp://user:{quote(text, safe='')}@host/{quote(text, safe='')}")
    assert (found.virtual_host, found.credentials.password) == (text, text)


def test_a_uri() -> None:
    found = of_uri("amqps://us%40er:p%3Aw@Host:5679/%2F?heartbeat=30&connection_timeout=2500&verify=verify_none")
    # Airflow writes a host's name in small letters
    assert (found.host, found.port, found.heartbeat, found.socket_timeout) == ("host", 5679, 30, 2.5)
    assert found.stack_timeout == 2.5
    assert found.credentials == PlainCredentials("us@er", "p:w")
    assert of_uri("amqps://host").port == 5671
    assert of_uri("amqp://host").port == 5672
    assert of_uri("amqp://host?ssl=true").port == 5671
    assert of_uri("amqp://[::1]:5672").host == "::1"


def test_a_uri_with_several_hosts() -> None:
    found = of(Connection.from_uri("amqp://rabbit1%2Crabbit2%3A5673%2C%5B%3A%3A1%5D%3A5674/v", conn_id="rabbit"))
    assert [(each.host, each.port) for each in found] == [("rabbit1", 5672), ("rabbit2", 5673), ("::1", 5674)]
    found = of(Connection.from_uri("amqp://rabbit1,rabbit2:5679/v", conn_id="rabbit"))
    assert [(each.host, each.port) for each in found] == [("rabbit1", 5679), ("rabbit2", 5679)]


@pytest.mark.parametrize(
    "host, extra, seconds",
    [("rabbit1", {}, 15), ("rabbit1,rabbit2", {}, 5), ("rabbit1,rabbit2", {"connection_timeout": 20_000}, 20)],
)
def test_each_of_several_hosts_has_less_time_to_log_in(host: str, extra: dict[str, object], seconds: float) -> None:
    for found in parameters("rabbit", host=host, extra=extra):
        assert (found.socket_timeout, found.stack_timeout) == (seconds, seconds)


@pytest.mark.parametrize(
    "extra, attribute, value",
    [
        ({"heartbeat": 0}, "heartbeat", 0),
        ({"heartbeat": "65535"}, "heartbeat", 65_535),
        ({"heartbeat": 30.0}, "heartbeat", 30),
        ({"heartbeat": ""}, "heartbeat", None),
        ({"heartbeat": None}, "heartbeat", None),
        ({"connection_timeout": 1}, "socket_timeout", 0.001),
        ({"connection_timeout": "60000"}, "stack_timeout", 60),
        ({"blocked_timeout": 7}, "blocked_connection_timeout", 7),
        ({"blocked_timeout": "0.5"}, "blocked_connection_timeout", 0.5),
        ({"confirm_timeout": "7.5"}, "confirm_timeout", 7.5),
        ({"confirm_timeout": ""}, "confirm_timeout", 60),
        ({"auth_mechanism": "PLAIN"}, "credentials", PlainCredentials("guest", "guest")),
        # a form's empty fields, and what belongs to others
        (
            dict.fromkeys(("cacertfile", "certfile", "keyfile", "verify", "server_name_indication"), ""),
            "port",
            5672,
        ),
        ({"topology": "celery", "ssl": "no"}, "ssl_options", None),
    ],
)
def test_extras(extra: dict[str, object], attribute: str, value: object) -> None:
    (found,) = parameters("rabbit", extra=extra)
    assert getattr(found, attribute) == value


@pytest.mark.parametrize(
    "extra, field, rule",
    [
        ({"ssl": "perhaps"}, "ssl", "must be true or false"),
        ({"heartbeat": "soon"}, "heartbeat", "a whole number of seconds from 0 to 65535"),
        ({"heartbeat": -1}, "heartbeat", "from 0 to 65535"),
        ({"heartbeat": 65_536}, "heartbeat", "from 0 to 65535"),
        ({"heartbeat": "1.5"}, "heartbeat", "a whole number"),
        ({"heartbeat": 1.5}, "heartbeat", "a whole number"),
        ({"heartbeat": True}, "heartbeat", "a whole number"),
        ({"heartbeat": [1]}, "heartbeat", "a whole number"),
        ({"connection_timeout": 0}, "connection_timeout", "of milliseconds, 1 or more"),
        ({"connection_timeout": "infinity"}, "connection_timeout", "a whole number of milliseconds"),
        ({"blocked_timeout": 0}, "blocked_timeout", "seconds, more than 0"),
        ({"confirm_timeout": 0}, "confirm_timeout", "seconds, more than 0"),
        ({"blocked_timeout": "nan"}, "blocked_timeout", "a number of seconds"),
        ({"blocked_timeout": "inf"}, "blocked_timeout", "a number of seconds"),
        ({"auth_mechanism": "amqplain"}, "auth_mechanism", "must be plain or external"),
        ({"auth_mechanism": "external"}, "auth_mechanism", "only with TLS and a client's certfile"),
        ({"auth_mechanism": "external", "ssl": True}, "auth_mechanism", "only with TLS and a client's certfile"),
        ({"ssl": True, "verify": "yes"}, "verify", "must be verify_peer or verify_none"),
        ({"ssl": True, "verify": False}, "verify", "must be text"),
        ({"ssl": True, "keyfile": "/k"}, "keyfile", "needs the certfile"),
        # whoever gives these relies on TLS
        ({"cacertfile": "/ca"}, "cacertfile", "needs TLS: set the extra ssl to true"),
        ({"certfile": "/c"}, "certfile", "needs TLS"),
        ({"keyfile": "/k"}, "keyfile", "needs TLS"),
        ({"verify": "verify_peer"}, "verify", "needs TLS"),
        ({"server_name_indication": "r"}, "server_name_indication", "needs TLS"),
    ],
)
def test_extras_that_cannot_be_read(extra: dict[str, object], field: str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"connection 'rabbit': the extra '{field}' .*{rule}"):
        parameters("rabbit", extra=extra)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "use_ssl",
            "USE-SSL",
            "SSL",
            "ssl_options",
            "sslmode",
            "tls",
            "tls_verify",
            "enableTLS",
            "cafile",
            "ca_certs",
        ),
        *("ca", "CAcertfile", "cert", "certificate", "client_cert", "fail_if_no_peer_cert", "Verify", "verify_ssl"),
        *("key_file", "ssl_keyfile", "ciphers", "secure", "check_hostname_ssl", "serverName", "Auth_Mechanism"),
    ],
)
@pytest.mark.parametrize("conn_type", ["rabbitmq", "amqps"])
def test_an_unknown_extra_that_means_tls_is_refused(name: str, conn_type: str) -> None:
    with pytest.raises(
        ValueError, match=f"the extra '{name}' is unknown, .*TLS is the extra ssl .*cacertfile, certfile"
    ):
        parameters("rabbit", conn_type=conn_type, extra={name: "true"})
    # a form's empty field
    assert parameters("rabbit", conn_type=conn_type, extra={name: ""})


@pytest.mark.parametrize(
    "name, advice",
    [
        ("hartbeat", "did you mean 'heartbeat'?"),
        ("Heartbeat", "did you mean 'heartbeat'?"),
        ("managementurl", "did you mean 'management_url'?"),
        ("broker_region", "those of this package are ssl, cacertfile,"),
    ],
)
def test_any_other_unknown_extra_is_one_warning(name: str, advice: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert parameters(f"rabbit {name}", extra={name: "1", "topology": "celery"})
    (line,) = caplog.messages
    assert f"connection 'rabbit {name}': the extra '{name}' is unknown and ignored; {advice}" in line


def test_tls_is_verified_unless_told_otherwise(files: Files) -> None:
    for conn_type, extra in (("amqps", {}), ("rabbitmq", {"ssl": True}), ("amqps", {"ssl": False})):
        context = ssl_context("rabbit", conn_type=conn_type, extra=extra)
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        # the system's store
        assert context.get_ca_certs() == ssl.create_default_context().get_ca_certs()
    only = ssl_context("rabbit", conn_type="amqps", extra={"cacertfile": str(files.cacertfile)})
    assert [dict(part[0] for part in each["subject"])["commonName"] for each in only.get_ca_certs()] == ["ours"]
    off = ssl_context("rabbit", conn_type="amqps", extra={"verify": "verify_none"})
    assert (off.verify_mode, off.check_hostname) == (ssl.CERT_NONE, False)
    assert ssl_context("rabbit", conn_type="amqp", extra={}) is None


def test_a_client_certificate_may_be_all_that_there_is_to_log_in(files: Files, tmp_path: Path) -> None:
    extra = {"auth_mechanism": "external", "server_name_indication": "rabbit.example"}
    both = tmp_path / "both.pem"
    both.write_bytes(files.certfile.read_bytes() + files.keyfile.read_bytes())
    for given_files in ({"certfile": str(files.certfile), "keyfile": str(files.keyfile)}, {"certfile": str(both)}):
        (found,) = parameters("rabbit", conn_type="amqps", host="r", extra={**extra, **given_files})
        assert isinstance(found.credentials, ExternalCredentials)
        assert found.ssl_options.server_hostname == "rabbit.example"


@pytest.mark.parametrize(
    "change, named, why",
    [
        ({"cacertfile": "{folder}/none"}, "cacertfile '{folder}/none'", "No such file"),
        ({"cacertfile": "{folder}"}, "cacertfile '{folder}'", "Is a directory"),
        ({"cacertfile": "{folder}/empty"}, "cacertfile '{folder}/empty'", "no certificate in PEM format"),
        ({"cacertfile": "{folder}/text"}, "cacertfile '{folder}/text'", "no certificate in PEM format"),
        ({"cacertfile": "a\0b"}, "cacertfile", "not a path"),
        ({"certfile": "{folder}/none"}, "certfile '{folder}/none'", "No such file"),
        ({"certfile": "{folder}/text"}, "certfile '{folder}/text'", "have to belong together, in PEM format"),
        ({"keyfile": "{folder}/none"}, "keyfile '{folder}/none'", "No such file"),
        ({"keyfile": "{folder}/text"}, "keyfile '{folder}/text'", "have to belong together, in PEM format"),
        ({"keyfile": "{locked}"}, "keyfile '{locked}'", "the key without a passphrase"),
        ({"keyfile": "{other}"}, "keyfile '{other}'", "have to belong together"),
        ({"keyfile": ""}, "certfile", "with no keyfile: certificate and private key"),
    ],
)
def test_files_that_cannot_be_used(
    authority: Authority, files: Files, tmp_path: Path, change: dict[str, str], named: str, why: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hunter2")
    names = {
        "folder": str(tmp_path),
        "locked": str(authority.sign("locked", passphrase=b"x").keyfile),
        "other": str(authority.sign("other").keyfile),
    }
    extra = {name: str(getattr(files, name)) for name in ("cacertfile", "certfile", "keyfile")}
    extra.update({name: value.format(**names) for name, value in change.items()})
    with pytest.raises(TransportUnavailable) as error:
        parameters("rabbit", conn_type="amqps", extra=extra)
    text = str(error.value)
    assert text.startswith("connection 'rabbit': ")
    assert named.format(**names) in text
    assert why in text
    assert "has to lie on every machine that sends, readable for Airflow's user" in text
    assert "hunter2" not in text


def test_a_binding_that_the_broker_cannot_make_is_explained() -> None:
    error = ConnectionClosedByBroker(541, "INTERNAL_ERROR - Could not add binding due to timeout")
    assert describe_error(error) == (
        "the broker could not do it (INTERNAL_ERROR - Could not add binding due to timeout). Has it lost its quorum?"
        " 'airflow delayed doctor' shows it"
    )


def test_a_limit_of_connections_is_no_missing_right():
    closed = ConnectionClosedByBroker(
        530, "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (1) is reached"
    )
    assert "raise its limit max-connections" in describe_error(ProbableAccessDeniedError(repr(closed)))
    assert "has no rights in it" in describe_error(ProbableAccessDeniedError("NOT_ALLOWED - access to vhost refused"))
