"""What was computed against what arrived: counted from Spark's files and the consumer's, not from what Airflow says."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services import process, sqs


@dataclass(frozen=True)
class Arrival:
    """One message that the consumer got."""

    id: str
    body: str = field(repr=False)
    arrived: float


class Consumer:
    """The consumer that runs outside Airflow, by the file that it writes."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def arrivals(self) -> list[Arrival]:
        """Return what has arrived, in the order in which it came."""
        if not self._file.exists():
            return []
        # a last line without its end is still being written
        lines = self._file.read_text().split("\n")[:-1]
        return [Arrival(**json.loads(line)) for line in lines]


@contextlib.contextmanager
def consuming(queue: str, endpoint: str, folder: Path) -> Iterator[Consumer]:
    """Run the consumer as a process until the block ends."""
    file = folder / f"{queue}.arrivals.jsonl"
    program = str(Path(__file__).with_name("demo_consumer.py"))
    env = {**sqs.CLIENT_ENV, "AWS_ENDPOINT_URL_SQS": endpoint}
    with process.running([sys.executable, program, queue, str(file)], log=folder / "consumer.log", env=env):
        yield Consumer(file)


def computed(folder: Path) -> dict[str, float]:
    """Return when each reminder in a folder of Parquet files is due (seconds since 1970), by its body."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder, columns=["value", "due_at"], coerce_int96_timestamp_unit="us")
    # of Spark's timestamps pyarrow reads UTC, and no time zone
    moments = rows["due_at"].cast(pa.timestamp("us", tz="UTC")).to_pylist()
    due = {value: moment.timestamp() for value, moment in zip(rows["value"].to_pylist(), moments, strict=True)}
    if len(due) != len(rows):
        raise ValueError(f"{folder} has {len(rows) - len(due)} reminders that say the same")
    return due


@dataclass(frozen=True)
class Reckoning:
    """How computed reminders and arrivals compare; latenesses are in seconds, sorted, of first arrivals."""

    computed: int
    arrived: int
    early: int
    missing: int
    twice: int
    strange: int
    lateness: Sequence[float] = field(repr=False)

    @property
    def kept(self) -> bool:
        """Whether every reminder came, none early, and nothing else."""
        return self.computed > 0 and not (self.early or self.missing or self.strange)

    def quantile(self, share: float) -> float:
        """Return the lateness that this share of the arrivals does not exceed."""
        return self.lateness[math.ceil(len(self.lateness) * share) - 1] if self.lateness else 0.0


def reckon(due: dict[str, float], arrivals: Sequence[Arrival]) -> Reckoning:
    """Compare; a message is early if any of its arrivals was, and strange if nothing like it was computed."""
    times = Counter(arrival.body for arrival in arrivals if arrival.body in due)
    first: dict[str, float] = {}
    for arrival in arrivals:
        if arrival.body in due:
            first[arrival.body] = min(arrival.arrived, first.get(arrival.body, arrival.arrived))
    lateness = sorted(when - due[body] for body, when in first.items())
    return Reckoning(
        computed=len(due),
        arrived=len(first),
        early=sum(late < 0 for late in lateness),
        missing=len(due) - len(first),
        twice=sum(count - 1 for count in times.values()),
        strange=sum(arrival.body not in due for arrival in arrivals),
        lateness=lateness,
    )
