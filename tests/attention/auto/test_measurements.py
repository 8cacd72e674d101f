"""What `explain(measure=True)` measures comes before the table, and is kept in a file."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention.auto import cache_file, cache_keys, measure
from flexvarlen.measure import timing
from tests.attention.auto.stand_ins import (
    CLOCK,
    StandIn,
    a_layout,
    attend,
    entries,
    explain,
    run_inside_a_backward,
)

SLOW_S = 1 / 64  # a sum of these is exact


@pytest.fixture
def surprising(candidates, monkeypatch):
    """The one that is slow in the table is fast here."""
    monkeypatch.setattr(timing, "time", CLOCK)
    monkeypatch.setattr(measure, "BUDGET_S", 0.1)
    return candidates(StandIn("recorded", 1.0, seconds=SLOW_S), StandIn("here", 2.0))


def test_a_measurement_comes_before_the_table(surprising):
    recorded, _ = surprising
    attend(requires_grad=True)
    assert recorded.calls == 2
    explanation = explain(measure=True)
    assert (explanation.chosen, explanation.compiled) == ("here", "here")
    assert explanation.why == f"measured on this machine ({cache_file.cache_path()})"
    timings = {c.name: c.timing for c in explanation.candidates if c.timing is not None}
    assert timings["recorded"].host.ms_p20 >= SLOW_S * 1e3 > timings["here"].host.ms_p50
    before = recorded.calls
    attend(requires_grad=True)  # decided anew, and both were checked by the way
    choose.clear_cache()  # as another process
    attend(requires_grad=True)
    assert explain().chosen == "here"
    assert recorded.calls == before


@pytest.mark.parametrize("other", [{"tokens": 65}, {"capacity": 2}, {"bound": 32}, {}], ids=str)
def test_a_measurement_holds_for_calls_of_its_kind(surprising, other):
    """And not for other powers of two, other masks, or without gradients."""
    explain(measure=True)
    assert explain(a_layout(1, 2, 3)).chosen == "here"
    assert explain(a_layout(9, tokens=60, bound=60)).chosen == "here"
    options = {} if other else {"causal": False}
    assert explain(a_layout(5, **other), **options).chosen == "recorded"
    assert explain(needs_grad=False).chosen == "recorded"


def test_a_measurement_of_other_versions_is_not_used(surprising, monkeypatch):
    explain(measure=True)
    monkeypatch.setattr(cache_keys, "versions", lambda: (("torch", "99"),))
    assert explain().chosen == "recorded"


def test_failing_kernels_are_reported_and_not_timed(candidates):
    candidates(
        StandIn("broken", 1.0, fails=RuntimeError("no")),
        StandIn("wrong", 1.0, change=lambda out: 2 * out),
        StandIn("huge", 1.0, fails=torch.OutOfMemoryError("CUDA out of memory ...")),
        StandIn("right", 2.0),
    )
    with pytest.warns(UserWarning, match="failed when auto tried it") as caught:
        explanation = explain(measure=True)
    assert explanation.chosen == "right"
    assert [str(one.message).split()[1] for one in caught] == ["broken", "wrong"]
    found = {c.name: (c.reason, c.timing is not None) for c in explanation.candidates}
    assert found["broken"] == ("failed: RuntimeError: no", False)
    assert found["wrong"][0].startswith("failed: wrong results")
    assert found["huge"] == ("supported; not timed.", False)
    assert found["right"] == (None, True)


def test_nothing_is_timed_inside_a_backward(surprising):
    with pytest.raises(RuntimeError, match="the call is inside a backward"):
        run_inside_a_backward(lambda: explain(measure=True))


# ---- the file ----


@pytest.mark.parametrize("damage", ["garbage", "[]", '{"format": 5, "entries": {}}', "\udcff", ""])
def test_a_damaged_file_is_reported_and_replaced(surprising, damage):
    path = cache_file.cache_path()
    path.parent.mkdir()
    path.write_bytes(damage.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"auto\.json .*so it is not used"):
        assert explain().chosen == "recorded"
    explain(measure=True)
    choose.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain().chosen == "here"


GOOD = {"host": [1, 1, 1, 1], "device": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"unknown": GOOD},
        {"here": GOOD["host"]},
        {"here": {"host": GOOD["host"]}},
        {"here": GOOD | {"device": [1]}},
        {"here": GOOD | {"device": [float("nan")] * 4}},
    ],
    ids=str,
)
def test_a_damaged_measurement_is_reported_and_not_used(surprising, entry):
    explain(measure=True)
    kept = {key: entry if "sizes" in key else {} for key in entries()}
    path = cache_file.cache_path()
    path.write_text(json.dumps({"format": cache_file.FORMAT, "entries": kept}))
    choose.clear_cache()
    with pytest.warns(UserWarning, match="so it is not used"):
        assert explain().chosen == "recorded"


def test_unwritable_folder(surprising, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(switches.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be written"):
        explain(measure=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert explain().chosen == "here"  # kept in the process
        attend()


def test_concurrent_writers_lose_no_entries(tmp_path):
    """Locks are of open files: threads wait for each other as processes do."""
    path, together = tmp_path / "auto.json", Barrier(2)

    def write_many(name):
        together.wait()
        for i in range(50):
            cache_file.write_entries(path, {f"{name}{i}": {}})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_many, "ab"))
    assert len(cache_file.read_entries(path)) == 100
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_user_without_a_home_has_a_cache_all_the_same(monkeypatch):
    """In some containers the user has no entry, and HOME is not set."""
    for name in ("HOME", "XDG_CACHE_HOME", switches.CACHE):
        monkeypatch.delenv(name, raising=False)

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert switches.cache_folder().name == "flexvarlen"


def test_a_file_that_has_not_changed_is_not_read_again(surprising, monkeypatch):
    """Some callers ask in each forward: reentrant checkpoints, for one."""
    attend()
    reads = []
    text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, **options: reads.append(path) or text(path, **options)
    )
    for _ in range(3):
        choose.clear_cache()
        attend()
    assert len(reads) <= 1


# ---- on a GPU ----

HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def on_gpu(layout, **options):
    return fv.explain(layout, dtype=torch.bfloat16, **HEADS, **options)


@pytest.mark.gpu
def test_gpu_measurement_disturbs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.CACHE, str(tmp_path))
    choose.clear_cache()
    layout = fv.PackedLayout.from_lengths([700, 1, 323], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Another kind: cuBLAS has its workspaces of all threads there from here on.
        on_gpu(fv.PackedLayout.from_lengths([64], device="cuda"), measure=True)
    state = torch.cuda.get_rng_state()
    allocated = torch.cuda.memory_allocated()
    with torch.cuda.stream(side), torch.no_grad():
        explanation = on_gpu(layout, measure=True)
        assert torch.cuda.current_stream() == side
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + 2**20
    timings = {c.name: c.timing for c in explanation.candidates if c.timing}
    assert explanation.compiled == min(timings, key=lambda name: timings[name].device.ms_p50)
    assert explanation.chosen == min(timings, key=lambda name: timings[name].host.ms_p50)
    choose.clear_cache()
    assert on_gpu(layout).chosen == explanation.chosen


@pytest.mark.gpu
def test_gpu_first_call_while_a_graph_is_captured(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.CACHE, str(tmp_path))
    choose.clear_cache()
    layout = fv.PackedLayout.from_lengths([700, 1, 323], device="cuda")
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            on_gpu(layout, measure=True)
        assert on_gpu(layout).chosen in fv.BACKENDS
    graph.replay()
    assert x.item() == 1
