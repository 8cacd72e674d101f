"""A head that is called on chunks learns what it does on all tokens at once, or says why not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import flexvarlen as fv

TOKENS, HIDDEN, VOCABULARY = 512, 32, 64


def head_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCABULARY, bias=False).to(dtype)


def loss_of(head, chunk_tokens, dtype=torch.float32, tokens=TOKENS):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return -fv.token_logprobs(hidden, labels, head=head, chunk_tokens=chunk_tokens).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_many_chunks_are_summed_in_float32(dtype):
    """Autocast's cache would share a low-precision cast of the weights, and so its sum."""
    exact = head_of(torch.float64)
    loss_of(exact, TOKENS, torch.float64).backward()
    errors = []
    for chunk_tokens in (TOKENS, 1):
        head = head_of()
        with torch.autocast("cpu", dtype):
            loss_of(head, chunk_tokens).backward()
        errors.append((head.weight.grad - exact.weight.grad).norm().item())
    assert errors[1] <= 1.5 * errors[0]


def test_a_head_in_low_precision_has_few_chunks():
    head = head_of(torch.bfloat16)
    with pytest.raises(ValueError, match=r"at least 8 of 512 tokens, .* in torch.bfloat16"):
        loss_of(head, 7, torch.bfloat16)
    assert loss_of(head, 8, torch.bfloat16).isfinite()
    with torch.no_grad():
        assert loss_of(head, 1, torch.bfloat16).isfinite()
    assert loss_of(head.requires_grad_(False), 1, torch.bfloat16).isfinite()


def test_the_default_grows_where_a_head_learns_in_low_precision():
    tokens, calls = 64 * 1024 + 1, []
    head = head_of(torch.bfloat16)
    head.register_forward_hook(lambda module, inputs, out: calls.append(len(out)))
    loss_of(head, None, torch.bfloat16, tokens)
    assert max(calls) == 1025
    calls.clear()
    loss_of(head.requires_grad_(False), None, torch.bfloat16, tokens)
    assert max(calls) == 1024


def change_in_place(head):
    with torch.no_grad():
        head.weight.mul_(2)


@pytest.mark.parametrize("change", [change_in_place, nullcontext])
def test_parameters_that_change_before_the_backward(change):
    head = head_of()
    loss = loss_of(head, 100)
    change(head)
    if change is nullcontext:
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="parameters of a head must be the same in the backward"):
        loss.backward()


def test_parameters_of_one_call():
    head = head_of()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self):
            return loss_of(self.head, 100)

    others = {"head.weight": (2 * head.weight.detach()).requires_grad_()}
    loss = torch.func.functional_call(Model(), others)
    with pytest.raises(RuntimeError, match="another functional_call"):
        loss.backward()
