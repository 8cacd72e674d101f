"""What `backend="auto"` keeps: in the process by kind of call and bucket, in a file for others."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import pytest

from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention.auto import cache_file, keys
from flexvarlen.mask.document_mask import DocumentMask
from tests.attention.auto.auto_candidates import (  # noqa: F401
    CAPACITY,
    FAST_S,
    SLOW_S,
    TOKENS,
    StandIn,
    a_layout,
    attend,
    candidates,
    entries,
    explain,
    in_processes,
    set_up,
    two,
)


def test_same_bucket_measured_again(two):
    slow, _ = two
    attend(a_layout(30, 34))
    calls = slow.calls
    attend(a_layout(1, 2, 3))
    attend(a_layout(64))
    attend(a_layout(10, tokens=60, bound=60), requires_grad=False)
    assert slow.calls == calls


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 65},
        {"capacity": 2},
        {"bound": 40, "capacity": CAPACITY, "lengths": (5,), "tokens": TOKENS},
        {"requires_grad": True},
        {"causal": False},
    ],
    ids=str,
)
def test_answer_of_another_bucket_taken(two, other):
    slow, fast = two
    attend(a_layout(30, 34))
    slow.seconds, fast.seconds = FAST_S, SLOW_S
    layout = {name: other[name] for name in ("tokens", "capacity") if name in other}
    lengths = other.get("lengths", (30, 34))
    if "bound" in other:
        layout["bound"] = 32
    before = slow.calls
    options = {name: other[name] for name in ("requires_grad", "causal") if name in other}
    attend(a_layout(*lengths, **layout), **options)
    assert slow.calls > before + 1
    assert len(entries()) == 2


def test_bucket_that_depends_on_documents(two):
    """A compiled graph, which knows none, would look for another answer than the eager call."""
    masks = [DocumentMask.of(a_layout(*lengths)) for lengths in ((1,), (30, 34), (5,) * 8)]
    assert len({keys.sizes(mask) for mask in masks}) == 1


def child(folder, delays, answers):
    with pytest.MonkeyPatch.context() as patch:
        stand_ins = [StandIn(name, seconds) for name, seconds in delays.items()]
        set_up(patch, folder, *stand_ins)
        explanation = explain()
        answers.put((explanation.chosen, explanation.why, [backend.calls for backend in stand_ins]))


def test_second_process_measures_anew(two, tmp_path):
    assert explain().chosen == "fast"
    swapped = {"slow": FAST_S, "fast": SLOW_S}
    [(chosen, why, calls)] = in_processes(child, [(tmp_path / "cache", swapped)])
    assert chosen == "fast"
    assert why == f"from the cache file {cache_file.cache_path()}"
    assert calls == [0, 0]


def test_answer_of_fewer_candidates_or_other_versions_taken(candidates, monkeypatch):
    candidates(StandIn("slow", SLOW_S), StandIn("slower", 2 * SLOW_S))
    assert explain().chosen == "slow"
    candidates(StandIn("slow", SLOW_S), StandIn("slower", 2 * SLOW_S), StandIn("new", FAST_S))
    assert explain().why == "measured"
    monkeypatch.setattr(keys, "versions", lambda: (("torch", "99"),))
    choose.clear_cache()
    assert explain().why == "measured"


@pytest.mark.parametrize("damage", ["garbage", "[]", '{"format": 99, "entries": {}}', "\udcff", ""])
def test_corrupt_cache_file_raises_or_is_silent(two, damage):
    path = cache_file.cache_path()
    path.parent.mkdir()
    path.write_bytes(damage.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"auto\.json .*measured again"):
        assert explain().why == "measured"
    choose.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain().why.startswith("from the cache file")


GOOD = {"host": [1, 1, 1, 1], "device": [1, 1, 1, 1]}


def entry_of(times, finalists=("fast",), **more):
    entry = {"ms_p20_p50_p80_repeats": times, "finalists": list(finalists), "failed": {}}
    return entry | {"layer_ms": [0.0, 0.0]} | more


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        entry_of({"flex": GOOD}, finalists=["flex"]),
        entry_of({"fast": GOOD}, finalists=["slow"]),
        entry_of({"fast": GOOD}, finalists=[]),
        {"ms_p20_p50_p80_repeats": {"fast": GOOD}, "failed": {}, "layer_ms": [0.0, 0.0]},
        entry_of({"fast": GOOD}, failed=None),
        entry_of({"fast": GOOD}, layer_ms=None),
        entry_of({"fast": GOOD}, layer_ms=[1.0]),
        entry_of({"fast": GOOD}, layer_ms="12"),
        entry_of({"fast": GOOD}, layer_ms=[1.0, float("nan")]),
        entry_of({}),
        entry_of({"fast": GOOD["host"]}),
        entry_of({"fast": {"host": GOOD["host"]}}),
        entry_of({"fast": GOOD | {"device": [1]}}),
    ],
    ids=str,
)
def test_damaged_answer_taken(two, entry):
    assert explain().why == "measured"
    [key] = entries()
    cache_file.cache_path().write_text(
        json.dumps({"format": cache_file.FORMAT, "entries": {key: entry}})
    )
    choose.clear_cache()
    with pytest.warns(UserWarning, match="measured again"):
        assert explain().why == "measured"


def test_unwritable_folder_fails_the_call(two, tmp_path, monkeypatch):
    slow, _ = two
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(switches.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert explain().why == "measured"
    calls = slow.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert explain().why == "measured"  # kept in the process
        assert explain(needs_grad=False).why == "measured"
    assert slow.calls > calls


def write_many(path, name, done):
    (path.parent / f"{name} is ready").touch()
    while len(list(path.parent.glob("* is ready"))) < 2:
        time.sleep(0.001)
    for i in range(50):
        cache_file.write_entry(path, f"{name}{i}", {"backend": name})
    done.put(None)


def test_concurrent_writers_lose_answers(tmp_path):
    path = tmp_path / "auto.json"
    in_processes(write_many, [(path, name) for name in "ab"])
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


def test_file_that_has_not_changed_is_read_again(two, monkeypatch):
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
