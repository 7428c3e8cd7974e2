"""An SQS for the demo and the tests: ministack, on loopback only, with a clock that can be moved."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from services import process

REGION = "us-east-1"
#: What a boto3 client reads from its environment; the emulator takes any key.
CLIENT_ENV = {"AWS_ACCESS_KEY_ID": "emulator", "AWS_SECRET_ACCESS_KEY": "emulator", "AWS_DEFAULT_REGION": REGION}


def connection(url: str, **extra: object) -> dict[str, object]:
    """Return the fields of an Airflow connection to an endpoint."""
    fields = {"region_name": REGION, "endpoint_url": url, **extra}
    return {"conn_type": "aws", "login": "emulator", "password": "emulator", "extra": fields}


@dataclass
class Sqs:
    """A running server: its endpoint, and its clock."""

    url: str
    control: str
    #: How far the clock was moved; nobody else moves it.
    offset: timedelta = timedelta(0)

    def advance(self, seconds: float) -> None:
        """Move the server's clock forwards."""
        with urllib.request.urlopen(f"{self.control}/?by={seconds}", data=b"", timeout=10) as answer:
            self.offset = timedelta(seconds=float(answer.read()))

    def now(self) -> datetime:
        """The server's time: pass it as a client's clock, and both move together."""
        return datetime.now(timezone.utc) + self.offset


@contextlib.contextmanager
def running(*, policies: bool = False) -> Iterator[Sqs]:
    """Run a private server until the block ends.

    :param policies: deny what the policy of a queue denies, as AWS does.
    """
    port, control = process.free_port(), process.free_port()
    launcher = str(Path(__file__).with_name("ministack_clock.py"))
    with tempfile.TemporaryDirectory(prefix="sqs-") as folder:
        log = Path(folder) / "ministack.log"
        env = {
            **CLIENT_ENV,
            "BIND_HOST": "127.0.0.1",  # it would listen on every interface
            "MINISTACK_HOST": "127.0.0.1",  # the host in queue URLs
            "GATEWAY_PORT": str(port),
            "SERVICES": "sqs",
            "TMPDIR": folder,
            "PERSIST_STATE": "0",
            "AUTH": str(policies).lower(),
        }
        server = Sqs(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{control}")
        with process.running([sys.executable, launcher, str(control)], log=log, env=env, cwd=Path(folder)) as child:
            try:
                process.wait_for("ministack", lambda: _answers(server), log=log)
                yield server
            finally:
                # it keeps nothing on disk, and would wait for each long poll that is open
                process.signal_group(child, signal.SIGKILL)


def _answers(server: Sqs) -> bool:
    with urllib.request.urlopen(f"{server.url}/_ministack/health", timeout=5) as answer:
        return bool(answer.status == 200)
