"""The closed forms of the reference are autograd's, whatever the pieces, masks and heads."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.reference import attention
from flexvarlen.reference.attention import Results, attend_alone, sampled_spans, samples, spans_of
from tests.oracle import Documents, attend, random_qkv

LENGTHS = (5, 1, 9)


def inputs(kv_heads=2, dtype=torch.float64):
    return random_qkv(sum(LENGTHS), 4, kv_heads, 8, dtype=dtype)


def by_autograd(q, k, v, grad, **kind):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, Documents(LENGTHS, sum(LENGTHS)), **kind)
    gradients = torch.autograd.grad(out, leaves, grad)
    return Results(out.detach(), lse.detach(), *gradients)


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
