"""Attention over trees by a call for each level, with the stand-in for FlashAttention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from flexvarlen.attention.backends.cu_seqlens.levels import (
    Levels,
    attend_levels,
    level_sizes,
    merge,
)
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.spec import MaskSpec
from tests.attention.backends.plain_kernel import backend  # noqa: F401
from tests.attention.test_trees import by_path
from tests.oracle import assert_as_accurate, differentiate, random_qkv
from tests.trees import EXAMPLES, trees

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16

pytestmark = pytest.mark.usefixtures("backend")


def attention(tree, *, any_row=False, sinks=None, **sizes):
    layout = tree.layout(**sizes)
    call = AttentionCall(
        torch.device("cpu"),
        *(torch.float32, HEADS, KV_HEADS, HEAD_DIM),
        scale=HEAD_DIM**-0.5,
        sinks=sinks is not None,
    )
    numbers = level_sizes(layout, any_row=any_row)
    levels = Levels.of(layout.segments)
    return lambda q, k, v: attend_levels("plain", q, k, v, sinks, levels, numbers, call)[0]


def check(tree, **how):
    *qkv, grad = random_qkv(tree.total_tokens, HEADS, KV_HEADS, HEAD_DIM)
    sinks = how.get("sinks")
    wide = {} if sinks is None else {"sinks": sinks.double()}
    exact = differentiate(by_path(tree, **wide), [x.double() for x in qkv], grad.double())
    plain = {} if sinks is None else {"sinks": sinks}
    peer = differentiate(by_path(tree, **plain), qkv, grad)
    found = differentiate(attention(tree, **how), qkv, grad)
    assert_as_accurate(found[0], exact[0], peer[0], 2)
    for mine, good, coarse in zip(found[1], exact[1], peer[1], strict=True):
        assert_as_accurate(mine, good, coarse, 3)


@pytest.mark.parametrize("tree", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("how", [{}, {"any_row": True}, {"capacity": 20, "max_depth": 5}])
def test_each_path_is_a_document(tree, how):
    check(tree, **how)


@settings(max_examples=40)
@given(trees(most_tokens=40))
def test_any_tree(tree):
    if tree.total_tokens and max(tree.parents) >= 0:
        check(tree)


def test_sinks():
    tree = EXAMPLES["levels"]
    sinks = torch.randn(HEADS)
    check(tree, sinks=sinks)
    *qkv, grad = random_qkv(tree.total_tokens, HEADS, KV_HEADS, HEAD_DIM)

    def of_sinks(attend):
        leaf = sinks.clone().requires_grad_()
        return torch.autograd.grad(attend(leaf)(*qkv), leaf, grad)[0]

    found = of_sinks(lambda leaf: attention(tree, sinks=leaf))
    expected = of_sinks(lambda leaf: by_path(tree, sinks=leaf))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 128])
def test_merge_in_one_launch(dtype, head_dim):
    """As in torch; tokens that see nothing in either call, or in one, included."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    out, own = draw(70, HEADS, head_dim).to(dtype), draw(70, HEADS, head_dim).bfloat16()
    lse, own_lse = draw(HEADS, 70), draw(HEADS, 70)
    own_lse[:, 20:40] = own_lse[:, -1] = lse[:, -1] = float("-inf")
    out[-1] = own[-1] = 0
    found = out.cuda(), lse.cuda()
    merge(*found, own.cuda(), own_lse.cuda())
    merge(out, lse, own, own_lse)
    torch.testing.assert_close(found[0].cpu(), out)
    torch.testing.assert_close(found[1].cpu(), lse)


def test_operators_trace():
    tree = EXAMPLES["levels"]
    layout = tree.layout()
    qkv = [x.requires_grad_() for x in random_qkv(tree.total_tokens, HEADS, KV_HEADS, HEAD_DIM)[:3]]
    numbers = [n for each in level_sizes(layout, any_row=False) for n in each]
    of_call = (MaskSpec().as_ints(), 0.25, 0.0, False, False, True)
    torch.library.opcheck(
        torch.ops.flexvarlen.levels_forward.default,
        ("plain", *qkv, None, *Levels.of(layout.segments), numbers, *of_call),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
