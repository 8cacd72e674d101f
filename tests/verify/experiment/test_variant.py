"""Variants: their names, their sizes, and what they share."""

import pytest
import torch

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.report.figure import style_of
from flexvarlen.runner.failures import Unsupported
from flexvarlen.verify.experiment.batch import PackedBatch, recut
from flexvarlen.verify.experiment.inputs import FORMS, inputs_of
from flexvarlen.verify.experiment.variant import Sizes, make_variant, variant_names

CPU = torch.device("cpu")


def row_of(*lengths):
    return PackedBatch(torch.zeros(1, sum(lengths), dtype=torch.int64), lengths)


@pytest.fixture(scope="module")
def base():
    return GeometryCase("qwen3-tiny", 1, dtype="float32").new_base_model(CPU)


def test_variants_share_parameters_and_leave_the_base_alone(base):
    made = make_variant("sdpa", base, Sizes.of(row_of(5, 3)))
    assert fv.is_patched(made.model)
    assert not fv.is_patched(base)
    assert next(made.model.parameters()) is next(base.parameters())
    with pytest.raises(Unsupported):
        make_variant("fa2", base, Sizes.of(row_of(5, 3)))
    for name in ("sdpa@cu_seqlens", "transformers:sdpa@packed_layout"):
        with pytest.raises(ValueError, match="@cu_seq_lens or @both or @default_cache"):
            make_variant(name, base, Sizes.of(row_of(5, 3)))


def test_their_fast_form_gets_boundaries_made_ahead(base):
    made = make_variant("transformers:sdpa@cu_seq_lens", base, Sizes.of(row_of(5, 3), row_of(4, 4)))
    found = made.inputs(row_of(5, 3))
    assert found["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert found["max_length_k"] == 5
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_is_left_to_the_model_only_where_the_form_says_so(form):
    """transformers makes one by default, also in training, and attends across documents then."""
    found = inputs_of(form, PackedLayout.from_lengths([5, 3]), [5, 3])
    without = "use_cache" not in found
    assert without == (form in ("default_cache", "packed_layout"))
    assert without or found["use_cache"] is False


def test_names_of_transformers_are_those_of_our_backends():
    names = variant_names("flash_attention_2,flex_attention,sdpa,fa2", torch.device("cpu"))
    assert names == ["fa2", "flex", "sdpa"]


@pytest.mark.parametrize("installed", [False, True])
def test_flash_attention_3_of_transformers_is_compared_where_it_is_installed(
    monkeypatch, installed
):
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: installed)
    name = "transformers:flash_attention_3"
    assert (name in variant_names("all", torch.device("cuda"))) == installed
    assert name not in variant_names("all", CPU)
    assert style_of(name).marker


def test_other_packings_fit_the_shapes_of_the_first():
    batch = row_of(30, 1, 17, 40, 8)
    sizes = Sizes.of(batch)
    for seed in range(30):
        other = recut(batch, seed, capacity=sizes.capacity, longest=sizes.max_seqlen_bound)
        assert sum(other.lengths) == batch.total_tokens
        assert min(other.lengths) >= 1
        PackedLayout.from_lengths(
            other.lengths, capacity=sizes.capacity, max_seqlen_bound=sizes.max_seqlen_bound
        )
