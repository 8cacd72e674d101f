"""The convolution at every width, over trees and documents, in plain torch and in Triton."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flexvarlen.recurrent.convolution import causal_convolution
from flexvarlen.recurrent.documents import RecurrentDocuments
from tests.recurrent.cases import TREE, documents, randn
from tests.trees import Tree

CHANNELS = 6
SHORT = Tree((1, 1, 1, 2, 1, 0, 1, 5), (-1, 0, 1, 2, 2, 0, 5, 6), 3)
"""Every segment but the last is shorter than a convolution."""


def inputs(tokens, width, bias):
    x, weight = randn(tokens, CHANNELS), randn(CHANNELS, width, seed=1)
    return [x, weight, *([randn(CHANNELS, seed=2)] if bias else [])]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("tree", [TREE, SHORT], ids=["long", "short"])
def test_another_width(tree, width):
    docs = RecurrentDocuments(tree.layout())
    x, weight, bias = inputs(tree.total_tokens, width, bias=True)
    found = causal_convolution(docs.tokens.enter(x[None])[0], weight, bias, False, docs)
    found = docs.tokens.leave(found[None])[0]
    for path in map(tree.path_of, tree.leaves()):
        channels = F.pad(x[path].t(), (width - 1, 0))
        expected = F.conv1d(channels[None], weight[:, None], bias, groups=CHANNELS)[0].t()
        torch.testing.assert_close(found[path], expected)


def run(tensors, silu, docs, device, dtype):
    """The output and the gradients."""
    leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
    x, weight, *bias = leaves
    out = causal_convolution(x, weight, bias[0] if bias else None, silu, docs)
    grad = randn(*out.shape, seed=9).to(device, dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.gpu
@pytest.mark.parametrize(("silu", "bias"), [(True, True), (False, False)])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("row", [SHORT, TREE, None], ids=["short", "long", "documents"])
def test_triton(row, width, silu, bias):
    layout = documents().layout if row is None else row.layout()
    tensors = inputs(layout.total_tokens, width, bias)
    exact = run(tensors, silu, RecurrentDocuments(layout), "cpu", torch.float64)
    docs = RecurrentDocuments(layout.to("cuda"))
    for x, y in zip(run(tensors, silu, docs, "cuda", torch.float32), exact, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def _two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_two_threads")
def test_gradients_are_the_same_bits_in_every_run():
    """Of 200 answers to one prompt, whose last tokens all of them read."""
    docs = RecurrentDocuments(Tree((40, *[9] * 200), (-1, *[0] * 200)).layout())
    tensors = [randn(docs.layout.total_tokens, 256), randn(256, 4, seed=1)]
    first, *others = (run(tensors, False, docs, "cpu", torch.float32) for _ in range(6))
    for again in others:
        assert all(map(torch.equal, first, again))
