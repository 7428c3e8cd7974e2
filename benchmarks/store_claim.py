"""Claiming and removing what is due, without a broker: this package beside procrastinate, pgqueuer and pgmq.

    python benchmarks/store_claim.py [--rounds 5] [--rows 10000000 [--scattered]] [--ours]
    python benchmarks/store_claim.py [--rounds 5] --beside CHECKOUT

Bodies of 200 bytes, 500 a claim, one process; a private PostgreSQL with fsync on, and a database of its own for each
contestant in each round, filled, vacuumed and checkpointed before; the rounds alternate. Ours is the dispatcher as the
operator runs it, with a transport that confirms at once: what goes fast it claims and removes by up to ten times 500 in
one transaction, while it sends what it claimed before; each id is remembered. procrastinate and pgqueuer keep what
was done too. pgmq keeps nothing when it deletes, and all when it archives.

With --rows, 100,000 messages fall due in a table of so many, in which they lie together, as if stored in turn; with
--scattered each in another page. (10,000,000 rows take about 6 GB of disk, and some minutes to fill.) "snapshot": a
transaction elsewhere stays open meanwhile, so that nothing of what is removed can be cleared away.

With --beside, another checkout of this repository, such as one of the commit before a change, claims in turn with this
one, and nothing else does.

CPU is user and system time, the server's that of all its processes.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from store_fill import BLOCK
from store_peers import (
    OURS,
    PGMQ,
    PGQUEUER,
    PROCRASTINATE,
    ROOT,
    Rounds,
    Server,
    alternating,
    long_snapshot,
    measured,
    verdict,
    work,
)
from store_peers import server as running

#: What procrastinate claims of it: it takes one at a time.
FEW = 2000
SNAPSHOT, MANY, BESIDE = "ours, a snapshot open", "ours, of many rows", "ours, the other checkout"
FETCH = "procrastinate, fetch and finish"
QUERIES, WORKER = "pgqueuer, dequeue and log", "pgqueuer, its worker"
DELETE, ARCHIVE = "pgmq, read and delete", "pgmq, read and archive"


def ours(server: Server, rounds: Rounds, number: int, *, name: str, snapshot: bool = False, root: Path = ROOT) -> None:
    with server.database() as url, ExitStack() as stack:
        work(OURS, "fill", url, BLOCK, server, "0", root=root)
        server.settle(url)
        if snapshot:
            stack.enter_context(long_snapshot(url))
        rounds.note(number, name, measured(OURS, "claim", url, BLOCK, server, "0", root=root))


def peer(server: Server, rounds: Rounds, number: int, *, name: str, who: str, action: str, count: int) -> None:
    with server.database() as url:
        work(who, "fill", url, BLOCK, server)
        server.settle(url)
        rounds.note(number, name, measured(who, action, url, count, server))


def many(server: Server, rounds: Rounds, number: int, *, name: str, url: str) -> None:
    """The next block of a table that is there already."""
    rounds.note(number, name, measured(OURS, "claim", url, BLOCK, server, str(number)))
    server.settle(url)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=0, help="also in a table of so many rows, such as 10000000")
    parser.add_argument("--scattered", action="store_true", help="what falls due lies all over that table")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--beside", type=Path, help="another checkout of this repository, to compare with")
    options = parser.parse_args()
    if options.rows and options.rows < (options.rounds + 1) * BLOCK:
        parser.error(f"--rows must be at least {(options.rounds + 1) * BLOCK}: each round claims {BLOCK} of them")
    rounds = Rounds()
    with running() as server, ExitStack() as stack:
        contestants = [
            partial(ours, server, rounds, name=OURS),
            partial(ours, server, rounds, name=SNAPSHOT, snapshot=True),
        ]
        peers = [
            partial(peer, server, rounds, name=FETCH, who=PROCRASTINATE, action="claim", count=FEW),
            partial(peer, server, rounds, name=QUERIES, who=PGQUEUER, action="claim", count=BLOCK),
            partial(peer, server, rounds, name=WORKER, who=PGQUEUER, action="work", count=BLOCK),
            partial(peer, server, rounds, name=DELETE, who=PGMQ, action="claim", count=BLOCK),
            partial(peer, server, rounds, name=ARCHIVE, who=PGMQ, action="archive", count=BLOCK),
        ]
        contestants += [] if options.ours else peers
        if options.beside:
            contestants[1:] = [partial(ours, server, rounds, name=BESIDE, root=options.beside.resolve())]
        if options.rows:
            url = stack.enter_context(server.database())
            print(f"filling a table with {options.rows:,} rows ...", file=sys.stderr, flush=True)
            work(OURS, "fill", url, options.rows, server, "0", *(["scattered"] if options.scattered else []))
            server.settle(url)
            contestants.append(partial(many, server, rounds, name=MANY, url=url))
        for number in range(options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
    return 0 if report(rounds, options.rows) else 1


def report(rounds: Rounds, rows: int) -> bool:
    rounds.table()
    ratios: list[tuple[str, str, float | None, str, float]] = [
        (OURS, FETCH, 100, "times procrastinate's fetch and finish", 1),
        (OURS, QUERIES, None, "times pgqueuer's bare queries", 1),
        (OURS, WORKER, 3, "times pgqueuer's worker", 1),
        (OURS, DELETE, 1, "times pgmq's read and delete", 1),
        (OURS, ARCHIVE, None, "times pgmq's read and archive", 1),
        (SNAPSHOT, OURS, 100 / 3, "% of its rate with a snapshot open", 100),
        (MANY, OURS, 85, f"% of its rate of {BLOCK:,} rows in one of {rows:,}", 100),
    ]
    good = [
        rounds.ratio(one, other, wanted, text, factor)
        for one, other, wanted, text, factor in ratios
        if one in rounds.found and other in rounds.found
    ]
    if BESIDE in rounds.found:
        pairs = zip(rounds.found[BESIDE], rounds.found[OURS], strict=True)
        costs = [100 * (one.client_us + one.server_us) / (own.client_us + own.server_us) for one, own in pairs]
        good.append(verdict(costs, 97, "% of the CPU of ours is that of the other checkout"))
    return all(good)


if __name__ == "__main__":
    sys.exit(main())
