"""The kernels as operators, on a GPU: accurate, and blind to other documents and to siblings."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.recurrent import fla_kernels
from flexvarlen.recurrent.convolution import _operator as causal_convolution
from flexvarlen.recurrent.fla_kernels.decayed_scan import decayed_scan
from flexvarlen.recurrent.fla_kernels.delta_rules import gated_delta_rule, kimi_delta_rule
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from tests.recurrent.cases import (
    CASES,
    LENGTHS,
    ROWS,
    TREE,
    T,
    branches,
    check_bits_of_others,
    documents,
    run_case,
)
from tests.trees import Tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document"),
]
KERNELS = {
    "convolution": causal_convolution,
    "gated_delta": gated_delta_rule,
    "kimi_delta": kimi_delta_rule,
    "mamba2": decayed_scan,
}


@pytest.fixture(autouse=True)
def needs_fla():
    reason = fla_kernels.why_not(torch.zeros(1, device="cuda", dtype=torch.bfloat16))
    if reason is not None:
        pytest.skip(reason)


def on_gpu(docs):
    return type(docs)(docs.layout.to("cuda"), for_any_row=True)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_accuracy(name, row):
    """Within bfloat16's eps of the loop over documents on the CPU, which scans in fp32."""
    exact = run_case(name, ROWS[row]())
    found = run_case(name, on_gpu(ROWS[row]()), "cuda", torch.bfloat16)
    for x, y in zip(found, exact, strict=True):
        error = (x.cpu().double() - y).norm() / y.norm()
        assert error < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_bits_of_other_documents(name, row):
    where = {"device": "cuda", "dtype": torch.bfloat16}
    check_bits_of_others(name, row, on_gpu(ROWS[row]()), **where)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_shapes_that_a_graph_sees(name, row):
    """What the operators put out is what their fake implementations say, and they differentiate."""
    docs = on_gpu(ROWS[row]())
    by_token = [x.bfloat16().cuda() for x in CASES[name]()[2]]
    if name == "convolution":
        weight = torch.randn(6, 4, device="cuda", dtype=torch.bfloat16)
        given = [by_token[0][0], weight, None, True]
    elif name == "mamba2":
        x, dt, B, C = by_token
        given = [C, B, x, -dt.float().abs()]
    else:
        given = [*by_token[:3], by_token[3].float(), by_token[4]]
    given = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
    tables = Boundaries.of(docs)
    if name == "convolution":
        tables = docs.previous, *(docs.next_tokens or (None, None))
    torch.library.opcheck(
        KERNELS[name],
        (*given, *tables),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


TREES = (TREE, Tree((60, 9, 9, 62), (-1, 0, 0, 0), 10), Tree((150,), (-1,)))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_other_documents_compile_nothing_again(name, row):
    from flexvarlen.measure import watch_compilation

    run, _, by_token, shared = CASES[name]()
    leaves = [x.bfloat16().cuda().requires_grad_() for x in (*by_token, *shared)]
    packings = {
        "documents": [documents(lengths) for lengths in (LENGTHS, (T,), (70, 70))],
        "trees": [branches(tree) for tree in TREES],
    }
    torch._dynamo.reset()
    run(on_gpu(packings[row][0]), *leaves).sum().backward()  # compiles the step that fla refuses
    compiled = torch.compile(run, fullgraph=True)
    with watch_compilation() as stats:
        for docs in map(on_gpu, packings[row]):
            outs = [call(docs, *leaves) for call in (compiled, run)]
            found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in outs)
            for x, y in zip((outs[0], *found), (outs[1], *expected), strict=True):
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))
    assert (stats.compilations, stats.graph_breaks) == (1, 0)
