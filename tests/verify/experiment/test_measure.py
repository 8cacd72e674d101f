"""Variants are checked before they are timed, and what one raises costs the others nothing."""

import pytest
import torch

from flexvarlen.runner.suite import DeviceLost, Options
from flexvarlen.verify.experiment import measure
from flexvarlen.verify.experiment.measure import (
    CheckedVariant,
    check_and_time,
    measure_variants,
)
from tests.verify.planted import KernelError

QUICK = Options(torch.device("cpu"), quick=True, seconds=0.02, say=lambda line: None)


def checked(**fields):
    return CheckedVariant(lambda: None, {"error": 0.0}, **fields)


def test_what_raises_is_a_finding_and_the_others_go_on():
    raised = {
        "oom": torch.OutOfMemoryError("CUDA out of memory"),
        "failed": KernelError("broke\nmore"),
        "unsupported": NotImplementedError("no such head_dim"),
    }

    def check(name):
        if name in raised:
            raise raised[name]
        return checked(wrong="leaks" if name == "wrong" else None)

    found = measure_variants([*raised, "wrong", "ok"], check, QUICK)
    assert [f.status for f in found] == [f.variant for f in found]
    assert found[1].reason == "KernelError: broke"


def test_a_slow_step_is_timed_once_unless_something_compiled_in_it(monkeypatch):
    found = measure_variants(["a"], lambda name: checked(), QUICK, slow_s=-1.0)
    assert found[0].measures["repeats"] == 1
    monkeypatch.setattr(measure, "wall_seconds", lambda call, device: (call(), 5.0)[1])
    again = checked()
    again.call = lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    found = measure_variants(["a"], lambda name: again, QUICK, slow_s=2.0)
    assert found[0].measures["repeats"] >= 3


def test_what_turns_out_wrong_after_timing_is_wrong():
    later = checked(afterwards=lambda: ({"done": 3}, "another packing leaks"))
    (found,) = measure_variants(["a"], lambda name: later, QUICK)
    assert (found.status, found.reason) == ("wrong", "another packing leaks")
    assert found.measures["done"] == 3


@pytest.mark.parametrize("calls", [0, 1], ids=["for its memory", "for its time"])
def test_what_raises_in_a_later_run_keeps_its_measures_and_the_others_theirs(calls):
    done = []

    def fails():
        if len(done) == calls:
            raise torch.OutOfMemoryError("no room")
        done.append(1)

    bad = checked()
    bad.call = fails
    found = measure_variants(["bad", "right"], {"bad": bad, "right": checked()}.get, QUICK)
    assert [(f.variant, f.status) for f in found] == [("bad", "oom"), ("right", "ok")]
    assert found[0].reason.startswith("not timed: ")
    assert found[0].measures["error"] == 0.0
    assert "ms_p50" in found[1].measures


def test_a_lost_device_ends_the_case_without_what_was_right_but_not_timed():
    def check(name):
        if name == "second":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return checked()

    with pytest.raises(DeviceLost, match="second lost the device") as raised:
        measure_variants(["first", "second", "third"], check, QUICK)
    (finding,) = raised.value.findings
    assert (finding.variant, finding.measures["fatal"]) == ("second", True)


def test_second_runs_come_after_all_checks_if_something_is_to_happen_between():
    done = []

    def check(name):
        done.append(f"check {name}")
        found = checked()
        found.call = lambda: done.append(f"run {name}")
        return found

    check_and_time(["a", "b"], check, QUICK, after_checks=lambda: done.append("between"))
    assert done[:5] == ["check a", "check b", "between", "run a", "run b"]
    done.clear()
    check_and_time(["a", "b"], check, QUICK)
    assert done[:4] == ["check a", "run a", "check b", "run b"]
