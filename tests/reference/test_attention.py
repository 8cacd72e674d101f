"""The closed forms of the reference are autograd's, whatever the pieces, masks and heads."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.reference import attention
from flexvarlen.reference.attention import Results, attend_alone, sampled_spans, samples, spans_of

LENGTHS = (5, 1, 9)


def inputs(kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(15, n, 8) for n in (4, kv_heads, kv_heads, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def by_autograd(q, k, v, grad, *, causal, window, scale):
    """Dense attention of the whole row, the documents kept apart by a mask."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    behind = torch.arange(15)[:, None] - torch.arange(15)
    seen = document[:, None] == document
    if causal:
        seen &= behind >= 0
    if window is not None:
        seen &= behind.abs() < window
    repeated = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
    keys, values = repeated
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (8**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return Results(out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad))


@pytest.mark.parametrize("piece", [1, 40, 1 << 25])
@pytest.mark.parametrize(
    ("kv_heads", "causal", "window", "scale"),
    [(2, True, None, None), (4, False, None, 0.5), (1, True, 3, None), (2, False, 2, None)],
)
def test_closed_forms_are_autograds(monkeypatch, piece, kv_heads, causal, window, scale):
    monkeypatch.setattr(attention, "PIECE_ELEMENTS", piece)
    q, k, v, grad = inputs(kv_heads)
    kind = {"causal": causal, "window": window, "scale": scale}
    expected = by_autograd(q, k, v, grad, **kind).named()
    found = attend_alone(q, k, v, LENGTHS, grad_out=grad, **kind).named()
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-12)


def test_an_empty_document_changes_nothing():
    q, k, v, grad = inputs()
    some = attend_alone(q, k, v, LENGTHS, grad_out=grad)
    same = attend_alone(q, k, v, (5, 0, 1, 9, 0), grad_out=grad)
    assert all(torch.equal(x, same.named()[name]) for name, x in some.named().items())


def test_samples_find_a_wrong_head_of_a_wrong_document():
    q, k, v, grad = inputs(dtype=torch.bfloat16)
    found = samples(q, k, v, LENGTHS, grad_out=grad, spans=spans_of(LENGTHS))
    assert len(found) == 6
    right = attend_alone(q, k, v, LENGTHS, dtype=torch.bfloat16, grad_out=grad)
    assert [sample.why_wrong(right) for sample in found] == [None] * 6
    leaking = attend_alone(q, k, v, (6, 9), dtype=torch.bfloat16, grad_out=grad)
    reasons = [(sample.why_wrong(leaking) or "right").split()[0] for sample in found]
    assert reasons == ["dk", "dk", "out", "out", "right", "right"]
    for name in ("lse", "dq", "dk", "dv"):
        parts = {**right.named(), name: right.named()[name] * 1.2}
        assert any(f"{name} of" in (s.why_wrong(Results(**parts)) or "") for s in found)


def test_sampled_spans():
    spans = sampled_spans((3, 100, 20, 5000, 40, 17), longest=4096)
    assert spans == [(3, 103), (103, 123), (5163, 5180)]
    assert sampled_spans((3, 5)) == [(3, 8)]
    assert sampled_spans((20_000, 0, 70_000)) == [(0, 20_000)]
