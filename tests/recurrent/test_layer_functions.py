"""Convolutions and scans by document: equal to each document alone, and blind to the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings

from flexvarlen.recurrent.layer_functions import (
    convolve,
    gated_delta_rule,
)
from flexvarlen.reference.model import Float64
from tests.recurrent.cases import (
    CASES,
    LENGTHS,
    TREE,
    T,
    branches,
    documents,
    of_tokens,
    randn,
)
from tests.trees import trees


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
def test_not_as_alone(name):
    """Outputs and gradients, with padding, an empty document, and chunks that begin anew."""
    run, alone, by_token, shared = CASES[name]()
    leaves = [x.clone().requires_grad_() for x in (*by_token, *shared)]
    out = run(documents(), *leaves)
    grad = randn(*out.shape, seed=9)
    found = torch.autograd.grad(out, leaves, grad)
    parts, expected = [], [torch.zeros_like(x) for x in leaves]
    start = 0
    for length in LENGTHS:
        if length:
            tokens = slice(start, start + length)
            own = [x.detach()[:, tokens].requires_grad_() for x in leaves[: len(by_token)]]
            parts.append(alone(*own, *leaves[len(by_token) :]))
            grads = torch.autograd.grad(
                parts[-1], [*own, *leaves[len(by_token) :]], grad[:, tokens]
            )
            for i, x in enumerate(grads):
                (expected[i][:, tokens] if i < len(by_token) else expected[i]).add_(x)
        start += length
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # transformers computes scans in fp32
    torch.testing.assert_close(out[:, :start], torch.cat(parts, 1), **tolerance)
    assert not out[:, start:].any()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
def test_a_bit_of_another_document(name):
    run, _, by_token, shared = CASES[name]()
    before = run(documents(), *by_token, *shared)
    changed = [x.clone() for x in by_token]
    for x in changed:
        x[:, 6:70] *= 0.5  # the third document
    after = run(documents(), *changed, *shared)
    others = torch.ones(T, dtype=torch.bool)
    others[6:70] = False
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 6:70], after[:, 6:70])


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(tree=trees(most_tokens=70))
@example(tree=TREE)
def test_a_path_not_as_alone(name, tree):
    """In float64: what a tree gives on each path, and gradients that add up over the paths."""
    if not sum(tree.lengths):
        return
    run, alone, by_token, shared = CASES[name](tree.total_tokens)
    docs = branches(tree)
    leaves = [x.clone().requires_grad_() for x in (*by_token, *shared)]
    ordered = [docs.tokens.enter(x) for x in leaves[: len(by_token)]]
    with Float64():
        out = docs.tokens.leave(run(docs, *ordered, *leaves[len(by_token) :]))
    grad = randn(*out.shape, seed=9)
    found = torch.autograd.grad(out, leaves, grad)
    paths = [path for leaf in tree.leaves() if (path := tree.path_of(leaf))]
    uses = torch.bincount(torch.tensor([x for path in paths for x in path]), minlength=out.shape[1])
    share = (grad / uses.clamp(min=1).view(1, -1, *[1] * (grad.ndim - 2))).nan_to_num()
    expected = [torch.zeros_like(x) for x in leaves]
    for path in paths:
        own = [x.detach()[:, path].requires_grad_() for x in leaves[: len(by_token)]]
        own += leaves[len(by_token) :]
        with Float64():
            part = alone(*own)
        torch.testing.assert_close(out[:, path], part, rtol=1e-12, atol=1e-12)
        for i, x in enumerate(torch.autograd.grad(part, own, share[:, path])):
            target = expected[i][:, path] + x if i < len(by_token) else expected[i] + x
            expected[i][(slice(None), path) if i < len(by_token) else ...] = target
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-11)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
def test_a_bit_of_a_sibling(name):
    run, _, by_token, shared = CASES[name]()
    docs = branches()

    def bits(tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = docs.tokens.leave(run(docs, *map(docs.tokens.enter, leaves), *shared))
        return [out, *torch.autograd.grad(out, leaves, randn(*out.shape, seed=9))]

    changed = [x.clone() for x in by_token]
    for x in changed:
        x[:, 6:70] *= 0.5  # the third segment, a leaf
    others = torch.ones(T, dtype=torch.bool)
    others[6:70] = False
    before, after = bits(by_token), bits(changed)
    assert torch.equal(before[0][:, others], after[0][:, others])
    others[:6] = False  # gradients of what is above it change
    for x, y in zip(before[1:], after[1:], strict=True):
        assert torch.equal(x[:, others], y[:, others])
    assert any(not torch.equal(x[:, :6], y[:, :6]) for x, y in zip(before, after, strict=True))


def test_a_state_that_goes_on():
    tensors = of_tokens()
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        gated_delta_rule(None, documents(), *tensors, output_final_state=True)


def test_an_activation_that_is_dropped():
    with pytest.raises(NotImplementedError, match=r"activation must be silu.*'gelu'"):
        convolve(None, documents(), randn(1, 6, T), randn(6, 4), activation="gelu")
