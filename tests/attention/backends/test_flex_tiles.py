"""Which tiles flex's forward takes: those of a row must not change a document's bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flexvarlen import DocumentMask, PackedLayout, packed_attention
from flexvarlen.attention.backends import compiled_flex
from flexvarlen.attention.call import AttentionCall

LONG = 2 * compiled_flex.LONGEST_OF_TILES


def tiles(monkeypatch, bound, head_dim, **promises):
    """What is chosen on a machine that they were measured on."""
    monkeypatch.setattr(compiled_flex, "_tiles_are_known", lambda *args: True)
    dtype = promises.pop("dtype", torch.bfloat16)
    q = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(1, 4, 8, head_dim))
    layout = PackedLayout.from_lengths([8], max_seqlen_bound=bound, total_tokens=bound)
    call = AttentionCall(q.device, dtype, 4, 4, head_dim, **promises)
    return compiled_flex.forward_tiles(q, DocumentMask.of(layout), call)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bound", [256, LONG])
def test_long_documents_of_wide_heads_take_torchs_own(monkeypatch, bound, head_dim):
    expected = "hopper" if head_dim == 64 or bound < LONG else None
    assert tiles(monkeypatch, bound, head_dim) == expected


@pytest.mark.parametrize("head_dim", [64, 128, 136, 200, 256])
def test_wide_heads_in_float32_take_small_tiles(monkeypatch, head_dim):
    expected = "wide_float32" if head_dim > 128 else None
    assert tiles(monkeypatch, 256, head_dim, dtype=torch.float32) == expected


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_promise_of_equal_bits_does_not_look_at_the_row(monkeypatch, head_dim):
    found = {tiles(monkeypatch, bound, head_dim, batch_invariant=True) for bound in (256, LONG)}
    assert found == {"hopper"}


@pytest.mark.gpu
def test_a_long_neighbour_changes_no_bit():
    q, k = (torch.randn(LONG, h, 128, dtype=torch.bfloat16, device="cuda") for h in (4, 2))
    alone = PackedLayout.from_lengths([300], device="cuda")
    packed = PackedLayout.from_lengths([300, LONG - 300], device="cuda")
    how = {"backend": "flex", "batch_invariant": True}
    with torch.no_grad():
        one = packed_attention(q[:300], k[:300], k[:300], alone, **how)
        row = packed_attention(q, k, k, packed, **how)
    assert torch.equal(one, row[:300])
