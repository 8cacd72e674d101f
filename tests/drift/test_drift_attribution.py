"""Attribution puts the blame where it was planted, and puts everything back."""

import pytest
import torch
from torch import nn

import flexvarlen as fv
from flexvarlen.attention.backends import registry as backends
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.drift.model.attribution import WHAT, attribute
from flexvarlen.drift.model.fixed_shapes import fixed_shapes
from flexvarlen.drift.model.measures import gradient_measures
from flexvarlen.drift.model.run import run_alone, run_packed
from flexvarlen.drift.model.serial import (
    CLASSES,
    SerialBackend,
    matmuls_of,
    norms_of,
    serial,
    serial_attention,
)
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.equivalence.models import build_model
from tests.drift.drift_models import (
    LENGTHS,
    markdown,
    new_batch,
    row_dependent_linear,
    rows_of,
    setting_of,
)

MODELS = ["llama", "qwen3"]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build_model(request.param)[0]


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


@pytest.fixture
def row_dependent(monkeypatch):
    """Linear layers whose result depends on how many rows they get, with any BLAS."""
    monkeypatch.setattr(nn.Linear, "forward", row_dependent_linear)


def shares_of(rows):
    return {what: row.measures["share"] for what, row in rows.items() if what != "invariant"}


# ---- everything by document is documents alone ----


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_serial_is_bit_equal_to_documents_alone(model, backend, dtype, row_dependent):
    setting = setting_of(model, dtype=dtype)
    variant = setting.variant(backend)
    alone = run_alone(variant, setting.batch)
    packed = run_packed(variant, setting.batch)
    assert not torch.equal(packed.logits, alone.logits)  # else the test shows nothing
    with serial(variant.model, backend, LENGTHS, CLASSES):
        found = run_packed(variant, setting.batch)
    assert torch.equal(found.logits, alone.logits)
    for ours, theirs in zip(found.hidden, alone.hidden, strict=True):
        assert torch.equal(ours, theirs)
    measures = gradient_measures(found.gradients, alone.gradients)
    assert measures["gradient_relative"] < (1e-5 if dtype == torch.float32 else 0.03)


# ---- planted blame ----


def test_matmuls_are_blamed_that_depend_on_their_rows(llama, row_dependent):
    rows = rows_of(llama)
    assert list(rows) == list(WHAT)
    shares = shares_of(rows)
    assert shares["all"] == shares["matmuls"] == 1
    assert shares["none"] == shares["norms"] == shares["attention"] == 0
    assert rows["all"].measures["logits_relative"] > 0


def test_attention_is_blamed_for_a_bug_in_attention(llama, monkeypatch):
    right = SdpaBackend.attend

    def wrong(self, q, k, v, sinks, call, mask, plan):
        out, lse = right(self, q, k, v, sinks, call, mask, plan)
        return out * (1.01 if len(mask.layout.lengths) > 1 else 1.0), lse

    monkeypatch.setattr(SdpaBackend, "attend", wrong)
    rows = rows_of(llama, batch=new_batch((30, 17, 40)), what=["attention", "norms", "none"])
    shares = shares_of(rows)
    assert (shares["all"], shares["attention"]) == (1, pytest.approx(1, abs=1e-2))
    assert (shares["norms"], shares["none"]) == (0, 0)


class Wrong:
    """A hook on a module's forward that moves a little what a whole row gets."""

    def __init__(self, forward, tokens):
        self.forward, self.tokens = forward, tokens

    def __call__(self, x):
        return self.forward(x) * (1.01 if x.shape[1] == self.tokens else 1.0)


@pytest.mark.parametrize(("what", "modules_of"), [("matmuls", matmuls_of), ("norms", norms_of)])
def test_class_of_the_bug_is_blamed(what, modules_of):
    model, _ = build_model("qwen3")
    lengths = (30, 17, 40)
    kind = type(modules_of(model)[0])
    right = kind.forward
    try:
        kind.forward = lambda self, x: Wrong(lambda y: right(self, y), sum(lengths))(x)
        rows = rows_of(model, batch=new_batch(lengths), what=[*CLASSES, "none"])
    finally:
        kind.forward = right
    shares = shares_of(rows)
    assert shares.pop("all") == 1
    assert shares.pop(what) > 0.9
    assert max(shares.values()) < 1e-3


# ---- rows ----


def test_operation_of_no_class_that_depends_on_the_row_passes_as_none():
    model, _ = build_model("llama")

    def wrong(module, args, output):
        return output * (1.01 if output.shape[1] == sum(LENGTHS) else 1.0)

    model.model.layers[0].mlp.act_fn.register_forward_hook(wrong)
    rows = rows_of(model, what=["none"])
    assert (rows["all"].status, rows["none"].status) == ("ok", "wrong")
    assert "logits differ in" in rows["none"].reason
    assert "the last block's hidden states differ in" in rows["none"].reason


@pytest.mark.parametrize("kind", [AssertionError, KeyError])
def test_kernel_that_asserts_is_a_row(llama, monkeypatch, kind):
    def broken(self, q, k, v, sinks, call, mask, plan):
        raise kind("no")

    monkeypatch.setattr(SdpaBackend, "attend", broken)
    rows = rows_of(llama, what=["none", "invariant"])
    assert {row.status for row in rows.values()} == {"failed"}
    assert all(row.reason.startswith(kind.__name__) for row in rows.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it runs")
def test_missing_backend_is_rows_with_its_reason(llama):
    rows = rows_of(llama, "fa2")
    assert {row.status for row in rows.values()} == {"unsupported"}
    assert all("CUDA" in row.reason for row in rows.values())
    assert "fa2, unsupported: fa2 needs" in markdown(rows)


def test_names_that_remain_of_all_are_not_told_to_be_lean(llama):
    rows = rows_of(llama, "flex", lean=True)
    assert {row.status for row in rows.values()} == {"skipped"}
    assert list(rows) == list(WHAT)


# ---- everything is put back ----


@pytest.mark.parametrize("place", [serial, fixed_shapes])
def test_all_is_put_back_also_after_an_exception(llama, place):
    setting = setting_of(llama, train=False)
    variant = setting.variant("sdpa")
    model, before = variant.model, backends.get_backend("sdpa")
    own = lambda x: x  # noqa: E731
    model.lm_head.forward = own
    arguments = (model, "sdpa", LENGTHS, CLASSES) if place is serial else (model, LENGTHS)

    def fail():
        with place(*arguments):
            assert "forward" in model.model.norm.__dict__
            assert model.lm_head.forward is not own
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert backends.get_backend("sdpa") is before
    assert model.lm_head.__dict__.pop("forward") is own
    changed = [m for m in model.modules() if "forward" in m.__dict__ and m is not model]
    assert changed in ([], [model.model])  # patch_model's own wrapper


def test_serial_attention_gives_each_document_its_own_layout():
    layout = fv.PackedLayout.from_lengths([5, 0, 3])
    q = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
    k, seen = q[:, :2], []

    class Spy(SdpaBackend):
        def attend(self, q, k, v, sinks, call, mask, plan):
            seen.append((q.shape[0], mask.layout.lengths))
            return super().attend(q, k, v, sinks, call, mask, plan)

    plain = fv.packed_attention(q, k, k, layout, backend="sdpa", window=2)
    before = backends._REGISTRY["sdpa"]
    backends._REGISTRY["sdpa"] = Spy()
    try:
        with serial_attention("sdpa"):
            found = fv.packed_attention(q, k, k, layout, backend="sdpa", window=2)
    finally:
        backends._REGISTRY["sdpa"] = before
    assert [(tokens, tuple(lengths)) for tokens, lengths in seen] == [(5, (5,)), (3, (3,))]
    assert torch.equal(found, plain)


def test_serial_attention_gives_the_log_sum_exp_too():
    layout = fv.PackedLayout.from_lengths([5, 3])
    q = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
    plain = fv.packed_attention(q, q, q, layout, backend="reference", return_lse=True)
    with serial_attention("reference"):
        found = fv.packed_attention(q, q, q, layout, backend="reference", return_lse=True)
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


# ---- refusals ----


def test_experts_are_refused(llama):
    variant = setting_of(llama).variant("sdpa")
    variant.model.model.layers[0].mlp.register_parameter("experts", nn.Parameter(torch.ones(2, 2)))
    for place in (serial(variant.model, "sdpa", LENGTHS, ()), fixed_shapes(variant.model, LENGTHS)):
        with pytest.raises(NotImplementedError, match="use a dense model"), place:
            pass


def test_other_tokens_than_the_rows_are_refused(llama):
    variant = setting_of(llama).variant("sdpa")
    with (
        serial(variant.model, "sdpa", LENGTHS, ["matmuls"]),
        pytest.raises(NotImplementedError, match="all 96 tokens"),
    ):
        variant.model.lm_head(torch.ones(1, 7, 96))


def test_padding_and_unknown_names_are_refused(llama):
    layout = fv.PackedLayout.from_lengths([3], total_tokens=5)
    mask = fv.DocumentMask.of(layout)
    with pytest.raises(ValueError, match="fill the row"):
        SerialBackend(backends.get_backend("sdpa")).plan(mask)
    with pytest.raises(ValueError, match="got 'auto'; name the backend"):
        attribute(llama, new_batch(), "sdpa,auto")
    with pytest.raises(ValueError, match="what must be of all, attention"):
        attribute(llama, new_batch(), "sdpa", what=["attentions"])


def test_tables_say_shares_cost_and_equality(llama):
    rows = attribute(llama, new_batch(), "sdpa,reference", repeats=1, piece=16)
    text = DriftReport(tuple(rows)).markdown()
    for said in ("whose drift it is", "batch invariant", "need not add up", "unsupported", " ×"):
        assert said in text
