"""By the plugin name alone, without patch_model: what reaches a layer tells the documents.

A layer takes those that the layer before it found, if its own. Shapes: B rows of S tokens; H =
heads, D = head_dim.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

import flexvarlen as fv
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.attention.without_patch import packed_by_name
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import batch_of, exact_and_baseline, new_model, one_row

BATCH = one_row()


def logits_of(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def assert_right(logits, batch, kind="llama"):
    exact, baseline = exact_and_baseline(kind, batch.order)
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)


def by_name(how, kind, tmp_path):
    if how == "from_config":
        return new_model(kind, implementation="flexvarlen_flex")
    model = new_model(kind)
    if how == "set_attn_implementation":
        model.set_attn_implementation("flexvarlen_doc")
        return model
    model.save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flexvarlen_doc")


FORMS = {
    "position_ids": ("one_row", "position_ids"),
    "two_rows": ("two_rows", "position_ids"),
    "cu_seq_lens": ("one_row", "cu_seq_lens", "positions"),
    "right_padding": ("right_padding", "padding_mask"),
    "left_padding": ("left_padding", "padding_mask"),
}


@pytest.mark.pairwise(
    kind=["llama", "qwen3_windows"],
    how=["from_config", "from_pretrained", "set_attn_implementation"],
    form=FORMS,
)
def test_each_form_is_the_documents_one_by_one(kind, how, form, tmp_path):
    model = by_name(how, kind, tmp_path)
    rows, way, *beside = FORMS[form]
    batch = forms.ROWS[rows]()
    inputs = forms.given(way, batch, *beside)
    assert_right(batch.of_documents(logits_of(model, batch.ids, **inputs)), batch, kind)


def test_finds_cu_seq_lens_without_position_ids():
    model = new_model("llama", implementation="flexvarlen_doc")
    out = logits_of(model, BATCH.ids, cu_seq_lens_q=BATCH.cu_seqlens)
    exact, _ = exact_and_baseline("llama", BATCH.order)
    # Positions run on through the row, and RoPE loses precision: 2e-4.
    torch.testing.assert_close(out[0], exact.logits.float(), rtol=1e-3, atol=1e-2)


WRITES = {
    "copy_": lambda positions, new: positions.copy_(new),
    # these two leave no trace in the tensor's version
    "data": lambda positions, new: positions.data.copy_(new),
    "numpy": lambda positions, new: np.copyto(positions.numpy(), new.numpy()),
}


@pytest.mark.pairwise(write=WRITES, mode=[torch.no_grad, torch.inference_mode], layers=[1, 2])
def test_is_not_misled_by_the_layout_of_the_last_forward(write, mode, layers):
    """Layers share what the first one found; the next forward may bring the same tensors."""
    model = new_model("llama", implementation="flexvarlen_doc", num_hidden_layers=layers)
    batches = (BATCH, batch_of(((5, 4, 3, 2, 1, 0),), row_tokens=256), BATCH)
    positions = torch.zeros_like(BATCH.position_ids)
    with mode():
        expected = [model(b.ids, position_ids=b.position_ids).logits for b in batches]
        for batch, logits in zip(batches, expected, strict=True):
            WRITES[write](positions, batch.position_ids)
            assert torch.equal(model(batch.ids, position_ids=positions).logits, logits)
    if layers == 2:
        assert_right(expected[1][0], batches[1])


def test_is_not_misled_after_a_forward_that_failed():
    model = new_model("llama", implementation="flexvarlen_doc")
    positions = BATCH.position_ids.clone()
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, BATCH.ids, position_ids=positions)
    hook.remove()
    other = batch_of(((5, 4, 3, 2, 1, 0),), row_tokens=256)
    positions.data.copy_(other.position_ids)
    out = logits_of(model, other.ids, position_ids=positions)
    assert_right(out[0], other)


# ---- what layers share ----

ONE, TWO = torch.arange(12)[None], torch.tensor([[*range(5), *range(7)]])


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
    layout = fv.PackedLayout.from_lengths([5, 7])
    packed = PackedForward(layout, "sdpa", deterministic=False, batch_invariant=False)
    attention = AttentionInterface()["flexvarlen_doc"]
    q, k = torch.randn(1, 2, queries, 16), torch.randn(1, 2, keys, 16)
    with pytest.raises(ValueError, match="queries and keys must be the 12 tokens"):
        attention(Layer(0), q, k, k, None, flexvarlen=packed)
