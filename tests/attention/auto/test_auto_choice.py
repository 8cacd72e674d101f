"""`backend="auto"`: what it chooses and says, what it leaves alone.

Nothing is timed on the CPU by itself: here stand-ins, of a speed made with sleep, are candidates.
"""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention.auto import cache_file, keys, timing
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto import decoder_layer as layer
from flexvarlen.attention.backends import registry as backends
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing
from tests.attention.auto.auto_candidates import (  # noqa: F401
    BY_FAST,
    BY_SLOW,
    FAST_S,
    HEADS,
    SLOW_S,
    TOKENS,
    StandIn,
    _fresh_dynamo,
    a_layout,
    attend,
    candidates,
    explain,
    taken,
    tensors,
    two,
)

# ---- what is chosen ----


def test_first_of_an_order_instead_of_the_fastest(two):
    explanation = explain()
    assert (explanation.chosen, explanation.why) == ("fast", "measured")
    timings = {c.name: c.timing for c in explanation.candidates if c.timing is not None}
    assert set(timings) == {"slow", "fast"}
    assert timings["slow"].host.ms_p20 >= SLOW_S * 1e3 > timings["fast"].host.ms_p50
    assert [c.name for c in explanation.candidates][:2] == ["fast", "slow"]


def test_refused_kernel_timed_or_chosen(candidates):
    refused, *_ = candidates(
        StandIn("refused", FAST_S, refuses=lambda request: "no; use another."),
        StandIn("served", SLOW_S),
        StandIn("also", SLOW_S * 2),
    )
    explanation = explain()
    assert explanation.chosen == "served"
    assert refused.calls == 0
    found = {c.name: c for c in explanation.candidates}
    assert (found["refused"].reason, found["refused"].can) == ("no; use another.", False)


@pytest.mark.parametrize(
    "promise",
    [{"deterministic": True}, {"batch_invariant": True}, {"window": 3}],
    ids=str,
)
def test_answer_for_other_arguments_taken(candidates, promise):
    """The fast one serves plain calls only: what was learnt from these must not reach others."""

    def plain_only(call):
        if call.spec.left != -1:
            return "plain only; use another."
        return "no promise; use another." if call.ordered_backward else None

    candidates(
        StandIn("slow", SLOW_S, BY_SLOW),
        StandIn("slower", 2 * SLOW_S),
        StandIn("fast", FAST_S, refuses=plain_only),
    )
    assert explain().chosen == "fast"
    assert explain(**promise).chosen == "slow"
    layout, (q, k, v) = a_layout(), tensors()
    out = fv.packed_attention(q, k, v, layout, backend="auto", **promise)
    other = {"window": 3} if "window" in promise else {}
    expected = fv.packed_attention(q, k, v, layout, backend="sdpa", **other)
    assert torch.equal(out, BY_SLOW * expected)


def test_stale_refusal_after_torchs_deterministic_switch(candidates):
    def switch(request):
        on = torch.are_deterministic_algorithms_enabled()
        return "not deterministic; use another." if on else None

    candidates(
        StandIn("slow", SLOW_S), StandIn("slower", 2 * SLOW_S), StandIn("fast", 0, refuses=switch)
    )
    layout = a_layout()
    mask = DocumentMask.of(layout)
    assert taken(mask) == "fast"
    torch.use_deterministic_algorithms(True)
    try:
        assert taken(mask) == "slow"
    finally:
        torch.use_deterministic_algorithms(False)


def test_failing_candidate_swallowed_or_chosen(candidates):
    candidates(
        StandIn("broken", FAST_S, fails=RuntimeError("kernel image is invalid\nsecond line")),
        StandIn("huge", FAST_S, fails=torch.OutOfMemoryError("CUDA out of memory ...")),
        StandIn("slow", SLOW_S),
    )
    with pytest.warns(UserWarning, match="failed when auto tried it") as caught:
        explanation = explain()
    assert explanation.chosen == "slow"
    warned = " ".join(str(warning.message) for warning in caught)
    assert "broken failed" in warned
    assert "huge failed" in warned
    reasons = {c.name: c.reason for c in explanation.candidates}
    assert reasons["broken"] == "failed: RuntimeError: kernel image is invalid"
    assert reasons["huge"] == "failed: out of memory"
    assert not cache_file.cache_path().exists()  # another process may have the memory


def test_all_candidates_failing_tried_again_at_each_call(candidates):
    broken = candidates(
        StandIn("one", FAST_S, fails=RuntimeError("no")),
        StandIn("two", FAST_S, fails=RuntimeError("no")),
    )
    with pytest.warns(UserWarning, match="failed"):
        explanation = explain()
    assert explanation.chosen == "sdpa"
    assert "every candidate failed" in explanation.why
    calls = [backend.calls for backend in broken]
    assert explain().chosen == "sdpa"
    assert [backend.calls for backend in broken] == calls
    assert not cache_file.cache_path().exists()  # another process may have the memory


def test_close_candidates_are_timed_no_longer_than_hopeless_ones(candidates):
    near, nearly, far = candidates(
        StandIn("near", 0.05), StandIn("nearly", 0.05), StandIn("far", 0.25)
    )
    assert explain().chosen != "far"
    # Whether both near ones come into the last heat too, a busy host's delays decide.
    assert far.calls <= 4 < min(near.calls, nearly.calls)


def test_anomaly_detection_is_not_timed(two, monkeypatch):
    """It is of all threads, and makes a layer's host time many times what it is."""
    seen = []
    clock = layer.time_host_and_device

    def timed(*given, **options):
        seen.append(torch.is_anomaly_enabled())
        return clock(*given, **options)

    monkeypatch.setattr(layer, "time_host_and_device", timed)
    with torch.autograd.set_detect_anomaly(True):
        explain()
        assert torch.is_anomaly_enabled()
    assert set(seen) == {False}  # more than once, where the host was slow at first


NOTHING = Timing(0.0, 0.0, 0.0, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_layer_that_cannot_be_timed_costs_no_kernel(two, monkeypatch, error):
    def linear(*_):
        raise error("no room for cuBLAS")

    monkeypatch.setattr(layer, "linear", linear)
    with pytest.warns(UserWarning, match="could not time a decoder layer"):
        explanation = explain()
    assert (explanation.chosen, explanation.why) == ("fast", "measured")
    assert explanation.layer is None
    assert "besides" not in str(explanation)
    monkeypatch.setattr(layer, "linear", torch.nn.functional.linear)
    choose.clear_cache()
    assert explain().why == "measured"  # with a layer, and so not from the file


def test_loser_of_a_cool_heat_wins_over_hotter_finalists(candidates, monkeypatch):
    """A GPU slows down as it heats: times of two heats are not to be compared."""
    candidates(StandIn("a", 0), StandIn("b", 0), StandIn("lost", 0), StandIn("broken", 0))
    heats = [
        {"a": 1.0, "b": 1.0, "lost": 1.08, "broken": 0.001},
        {"a": 1.0, "b": 1.0, "lost": 1.08},
        {"a": 1.12, "b": 1.10},
    ]
    asked = []

    def timed(calls, **options):
        if not set(calls) & set(heats[0]):  # the layer around them
            return dict.fromkeys(calls, HostAndDevice(NOTHING, NOTHING))
        asked.append(set(calls))
        if len(asked) == 1:
            backends._REGISTRY["broken"].fails = RuntimeError("no more")
            calls["broken"]()
        ms = heats[len(asked) - 1]
        times = {name: Timing(*[ms[name]] * 3, 5) for name in calls}
        return {name: HostAndDevice(one, one) for name, one in times.items()}

    monkeypatch.setattr(timing, "time_host_and_device", timed)
    with pytest.warns(UserWarning, match="broken failed"):
        explanation = explain()
    assert asked == [set(heat) for heat in heats]
    assert (explanation.chosen, explanation.compiled) == ("b", "b")
    choose.clear_cache()
    assert explain().chosen == "b"  # from the file


def test_kernels_are_launched_for_the_longest_that_may_come():
    """A graph that alone sees the documents of a long row: flex, whose time does not grow so."""
    request = AttentionCall(torch.device("cuda"), torch.bfloat16, 8, 2, 64)
    tokens, slots = 32_768, 256  # patch_model's defaults
    seen = {
        launch: keys.is_wasteful(keys.bucket((tokens, slots, tokens, launch)))
        for launch in (keys._OWN, keys._BOUNDS)
    }
    assert seen == {keys._OWN: False, keys._BOUNDS: True}
    assert not keys.is_wasteful(keys.bucket((tokens, slots, 1024, keys._BOUNDS)))
    assert keys.is_wasteful(keys.bucket((8, 8, 8, keys._OWN, tokens, slots, tokens, keys._BOUNDS)))
    of_both = {
        keys.kind_key(request, keys.bucket((tokens, slots, tokens, launch)))
        for launch in (keys._OWN, keys._BOUNDS)
    }
    assert len(of_both) == 2  # what rank 0 measured for one is no answer for the other
    assert not keys.is_wasteful(keys.bucket((2048, 64, 2048, keys._BOUNDS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "refusal", lambda name, request: None)
        assert backends.first_usable(request) == "fa3"
        assert backends.first_usable(request, wasteful=True) == "flex"
    long = a_layout(30, 34, tokens=SHORT_ROW + 1, bound=SHORT_ROW + 1)
    for layout, launch in ((long, keys._OWN), (a_layout(), keys._BOUNDS)):
        assert keys.sizes(DocumentMask.of(layout))[-1] == launch
    assert keys.sizes(DocumentMask.of(long.fix_launch_sizes()))[-1] == keys._BOUNDS


def test_cpu_measures_nothing():
    choose.clear_cache()
    explanation = explain()
    assert explanation.chosen == "sdpa"
    assert explanation.why == "static order, because nothing is timed on cpu"


# ---- what must not be disturbed ----


def test_random_state_moved(two):
    state = torch.get_rng_state()
    q, k, v = tensors()
    after = torch.get_rng_state()
    assert not torch.equal(state, after)
    fv.packed_attention(q, k, v, a_layout(), backend="auto")
    assert torch.equal(torch.get_rng_state(), after)


class Seen(TorchDispatchMode):
    """Counts the operators that run under it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["modes", "hooks", "autocast", "grad mode", "inference mode"])
def test_measurement_seen_by_its_caller(two, way):
    qkv, layout, seen = tensors(requires_grad=way == "hooks"), a_layout(), Seen()
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x)
    context = {
        "modes": seen,
        "hooks": hooks,
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "grad mode": torch.no_grad(),
        "inference mode": torch.inference_mode(),
    }[way]

    def counts():
        with context if way not in ("modes", "hooks") else contextlib.ExitStack() as stack:
            if way in ("modes", "hooks"):
                stack.enter_context(context)
            grad = torch.is_grad_enabled()
            out = fv.packed_attention(*qkv, layout, backend="auto")
            assert torch.is_grad_enabled() == grad
            assert out.dtype == torch.float32
        return seen.count, len(packed)

    first = counts()
    second = counts()
    assert [b - a for a, b in zip(first, second, strict=True)] == list(first)
    assert two[1].calls > 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_breaks_at_the_first_call(two, reentrant):
    layout, qkv = a_layout(), tensors(requires_grad=True)

    def layer(*qkv):
        return fv.packed_attention(*qkv, layout, backend="auto")

    out = checkpoint(layer, *qkv, use_reentrant=reentrant)
    out.sum().backward()
    mine = [x.grad.clone() for x in qkv]
    expected = torch.autograd.grad(
        (BY_FAST if not reentrant else 1.0)
        * fv.packed_attention(*qkv, layout, backend="sdpa").sum(),
        qkv,
    )
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_measured_inside_a_backward(two):
    """There it would wait for the thread that it runs in, on a GPU."""
    found = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            found.append(explain())
            return grad

    Asks.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert found[0].why == "static order, because the call is inside a backward"
    assert [backend.calls for backend in two] == [0, 0]
    assert explain().why == "measured"


# ---- environment variables ----


@pytest.fixture
def environment(monkeypatch):
    def set_variable(name, value):
        monkeypatch.setenv(name, value)
        switches._flag.cache_clear()

    yield set_variable
    monkeypatch.undo()
    switches._flag.cache_clear()


def test_static_variable_ignored(two, environment):
    environment(switches.AUTO, "static")
    explanation = explain()
    assert explanation.chosen == "sdpa"
    assert explanation.why == "static order, because FLEXVARLEN_AUTO=static"
    assert [backend.calls for backend in two] == [0, 0]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("name", [switches.DETERMINISTIC, switches.BATCH_INVARIANT])
@pytest.mark.parametrize("compiled", [False, True])
def test_promise_of_the_environment_ignored(candidates, environment, name, compiled):
    field = name.removeprefix("FLEXVARLEN_").lower()
    asked = []

    def note(request):
        asked.append(getattr(request, field))

    candidates(StandIn("noting", FAST_S, refuses=note))
    environment(name, "1")

    def call(layout, *qkv, **options):
        return fv.packed_attention(*qkv, layout, backend="noting", **options)

    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    layout, qkv = a_layout(), tensors()
    run(layout, *qkv)
    assert asked == [True]
    run(layout, *qkv, **{field: False})  # the call's own word wins
    assert asked == [True, False]


@pytest.mark.parametrize("name", [switches.DETERMINISTIC, switches.BATCH_INVARIANT, switches.AUTO])
def test_bad_value_of_a_variable_taken(two, environment, name):
    environment(name, "yes")
    with pytest.raises(ValueError, match=rf"{name} must be .*, got 'yes'; set one of them"):
        attend()


# ---- what it tells ----


def test_explanation_without_measuring_measures(two):
    explanation = explain(measure=False)
    assert explanation.why == "static order, because measure=False was asked for"
    assert [backend.calls for backend in two] == [0, 0]
    assert explain().why == "measured"
    choose.clear_cache()
    assert explain(measure=False).chosen == "fast"


def test_explanation_as_text_lacks_a_backend(two):
    explanation = explain()
    text = str(explanation)
    assert "auto takes fast: measured." in text
    for name in (*fv.BACKENDS, "slow", "fast"):
        assert f" {name} " in text
    assert "\n* fast" in text
    assert all(math.isfinite(c.timing.eager_ms) for c in explanation.candidates if c.timing)


# ---- on a GPU ----


def on_gpu(layout, **options):
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    return fv.explain(layout, dtype=torch.bfloat16, **heads, **options)


@pytest.mark.gpu
def test_gpu_measurement_disturbs_or_picks_wrongly(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.CACHE, str(tmp_path))
    choose.clear_cache()
    layout = fv.PackedLayout.from_lengths([700, 1, 323], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Another kind: cuBLAS has its workspaces of all threads there from here on.
        on_gpu(fv.PackedLayout.from_lengths([64], device="cuda"))
    state = torch.cuda.get_rng_state()
    allocated = torch.cuda.memory_allocated()
    with torch.cuda.stream(side), torch.no_grad():
        explanation = on_gpu(layout)
        assert torch.cuda.current_stream() == side
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2**20
    timings = {c.name: c.timing for c in explanation.candidates if c.timing}
    if len(timings) > 1:
        # Those of the last heat; others were timed less often, and may have been faster then.
        rounds = timings[explanation.chosen].host.repeats
        last = {name: t for name, t in timings.items() if t.host.repeats == rounds}
        times = {name: t.compiled_ms for name, t in last.items()}
        eager = {name: explanation.layer.added_by(t) for name, t in last.items()}
        assert explanation.why == "measured"
        assert explanation.compiled == min(times, key=times.get)
        assert eager[explanation.chosen] <= auto._TIE * min(eager.values())
    assert not any(c.timing for c in explanation.candidates if not c.can)
    choose.clear_cache()
    assert on_gpu(layout).chosen == explanation.chosen


@pytest.mark.gpu
def test_gpu_measured_while_a_graph_is_captured(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.CACHE, str(tmp_path))
    choose.clear_cache()
    layout = fv.PackedLayout.from_lengths([700, 1, 323], device="cuda")
    if len(auto.candidates(AttentionCall(layout.device, torch.bfloat16, 8, 2, 64))) < 2:
        pytest.skip("needs two kernels")
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        explanation = on_gpu(layout)
    assert explanation.why == "static order, because a CUDA graph is being captured"
    graph.replay()
    assert x.item() == 1
