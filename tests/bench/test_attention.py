"""Suites of attention, tiny: nothing wrong is timed, padded batches hold what the row holds."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import pytest
import torch

from flexvarlen.bench.suites import suite_of
from flexvarlen.bench.suites.attention import engine
from flexvarlen.bench.suites.attention.engine import measure_attention
from flexvarlen.bench.suites.attention.inputs import Expected, Inputs, serial, switched
from flexvarlen.bench.suites.attention.packed import ours, sdpa_of_one
from flexvarlen.bench.suites.attention.padded import Padding, sdpa
from flexvarlen.bench.suites.attention.padding import PaddingCase
from flexvarlen.bench.suites.attention.tables import measured
from flexvarlen.reference.attention import Results, attend_alone
from flexvarlen.report.records import Record
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import DeviceLost
from tests.bench.quick import CPU, QUICK, records_of
from tests.planted import with_gradient

LENGTHS = (20, 17, 30, 1, 25, 19, 40, 16)


def inputs(lengths=LENGTHS, dtype=torch.float32, causal=True, heads=(2, 2)):
    return Inputs.random(lengths, heads, 16, dtype, CPU, causal)


def statuses(variants, causal=True):
    """Of each variant and pass, measured beside one another."""
    found = measure_attention(inputs(causal=causal), variants, QUICK)
    return {(x.variant, x.pass_): x.status for x in found}


def changed(change):
    """Our sdpa, whose output is `change` of its forward function."""

    def prepare(own, needs_grad):
        right = ours("sdpa")(own, needs_grad)
        return dataclasses.replace(right, forward=lambda: change(right.forward))

    return prepare


def raising(error, only_backward=False):
    """A variant that cannot be prepared; `error` makes what it raises."""

    def prepare(own, needs_grad):
        if needs_grad or not only_backward:
            raise error()
        return ours("sdpa")(own, needs_grad)

    return prepare


def failing_after(calls, error):
    """A function that hands on its first argument, and raises once it was called that often."""
    count = iter(range(1000))

    def call(x, *_):
        if next(count) >= calls:
            raise error()
        return x

    return call


def in_backward(change):
    """A variant whose gradient passes through `change(gradient, x)`."""
    return changed(lambda forward: with_gradient(change)(forward()))


OUT_OF_MEMORY = partial(torch.OutOfMemoryError, "CUDA out of memory")

# --- the engine ----------------------------------------------------------------------------------


def test_what_is_right_is_timed():
    for found in measure_attention(inputs(), {"sdpa": ours("sdpa")}, QUICK):
        assert found.status == "ok"
        assert 0 < found.measures["device_ms_p20"] <= found.measures["device_ms_p80"]
        assert found.measures["tflops"] > 0
        assert ("error_out" in found.measures) == (found.pass_ == "forward")
        assert ("error_dk" in found.measures) == (found.pass_ == "backward")


def test_what_is_wrong_is_not_timed():
    wrong = changed(lambda forward: 1.01 * forward())
    found = measure_attention(inputs(), {"x": wrong}, QUICK)
    assert found[0].status == "wrong"
    assert all("device_ms_p50" not in x.measures for x in found)


def test_an_error_outside_the_sampled_documents_is_found():
    own = inputs()
    expected = Expected(own)
    starts = {0, *torch.tensor(LENGTHS).cumsum(0)[:-1].tolist()}
    start = min(starts - {sample.tokens.start for sample in expected.samples})
    plain = Results(attend_alone(own.q, own.k, own.v, LENGTHS, dtype=torch.float32).out)
    assert expected.why_wrong(plain) is None
    plain.out[start] += 1
    assert "of the whole row differs" in expected.why_wrong(plain)
    plain.out[start] = float("nan")
    assert "of the whole row differs" in expected.why_wrong(plain)


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (lambda: in_backward(lambda gradient, x: 2 * gradient), "ok", "wrong"),
        (lambda: raising(partial(Unsupported, "none"), only_backward=True), "ok", "unsupported"),
        (lambda: raising(OUT_OF_MEMORY), "oom", "oom"),
        (lambda: in_backward(failing_after(0, OUT_OF_MEMORY)), "ok", "oom"),
        # Once others are timed beside it.
        (lambda: in_backward(failing_after(3, OUT_OF_MEMORY)), "ok", "oom"),
    ],
    ids=["wrong_gradient", "no_backward", "no_memory", "no_memory_behind", "no_memory_later"],
)
def test_a_pass_that_fails_leaves_the_other_and_the_other_variants(make, forward, backward):
    found = statuses({"x": make(), "sdpa": ours("sdpa")})
    assert (found["x", "forward"], found["x", "backward"]) == (forward, backward)
    assert found["sdpa", "forward"] == found["sdpa", "backward"] == "ok"


def test_a_variant_that_fails_in_the_timing_leaves_the_others():
    fail = failing_after(4, partial(RuntimeError, "fails later"))
    found = statuses({"sdpa": ours("sdpa"), "x": changed(lambda forward: fail(forward()))})
    assert found["x", "forward"] == "failed"
    assert found["sdpa", "forward"] == "ok"


def test_a_switched_backward_is_deterministic_and_leaves_the_switch_off():
    switch = []

    def look(gradient, x):
        switch.append(torch.are_deterministic_algorithms_enabled())
        return gradient

    assert set(statuses({"x": partial(switched, in_backward(look))}).values()) == {"ok"}
    assert set(switch) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_lost_device_stops_the_run_and_names_the_variant():
    lost = partial(RuntimeError, "CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="x lost the device") as caught:
        statuses({"x": raising(lost)})
    assert all(x.measures == {"fatal": True} for x in caught.value.findings)


def test_the_garbage_collector_runs_again_after_a_failure():
    fails = partial(failing_after(0, partial(RuntimeError, "fails")), None)
    with pytest.raises(RuntimeError, match="fails"):
        engine._timed({"x": fails}, {"x": 1.0}, QUICK, 5, print)
    assert gc.isenabled()


# --- variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_serial_calls_and_padded_batches_give_what_one_call_gives(causal):
    masked = partial(sdpa, masked=True, length=64)
    found = statuses({"serial": serial(sdpa_of_one), "masked": masked}, causal)
    assert set(found.values()) == {"ok"}


def test_a_padded_batch_holds_the_tokens_of_the_row():
    own = inputs()
    padding = Padding.of(own, 64)
    padded = padding.pad(own.q)
    assert padded.shape == (len(LENGTHS), 64, 2, 16)
    assert torch.equal(padding.unpad(padded), own.q)
    assert not padded[1, 17:].any()
    assert padding.real.sum(1).tolist() == list(LENGTHS)


def test_sdpa_without_a_mask_sees_the_padding():
    found = statuses({"x": partial(sdpa, length=64)}, causal=False)
    assert set(found.values()) == {"wrong"}


# --- cases and records ---------------------------------------------------------------------------


def test_the_documents_of_the_pull_request():
    case = PaddingCase("multiples", False)
    assert case.lengths() == (448, 1280, 1856, 960, 704, 512, 1856, 1344)
    assert case.data()["sparsity"] == 0.4531


@pytest.mark.parametrize("name", ["kernels", "varlen-study", "padding"])
def test_a_quick_run_gives_records_and_a_table(name, tmp_path):
    suite = suite_of(name)
    found = records_of(suite, tmp_path, cases=f"^{suite.cases(QUICK)[0].name}$")
    assert not [r for r in found if r.status not in ("ok", "unsupported")]
    assert any(r.case["variant"] == "sdpa" and r.status == "ok" for r in found)
    assert "`sdpa`" in suite.section(found)
    assert all(table.lines for table in suite.page_tables(found))


def test_times_of_two_runs_are_not_compared():
    case = {"tokens": 8, "variant": "fa2", "pass": "forward"}
    where = {"gpu": "NVIDIA H200", "started_utc": "1"}
    first = Record("kernels", case, "ok", None, {"device_ms_p50": 1.0}, where)
    later = dataclasses.replace(
        first, case=case | {"variant": "fa3"}, environment=where | {"started_utc": "2"}
    )
    (line,) = measured([first, later])
    assert list(line.records) == ["fa3"]
