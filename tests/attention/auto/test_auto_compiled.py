"""`backend="auto"` where it may not measure: inside compiled graphs, and on ranks but the first."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.auto import keys, ranks
from flexvarlen.attention.auto.decoder_layer import Layer
from flexvarlen.attention.auto.timing import Race
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing
from tests.attention.auto.auto_candidates import (  # noqa: F401
    BY_FAST,
    BY_SLOW,
    FAST_S,
    HEADS,
    SLOW_S,
    StandIn,
    _fresh_dynamo,
    a_layout,
    candidates,
    explain,
    in_processes,
    set_up,
    taken,
    tensors,
    two,
)

# ---- compiled ----


PACKINGS = [
    (64,),
    (30, 34),
    (1, 2, 3),
    (8,) * 8,
    (0, 5),
    (63, 1),
    (20, 20),
    (7, 0, 9),
    (16,) * 4,
    (2,),
]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("known", ["memory", "file"])
def test_compiled_graph_measures_or_recompiles(two, known):
    _, fast = two
    qkv = tensors(requires_grad=True)
    assert explain(a_layout(30, 34)).chosen == "fast"
    if known == "file":
        choose.clear_cache()
    calls = fast.calls

    def layer(layout, *qkv):
        return fv.packed_attention(*qkv, layout, backend="auto")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in PACKINGS:
        layout = a_layout(*lengths)
        expected = BY_FAST * fv.packed_attention(*qkv, layout, backend="sdpa")
        torch.testing.assert_close(compiled(layout, *qkv), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert fast.calls == calls


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_first_call_measures(two):
    qkv, layout = tensors(), a_layout()
    compiled = torch.compile(
        lambda *qkv: fv.packed_attention(*qkv, layout, backend="auto"),
        fullgraph=True,
        backend="aot_eager",
    )
    plain = fv.packed_attention(*qkv, layout, backend="sdpa")
    torch.testing.assert_close(compiled(*qkv), plain)  # the static order's
    assert [backend.calls for backend in two] == [0, 0]
    torch.testing.assert_close(attend_same(qkv, layout), BY_FAST * plain)  # eager: measured


LONE = Layer(0.0, 0.0)


def times(host_ms, device_ms):
    return HostAndDevice(Timing(*[host_ms] * 3, 5), Timing(*[device_ms] * 3, 5))


@pytest.mark.parametrize(
    ("layer", "chosen"),
    [(LONE, "slow"), (Layer(0.5, 4.0), "fast"), (Layer(0.5, 0.05), "slow")],
    ids=["no layer", "the device sets the pace", "the host sets the pace"],
)
def test_host_time_counts_eagerly_where_the_device_would_wait(two, monkeypatch, layer, chosen):
    found = {"slow": times(0.1, 0.2), "fast": times(0.3, 0.1)}
    race = Race(found, tuple(found), {}, layer)
    monkeypatch.setattr(auto, "time_candidates", lambda *args: race)
    explanation = explain(needs_grad=False)
    assert (explanation.chosen, explanation.compiled) == (chosen, "fast")
    assert explanation.layer == layer
    assert f"{layer.host_ms:.3f} ms on the host." in str(explanation)
    choose.clear_cache()
    again = explain(needs_grad=False)  # from the file
    assert (again.chosen, again.compiled, again.layer) == (chosen, "fast", layer)


def test_among_equal_host_times_the_device_decides(two, monkeypatch):
    found = {"slow": times(0.300, 0.2), "fast": times(0.303, 0.1)}
    race = Race(found, tuple(found), {}, Layer(5.0, 0.5))
    monkeypatch.setattr(auto, "time_candidates", lambda *args: race)
    assert explain(needs_grad=False).chosen == "fast"


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("known", ["memory", "file"])
def test_host_time_counts_inside_a_graph_or_not_outside(two, monkeypatch, known):
    """A kernel with much Python around it: the best where none of that runs."""
    found = {"slow": times(0.1, 0.2), "fast": times(0.3, 0.1)}
    monkeypatch.setattr(auto, "time_candidates", lambda *args: Race(found, tuple(found), {}, LONE))
    explanation = explain(needs_grad=False)
    assert (explanation.chosen, explanation.compiled) == ("slow", "fast")
    assert "auto takes slow, and fast in a compiled graph: measured." in str(explanation)
    if known == "file":
        choose.clear_cache()
    qkv, layout = tensors(), a_layout()
    plain = fv.packed_attention(*qkv, layout, backend="sdpa")
    torch.testing.assert_close(attend_same(qkv, layout), BY_SLOW * plain)
    compiled = torch.compile(attend_same, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(qkv, layout), BY_FAST * plain)


def test_ranks_take_both_choices(two, monkeypatch):
    class RankOne(ranks.RankGroup):
        decides = False

        def __init__(self):
            super().__init__(None)
            self.several = True

        def ask(self, kind):
            return "slow fast"

    monkeypatch.setattr(auto._state, "run", RankOne())
    explanation = explain()
    assert (explanation.chosen, explanation.compiled) == ("slow", "fast")


def attend_same(qkv, layout):
    return fv.packed_attention(*qkv, layout, backend="auto")


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("hints", [True, False])
def test_dynamic_sizes_are_guarded_on(two, hints, monkeypatch):
    monkeypatch.setattr(keys, "_HINTS", keys._HINTS and hints)
    explain(a_layout(30), needs_grad=False)
    compiled = torch.compile(attend_same, fullgraph=True, dynamic=True, backend="eager")
    factor = BY_FAST if keys._HINTS else 1.0
    for tokens in (64, 62, 50, 200):
        qkv, layout = tensors(tokens), a_layout(20, 30, tokens=tokens, bound=tokens)
        expected = factor * fv.packed_attention(*qkv, layout, backend="sdpa")
        torch.testing.assert_close(compiled(qkv, layout), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_the_choice_does_not_trace(two):
    explain(needs_grad=False)

    def step(x, layout):
        name = taken(DocumentMask.of(layout))
        return x * {"fast": 3.0}.get(name, 0.0)

    out = torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2), a_layout())
    assert out.tolist() == [3.0, 3.0]


# ---- several ranks ----


def rank(folder, rank, delays, asks, answers):
    with pytest.MonkeyPatch.context() as patch:
        stand_ins = [StandIn(name, seconds) for name, seconds in delays.items()]
        set_up(patch, folder / str(rank), *stand_ins)
        patch.setattr(ranks, "BEGIN_S", 1.0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [
                explain(a_layout(*lengths, bound=bound), **options)
                for lengths, bound, *rest in asks
                for options in (rest or [{}])
            ]
        dist.barrier()
        dist.destroy_process_group()
        answers.put(
            (
                [(explanation.chosen, explanation.why) for explanation in found],
                [backend.calls for backend in stand_ins],
                [
                    str(warning.message)
                    for warning in caught
                    if "flexvarlen" in str(warning.message)
                ],
            )
        )


def test_ranks_decide_apart(tmp_path):
    """Other documents, other speeds: rank 1 must take what rank 0 measured."""
    asks = [((30, 34), 64), ((8,) * 8, 8)]
    zero, one = in_processes(
        rank,
        [
            (tmp_path, 0, {"slow": SLOW_S, "fast": FAST_S}, asks),
            (tmp_path, 1, {"slow": FAST_S, "fast": SLOW_S}, asks[::-1]),
        ],
    )
    assert zero[0] == [("fast", "measured"), ("fast", "decided earlier in this run")]
    assert one[0] == [("fast", "decided by rank 0")] * 2
    assert one[1] == [0, 0]
    assert zero[2] == one[2] == []


def test_looking_at_what_auto_knows_decides_for_the_whole_run(tmp_path):
    """`measure=False` on rank 0 leaves nothing behind, and on another waits for nobody."""
    asks = [((30, 34), 64, {"measure": False}, {})]
    delays = {"slow": SLOW_S, "fast": FAST_S}
    zero, one = in_processes(rank, [(tmp_path, 0, delays, asks), (tmp_path, 1, delays, asks)])
    assert zero[0] == [
        ("sdpa", "static order, because measure=False was asked for"),
        ("fast", "measured"),
    ]
    assert one[0][1] == ("fast", "decided by rank 0")
    assert one[2] == []  # no warning that it waited in vain


def test_kernel_of_rank_0_that_this_rank_lacks_taken(candidates, monkeypatch):
    candidates(
        StandIn("slow", SLOW_S),
        StandIn("slower", SLOW_S),
        StandIn("fast", FAST_S, refuses=lambda request: "not here; use another."),
    )

    class RankOne(ranks.RankGroup):
        several, decides = True, False

        def __init__(self):
            super().__init__(None)
            self.several = True

        def ask(self, kind):
            return "fast fast"

    monkeypatch.setattr(auto._state, "run", RankOne())
    with pytest.warns(UserWarning, match=r"rank 0's choice does not support .*fast: not here"):
        assert explain().chosen == "sdpa"


def test_rank_waits_for_ever_for_rank_0(tmp_path):
    delays = {"slow": SLOW_S, "fast": FAST_S}
    _, one = in_processes(
        rank, [(tmp_path, 0, delays, []), (tmp_path, 1, delays, [((30, 34), 64)])]
    )
    assert one[0][0][0] == "sdpa"
    assert one[0][0][1].startswith("static order, because rank 0")
    assert len(one[2]) == 1
    assert re.search(r"rank 0 has not chosen .* within [1-9] s", one[2][0])
