"""The clock beside a trace, on a CPU by a trace that is made up: disagreement is "wrong"."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.bench import clock_check
from flexvarlen.bench.attention.raw_kernels import Prepared
from flexvarlen.bench.clock_check import SUITE, ClockCase, Unreadable, calls_of, clock_cases
from flexvarlen.bench.device_trace import DeviceEvent
from flexvarlen.bench.suite import DeviceLost, Options, suite_of
from flexvarlen.measure import HostAndDevice, summarize
from flexvarlen.rows import Row

OPTIONS = Options(torch.device("cpu"), quick=True)
CASE = ClockCase("tiny", (8, 8), 2, 2, False, head_dim=8)
BACKWARD = ClockCase("tiny", (8, 8), 2, 2, False, True, head_dim=8)
SERIAL = ClockCase("tiny", (8, 8), 2, 2, False, True, head_dim=8, serial=True)
WRITES, KERNELS_US = 3, (300.0, 600.0)


def plain(inputs, needs_grad):
    leaves = inputs.leaves(needs_grad)
    return Prepared(lambda: leaves[0] * leaves[1] + leaves[2], leaves, inputs.cotangent)


def fake_events(calls, kernels=KERNELS_US):
    """A trace: before each call three writes of 90 us, 1 us between any two events."""
    events, now = [], 0.0
    for _ in range(calls):
        for name, took in [*[("write", 90.0)] * WRITES, *((f"k{x}", x) for x in kernels)]:
            events.append(DeviceEvent(name, now, took))
            now += took + 1.0
    return events


@pytest.fixture
def device(monkeypatch):
    """A device on which each call takes 1 ms by the clock, 0.9 ms by its kernels in the trace."""
    state = {"clock_ms": 0.9, "kernels": KERNELS_US}

    def timed(calls, *, device, warmup, repeats):
        ((_, call),) = calls.items()
        timed.empty = call() is None
        timed.repeats = repeats
        ms = summarize([state["clock_ms"]] * repeats)
        return {"": HostAndDevice(ms, ms)}

    def traced(work, device):
        work()
        return fake_events(timed.repeats, () if timed.empty else state["kernels"])

    monkeypatch.setattr(clock_check, "why_not", lambda options: None)
    monkeypatch.setattr(clock_check, "time_host_and_device", timed)
    monkeypatch.setattr(clock_check, "device_events", traced)
    monkeypatch.setattr(clock_check, "RAW", {"varlen": plain})
    return state


def measure(case=CASE, *variants):
    return list(SUITE.measure(case, variants or ["raw:varlen"], OPTIONS))


def test_a_cpu_has_no_second_clock():
    for case in clock_cases():
        findings = SUITE.measure(case, SUITE.variants(case, OPTIONS), OPTIONS)
        assert {finding.status for finding in findings} == {"unsupported"}
        assert all("CPU" in finding.reason for finding in findings)


def test_six_cases_one_of_them_a_backward_and_one_a_call_a_document():
    cases = suite_of("clock-check").cases(OPTIONS)
    assert len({case.name for case in cases}) == len(cases) == 6
    assert sum(case.serial for case in cases) == 1
    assert "raw:nested" in SUITE.variants(cases[0], OPTIONS)
    assert sum(case.backward for case in cases) == 1
    assert {case.data()["tokens"] for case in cases} == {4160, 8 * 4160, 8192, 32_768}


@pytest.mark.parametrize("case", [CASE, BACKWARD, SERIAL])
def test_clocks_that_agree_are_a_row_with_both(device, case):
    (finding,) = measure(case)
    assert (finding.status, finding.pass_) == ("ok", "backward" if case.backward else "forward")
    m = finding.measures
    assert m["ratio"] == pytest.approx(0.9 / 0.901)
    assert m["ratio_of_sum"] == pytest.approx(1.0)
    assert m["trace_ms_p50"] == pytest.approx(0.9)
    assert m["span_ms_p50"] == pytest.approx(0.901)
    assert (m["kernels"], m["calls"]) == (2, clock_check.ROUNDS * clock_check.CALLS)


@pytest.mark.parametrize(("clock_ms", "status"), [(0.94, "ok"), (0.95, "wrong"), (0.85, "wrong")])
def test_a_clock_beyond_five_percent_is_wrong_and_its_row_has_both(device, clock_ms, status):
    device["clock_ms"] = clock_ms
    (finding,) = measure()
    assert finding.status == status
    assert finding.measures["ratio"] == pytest.approx(clock_ms / 0.901)
    if status == "wrong":
        assert "more than 5% apart" in finding.reason
    row = Row("clock-check", CASE.data() | {"variant": "raw:varlen", "pass": "forward"}, status,
              finding.reason, finding.measures, {"gpu": "G", "torch": "2"})  # fmt: skip
    text = SUITE.section([row])
    right = status == "ok"
    assert f"{int(right)} of 1 timings, of 1 cases, agree" in text
    assert ("**disagree**" in text) == (not right)
    assert "| tiny | forward | `raw:varlen` |" in text


def test_what_a_kernel_raises_is_its_row_and_the_others_go_on(device, monkeypatch):
    def missing(inputs, needs_grad):
        raise ImportError("no flash_attn")

    def too_large(inputs, needs_grad):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def strange(inputs, needs_grad):
        raise AssertionError("what a compiler raises")

    known = {"varlen": plain, "fa2": missing, "fa3": too_large, "fa4": strange}
    monkeypatch.setattr(clock_check, "RAW", known)
    found = measure(CASE, "raw:fa2", "raw:fa3", "raw:fa4", "raw:varlen", "raw:x")
    assert {x.variant: x.status for x in found} == {
        "raw:fa2": "unsupported",
        "raw:fa3": "oom",
        "raw:fa4": "failed",
        "raw:varlen": "ok",
        "raw:x": "unsupported",
    }


def test_a_dead_device_ends_the_run(device, monkeypatch):
    def deadly(inputs, needs_grad):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(clock_check, "RAW", {"varlen": deadly})
    with pytest.raises(DeviceLost) as caught:
        measure()
    assert caught.value.findings[0].measures == {"fatal": True}


def test_a_profiler_that_fails_is_a_row_of_each(device, monkeypatch):
    def broken(work, device):
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(clock_check, "device_events", broken)
    (finding,) = measure()
    assert finding.status == "failed"
    assert finding.reason == "an empty call cannot be traced: RuntimeError: CUPTI is in use"


def test_inputs_that_do_not_fit_are_rows_of_every_variant(device, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(clock_check.Inputs, "random", too_large)
    found = measure(BACKWARD, "raw:varlen", "raw:fa2")
    assert [(x.variant, x.status, x.pass_) for x in found] == [
        ("raw:varlen", "oom", "backward"),
        ("raw:fa2", "oom", "backward"),
    ]


def test_a_serial_case_is_a_call_a_document(device, monkeypatch):
    seen = []

    def noting(inputs, needs_grad):
        seen.append(inputs.lengths)
        return plain(inputs, needs_grad)

    monkeypatch.setattr(clock_check, "RAW", {"varlen": noting})
    measure(SERIAL)
    assert seen == [(8,), (8,)]


def test_gaps_between_kernels_are_a_call_s_time(device):
    """Of several kernels the clock sees the span, not the sum."""
    device["kernels"] = (10.0,) * 60
    device["clock_ms"] = 0.66
    (finding,) = measure()
    assert finding.status == "ok"
    assert finding.measures["ratio_of_sum"] == pytest.approx(1.1)


def test_a_trace_that_misses_events_is_no_timing(device):
    device["kernels"] = ()
    (finding,) = measure()
    assert finding.status == "failed"
    assert "no whole number a call" in finding.reason
    assert finding.measures == {}


def test_a_trace_is_told_apart_by_calls():
    events = fake_events(4)
    assert [[e.name for e in x] for x in calls_of(events, 4, WRITES)] == [["k300.0", "k600.0"]] * 4
    with pytest.raises(Unreadable, match="no whole number"):
        calls_of(events[:-1], 4, WRITES)
    with pytest.raises(Unreadable, match="did not see"):
        calls_of([], 4, WRITES)
    mixed = [*fake_events(1, (1.0, 2.0)), *fake_events(1, (2.0, 1.0))]
    with pytest.raises(Unreadable, match="different kernels"):
        calls_of(mixed, 2, WRITES)
