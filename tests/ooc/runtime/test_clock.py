"""Clocks and traces: waiting is not work, spans tell when, and the trace file says the same as the clocks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.report.gantt import gantt_figure, section
from ooc.report.page import svg_of
from ooc.runtime.clock import MOST_SPANS, Clock, Span, lanes, noting_waits, read_trace, waiting, write_trace
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.stores.errors import ConfigError
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20).map(sorted))
def test_work_and_waiting_share_the_time(at: list[float]) -> None:
    clock, waits = Clock(), list(zip(at[1:-1:2], at[2:-1:2], strict=False))
    clock.worked(3, at[0], at[-1], waits)
    assert clock.work_s + clock.wait_s == pytest.approx(at[-1] - at[0])
    assert clock.wait_s == pytest.approx(sum(end - begin for begin, end in waits))
    covered = sum(span.end - span.start for span in clock.spans)
    assert covered == pytest.approx(clock.work_s, abs=0.5e-3 * len(waits) + 1e-9)
    assert all(a.end <= b.start for a, b in pairwise(clock.spans))


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 3)), min_size=1, max_size=9))
def test_threads_at_work_at_once_keep_a_stage_busy_once(work: list[tuple[float, float]]) -> None:
    clock = Clock()
    for start, length in sorted(work, key=lambda each: sum(each)):  # booked as they end
        clock.worked(0, start, start + length, [])
    at = sorted({edge for start, length in work for edge in (start, start + length)})
    covered = sum(b - a for a, b in pairwise(at) if any(s <= a and b <= s + n for s, n in work))
    assert clock.busy_s == pytest.approx(covered, abs=1e-6)


def test_spans_are_bounded() -> None:
    clock = Clock()
    for item in range(MOST_SPANS + 5):
        clock.worked(item, item, item + 0.5, [])
    assert [span.item for span in clock.spans] == list(range(MOST_SPANS))


def test_waits_are_noted_by_the_innermost_stage_only() -> None:
    with noting_waits() as outer:
        with noting_waits() as inner, waiting():
            pass
        assert (len(outer), len(inner)) == (0, 1)
    with waiting():
        pass
    assert len(outer) == 0


def test_a_stage_that_waits_for_another_pipeline_does_not_work_meanwhile() -> None:
    slow = Pipeline(range(4), [Stage("slow", lambda item: _busy() or item)], max_bytes=1)
    fast = Pipeline(slow, [Stage("fast", lambda item: item)], max_bytes=1, before=slow)
    assert list(fast) == [0, 1, 2, 3]
    assert fast.times()["source"]["wait_s"] > fast.times()["source"]["work_s"]


def _busy() -> None:
    total = np.zeros(1000)
    for _ in range(20_000):
        total += 1


spans_of_stages = st.dictionaries(
    st.sampled_from(["sample", "group", "read", "consumer"]),
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50), st.floats(1e-3, 9)), min_size=1, max_size=12),
    min_size=1,
).map(lambda stages: {name: [Span(item, 7, s, s + d) for item, s, d in each] for name, each in stages.items()})


@given(spans_of_stages)
def test_lanes_hold_no_two_spans_at_once(spans: dict[str, list[Span]]) -> None:
    for each in spans.values():
        chosen = lanes(each)
        for lane in set(chosen):
            own = sorted(span[2:] for span, k in zip(each, chosen, strict=True) if k == lane)
            assert all(a[1] <= b[0] for a, b in pairwise(own))
        most = max(sum(a.start <= b.start < a.end for a in each) for b in each)
        assert max(chosen) + 1 == most, "as many lanes as spans at once"


@settings(deadline=None, max_examples=25)
@given(spans_of_stages)
def test_any_spans_make_a_chart(spans: dict[str, list[Span]]) -> None:
    start, end = section(spans)
    assert start < end
    ElementTree.fromstring(svg_of(gantt_figure(spans)))


def test_the_chart_shows_whole_sweeps_though_they_are_read_in_pieces() -> None:
    pieces = [Span(i, 0, i * 0.01, i * 0.01 + 0.009) for i in range(600)]
    sums = [Span(k, 1, k * 1.0, k + 0.9) for k in range(6)]
    spans = {"group": [Span(0, 2, 0.0, 0.1)], "read": pieces, "sum": sums}
    assert section(spans) == pytest.approx((1.0, 3.9))


def test_the_trace_of_a_run_comes_back(make_store: MakeStore, tmp_path: Path) -> None:
    train(configure(make_store(), tmp_path / "run", epochs=2))
    events: list[dict[str, Any]] = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    spans = read_trace(tmp_path / "run").spans
    assert set(spans) == {"sample", "group", "read", "collate", "consumer"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len({span.item for span in spans["sample"]}) == summary["steps_per_epoch"]
    write_trace(tmp_path, spans)
    again = read_trace(tmp_path).spans
    for stage, each in spans.items():
        np.testing.assert_allclose([s[2:] for s in again[stage]], [s[2:] for s in each], atol=1e-9)


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == ({}, [])
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"trace\.json: not a trace"):
        read_trace(tmp_path)


def test_a_trace_of_one_superbatch_shows_its_batches() -> None:
    """And of few batches all of it, also what came before them."""
    spans = {"group": [Span(0, 1, 0.0, 0.1)], "read": [Span(0, 2, 0.1, 0.4)]}
    few, many = ([Span(k, 3, 0.5 + 0.1 * k, 0.58 + 0.1 * k) for k in range(count)] for count in (4, 60))
    assert section({**spans, "consumer": few}) == pytest.approx((0.0, 0.88))
    start, end = section({**spans, "consumer": many})
    assert 0.5 < start < end < 6.5
