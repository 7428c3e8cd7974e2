"""A private RabbitMQ from Debian's package: own ports, own folder, own epmd; no systemd needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from services import packages, process

PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # not the wrapper in /usr/sbin: it insists on /var/lib
USER = "rabbitmq"
#: Quorum queues tell how they are every two seconds: every five, as by default, tests would wait for; every second,
#: hundreds of idle levels would cost twice the CPU. What a queue has not confirmed, such as a queue still starting, a
#: level sends again after 20 s; by default after 180, which tests would wait for too.
_INTERVALS = (
    "[{rabbit, [{collect_statistics_interval, 1000}, {quorum_tick_interval, 2000},"
    " {dead_letter_worker_publisher_confirm_timeout, 20000}]}]."
)
#: An Erlang machine that runs out of work looks for more for a while, which costs more CPU than to be woken.
_NO_SPINNING = "+sbwt none +sbwtdcpu none +sbwtdio none"
#: The management API listens this far above AMQP, as with RabbitMQ's own default ports.
MANAGEMENT_OFFSET = 10_000
LOOPBACK = "127.0.0.1"


class CertificateFiles(Protocol):
    """PEM files of a certificate authority, and of a server's certificate and its key."""

    cacertfile: Path
    certfile: Path
    keyfile: Path


class Broker:
    """One node. ``stop()`` and ``start()`` keep its data and its ports.

    :param tls: have it listen for TLS too, at ``tls_port``: clients must show a certificate of that authority, and may
        log in by its common name (EXTERNAL).
    :param management_port: where its management API listens; by default so far above AMQP that clients find it.
    :param host: the IPv4 address on which it listens.
    """

    #: The beginning of the command that starts it; see services.process.running.
    _within: Sequence[str] = ()

    def __init__(
        self,
        folder: Path,
        tls: CertificateFiles | None = None,
        *,
        management_port: int | None = None,
        host: str = LOOPBACK,
    ) -> None:
        self.folder = folder
        self.host = host
        self.port = _free_pair() if management_port is None else process.free_port()
        self.name = f"private{self.port}@{host}"
        self.url = f"amqp://guest:guest@{host}:{self.port}/%2F"
        self._management_port = management_port or self.port + MANAGEMENT_OFFSET
        self.management_url = f"http://guest:guest@{host}:{self._management_port}"
        self.tls_port = process.free_port() if tls else None
        self._environment = self._configure(tls)
        self._running = contextlib.ExitStack()
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the node and wait until it serves clients."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the node's process."""
        with contextlib.ExitStack() as stack:
            self._name_service(stack)
            server = process.running([PROGRAM], log=self._log, env=self._environment, user=USER, within=self._within)
            self._server = stack.enter_context(server)
            self._running = stack.pop_all()

    def wait_until_ready(self) -> None:
        """Wait until the node serves clients."""
        process.wait_for("RabbitMQ", self._ready, seconds=120, log=self._log)

    def stop(self) -> None:
        """Stop the node and its epmd."""
        self._running.close()

    def kill(self) -> None:
        """Kill the node, which saves seconds where its data is not needed any more, and stop its epmd."""
        if self._server:
            process.signal_group(self._server, signal.SIGKILL)
        self.stop()

    def eval(self, expression: str) -> str:
        """Have the node evaluate an Erlang expression, and return the result; takes milliseconds.

        rabbitmqctl would start an Erlang machine of its own for it, which takes one to two seconds.
        """
        cookie = (self.folder / ".erlang.cookie").read_text()
        # on a busy machine a node sometimes refuses the first call; each expression may be evaluated twice
        for _ in range(3):
            done = subprocess.run(
                ["erl_call", "-name", self.name, "-c", cookie, "-timeout", "60", "-e"],
                env={**os.environ, **self._environment},
                input=f"{expression}.\n",
                check=False,
                capture_output=True,
                text=True,
                timeout=90,
            )
            if not done.returncode and done.stdout.startswith("{ok, "):
                return done.stdout.removeprefix("{ok, ").removesuffix("}")
        raise RuntimeError(f"{expression}: {done.stdout}{done.stderr}")

    def alarm(self) -> None:
        """Have it be short of memory, so that it takes no messages."""
        self.eval('vm_memory_monitor:set_vm_memory_high_watermark({absolute, "1MB"})')

    def end_alarm(self) -> None:
        """Let it have memory again."""
        self.eval("vm_memory_monitor:set_vm_memory_high_watermark(0.4)")

    def close(self) -> None:
        """Stop RabbitMQ in its Erlang machine, which runs on: nothing listens, and no connection is left."""
        self.eval("rabbit:stop()")

    def open(self) -> None:
        """Start RabbitMQ again in its Erlang machine, seconds of CPU cheaper than ``start()``."""
        self.eval("rabbit:start()")
        process.wait_for("RabbitMQ", self._answers, seconds=120, log=self._log)

    def restore(self) -> None:
        """Have it serve clients, whatever was done to it."""
        if self._server is None or process.ended(self._server):
            self.start()
        elif self.eval("rabbit:is_running()") != "true":
            self.open()
        self.end_alarm()

    @property
    def _log(self) -> Path:
        return self.folder / "console.log"

    def _name_service(self, stack: contextlib.ExitStack) -> None:
        port = int(self._environment["ERL_EPMD_PORT"])
        stack.enter_context(epmd(self.host, port, log=self._log))

    def _ready(self) -> bool:
        if self._server is None or process.ended(self._server):
            raise RuntimeError("it has ended")
        return self._answers()

    def _answers(self) -> bool:
        return answers(self.host, self.port, b"AMQP\x00\x00\x09\x01") and answers(self.host, self._management_port)

    def _configure(self, tls: CertificateFiles | None) -> dict[str, str]:
        folder = self.folder
        cookie = folder / ".erlang.cookie"
        cookie.write_text(os.urandom(16).hex())
        cookie.chmod(0o400)
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {self.host}:{self.port}\n"
            f"management.tcp.ip = {self.host}\n"
            f"management.tcp.port = {self._management_port}\n"
            "disk_free_limit.absolute = 100MB\n" + (self._listen_tls(tls) if tls else "")
        )
        (folder / "advanced.config").write_text(_INTERVALS)
        (folder / "enabled_plugins").write_text(
            f"[rabbitmq_management{',rabbitmq_auth_mechanism_ssl' if tls else ''}]."
        )
        (folder / "rabbitmq-env.conf").touch()
        for name in ("mnesia", "log", "schema", "generated"):
            (folder / name).mkdir()
        if os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, USER, USER)
        interface = self.host.replace(".", ",")
        return {
            "HOME": str(folder),
            # a name with an address is a long one
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_SCHEMA_DIR": str(folder / "schema"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": self.host,
            "RABBITMQ_DIST_PORT": str(process.free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-kernel inet_dist_use_interface {{{interface}}} {_NO_SPINNING}",
            "ERL_EPMD_PORT": str(process.free_port()),
            "ERL_EPMD_ADDRESS": self.host,
        }

    def _listen_tls(self, tls: CertificateFiles) -> str:
        lines = [f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}"]
        for name in ("cacertfile", "certfile", "keyfile"):
            # copied: the server's own user has to be able to read it
            path = shutil.copy(getattr(tls, name), self.folder / f"{name}.pem")
            lines.append(f"ssl_options.{name} = {path}")
        lines += ["ssl_options.verify = verify_peer", "ssl_options.fail_if_no_peer_cert = true"]
        lines += ["auth_mechanisms.1 = PLAIN", "auth_mechanisms.2 = EXTERNAL", "ssl_cert_login_from = common_name"]
        return "\n".join(lines) + "\n"


def require() -> None:
    """Install RabbitMQ if it is missing; raises SystemExit with what to type where that cannot be done."""
    packages.require(PROGRAM, "rabbitmq-server")


@contextlib.contextmanager
def running(tls: CertificateFiles | None = None, *, management_port: int | None = None) -> Iterator[Broker]:
    """Run a RabbitMQ of one's own until the block ends, however it ends; its data is deleted then."""
    require()
    # not below a folder of the test run's: the server's own user has to be able to enter
    folder = Path(tempfile.mkdtemp(prefix="airflow-delayed-rabbitmq-"))
    try:
        folder.chmod(0o755)
        broker = Broker(folder, tls, management_port=management_port)
        try:
            broker.start()
            yield broker
        finally:
            broker.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def epmd(host: str, port: int, *, log: Path, within: Sequence[str] = ()) -> Iterator[None]:
    """Run Erlang's name service until the block ends.

    In the foreground, so that it ends with us; else a node would leave one behind as a daemon.
    """
    environment = {"ERL_EPMD_PORT": str(port), "ERL_EPMD_ADDRESS": host}
    command = ["epmd", "-port", str(port), "-address", host]
    with process.running(command, log=log, env=environment, user=USER, within=within):
        process.wait_for("epmd", lambda: answers(host, port), seconds=15, log=log)
        yield


def _free_pair() -> int:
    while not process.reserve((port := process.free_port()) + MANAGEMENT_OFFSET):
        pass
    return port


def answers(host: str, port: int, greeting: bytes = b"") -> bool:
    """Whether a server listens on a port, and replies to a greeting if one is given."""
    with socket.create_connection((host, port), timeout=2) as client:
        if greeting:
            client.sendall(greeting)
            return bool(client.recv(1))
    return True
