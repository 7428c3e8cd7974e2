"""A stand-in of spark-submit for the example's job: rows that a live Airflow needs, where Spark is not the point.

A day's reminders as the job writes them, with its own clock of a replay; where there are some already, the same in
another order, as Spark may return them when it runs again.
"""

from __future__ import annotations

import random
import runpy
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.dataset
import pyarrow.parquet

from support import flights


def main() -> None:
    (at,) = (number for number, word in enumerate(sys.argv) if word.endswith("flight_reminders_job.py"))
    sys.argv = sys.argv[at:]
    job = runpy.run_path(sys.argv[0])
    args = job["arguments"]()
    output, before = Path(args.output), timedelta(hours=args.hours_before)
    if not output.exists():
        if args.replay_seconds:
            starts = job["kept_clock"](args.output, args.lead)
            departure = partial(flights.replayed, starts, args.replay_seconds, before)
            before *= args.replay_seconds / timedelta(days=1).total_seconds()
        else:
            departure = partial(flights.in_new_york, args.day)
        flights.write_reminders(output, args.day, departure, before)
        return
    found = pyarrow.dataset.dataset(output, format="parquet").to_table()
    order = random.sample(range(found.num_rows), found.num_rows)
    for file in output.glob("*.parquet"):
        file.unlink()
    pyarrow.parquet.write_table(found.take(order), output / "part-0.parquet")


if __name__ == "__main__":
    main()
