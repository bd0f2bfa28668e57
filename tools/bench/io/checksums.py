"""What comparing chunks with their checksums costs a benchmark: the processor's seconds, and the bytes.

    python -m tools.bench.io.checksums tools.bench.sampled.steps graph.ooc --limit 1500MB --batches 300

Runs the module with its arguments in this process, and prints another JSON line behind what it prints: the seconds of
processor time that all threads spent on checksums, the bytes they compared, and the seconds of the whole process.
"""

import json
import runpy
import sys
import threading
import time
from typing import Any

from ooc.stores.io.chunk_sums import ChunkSums


class Meter:
    """Adds up what all calls of `ChunkSums.see` take."""

    def __init__(self) -> None:
        self.seconds, self.nbytes = 0.0, 0
        self._lock, self._see = threading.Lock(), ChunkSums.see

    def see(self, sums: ChunkSums, begin: int, data: Any) -> None:
        """`ChunkSums.see`, timed."""
        before, pending = time.thread_time(), sums.pending
        self._see(sums, begin, data)
        took = time.thread_time() - before
        with self._lock:
            self.seconds += took
            self.nbytes += len(data) if pending else 0


def main() -> None:
    """Run the module that the command line names, and print JSON."""
    if len(sys.argv) < 2:
        raise SystemExit("give the name of a module to run, and its arguments")
    meter, start = Meter(), time.perf_counter()
    ChunkSums.see = lambda self, begin, data: meter.see(self, begin, data)  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        found = {"checksum_seconds": meter.seconds, "checksum_bytes": meter.nbytes}
        print(json.dumps({**found, "process_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
