"""flexvarlen.bench.claims: a ratio of the right two records, and its verdict."""

from __future__ import annotations

from dataclasses import replace

from flexvarlen.bench.claims import CLAIMS, section, within
from flexvarlen.report.records import Record


def record(variant, ms, suite="scaling", started="1", **case):
    case = {"variant": variant, "pass": "forward", "causal": False} | case
    measures = {"device_ms_p50": ms, "host_ms_p50": 0.1}
    return Record(suite, case, "ok", None, measures, {"gpu": "G", "started_utc": started})


def scaling(slow_ms, **case):
    case = {"tokens": 8192, "dtype": "bfloat16"} | case
    return [record("standard", slow_ms, **case), record("fixed:fa2", 1.0, **case)]


def test_a_speed_up_and_its_verdict():
    assert "| 3.2×" in section(scaling(3.1))
    assert "3.10×, G | holds |" in section(scaling(3.1))
    assert "does not hold" in section(scaling(2.0))
    assert "2.00× to 4.00×, G | holds in 1 of 2 |" in section(
        scaling(2.0) + scaling(4.0, causal=True)
    )


def test_what_is_no_measurement_of_a_claim_gives_no_ratio():
    slow, fast = scaling(9.0)
    assert section(scaling(9.0, tokens=1024)) == ""
    assert section([slow, replace(fast, status="failed")]) == ""
    assert section([slow, replace(fast, measures=fast.measures | {"host_bound": True})]) == ""
    assert section([slow, replace(fast, environment=fast.environment | {"started_utc": "2"})]) == ""
    assert section([replace(r, environment={"cpu": "C"}) for r in (slow, fast)]) == ""


def test_padding_without_a_mask_is_timed_on_full_rows():
    case = {"suite": "padding", "part": "module", "max_length": 2048}
    records = [
        record("padded:unmasked", 9.0, documents="multiples", tokens=8960, **case),
        record("padded:unmasked", 4.0, documents="full-length", tokens=16_384, **case),
        record("varlen", 2.0, documents="multiples", tokens=8960, **case),
        record("varlen", 3.0, documents="full-length", tokens=16_384, **case),
    ]
    assert "2.00×, G | holds |" in section(records)


def test_a_call_counts_the_host_where_it_is_slower():
    (claim,) = (x for x in CLAIMS if "256 tokens" in x.what)
    records = [
        record(name, ms, "varlen-study", name="256")
        for name, ms in (("raw:fa2", 2.0), ("raw:varlen", 1.0))
    ]
    records[1] = replace(records[1], measures={"device_ms_p50": 1.0, "host_ms_p50": 4.0})
    assert list(claim.measured(records)) == [2.0, 0.5]
    (claim,) = (x for x in CLAIMS if x.holds is within)
    assert not claim.holds(1.2, claim.ratio)
