"""Seconds by op and samples of memory, of an exact step."""

import time

from ooc.layerwise.io_stats import IoStats


def test_an_ops_seconds_leave_out_what_was_run_again_meanwhile() -> None:
    traffic, began = IoStats(), time.perf_counter()
    with traffic.op("back1"):
        with traffic.op("layer0 again"):
            time.sleep(0.1)
        time.sleep(0.02)
    passed = time.perf_counter() - began
    assert traffic.seconds["back1"] >= 0.02
    assert traffic.seconds["layer0 again"] >= 0.1
    assert sum(traffic.seconds.values()) <= passed


def test_samples_stay_few_and_keep_the_most() -> None:
    traffic = IoStats()
    sizes = [number % 7919 for number in range(20_000)]
    for number, size in enumerate(sizes):
        traffic.sample(size, 10**6 - number)
    samples = traffic.samples
    assert len(samples) < 1024
    assert max(sample.memory for sample in samples) == max(sizes)
    assert max(sample.disk for sample in samples) == 10**6
    assert [sample.seconds for sample in samples] == sorted(sample.seconds for sample in samples)
    traffic.restart()
    assert not traffic.samples
