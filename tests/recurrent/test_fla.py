"""fla's kernels as operators, on a GPU: accurate, and blind to other documents."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.recurrent import fla_kernels
from flexvarlen.recurrent.fla_kernels.convolution import causal_convolution
from flexvarlen.recurrent.fla_kernels.decayed_scan import decayed_scan
from flexvarlen.recurrent.fla_kernels.delta_rules import gated_delta_rule, kimi_delta_rule
from tests.recurrent.cases import CASES, LENGTHS, T, documents, randn

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


def run_case(name, dtype, device, docs):
    """Output and gradients, of the same rounded inputs in every dtype."""
    run, _, by_token, shared = CASES[name]()
    leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in (*by_token, *shared)]
    out = run(docs, *leaves)
    grad = randn(*out.shape, seed=9).bfloat16().to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("name", CASES)
def test_accuracy(name):
    """Within bfloat16's eps of the loop over documents on the CPU, which scans in fp32."""
    exact = run_case(name, torch.float64, "cpu", documents())
    found = run_case(name, torch.bfloat16, "cuda", on_gpu(documents()))
    for x, y in zip(found, exact, strict=True):
        error = (x.cpu().double() - y).norm() / y.norm()
        assert error < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", CASES)
def test_bits_of_other_documents(name):
    """Output and gradients of a document do not change with another's tokens."""
    run, _, by_token, shared = CASES[name]()
    docs = on_gpu(documents())

    def bits(change):
        tensors = [x.bfloat16().cuda() for x in by_token]
        if change:
            for x in tensors:
                x[:, 6:70] *= 0.5
        leaves = [x.requires_grad_() for x in tensors]
        out = run(docs, *leaves, *(x.bfloat16().cuda() for x in shared))
        grad = randn(*out.shape, seed=9).bfloat16().cuda()
        return [out, *torch.autograd.grad(out, leaves, grad)]

    others = torch.ones(T, dtype=torch.bool)
    others[6:70] = False
    for before, after in zip(bits(False), bits(True), strict=True):
        assert torch.equal(before[:, others], after[:, others])


@pytest.mark.parametrize("name", CASES)
def test_shapes_that_a_graph_sees(name):
    """What the operators put out is what their fake implementations say, and they differentiate."""
    docs = on_gpu(documents())
    by_token = [x.bfloat16().cuda() for x in CASES[name]()[2]]
    if name == "convolution":
        weight = torch.randn(6, 4, device="cuda", dtype=torch.bfloat16)
        given = [by_token[0], weight, None, "silu"]
    elif name == "mamba2":
        x, dt, B, C = by_token
        given = [C, B, x, -dt.float().abs()]
    else:
        given = [*by_token[:3], by_token[3].float(), by_token[4]]
    given = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
    torch.library.opcheck(
        KERNELS[name],
        (*given, docs.cu_seqlens, docs.chunk_indices),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("name", CASES)
def test_other_documents_compile_nothing_again(name):
    from flexvarlen.measure import watch_compilation

    run, _, by_token, shared = CASES[name]()
    leaves = [x.bfloat16().cuda().requires_grad_() for x in (*by_token, *shared)]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    with watch_compilation() as stats:
        for lengths in (LENGTHS, (T,), (70, 70)):
            docs = on_gpu(documents(lengths))
            outs = [call(docs, *leaves) for call in (compiled, run)]
            found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in outs)
            for x, y in zip((outs[0], *found), (outs[1], *expected), strict=True):
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))
    assert (stats.compilations, stats.graph_breaks) == (1, 0)
