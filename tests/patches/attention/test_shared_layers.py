"""By the plugin name alone a layer takes the documents that the layer before it found, if its own.

Shapes: B rows of S tokens; H = heads, D = head_dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig

import flexvarlen as fv
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.attention.without_patch import packed_by_name
from flexvarlen.patches.models.layers import LayerKind

ONE, TWO = torch.arange(12)[None], torch.tensor([[*range(5), *range(7)]])


def packed_forward(layout):
    return PackedForward(layout, "sdpa", deterministic=False, batch_invariant=False)


class Layer(nn.Module):
    """What a layer tells of itself."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx, self.config = index, LlamaConfig()


def found_by(index, positions, *, backend="sdpa", batch=1, **given):
    """What this layer gets."""
    query = torch.zeros(batch, 2, positions.numel() // batch, 16)
    given = {"position_ids": positions, **given}
    return packed_by_name(Layer(index), query, None, backend, None, given)


def test_layers_share_what_the_first_one_found():
    first = found_by(0, TWO)
    assert found_by(1, TWO) is first
    assert found_by(5, TWO) is first
    assert found_by(0, TWO) is not first


def test_a_tensor_written_to_between_two_layers():
    positions = ONE.clone()
    assert found_by(0, positions).layout.num_docs == 1
    positions.copy_(TWO)
    assert found_by(1, positions).layout.num_docs == 2


def test_another_tensor_of_the_same_version():
    """Layers of two interleaved forwards."""
    ones, twos = ONE.clone(), TWO.clone()
    assert ones._version == twos._version
    assert found_by(0, ones).layout.num_docs == 1
    assert found_by(1, twos).layout.num_docs == 2
    with torch.inference_mode():
        ones, twos = ONE.clone(), TWO.clone()
        assert found_by(0, ones).layout.num_docs == 1
        assert found_by(1, twos).layout.num_docs == 2


def test_another_backend_for_the_same_tensor():
    positions = ONE[:, :6].repeat(2, 1)
    first = found_by(0, positions, backend="sdpa", batch=2)
    second = found_by(1, positions, backend="reference", batch=2)
    assert (first.backend, second.backend) == ("sdpa", "reference")


def test_a_longest_document_that_a_later_layer_contradicts():
    """A number is no tensor, but belongs to what was given."""
    cu_seqlens = torch.tensor([0, 12], dtype=torch.int32)
    found_by(0, ONE, cu_seq_lens_q=cu_seqlens, max_length_q=12)
    with pytest.raises(ValueError, match="max_length_q"):
        found_by(1, ONE, cu_seq_lens_q=cu_seqlens, max_length_q=3)


@pytest.mark.parametrize(("queries", "keys"), [(12, 16), (6, 6), (6, 12)])
def test_keys_that_are_not_the_packed_tokens(queries, keys):
    """A cache that kept more: the kernel would read other tokens as the documents."""
    packed = packed_forward(fv.PackedLayout.from_lengths([5, 7]))
    attention = AttentionInterface()["flexvarlen_doc"]
    q, k = torch.randn(1, 2, queries, 16), torch.randn(1, 2, keys, 16)
    with pytest.raises(ValueError, match="queries and keys must be the 12 tokens"):
        attention(Layer(0), q, k, k, None, flexvarlen=packed)


def test_a_plan_is_made_of_a_consistent_mask():
    layout = fv.PackedLayout.from_lengths([5, 7])
    for causal in (True, False):
        for window in (None, 1, 4, (3, 0), (0, 3), (-1, 2)):
            kind = LayerKind("full_attention", causal, window, None, 2, 2, 16, 0.25)
            mask = packed_forward(layout).route(kind, torch.float32, False).mask
            assert mask == DocumentMask.of(layout, causal=causal, window=window)
            assert mask.spec == MaskSpec.of(causal=causal, window=window)
