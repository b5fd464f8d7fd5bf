"""How long a ledger of 100,000 lines takes: written, checked line by line, composed, and one step more.

python benchmarks/ledger.py --lines 100000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

from confide.privacy.accountant import epsilon
from confide.privacy.events import Event
from confide.privacy.ledger import Ledger

EVENT = Event("poisson", 0.01, 100, 10_000, 1.0, 0.5)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lines", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    epsilon([EVENT], 1e-6, "pld")  # the import
    for lines in options.parse_args().lines:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.jsonl"
            book, times = Ledger.create(path, {"fresh_cohorts": True}), list[float]()
            with mock.patch("os.fsync"):  # disks differ, and what is measured is the processor's time
                for step in range(lines):
                    book.record(step, EVENT, "here")
                times.append(time.process_time())
                held = Ledger.read(path)
                times.append(time.process_time())
                epsilon(held.counted(), 1e-6, "pld")
                times.append(time.process_time())
                held.record(lines, EVENT, "here")
                times.append(time.process_time())
                epsilon(held.counted(), 1e-6, "pld")
                times.append(time.process_time())
        read, composed, line, again = (1e3 * (b - a) for a, b in pairwise(times))
        print(
            f"{lines:>8,} lines: checked in {read:.1f} ms, composed by PLD in {composed:.1f} ms; one line more "
            f"{line:.3f} ms, epsilon with it {again:.1f} ms"
        )


if __name__ == "__main__":
    main()
