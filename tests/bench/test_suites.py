"""All suites: their cases are those of the committed records, and unknown variants raise.

Their tables are on the pages, which tests/docs/test_docs.py makes again of the committed records.
"""

from __future__ import annotations

import pytest
import torch

from flexvarlen.bench.suites import suite_of
from flexvarlen.runner.suite import Options
from tests.bench.quick import ON_A_GPU, committed, records_of

MEASURED = (
    *("capabilities", "compile", "convergence", "embeddings", "end-to-end", "host-time", "hybrid"),
    *("kernels", "mask-build", "model", "packings", "published", "scaling-ranks"),
    *("small-inference", "varlen-study"),
)
LONGER = ("preference", "trees")
"""Suites whose cases have fields that older records lack."""


@pytest.mark.parametrize("name", [*MEASURED, *LONGER])
def test_a_run_on_a_gpu_goes_on_where_the_committed_records_end(name):
    """The fields of its cases are those of the records, or it would measure all of them again."""
    cases = suite_of(name).cases(ON_A_GPU)
    assert len({case.name for case in cases}) == len(cases)
    ours = [case.data() for case in cases]
    found = [
        {k: v for k, v in record.case.items() if k not in ("variant", "pass")}
        for record in committed(name)
    ]
    assert found
    if name in LONGER:
        assert all(any(case.items() <= own.items() for own in ours) for case in found)
    else:
        assert all(case in ours for case in found)


@pytest.mark.parametrize(
    "name",
    ["convergence", "end-to-end", "kernels", "mask-build", "model", "packings", "preference"],
)
def test_the_figures_of_the_committed_records_are_drawn(name, tmp_path):
    paths = suite_of(name).figures(committed(name), tmp_path)
    assert paths
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("hybrid", "fa3+fla-conv"),
        ("hybrid", "padded:fa9"),
        ("kernels", "fa9"),
        ("model", "packed:fa9"),
        ("preference", "fa9@128"),
        ("trees", "repeated:fa9"),
    ],
)
def test_an_unknown_variant_is_refused(name, variant, tmp_path):
    with pytest.raises(ValueError, match=r"variants? must|\+fla-conv must follow"):
        records_of(suite_of(name), tmp_path, variant)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["kernels", "varlen-study", "padding", "published", "hybrid", "trees"]
)
def test_a_quick_run_on_a_gpu(name, tmp_path):
    options = Options(torch.device("cuda"), quick=True, seconds=0.05)
    records = records_of(suite_of(name), tmp_path, options=options)
    for record in records:
        leaks = name == "hybrid" and "transformers" in record.case["variant"]
        assert record.status in ("ok", "unsupported", *["wrong"] * leaks), record
        if record.case["variant"] == "auto" and name in ("hybrid", "trees"):
            assert record.status == "ok"
            assert record.measures.get("recompilations", 0) == 0
    assert any(record.status == "ok" for record in records)
