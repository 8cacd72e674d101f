"""flexvarlen.measure: counters that count what they say, clocks that order what they time."""

from __future__ import annotations

import json
import time
import types
from collections import Counter

import pytest
import torch

from flexvarlen.measure import (
    CompileStats,
    environment,
    memory_meaning,
    peak_memory_mib,
    summarize,
    time_host_and_device,
    time_interleaved,
    watch_compilation,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_environment_is_json_and_names_no_place():
    info = environment("cpu")
    text = json.dumps(info)
    assert info["torch"] == torch.__version__
    assert info["gpu"] is None
    assert info["cpu"]
    assert {"triton", "transformers", "flash_attn", "flexvarlen", "git_commit"} <= info.keys()
    assert "/" not in text.replace(info["cpu"], "").replace(str(info["gpu"]), "")


def test_percentiles_of_one_and_of_many():
    assert summarize([7.0]).ms_p20 == summarize([7.0]).ms_p80 == 7.0
    timing = summarize([float(value) for value in range(101)])
    assert (timing.ms_p20, timing.ms_p50, timing.ms_p80) == (20.0, 50.0, 80.0)
    with pytest.raises(ValueError, match="repeats"):
        summarize([])


def test_timings_are_ordered_and_in_milliseconds(monkeypatch):
    taken = []  # seconds, on a clock that other processes do not slow
    monkeypatch.setattr(time, "perf_counter", lambda: sum(taken))
    timings = time_interleaved(
        {"slow": lambda: taken.append(0.02), "fast": lambda: taken.append(0.002)},
        device="cpu",
        warmup=0,
        repeats=5,
    )
    assert list(timings) == ["slow", "fast"]
    found = {name: timing.ms_p50 for name, timing in timings.items()}
    assert found == pytest.approx({"slow": 20, "fast": 2})
    assert timings["fast"].ms_p20 <= timings["fast"].ms_p50 <= timings["fast"].ms_p80


def test_rounds_have_an_order_of_their_own_fewer_of_slow_variants_and_lead_ins():
    calls: list[str] = []
    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = time_interleaved(variants, device="cpu", warmup=1, repeats={"a": 4, "b": 2, "c": 4})
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 4, "b": 2, "c": 4}
    assert calls[:3] == ["a", "b", "c"]  # the warm-up
    rounds = [calls[3:5], calls[5:8], calls[8:10], calls[10:13]]
    assert [sorted(names) for names in rounds] == [list("ac"), list("abc")] * 2
    assert rounds[1] != rounds[3] or rounds[0] != rounds[2]
    calls.clear()
    timings = time_interleaved(variants, device="cpu", warmup=1, repeats=3, lead_in=2)
    assert {timing.repeats for timing in timings.values()} == {3}
    assert Counter(calls) == dict.fromkeys("abc", 1 + 3 * 3)
    with pytest.raises(ValueError, match="repeats of 'a' must be at least 1"):
        time_interleaved(variants, device="cpu", repeats=0)


def test_host_and_device_are_one_on_the_cpu():
    found = time_host_and_device({"a": lambda: time.sleep(0.002)}, device="cpu", repeats=3)["a"]
    assert found.host == found.device
    assert found.eager_ms == found.compiled_ms == found.device.ms_p50 >= 2


def test_calls_are_named_before_warm_up_and_timing():
    """So that of a device that dies it is known which call did it."""
    said = []
    calls = {name: (lambda name=name: said.append(name)) for name in "ab"}
    time_host_and_device(
        calls, device="cpu", warmup=1, repeats=2, progress=lambda name: said.append(f"{name}:")
    )
    assert said[:4] == ["a:", "a", "b:", "b"]
    assert said[4::2] == [f"{name}:" for name in said[5::2]]


def test_one_break_is_one_break_and_two_graphs():
    @torch.compile(backend="eager")
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    with watch_compilation() as stats:
        broken(torch.zeros(4))
        broken(torch.ones(4))
    assert (stats.graph_breaks, stats.compilations, stats.recompilations) == (1, 2, 0)
    assert sum(stats.break_reasons.values()) == 1
    assert stats.compile_s > 0
    with watch_compilation() as again:
        broken(torch.ones(4))
    assert (again.graph_breaks, again.compilations, again.compile_s) == (0, 0, 0.0)


def test_one_changed_constant_is_one_recompilation():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def scaled(x, name):
        return x * len(name)

    weight = torch.ones(4, requires_grad=True)
    with watch_compilation() as first:
        scaled(weight, "a").sum().backward()
    # The backward graph belongs to the same compilation.
    assert (first.compilations, first.recompilations) == (1, 0)
    with watch_compilation() as second:
        scaled(weight, "a").sum().backward()
        scaled(weight, "bb").sum().backward()
        scaled(weight, "bb").sum().backward()
    assert (second.compilations, second.recompilations, second.graph_breaks) == (1, 1, 0)
    assert len(second.reasons) == 1
    (short,) = second.first_reasons()
    assert len(short) <= 200
    assert "\n" not in short


def test_reasons_of_a_row_have_no_paths():
    why = (
        '0/0: ___check_obj_id(f, 1), type=<code object f at 0x1, file "/home/me/site/f.py", line 2>'
    )
    stats = CompileStats(reasons=[f"{why}\n  more", "b", "c", "d"])
    assert stats.first_reasons() == (f"{why.replace('/home/me/site/', '')} more", "b", "c")


def sine(x):
    return x.sin()


def test_more_compilations_than_dynamo_keeps_by_default():
    torch._dynamo.utils.set_compilation_metrics_limit(2)  # by default 64
    with watch_compilation() as stats:
        for index in range(6):
            # Another code object each time: Dynamo's cache and its recompile limit go by code.
            code = sine.__code__.replace(co_name=f"sine_{index}")
            torch.compile(types.FunctionType(code, globals()), backend="eager")(torch.zeros(2))
    assert stats.compilations == 6


def test_stats_are_filled_in_when_the_block_raises():
    seen = []

    def failing_block():
        with watch_compilation() as stats:
            seen.append(stats)
            torch.compile(sine, backend="eager")(torch.zeros(2))
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        failing_block()
    assert seen[0].compilations == 1


def test_peak_memory_sees_a_large_allocation():
    peak = peak_memory_mib(lambda: torch.ones(64 * 2**20 // 4), "cpu")
    if peak is None:
        pytest.skip("this system cannot reset or read the peak of resident memory")
    assert 60 <= peak < 200
    assert "lower bound" in memory_meaning("cpu")


@pytest.mark.gpu
def test_host_time_is_no_device_time():
    x, large = (torch.randn(n, n, device="cuda") for n in (64, 8192))

    def much_python():
        time.sleep(0.001)
        return x @ x

    timings = time_host_and_device(
        {"much_python": much_python, "large": lambda: large @ large}, device="cuda", repeats=10
    )
    mine, theirs = timings["much_python"], timings["large"]
    # The fastest fifth: beside other processes some calls outlast what keeps the device busy.
    assert mine.device.ms_p20 < 0.2 < 1 <= mine.host.ms_p50
    assert theirs.host.ms_p20 < 0.5 < 2 < theirs.device.ms_p50 == theirs.eager_ms


@pytest.mark.gpu
def test_device_is_kept_busy_for_as_long_as_asked():
    """Under a host of 6 ms: busy for 2.2 ms by default, the device would wait for the rest."""
    x = torch.randn(64, 64, device="cuda")

    def much_python():
        time.sleep(0.006)
        return x @ x

    (timing,) = time_host_and_device(
        {"": much_python}, device="cuda", repeats=10, busy_ms=15.0
    ).values()
    assert timing.device.ms_p20 < 0.2 < 6 <= timing.host.ms_p50


@pytest.mark.gpu
def test_cuda_clock_and_memory():
    x = torch.randn(4096, 4096, device="cuda")
    timings = time_interleaved(
        {"one": lambda: x @ x, "four": lambda: [x @ x for _ in range(4)]}, device="cuda", repeats=10
    )
    assert 2 < timings["four"].ms_p50 / timings["one"].ms_p50 < 8
    peak = peak_memory_mib(lambda: x @ x, "cuda")
    assert peak is not None
    assert peak >= 128
