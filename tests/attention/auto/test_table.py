"""The table that ships with the package: which of its cases is nearest."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.attention.auto import table
from flexvarlen.attention.auto.cache_keys import bucket
from flexvarlen.attention.auto.table import Times
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.spec import MaskSpec
from tests.attention.auto.stand_ins import SOURCE, a_case

HERE = (0, 0)
LONG = {"tokens": 4096, "capacity": 1, "longest": 4096}
SHORT = {"tokens": 4096, "capacity": 64, "longest": 64}


def nearest(cases, spec=None, *, sizes=LONG, depth=1, capability=HERE, heads=(4, 2, 16)):
    call = AttentionCall(torch.device("cuda"), torch.bfloat16, *heads, spec or MaskSpec())
    found = table.nearest(call, bucket((*sizes.values(), depth, 1)), capability, cases)
    return next(iter(found.ms))


def named(name, **fields):
    return a_case({name: [1.0, 1.0, 1.0, 1.0]}, **fields)


@pytest.mark.parametrize(
    ("near", "far", "call"),
    [
        ({**LONG, "head_dim": 32}, {**LONG, "head_dim": 64}, {}),
        ({**LONG, "num_heads": 8}, {**LONG, "num_heads": 32}, {}),
        ({**LONG, "num_heads": 8, "num_kv_heads": 4}, {**LONG, "num_kv_heads": 1}, {}),
        (LONG, SHORT, {}),
        ({**LONG, "tokens": 32_768, "capacity": 8}, {**LONG, "longest": 256}, {}),
        (LONG, {**LONG, "causal": False}, {}),
        ({**LONG, "causal": False}, LONG, {"spec": MaskSpec.of(causal=False)}),
        ({**LONG, "causal": False}, SHORT, {}),
        ({**SHORT, "depth": 2}, LONG, {"depth": 3}),
        ({**SHORT, "depth": 3}, {**LONG, "depth": 2}, {"depth": 12}),
        (SHORT, LONG, {"spec": MaskSpec.of(window=64)}),
        (SHORT, LONG, {"spec": MaskSpec.of(chunk=64)}),
        (LONG, SHORT, {"spec": MaskSpec.of(window=2048)}),
        (
            {**SHORT, "source": {**SOURCE, "capability": [9, 0]}},
            {**LONG, "source": {**SOURCE, "capability": [8, 0]}},
            {"capability": (9, 0)},
        ),
    ],
    ids=str,
)
def test_the_nearer_case(near, far, call):
    cases = [named("far", **far), named("near", **near)]
    assert nearest(cases, **call) == "near"
    assert nearest(cases[::-1], **call) == "near"


def test_a_kernel_without_a_backward_is_not_taken_for_training():
    case = a_case({"both": [2.0, 3.0, 1.0, 1.5], "forward": [1.0, None, 0.5, None]})
    assert case.times(needs_grad=True) == {"both": Times(5.0, 2.5)}
    assert case.times(needs_grad=False) == {"both": Times(2.0, 1.0), "forward": Times(1.0, 0.5)}


def test_kernels_that_attend_level_by_level_are_not_taken_for_deep_trees():
    """FA3 is faster than FlexAttention's Triton kernel on two levels, and slower on more."""
    call = AttentionCall(torch.device("cuda"), torch.bfloat16, 16, 8, 128, MaskSpec().with_trees())
    for depth, kernels in ((2, ["fa3", "flex"]), (4, ["flex", "fa3"]), (13, ["flex", "fa3"])):
        sizes = bucket((32_768, 64, 8192, depth, 1))
        times = table.nearest(call, sizes, (9, 0), table.shipped_cases()).times(needs_grad=True)
        assert [x for x in table.fastest_first(times, by_host=False) if x in kernels] == kernels


def test_the_shipped_table_names_what_it_was_measured_on():
    for case in table.shipped_cases():
        assert len(case.ms) > 1
        assert {"gpu", "capability", "torch", "commit"} <= set(case.source)
