"""Attention over trees by a call for each level, with the stand-in for FlashAttention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from flexvarlen import DocumentMask
from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS
from flexvarlen.attention.backends.cu_seqlens.levels import merge
from flexvarlen.layout import launch_sizes
from tests.attention.accuracy import assert_right, assert_same_bits
from tests.attention.backends.plain_kernel import attend
from tests.attention.test_trees import by_path
from tests.oracle import differentiate, random_qkv
from tests.trees import EXAMPLES, Tree, trees

HEADS = 6

pytestmark = pytest.mark.usefixtures("backend")


def attention(tree, *, short_row=0, **sizes):
    """Launched with the sizes of the row, but for one of at most `short_row` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_sizes, "SHORT_ROW", short_row)
        mask = DocumentMask.of(tree.layout(**sizes))
    return lambda *inputs: attend(KERNELS["plain"], *inputs[:3], mask, *inputs[3:])[0]


def check(tree, *sinks, **how):
    *qkv, grad = random_qkv(tree.total_tokens, HEADS, 2, 16)
    plain = by_path(tree, scale=0.25)
    assert_right(attention(tree, **how), plain, [*qkv, *sinks], grad)


@pytest.mark.parametrize("tree", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("how", [{}, {"short_row": 2048}, {"capacity": 20, "max_depth": 5}])
def test_each_path_is_a_document(tree, how):
    check(tree, **how)


@settings(max_examples=20)
@given(trees(most_tokens=40))
def test_any_tree(tree):
    if tree.total_tokens and max(tree.parents) >= 0:
        check(tree)


def test_sinks():
    check(EXAMPLES["levels"], torch.randn(HEADS))


def test_segment_whose_scores_overflow():
    """To -inf: the query sees only the prompt, and FA2's LSE of the segment is +inf."""
    tree = Tree((4, 3), (-1, 0))
    q, k, v, grad = random_qkv(tree.total_tokens, HEADS, 2, 16)
    q[5], k[4:] = 1e20, -1e20
    out, grads = differentiate(attention(tree), [q, k, v], grad)
    exact = by_path(tree, scale=0.25)(q.double(), k.double(), v.double())
    torch.testing.assert_close(out[5].double(), exact[5], atol=1e-5, rtol=1e-5)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("head_dim", [8, 24, 128])
def test_merge_in_one_launch(dtypes, head_dim):
    """As in torch; tokens that see nothing in either call, or in one, and NaN included."""
    generator, tokens = torch.Generator().manual_seed(0), 20_001
    dtype, merged_dtype = (getattr(torch, name) for name in dtypes)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    out, after = (draw(tokens, HEADS, head_dim).to(x) for x in (dtype, torch.bfloat16))
    lse, next_lse = draw(HEADS, tokens), draw(HEADS, tokens)
    next_lse[:, 20:40] = next_lse[:, -1] = lse[:, -1] = float("-inf")
    next_lse[:, 30:35] = lse[:, 70:80] = float("inf")  # FA2
    after[20:40] = out[70:80] = out[-1] = after[-1] = 0
    next_lse[:, 50] = after[60] = after[20] = float("nan")
    given = out, lse, after, next_lse
    on_gpu = [x.cuda() for x in given]
    found = merge(*on_gpu, merged_dtype)
    expected = merge(*given, merged_dtype)
    torch.testing.assert_close([x.cpu() for x in found], expected, equal_nan=True)
    assert_same_bits([x.cpu() for x in on_gpu], given, equal_nan=True)
