"""`backend="auto"`: what it takes and says, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention.auto import cache_keys, table
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.mask.document_mask import DocumentMask
from tests.attention.auto.stand_ins import (
    BY_FAST,
    BY_SLOW,
    StandIn,
    a_layout,
    attend,
    explain,
    tensors,
)
from tests.attention.deterministic import torch_is_deterministic

# ---- what is taken ----


def test_the_fastest_in_the_nearest_record_is_taken(two):
    explanation = explain()
    assert (explanation.chosen, explanation.compiled) == ("fast", "fast")
    assert explanation.why == (
        "fastest in the nearest record, 4/2 heads of 16, causal, 64 tokens, documents of up to 64 "
        "(a GPU, torch 2.0, commit abc1234)"
    )
    assert [c.name for c in explanation.candidates][:2] == ["fast", "slow"]
    assert [backend.calls for backend in two] == [0, 0]


def test_kernels_behind_the_one_taken_are_not_imported(two):
    """A kernel's package is imported when it is asked about, which takes seconds."""
    slow, fast = two
    attend()
    assert (slow.asked, slow.calls) == (0, 0)
    assert fast.asked > 0


def test_refused_kernel_is_passed_over(candidates):
    refused, *_ = candidates(
        StandIn("refused", 1.0, refuses=lambda call: "no; use another."), StandIn("served", 2.0)
    )
    explanation = explain()
    assert explanation.chosen == "served"
    attend()
    assert refused.calls == 0
    found = {c.name: c for c in explanation.candidates}
    assert (found["refused"].reason, found["refused"].can) == ("no; use another.", False)


@pytest.mark.parametrize(
    "guarantee", [{"deterministic": True}, {"batch_invariant": True}, {"window": 3}], ids=str
)
def test_the_choice_for_plain_calls_does_not_reach_others(candidates, guarantee):
    def plain_only(call):
        if call.spec.left != -1 or call.ordered_backward:
            return "plain only; use another."
        return None

    candidates(StandIn("slow", 2.0, BY_SLOW), StandIn("fast", 1.0, refuses=plain_only))
    assert explain().chosen == "fast"
    attend()
    layout, (q, k, v) = a_layout(), tensors()
    out = fv.packed_attention(q, k, v, layout, backend="auto", **guarantee)
    other = {"window": 3} if "window" in guarantee else {}
    expected = fv.packed_attention(q, k, v, layout, backend="sdpa", **other)
    assert torch.equal(out, BY_SLOW * expected)


def test_torchs_deterministic_switch_is_asked_each_time(candidates):
    def switch(call):
        on = torch.are_deterministic_algorithms_enabled()
        return "not deterministic; use another." if on else None

    slow, fast = candidates(StandIn("slow", 2.0), StandIn("fast", 1.0, refuses=switch))
    attend()
    assert (slow.calls, fast.calls) == (0, 2)  # the check, and the call
    with torch_is_deterministic():
        attend()
    assert (slow.calls, fast.calls) == (2, 2)


def test_the_host_decides_in_small_eager_rows_alone(candidates, monkeypatch):
    """A kernel with much Python around it: the best inside a graph, where none of that runs."""
    candidates(StandIn("slow", 2.0, host_ms=0.1), StandIn("fast", 1.0, host_ms=0.3))
    assert (explain().chosen, explain().compiled) == ("fast", "fast")
    monkeypatch.setattr(table, "HOST_BOUND", 64 * 64**2)
    choose.clear_cache()
    explanation = explain()
    assert (explanation.chosen, explanation.compiled) == ("slow", "fast")
    assert "auto takes slow, and fast in a compiled graph: " in str(explanation)
    assert explain(a_layout(tokens=65)).chosen == "fast"


def test_a_kernel_that_cannot_run_in_a_graph_says_so(candidates):
    def eager_only(call):
        return "fast needs eager calls; use another." if call.graph else None

    candidates(StandIn("slow", 2.0), StandIn("fast", 1.0, refuses=eager_only))
    explanation = explain()
    assert (explanation.chosen, explanation.compiled) == ("fast", "slow")
    (fast,) = (c for c in explanation.candidates if c.name == "fast")
    assert fast.can
    assert fast.reason.endswith("in the record. fast needs eager calls; use another.")


def test_kernels_launched_for_the_longest_that_may_come():
    """A graph that alone sees the documents of a long row: flex, whose time does not grow so."""
    call = AttentionCall(torch.device("cuda"), torch.bfloat16, 8, 2, 64)
    tokens, slots = 32_768, 256  # patch_model's defaults
    wasteful = (tokens, slots, tokens, 1, cache_keys._BOUNDS)
    sizes = cache_keys.bucket(wasteful)
    assert cache_keys.is_wasteful(sizes)
    assert not cache_keys.is_wasteful(
        cache_keys.bucket((tokens, slots, tokens, 1, cache_keys._OWN))
    )
    assert not cache_keys.is_wasteful(
        cache_keys.bucket((tokens, slots, 1024, 1, cache_keys._BOUNDS))
    )
    assert not cache_keys.is_wasteful(cache_keys.bucket((2048, 64, 2048, 1, cache_keys._BOUNDS)))
    assert cache_keys.is_wasteful(cache_keys.bucket((8, 8, 8, 1, cache_keys._OWN, *wasteful)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "_own_timings", lambda call, sizes: {})
        assert auto.order(call.in_graph(), sizes).names[0] == "flex"
    long = a_layout(30, 34, tokens=SHORT_ROW + 1, bound=SHORT_ROW + 1)
    for layout, launch in ((long, cache_keys._OWN), (a_layout(), cache_keys._BOUNDS)):
        assert cache_keys.sizes(DocumentMask.of(layout))[-1] == launch
    assert cache_keys.sizes(DocumentMask.of(long.replace(num_docs=None)))[-1] == cache_keys._BOUNDS


def test_sizes_do_not_depend_on_documents():
    """A compiled graph, which knows none, would look for another choice than the eager call."""
    masks = [DocumentMask.of(a_layout(*lengths)) for lengths in ((1,), (30, 34), (5,) * 8)]
    assert len({cache_keys.sizes(mask) for mask in masks}) == 1


def test_cpu_takes_the_fixed_order():
    explanation = explain()
    assert (explanation.chosen, explanation.why) == (
        "sdpa",
        "by the built-in order, as nothing was measured on cpu",
    )


def test_the_text_names_each_backend(two):
    text = str(explain())
    for name in (*fv.BACKENDS, "slow", "fast"):
        assert f" {name} " in text
    assert "\n* fast" in text
    assert "slow       supported; 4.000 ms on the device in the record." in text  # both passes


# ---- compiled ----

PACKINGS = [(64,), (30, 34), (1, 2, 3), (8,) * 8, (0, 5), (7, 0, 9), (2,)]


def call_auto(qkv, layout):
    return fv.packed_attention(*qkv, layout, backend="auto")


@pytest.mark.usefixtures("_fresh_dynamo")
def test_one_graph_for_all_packings(two):
    qkv = tensors(requires_grad=True)
    compiled = torch.compile(call_auto, fullgraph=True, backend="aot_eager")
    for lengths in PACKINGS:
        layout = a_layout(*lengths)
        expected = BY_FAST * fv.packed_attention(*qkv, layout, backend="sdpa")
        torch.testing.assert_close(compiled(qkv, layout), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("hints", [True, False])
def test_dynamic_sizes_are_not_guarded_on(two, hints, monkeypatch):
    monkeypatch.setattr(cache_keys, "_HINTS", cache_keys._HINTS and hints)
    compiled = torch.compile(call_auto, fullgraph=True, dynamic=True, backend="eager")
    # Where a graph does not know sizes: the fixed order.
    factor = BY_FAST if cache_keys._HINTS else 1.0
    for tokens in (64, 62, 50, 200):
        qkv, layout = tensors(tokens), a_layout(20, 30, tokens=tokens, bound=tokens)
        expected = factor * fv.packed_attention(*qkv, layout, backend="sdpa")
        torch.testing.assert_close(compiled(qkv, layout), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_symbolic_size_with_one_value(two, monkeypatch):
    """A model may have compared it with a number before."""
    monkeypatch.setattr(cache_keys, "_HINTS", False)

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def call(qkv, layout):
        assert layout.total_tokens == 62
        return call_auto(qkv, layout)

    qkv, layout = tensors(62), a_layout(20, 30, tokens=62, bound=62)
    expected = fv.packed_attention(*qkv, layout, backend="sdpa")
    torch.testing.assert_close(call(qkv, layout), expected)


# ---- what the check of the first call must not disturb ----


def test_random_state_is_kept(two):
    qkv, before = tensors(), torch.get_rng_state()
    call_auto(qkv, a_layout())
    assert two[1].calls == 2  # the check, and the call
    assert torch.equal(torch.get_rng_state(), before)


class Seen(TorchDispatchMode):
    """Counts the operators that run under it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["modes", "hooks", "autocast", "grad mode", "inference mode"])
def test_the_check_is_not_seen_by_its_caller(two, way):
    qkv, layout, seen = tensors(requires_grad=way == "hooks"), a_layout(), Seen()
    packed = []
    context = {
        "modes": seen,
        "hooks": saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "grad mode": torch.no_grad(),
        "inference mode": torch.inference_mode(),
    }[way]

    def counts():
        with context:
            grad = torch.is_grad_enabled()
            out = call_auto(qkv, layout)
            assert torch.is_grad_enabled() == grad
            assert out.dtype == torch.float32
        return seen.count, len(packed)

    first = counts()
    second = counts()
    assert [b - a for a, b in zip(first, second, strict=True)] == list(first)
    assert two[1].calls == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_at_the_first_call(two, reentrant):
    layout, qkv = a_layout(), tensors(requires_grad=True)
    checkpoint(lambda *x: call_auto(x, layout), *qkv, use_reentrant=reentrant).sum().backward()
    mine = [x.grad.clone() for x in qkv]
    out = BY_FAST * fv.packed_attention(*qkv, layout, backend="sdpa")
    torch.testing.assert_close(mine, torch.autograd.grad(out.sum(), qkv))


# ---- environment variables ----


@pytest.fixture
def environment(monkeypatch):
    def set_variable(name, value):
        monkeypatch.setenv(name, value)
        switches._flag.cache_clear()

    yield set_variable
    monkeypatch.undo()
    switches._flag.cache_clear()


FLAGS = [switches.DETERMINISTIC, switches.BATCH_INVARIANT]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in FLAGS), (switches.DETERMINISTIC, True)]
)
def test_guarantee_of_the_environment(candidates, environment, name, compiled):
    field = name.removeprefix("FLEXVARLEN_").lower()
    asked = []

    def note(request):
        asked.append(getattr(request, field))

    candidates(StandIn("noting", 1.0, refuses=note))
    environment(name, "1")

    def call(layout, *qkv, **options):
        return fv.packed_attention(*qkv, layout, backend="noting", **options)

    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    layout, qkv = a_layout(), tensors()
    run(layout, *qkv)
    assert asked == [True]
    run(layout, *qkv, **{field: False})  # the call's own word wins
    assert asked == [True, False]


@pytest.mark.parametrize("name", FLAGS)
def test_bad_value_of_a_variable(environment, name):
    environment(name, "yes")
    with pytest.raises(ValueError, match=rf"{name} must be .*, got 'yes'; set one of them"):
        attend()
