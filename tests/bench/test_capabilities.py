"""The table of what backends can do is made of their own refusals."""

from __future__ import annotations

from flexvarlen import BACKENDS, why_not
from flexvarlen.bench.contract.capabilities import BASE, FEATURES, capabilities_section, measure
from flexvarlen.rows import Row


def test_every_backend_has_a_row_and_a_refusal_its_reason():
    rows = measure("cpu", "0123456789")
    assert [row.case["backend"] for row in rows] == list(BACKENDS)
    by_name = {row.case["backend"]: row for row in rows}
    assert by_name["fa3"].status == "unsupported"
    assert "CUDA GPU" in by_name["fa3"].reason
    assert by_name["sdpa"].measures["why_not"].keys() == FEATURES.keys()
    text = capabilities_section(rows)
    assert "commit 0123456" in text
    assert by_name["fa3"].reason in text
    line = next(line for line in text.splitlines() if line.startswith("| `sdpa`"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    answers = dict(zip(FEATURES, cells, strict=False))
    assert answers["sliding window"] == "yes"
    assert f"{answers['softcap']} {why_not('sdpa', softcap=30.0)}" in text


def test_each_machine_has_a_table_of_its_latest_run():
    def row(backend, started, gpu, **heads):
        case = {"backend": backend, **BASE, **heads}
        where = {"gpu": gpu, "torch": "2.13", "started_utc": started}
        return Row("capabilities", case, "unsupported", f"no {backend}", {}, where)

    rows = [row("gone", "1", "A"), row("fa3", "2", "A"), row("fa3", "1", "B", head_dim=64)]
    text = capabilities_section(rows)
    assert "A, torch 2.13; 32 query heads over 8 KV heads of 128:" in text
    assert "B, torch 2.13; 32 query heads over 8 KV heads of 64:" in text
    assert text.count("| `fa3` |") == 2
    assert text.count("(1) no fa3") == 2
    assert "gone" not in text
