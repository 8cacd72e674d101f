"""Attention measured: what is not right is not timed, and one variant's trouble is its own."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch

from flexvarlen.bench.attention import check as attention_check
from flexvarlen.bench.attention import clock as attention_clock
from flexvarlen.bench.attention import engine as attention
from flexvarlen.bench.attention.clock import MAX_REPEATS, MIN_REPEATS, time_calls
from flexvarlen.bench.attention.engine import PASSES, measure_attention, ours, raw, ways_of
from flexvarlen.bench.attention.raw_kernels import (
    RAW,
    Inputs,
    Prepared,
    Unsupported,
    sdpa_of_one,
    serial,
)
from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.bench.suite import DeviceLost, Options, suite_of
from flexvarlen.measure import HostAndDevice, summarize
from flexvarlen.plotstyle import style_of
from flexvarlen.rows import read_rows

CPU = torch.device("cpu")
OPTIONS = Options(CPU, quick=True, seconds=0.01)
LENGTHS = (20, 33, 17)
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


@pytest.fixture
def inputs():
    return Inputs.random(LENGTHS, (4, 2), 16, torch.float32, CPU, causal=True)


def measured(inputs, ways, **more):
    findings = measure_attention(inputs, ways, OPTIONS, **more)
    return {(finding.variant, finding.pass_): finding for finding in findings}


def statuses(found, variant):
    return [found[variant, pass_].status for pass_ in PASSES]


def bent(*, out=None, gradients=None, backward=None):
    """Prepares sdpa's call, with something done to what it gives."""

    class Bent(Prepared):
        def backward(self, out):
            if backward is not None:
                backward()
            found = super().backward(out)
            return found if gradients is None else tuple(gradients(x) for x in found)

    def prepare(inputs, needs_grad):
        right = ours("sdpa")(inputs, needs_grad)

        def forward():
            found = right.forward()
            return found if out is None else out(found)

        return Bent(forward, right.leaves, right.cotangent)

    return prepare


def raises(error):
    def call(*arguments):
        raise error

    return call


# --- what is right -------------------------------------------------------------------------------


def test_what_is_right_is_timed_forward_and_backward_apart(inputs):
    ways = {"auto": ours("auto"), "sdpa": ours("sdpa"), "reference": ours("reference")}
    findings = measure_attention(inputs, ways, OPTIONS, peak=True)
    assert [(x.variant, x.pass_) for x in findings] == [(v, p) for v in ways for p in PASSES]
    for finding in findings:
        assert (finding.status, finding.reason) == ("ok", None)
        m = finding.measures
        assert 0 < m["device_ms_p20"] <= m["device_ms_p50"] <= m["device_ms_p80"]
        assert m["device_repeats"] >= MIN_REPEATS
        errors = {name for name in m if name.startswith("error_")}
        backward = finding.pass_ == "backward"
        assert errors == ({"error_dq", "error_dk", "error_dv"} if backward else {"error_out"})
        assert m["peak_mib"] is None
        assert (m["num_docs"], m["longest"], m["capacity"]) == (3, 33, 4)
        assert "timed_alone" not in m
        assert "bits_equal" not in m
        pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
        work = 4 * pairs * 16 * 4 * (2.5 if backward else 1)
        assert m["tflops"] == pytest.approx(work / m["device_ms_p50"] / 1e9)


def test_a_forward_alone_asks_for_no_gradients(inputs):
    asked = []

    def prepare(inputs, needs_grad):
        asked.append(needs_grad)
        return ours("sdpa")(inputs, needs_grad)

    (finding,) = measure_attention(inputs, {"x": prepare}, OPTIONS, passes=("forward",))
    assert (finding.pass_, finding.status) == ("forward", "ok")
    assert not any(asked)


def test_serial_calls_give_the_answer_of_the_batch(inputs):
    ways = {"batch": ours("sdpa"), "ours": serial(ours("sdpa")), "raw": serial(sdpa_of_one)}
    found = measured(inputs, ways)
    for variant in ways:
        assert statuses(found, variant) == ["ok", "ok"]
        assert found[variant, "backward"].measures["num_docs"] == 3
    one = serial(sdpa_of_one)(inputs, True)
    outs = one.forward()
    assert [len(out) for out in outs] == list(LENGTHS)
    assert [len(x) for x in one.answer(outs, one.backward(outs))] == [sum(LENGTHS)] * 4
    with pytest.raises(Unsupported, match="one document at a time"):
        sdpa_of_one(inputs, True)


def test_equal_documents_are_those_of_a_list_of_lengths():
    """So that rows of before and after are of the same tensors."""
    found = Inputs.equally_long(3, 24, 2, 16, "bfloat16", CPU, False)
    right = Inputs.random((24,) * 3, (2, 2), 16, torch.bfloat16, CPU, False)
    assert (found.lengths, found.causal) == (right.lengths, right.causal)
    for name in ("q", "k", "v", "cotangent", "cu_seqlens"):
        assert torch.equal(getattr(found, name), getattr(right, name))


def test_raw_nested_repeats_k_and_v_in_each_call_as_the_backend_does(monkeypatch):
    """Those of a step are new: a call that was prepared on others must see them."""
    inputs = Inputs.random(LENGTHS, (4, 2), 16, torch.float32, CPU, causal=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        prepared = RAW["nested"](inputs, False)
    before = prepared.forward()
    _, k, v = prepared.leaves
    assert k.shape == v.shape == inputs.k.shape
    v.mul_(2)
    torch.testing.assert_close(prepared.forward(), 2 * before)


# --- what is not ---------------------------------------------------------------------------------


def test_a_wrong_output_is_not_timed(inputs):
    ways = {"good": ours("sdpa"), "bad": bent(out=lambda x: 1.01 * x)}
    found = measured(inputs, ways)
    assert statuses(found, "good") == ["ok", "ok"]
    assert statuses(found, "bad") == ["wrong", "wrong"]
    for pass_ in PASSES:
        assert "relative error of out" in found["bad", pass_].reason
        assert not any("_ms_" in name for name in found["bad", pass_].measures)
    assert found["bad", "forward"].measures["error_out"] > 0.009


def test_wrong_gradients_leave_the_forward_its_time(inputs):
    found = measured(inputs, {"bad": bent(gradients=lambda x: 1.01 * x)})
    assert statuses(found, "bad") == ["ok", "wrong"]
    assert "relative error of dq" in found["bad", "backward"].reason
    assert "device_ms_p50" not in found["bad", "backward"].measures


def test_unchecked_answers_are_timed_only_where_that_is_asked_for(inputs):
    found = measured(inputs, {"bad": bent(out=lambda x: 2 * x)}, exact=False)
    assert statuses(found, "bad") == ["ok", "ok"]
    assert "error_out" not in found["bad", "forward"].measures


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AssertionError("no such head_dim"), "failed"),
        (NotImplementedError("not yet"), "unsupported"),
        (torch.OutOfMemoryError("no room"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "oom"),
    ],
    ids=["failed", "unsupported", "oom", "oom on the CPU"],
)
def test_a_backward_that_raises_leaves_the_forward_its_time(inputs, error, status):
    found = measured(inputs, {"bad": bent(backward=raises(error)), "good": ours("sdpa")})
    assert statuses(found, "bad") == ["ok", status]
    assert str(error) in found["bad", "backward"].reason
    assert statuses(found, "good") == ["ok", "ok"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unsupported("no such kernel"), "unsupported"),
        (ImportError("no such package"), "unsupported"),
        (KeyError("what a compiler raises"), "failed"),
        (torch.OutOfMemoryError("no room"), "oom"),
    ],
    ids=["refused", "missing", "failed", "oom"],
)
def test_what_cannot_be_prepared_is_a_finding(inputs, error, status):
    found = measured(inputs, {"good": ours("sdpa"), "bad": raises(error)})
    assert statuses(found, "bad") == [status, status]
    assert error.args[0] in found["bad", "forward"].reason
    assert statuses(found, "good") == ["ok", "ok"]


def test_without_a_backward_the_forward_is_prepared_alone(inputs):
    def prepare(inputs, needs_grad):
        if needs_grad:
            raise Unsupported("there is no backward")
        return ours("sdpa")(inputs, needs_grad)

    found = measured(inputs, {"half": prepare})
    assert statuses(found, "half") == ["ok", "unsupported"]
    assert found["half", "backward"].reason == "there is no backward"
    (finding,) = measure_attention(inputs, {"half": prepare}, OPTIONS, passes=("backward",))
    assert finding.status == "unsupported"


def test_no_room_for_the_exact_answers_is_said_of_all(inputs, monkeypatch):
    monkeypatch.setattr(attention_check, "Oracle", raises(torch.OutOfMemoryError("no room")))
    found = measured(inputs, {"a": ours("sdpa"), "b": ours("sdpa")})
    assert {finding.status for finding in found.values()} == {"oom"}
    assert len(found) == 4
    assert "room for the exact answers" in found["b", "backward"].reason


def test_a_name_that_is_not_known_is_refused():
    known = {"sdpa": ours("sdpa"), "raw:fa2": raw("fa2")}
    assert list(ways_of(("raw:fa2",), known)) == ["raw:fa2"]
    with pytest.raises(ValueError, match="variants must be of sdpa, raw:fa2, got 'fa9'"):
        ways_of(("sdpa", "fa9"), known)


# --- bits ----------------------------------------------------------------------------------------


def restless(*, deterministic):
    """Right, but each backward's bits are others."""
    calls = []

    class Restless(Prepared):
        def backward(self, out):
            calls.append(None)
            return tuple(x * (1 + len(calls) * 2**-23) for x in super().backward(out))

    def prepare(inputs, needs_grad):
        right = ours("sdpa")(inputs, needs_grad)
        return Restless(right.forward, right.leaves, right.cotangent, deterministic=deterministic)

    return prepare


def test_a_deterministic_backward_must_repeat_its_bits(inputs):
    ways = {
        "promised": restless(deterministic=True),
        "ordinary": restless(deterministic=False),
        "kept": ours("sdpa", deterministic=True),
    }
    found = measured(inputs, ways, bits=True)
    assert statuses(found, "promised") == ["ok", "wrong"]
    assert "did not all give the same bits" in found["promised", "backward"].reason
    assert "device_ms_p50" not in found["promised", "backward"].measures
    assert statuses(found, "ordinary") == ["ok", "ok"]
    bits = [found[name, "backward"].measures["bits_equal"] for name in ways]
    assert bits == [False, False, True]
    assert "bits_equal" not in found["ordinary", "forward"].measures


def test_a_promise_is_checked_unasked(inputs):
    found = measured(inputs, {"promised": restless(deterministic=True)})
    assert statuses(found, "promised") == ["ok", "wrong"]


def test_the_raw_kernel_is_asked_for_determinism_where_it_takes_that(inputs):
    with pytest.raises(Unsupported, match="raw:flex takes no `deterministic`"):
        raw("flex", deterministic=True)(inputs, False)


# --- memory --------------------------------------------------------------------------------------


class Memory:
    """A device of so many bytes, held by what is alive."""

    def __init__(self, size):
        self.size, self.held = size, weakref.WeakKeyDictionary()

    def allocated(self, options=None):
        return sum(self.held.values())

    def prepare(self, takes, inputs, needs_grad):
        class Buffer:
            pass

        right, buffer = ours("sdpa")(inputs, needs_grad), Buffer()
        if self.allocated() + takes > self.size:
            raise torch.OutOfMemoryError("no room")
        self.held[buffer] = takes

        def forward(buffer=buffer):
            return right.forward()

        return Prepared(forward, right.leaves, right.cotangent)


def test_what_does_not_fit_beside_the_others_is_timed_alone(inputs, monkeypatch):
    """Neither are the small ones lost, nor the large one, whichever comes first."""
    memory = Memory(10)
    monkeypatch.setattr(attention_check, "allocated", memory.allocated)
    takes = {"small": 2, "large": 9, "other": 3, "larger": 11}
    ways = {name: partial(memory.prepare, size) for name, size in takes.items()}
    found = measured(inputs, ways)
    alone = {key[0] for key, finding in found.items() if finding.measures.get("timed_alone")}
    assert statuses(found, "larger") == ["oom", "oom"]
    for name in ("small", "other", "large"):
        assert statuses(found, name) == ["ok", "ok"]
    assert alone == {"large"}


def raises_when_timed(error):
    """Right, until it was checked and tried out."""
    calls = []

    def prepare(inputs, needs_grad):
        right = ours("sdpa")(inputs, needs_grad)

        def forward():
            calls.append(None)
            if len(calls) > 3:
                raise error
            return right.forward()

        return Prepared(forward, right.leaves, right.cotangent)

    return prepare


def test_a_variant_that_fails_when_it_is_timed_fails_alone(inputs):
    prepare = raises_when_timed(AssertionError("tired"))
    found = measured(inputs, {"tired": prepare, "good": ours("sdpa")})
    assert statuses(found, "tired") == ["failed", "failed"]
    assert "tired" in found["tired", "forward"].reason
    assert statuses(found, "good") == ["ok", "ok"]


# --- a dead device -------------------------------------------------------------------------------

DEAD = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_kernel_that_kills_the_device_ends_the_case(inputs, where):
    bad = bent(out=raises(DEAD)) if where == "forward" else bent(backward=raises(DEAD))
    refused = raises(Unsupported("refused"))
    with pytest.raises(DeviceLost, match=r"bad killed the device.*run again") as caught:
        measured(inputs, {"refused": refused, "good": ours("sdpa"), "bad": bad})
    found = {(x.variant, x.pass_): x for x in caught.value.findings}
    assert statuses(found, "refused") == ["unsupported", "unsupported"]
    assert statuses(found, "bad") == ["failed", "failed"]
    assert all(found["bad", pass_].measures["fatal"] for pass_ in PASSES)
    assert ("good", "forward") not in found  # it was not timed


def test_of_a_death_while_timing_the_one_that_ran_is_marked_alone(inputs):
    """The others have no row, so that a run that goes on measures them."""
    prepare = raises_when_timed(DEAD)
    ways = {"a": ours("sdpa"), "deadly": prepare, "b": ours("reference")}
    with pytest.raises(DeviceLost, match="timing killed the device in a call of deadly") as caught:
        measured(inputs, ways)
    found = [(x.variant, x.pass_, x.measures["fatal"]) for x in caught.value.findings]
    assert found == [("deadly", pass_, True) for pass_ in PASSES]


def test_compiled_kernels_do_not_depend_on_the_cases_before(inputs):
    """Dynamo makes the first shape static and those after it dynamic."""
    sizes = []

    def backend(graph, examples):
        sizes.append(all(type(x) is int for y in examples for x in getattr(y, "shape", ())))
        return graph

    double = torch.compile(lambda x: 2 * x, backend=backend)

    def prepare(inputs, needs_grad):
        right = ours("sdpa")(inputs, needs_grad)
        return Prepared(lambda: double(right.forward()) / 2, right.leaves, right.cotangent)

    for lengths in ((20, 33), (40, 9, 5), (31, 31)):
        one = Inputs.random(lengths, (2, 2), 8, torch.float32, CPU, causal=True)
        (found,) = measure_attention(one, {"x": prepare}, OPTIONS, passes=("forward",))
        assert found.status == "ok", found.reason
    assert sizes == [True, True, True]


def test_what_the_exact_answers_raise_is_said_of_all(inputs, monkeypatch):
    monkeypatch.setattr(attention_check, "Oracle", raises(KeyError("no such engine")))
    found = measured(inputs, {"a": ours("sdpa"), "b": ours("sdpa")})
    assert {finding.status for finding in found.values()} == {"failed"}
    assert "there are no exact answers: KeyError" in found["a", "forward"].reason
    monkeypatch.setattr(attention_check, "Oracle", raises(DEAD))
    with pytest.raises(DeviceLost, match="the exact answers killed the device"):
        measured(inputs, {"a": ours("sdpa")})


# --- the clock -----------------------------------------------------------------------------------


def test_calls_on_the_cpu_are_timed_in_turn():
    order = []
    calls = {name: partial(order.append, name) for name in "abc"}
    timings = time_calls(calls, dict.fromkeys(calls, 1e-6), OPTIONS)
    assert {x["device_repeats"] for x in timings.values()} == {MAX_REPEATS}
    assert not any(name.startswith("host") for x in timings.values() for name in x)
    each = len(order) // (3 * MAX_REPEATS)
    rounds = [order[i : i + 3 * each] for i in range(0, len(order), 3 * each)]
    assert all(set(one) == set("abc") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1  # in an order of its own each


def test_more_repeats_may_be_asked_for_and_take_their_time():
    calls, seconds = {"a": lambda: None}, {"a": 1e-4}
    timings = time_calls(calls, seconds, OPTIONS, most=100)
    assert timings["a"]["device_repeats"] == 100
    assert time_calls(calls, {"a": 1e-3}, OPTIONS, most=100)["a"]["device_repeats"] < 30


def test_slow_calls_are_timed_a_few_times():
    timings = time_calls({"a": lambda: None}, {"a": 10.0}, OPTIONS)
    assert timings["a"]["device_repeats"] == MIN_REPEATS


@pytest.mark.parametrize(("seconds", "lead_in"), [(1e-4, 1), (1e-2, 0)])
def test_on_a_gpu_host_and_device_are_told_apart(monkeypatch, seconds, lead_in):
    asked = []

    def timed(calls, **options):
        asked.append(options)
        return {name: HostAndDevice(summarize([1.0]), summarize([2.0])) for name in calls}

    monkeypatch.setattr(attention_clock, "time_host_and_device", timed)
    options = Options(torch.device("cuda"), seconds=1.0)
    found = time_calls({"a": lambda: None}, {"a": seconds}, options)
    assert (found["a"]["host_ms_p50"], found["a"]["device_ms_p50"]) == (1.0, 2.0)
    assert asked[0]["lead_in"] == lead_in


def test_a_slow_call_takes_no_repeats_from_the_others(monkeypatch):
    asked = []

    def timed(calls, *, repeats, **_):
        asked.append(repeats)
        return {name: HostAndDevice(summarize([1.0]), summarize([2.0])) for name in calls}

    monkeypatch.setattr(attention_clock, "time_host_and_device", timed)
    seconds = dict.fromkeys("abcdefgh", 1e-3) | {"slow": 1.0}
    options = Options(torch.device("cuda"), seconds=1.0)
    time_calls(dict.fromkeys(seconds, lambda: None), seconds, options)
    (repeats,) = asked
    assert repeats["slow"] == MIN_REPEATS
    assert all(20 < repeats[name] <= MAX_REPEATS for name in "abcdefgh")


@pytest.mark.parametrize(("host_ms", "bound"), [(2.1, False), (2.3, True)])
def test_a_device_that_waits_for_the_host_is_said(inputs, monkeypatch, host_ms, bound):
    """Its time is the host's: no TFLOP/s follow from it."""

    def timed(calls, **options):
        return {name: HostAndDevice(summarize([host_ms]), summarize([2.0])) for name in calls}

    monkeypatch.setattr(attention_clock, "time_host_and_device", timed)
    found = time_calls({"a": lambda: None}, {"a": 1.0}, Options(torch.device("cuda")))["a"]
    assert ("host_bound" in found) == attention_clock.host_bound(found) == bound
    monkeypatch.setattr(
        attention, "time_calls", lambda calls, *a, **k: {x: dict(found) for x in calls}
    )
    measures = measured(inputs, {"sdpa": ours("sdpa")})["sdpa", "forward"].measures
    assert ("tflops" in measures) == (not bound)


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [Options(torch.device("cuda")), Options(CPU, quick=True)], ids=["cuda", "cpu"]
)
@pytest.mark.parametrize("name", ["scaling", "sdpa-backends", "varlen-study", "padding", "kernels"])
def test_no_two_variants_of_a_figure_look_alike(name, options):
    """Colour and marker tell kernels apart; forms of one kernel, fill or the kind of line."""
    suite = suite_of(name)
    variants = {
        variant.partition("@")[0]
        for case in suite.cases(options)
        for variant in suite.variants(case, options)
    }
    for one, other in combinations(sorted(variants), 2):
        a, b = style_of(one), style_of(other)
        assert a != b, (one, other)
        if one.rpartition(":")[2] != other.rpartition(":")[2]:
            assert (a.color, a.marker) != (b.color, b.marker), (one, other)


def test_a_call_of_torchs_flash_has_the_colour_of_its_kernel_and_not_of_fa2s():
    assert style_of("sdpa:flash").color == style_of("varlen").color


@pytest.mark.parametrize("name", ["kernels", "mask-build"])
def test_committed_figures_keep_their_names(name):
    rows = read_rows([RESULTS / f"{name}-h200.jsonl"])
    assert figure_path(RESULTS, name, rows).is_file()


def test_a_figure_is_saved_in_a_new_folder_and_closed(tmp_path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, _ = pyplot.subplots()
    path = save_figure(figure, tmp_path / "new" / "one.png")
    assert path.stat().st_size > 1000
    assert not pyplot.fignum_exists(figure.number)
