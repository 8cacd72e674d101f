"""What `same_bits` checks before a model trains: bits that depend on offsets or neighbours."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

import flexvarlen as fv
from flexvarlen.patches import verification
from flexvarlen.patches.isolation.same_bits import rows_of
from tests.patches.test_same_bits import SIZE, TOKENS, documents, packed
from tests.planted import with_gradient
from tests.tiny_models import config_of, new_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def by_offset(module, args, output):
    """A difference that depends on where a token is in its row."""
    return output * (1 + torch.arange(output.shape[1])[:, None] % 7 * 1e-6)


@pytest.fixture
def checks_again(monkeypatch):
    """A model of a kind that has passed, as what is planted on an instance is no other kind."""
    monkeypatch.setattr(verification, "_passed", set())


def test_offsets_that_matter_are_found(checks_again):
    model = new_model("qwen3").eval()
    handle = model.model.layers[1].mlp.register_forward_hook(by_offset)
    with pytest.raises(fv.SameBitsError, match="must have outputs of the same bits") as raised:
        fv.patch_model(model, "sdpa", same_bits=SIZE)
    assert raised.value.row == "in reverse order"
    assert not fv.is_patched(model)
    assert "forward" not in vars(model.lm_head)
    handle.remove()
    fv.patch_model(model, "sdpa", same_bits=SIZE)
    assert fv.verify_isolation(model, packed(documents()), same_bits=True).same_bits == "outputs"
    model.model.layers[1].mlp.register_forward_hook(by_offset)
    with pytest.raises(fv.SameBitsError, match=r"backend 'sdpa', torch\.float32, cpu"):
        fv.verify_isolation(model, packed(documents()), same_bits=True, gradients=False)


def test_neighbours_that_matter_are_found(checks_again):
    """Bits of a document that depend on the others alone, as a mixture's experts might."""
    model = new_model("qwen3").eval()
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, __, out: out * (1 + (out[0, :, 0] > 0).sum() * 1e-6)
    )
    with pytest.raises(fv.SameBitsError):
        fv.patch_model(model, "sdpa", same_bits=SIZE)


def test_matrix_products_that_depend_on_the_row_are_found():
    """Of float32 rows of few tokens, on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, weight = torch.randn(10, 48), torch.randn(64, 48)
        if torch.equal(linear(x.flip(0), weight), linear(x, weight).flip(0)):
            pytest.skip("these matrix products have the same bits at every offset")
        with pytest.raises(fv.SameBitsError):
            fv.patch_model(new_model("qwen3").eval(), "sdpa", same_bits=10)
    finally:
        torch.set_num_threads(threads)


def test_input_gradients_keep_their_bits_if_deterministic():
    model = new_model("qwen3").eval()
    fv.patch_model(model, "sdpa", same_bits=TOKENS, deterministic=True)
    report = fv.verify_isolation(model, packed(documents()), same_bits=True, gradients=True)
    assert report.same_bits == "outputs and input gradients"
    assert "outputs and input gradients kept their bits" in report.sentence()


def test_gradients_that_depend_on_the_offset_are_found():
    model = new_model("qwen3").eval()
    fv.patch_model(model, "sdpa", same_bits=TOKENS, deterministic=True)
    shifted = with_gradient(lambda grad, _: by_offset(None, None, grad))
    model.model.layers[0].register_forward_hook(lambda _, __, out: shifted(out))
    batch = packed(documents())
    assert fv.verify_isolation(model, batch, same_bits=True).same_bits == "outputs"
    with pytest.raises(fv.SameBitsError, match="input gradients of the same bits") as raised:
        fv.verify_isolation(model, batch, same_bits=True, gradients=True)
    assert raised.value.gradients


@pytest.mark.parametrize("same_bits", [None, 64])
def test_trees_are_rearranged_whole(same_bits):
    tree = fv.PackedLayout.from_tree([9, 4, 2, 3, 8, 5], [-1, 0, 1, 0, -1, -1])
    batch = {"input_ids": torch.arange(3, 34)[None], "packed_layout": tree}
    model = fv.patch_model(new_model("qwen3").eval(), "sdpa", same_bits=same_bits)
    assert fv.verify_isolation(model, batch, same_bits=True).same_bits


def test_each_document_is_in_another_row():
    for count in (1, 2, 3, 8):
        rows = rows_of(count)
        for document in range(count):
            held = [row for row in rows if document in row.documents]
            assert any(row.documents != tuple(range(count)) for row in held)
        assert {-1} <= {x for row in rows for x in row.documents}


def test_checked_once_for_a_kind_of_model(monkeypatch):
    config = config_of("qwen3", intermediate_size=80)
    first, second = (new_model("qwen3", intermediate_size=80).eval() for _ in range(2))
    assert first.config.intermediate_size == config.intermediate_size
    fv.patch_model(first, "sdpa", same_bits=SIZE)
    monkeypatch.setattr(
        "flexvarlen.patches.verification.compare_bits", lambda _: pytest.fail("checked again")
    )
    fv.patch_model(second, "sdpa", same_bits=SIZE)
