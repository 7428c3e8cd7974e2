"""A stand-in of spark-submit for the example's job: rows that a live Airflow needs, where Spark is not the point.

A day's reminders as the job writes them; where there are some already, the same in another order, as Spark may return
them when it runs again.
"""

from __future__ import annotations

import random
import runpy
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.dataset
import pyarrow.parquet

from support import flights


def main() -> None:
    (at,) = (number for number, word in enumerate(sys.argv) if word.endswith("flight_reminders_job.py"))
    sys.argv = sys.argv[at:]
    args = runpy.run_path(sys.argv[0])["arguments"]()
    output = Path(args.output)
    if not output.exists():
        if args.replay_seconds:
            raise SystemExit("a replay is Spark's")
        if args.onto != args.day:
            raise SystemExit("another date than the flights' own is Spark's")
        flights.write_reminders(output, args.day, timedelta(hours=args.hours_before))
        return
    found = pyarrow.dataset.dataset(output, format="parquet").to_table()
    order = random.sample(range(found.num_rows), found.num_rows)
    for file in output.glob("*.parquet"):
        file.unlink()
    pyarrow.parquet.write_table(found.take(order), output / "part-0.parquet")


if __name__ == "__main__":
    main()
