"""What a run spent, put together over its processes."""

from typing import Any

from ooc.training.summary import account, add, nothing_spent


def spent(**counts: Any) -> dict[str, Any]:
    stages = {"consumer": {"work_s": 1.0, "wait_s": 0.0, "busy_s": 1.0, "items": 4}}
    return {**nothing_spent(), "steps": 4, "train_seconds": 2.0, "stages": stages, **counts}


def test_the_hit_rate_counts_all_processes() -> None:
    whole = add(spent(rows_read=30, rows_asked=100), spent(rows_read=10, rows_asked=100))
    assert account(whole, 8, 512, None)["actual"]["hit_rate"] == 0.8
    assert account(whole, 8, 0, None)["actual"]["hit_rate"] is None


def test_edges_read_while_sampling_are_not_taken_for_features() -> None:
    stages = {"read": {"work_s": 2.0, "wait_s": 0.0, "busy_s": 2.0, "items": 4}}
    found = spent(bytes_read=90_000, edge_bytes_read=30_000, rows_read=100, stages=stages)
    actual = account(add(found, found), 8, 400, None)["actual"]
    assert (actual["bytes_read"], actual["edge_bytes_read"]) == (180_000, 60_000)
    assert (actual["read_amplification"], actual["read_bytes_per_second"]) == (1.5, 30_000)


def test_a_run_that_began_before_requests_were_counted_goes_on_without_a_hit_rate() -> None:
    before = spent(rows_read=90)
    del before["rows_asked"]
    del before["stages"]["consumer"]["busy_s"]
    actual = account(add(before, spent(rows_read=10, rows_asked=50)), 8, 512, None)["actual"]
    assert actual["hit_rate"] is None
    assert actual["rows_read"] == 100
