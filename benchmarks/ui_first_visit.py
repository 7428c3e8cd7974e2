"""How long a visit of the operations page takes until the first message is there, beside Airflow's own pages.

    python benchmarks/ui_first_visit.py [--rounds 5]

An Airflow with the data of `make demo-ui`, and Debian's Chromium. In each round each page is visited once with an empty
cache and once with a full one, in a new tab. Wanted: 1.5 s for the page by itself with a full cache. In Airflow's frame
it needs Airflow's own shell first, and compares with Airflow's pages. It prints medians, and the requests of a visit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))

import demo_ui

from services import chromium

WANTED = 1.5
FRAME = "iframe[title^='Delayed']"
ROW = "page.querySelector('#messages tbody tr') !== null"
#: Address, what says that it is there, and the frame to look into.
VISITS = {
    "the page by itself": ("/delayed-deliveries/", ROW, None),
    "the page in Airflow": (demo_ui.PAGE, ROW, FRAME),
    "Airflow's Dags": ("/dags", f"page.body.innerText.includes('{demo_ui.DAG}')", None),
    "Airflow's Assets": ("/assets", "page.querySelector('table, [data-testid=table-list]') !== null", None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    requests: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, demo_ui.running(Path(folder)) as demo, chromium.running() as browser:
        demo_ui.fill(demo)
        page = browser.open(f"{demo.live.url}/auth/login")
        page.log_in("op", demo.live.passwords["op"])
        for number in range(rounds + 1):
            for name, (path, there, frame) in VISITS.items():
                for cached in (False, True):
                    page = browser.open("about:blank")
                    if not cached:
                        page.forget_files()
                    began = time.perf_counter()
                    page.go(f"{demo.live.url}{path}", complete=False)
                    page.frame = frame
                    page.wait_for(there, every=0.02)
                    # the first round warms the server
                    if number:
                        times[name, cached].append(time.perf_counter() - began)
                requests[name] = page.evaluate("page.defaultView.performance.getEntriesByType('resource').length")
    print(f"{'until it is there, in seconds (medians)':42}{'empty cache':>12}{'full cache':>12}{'requests':>10}")
    for name in VISITS:
        cold, warm = (statistics.median(times[name, cached]) for cached in (False, True))
        print(f"{name:42}{cold:12.2f}{warm:12.2f}{requests[name]:10}")
    return 0 if statistics.median(times["the page by itself", True]) <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
