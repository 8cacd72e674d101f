"""Convolutions and scans by document: equal to each document alone, and blind to the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings

from flexvarlen.recurrent.layer_functions import convolve, gated_delta_rule
from flexvarlen.reference.model import Float64
from tests.recurrent.cases import (
    CASES,
    LENGTHS,
    ROWS,
    TREE,
    T,
    branches,
    check_bits_of_others,
    documents,
    of_tokens,
    randn,
)
from tests.trees import Tree, trees

pytestmark = pytest.mark.filterwarnings(
    "ignore:flexvarlen. recurrent layers run one document after another"
)


def check_paths(name, tree, docs):
    """In float64: each path as alone, gradients that add up over the paths, nothing at padding."""
    run, alone, by_token, shared = CASES[name](tree.total_tokens)
    leaves = [x.clone().requires_grad_() for x in (*by_token, *shared)]
    ordered = [docs.tokens.enter(x) for x in leaves[: len(by_token)]]
    with Float64():
        out = docs.tokens.leave(run(docs, *ordered, *leaves[len(by_token) :]))
    assert not out[:, sum(tree.lengths) :].any()
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


@pytest.mark.parametrize("name", CASES)
def test_not_as_alone(name):
    """With padding, an empty document, and chunks that begin anew."""
    check_paths(name, Tree(LENGTHS, (-1,) * len(LENGTHS), T - sum(LENGTHS)), documents())


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None)
@given(tree=trees(most_tokens=70))
@example(tree=TREE)
def test_a_path_not_as_alone(name, tree):
    assume(sum(tree.lengths))
    check_paths(name, tree, branches(tree))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_a_bit_of_another_document(name, row):
    """Or of a sibling."""
    check_bits_of_others(name, row, ROWS[row]())


def test_a_state_that_goes_on():
    tensors = of_tokens()
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        gated_delta_rule(None, documents(), *tensors, output_final_state=True)


def test_an_activation_that_is_dropped():
    with pytest.raises(NotImplementedError, match=r"activation must be silu.*'gelu'"):
        convolve(None, documents(), randn(1, 6, T), randn(6, 4), activation="gelu")
