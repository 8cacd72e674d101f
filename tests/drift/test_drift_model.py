"""`model_drift` shows a leak, names the layer of a planted bug, and calls equal what is equal."""

import json
import math

import pytest
import torch
from torch import nn

from flexvarlen.drift.model.comparisons import COMPARISONS, model_drift
from flexvarlen.drift.model.measures import run_measures, why_not_finite
from flexvarlen.drift.model.run import (
    ModelRun,
    padded_groups,
    run_alone,
    run_packed,
    run_padded,
    targets_of,
)
from flexvarlen.drift.model.setting import ModelSetting
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.equivalence.models import build_model
from flexvarlen.rows import append_row, read_rows
from tests.drift.drift_models import LENGTHS, TOKENS, new_batch


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


def drift(model, backends="sdpa", comparisons="packed-alone", **options):
    return model_drift(model, new_batch(), backends, comparisons=comparisons, **options)


def of_batch(rows):
    (row,) = [row for row in rows if row.case["scope"] == "batch"]
    assert row.status == "ok", row.reason
    return row.measures


def variant_of(model, **changes):
    setting = ModelSetting.of(model, new_batch(), **changes)
    return setting.variant("sdpa"), setting.batch


# ---- forms of a batch ----


def test_loss_and_order_are_the_same_in_all_forms(llama):
    variant, batch = variant_of(llama)
    packed = run_packed(variant, batch)
    logits = packed.logits.log_softmax(-1)
    targets = targets_of(batch)
    counted = targets >= 0
    assert int(counted.sum()) == TOKENS - len(LENGTHS)
    by_hand = -logits[counted].gather(1, targets[counted, None]).mean().item()
    assert packed.loss == pytest.approx(by_hand, rel=1e-6)
    for run in (run_alone(variant, batch), run_padded(variant, batch)):
        assert run.loss == pytest.approx(packed.loss, rel=1e-5)
        assert torch.allclose(run.logits, packed.logits, atol=1e-3)
        assert len(run.hidden) == 3
        for ours, theirs in zip(run.hidden, packed.hidden, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-3)
        for name, gradient in packed.gradients.items():
            assert torch.allclose(run.gradients[name], gradient, atol=1e-4), name


def test_padded_calls_stay_within_the_row(llama):
    assert padded_groups((100, 1, 1, 1)) == [(0, 1), (1, 4)]
    assert padded_groups((5,)) == [(0, 1)]
    for lengths in (LENGTHS, (1,) * 9, (50, 2, 2, 50, 1)):
        groups = padded_groups(lengths)
        assert [d for group in groups for d in range(*group)] == list(range(len(lengths)))
        sizes = [max(lengths[a:b]) * (b - a) for a, b in groups]
        assert max(sizes) <= sum(lengths)


def test_padded_rows_have_room_for_their_padding(llama):
    batch = new_batch((3, 4) * 7 + (3,))  # 13 rows in the first call, 7 of them padded
    setting = ModelSetting.of(llama, batch, train=False)
    variant = setting.variant("sdpa")
    packed, padded = run_packed(variant, batch), run_padded(variant, batch)
    assert torch.allclose(padded.logits, packed.logits, atol=1e-3)


def test_hidden_states_are_before_the_last_norm(llama):
    variant, batch = variant_of(llama)
    hooks = [len(module._forward_hooks) for module in variant.model.modules()]
    run = run_packed(variant, batch)
    embedded = llama.get_input_embeddings()(batch.input_ids[0])
    assert torch.equal(run.hidden[0], embedded)
    logits = llama.lm_head(llama.model.norm(run.hidden[-1]))
    assert torch.allclose(logits, run.logits, atol=1e-4)
    assert hooks == [len(module._forward_hooks) for module in variant.model.modules()]


# ---- identical runs ----


def test_identical_runs_give_zeros(llama):
    rows = drift(llama, comparisons="backend-backend")  # sdpa against itself: run to run
    measures = of_batch(rows)
    zero = ("logits_max_abs", "kl_mean", "kl_max", "logprob_max_abs", "logprob_p99")
    zero += ("loss_difference", "gradient_relative", "worst_parameter_relative")
    assert {name: measures[name] for name in zero} == dict.fromkeys(zero, 0)
    for name in ("logits_equal", "top1", "top5", "gradient_cosine"):
        assert measures[name] == 1
    assert measures["worst_tokens"] == []
    for name in ("first_layer", "first_part", "worst_parameter"):
        assert measures[name] is None
    layers = [row.measures["hidden_equal"] for row in rows if row.case["scope"] == "layer"]
    assert layers == [1, 1, 1]


def test_drift_in_the_head_alone_is_said(llama):
    variant, batch = variant_of(llama, train=False)
    truth = run_packed(variant, batch)
    moved = truth.logits.clone()
    moved[35, 7] += 1
    found = ModelRun(moved, truth.hidden, truth.loss)
    (_, _, measures), *others = run_measures(found, truth, batch)
    assert (measures["first_layer"], measures["first_part"]) == (None, "head")
    assert "gradient_cosine" not in measures
    apart = [i for scope, i, of in others if scope == "document" and of["kl_max"] > 0]
    assert apart == [2]  # token 35 is the fifth of the third document
    assert measures["worst_tokens"][0][:2] == [2, 35 - 31 + 1]  # its label is the token after


# ---- planted bugs ----


def test_leaking_variant_parts_at_the_first_block(llama):
    rows = drift(llama, "transformers:sdpa", ["packed-alone", "packed-padded"])
    for comparison in ("packed-alone", "packed-padded"):
        own = [row for row in rows if row.case["comparison"] == comparison]
        measures = of_batch(own)
        assert (measures["first_layer"], measures["first_part"]) == (0, "block 0")
        assert measures["logits_relative"] > 0.1
        assert measures["kl_mean"] > 0.1
        assert measures["gradient_cosine"] < 0.95
        documents = {r.case["index"]: r.measures for r in own if r.case["scope"] == "document"}
        assert documents[0]["logits_relative"] < 1e-5  # nothing stands before it
        assert min(documents[i]["logits_relative"] for i in (1, 2, 3, 4)) > 0.1
        assert all(document != 0 for document, _, moved in measures["worst_tokens"] if moved > 1)


class Wrong:
    """A hook that moves what a block puts out when the call is one packed row."""

    def __call__(self, module, args, output):
        if output.shape[1] != TOKENS:
            return None
        moved = output.clone()
        moved[:, 40] += 0.5
        return moved


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_bug_in_one_layer_is_reported_with_that_layer_first(layer):
    model, _ = build_model("llama@3")
    model.double()  # rounding must not part the layers before it by much
    model.model.layers[layer].register_forward_hook(Wrong())
    rows = drift(model, train=False, comparisons="packed-alone", dtype=torch.float64)
    sizes = [row.measures["hidden_relative"] for row in rows if row.case["scope"] == "layer"]
    assert max(sizes[: layer + 1]) < 1e-13 < 1e-3 < min(sizes[layer + 1 :])
    measures = of_batch(rows)
    parted = [i - 1 for i, size in enumerate(sizes) if size]
    assert measures["first_layer"] == parted[0]
    document = measures["worst_tokens"][0][0]
    assert document == 2  # token 40 is in the third: 30 + 1 <= 40 < 48


def test_bug_in_one_layer_of_the_compiled_model_is_exactly_there():
    class Compiled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            out = self.inner(*args, **kwargs)
            return out * 1.01 if torch.compiler.is_compiling() else out

    model, _ = build_model("llama@3")
    model.model.layers[1].mlp = Compiled(model.model.layers[1].mlp)
    measures = of_batch(drift(model, comparisons="eager-compiled", train=False))
    assert (measures["first_layer"], measures["first_part"]) == (1, "block 1")
    assert measures["compiler"] == "aot_eager"


# ---- comparisons and rows ----


def test_every_comparison_has_rows_of_every_scope_and_tables(llama, tmp_path):
    before = {name: p.detach().clone() for name, p in llama.named_parameters()}
    written = []
    rows = drift(llama, "sdpa,fa2", "all", append=written.append, name="tiny", seed=3)
    assert rows == written
    for name, parameter in llama.named_parameters():
        assert torch.equal(before[name], parameter)
        assert parameter.grad is None
    assert llama.config._attn_implementation == "sdpa"
    assert list(dict.fromkeys(row.case["comparison"] for row in rows)) == list(COMPARISONS)
    for comparison in COMPARISONS:
        own = [r for r in rows if r.case["comparison"] == comparison and r.status == "ok"]
        scopes = [row.case["scope"] for row in own]
        assert scopes == ["batch"] + ["document"] * 5 + ["layer"] * 3
        assert own[0].case["seed"] == 3
        assert own[0].measures["gradient_cosine"] > 0.99
        assert own[0].measures["top1"] > 0.9
    missing = [row for row in rows if row.case["backend"] == "fa2"]
    if not torch.cuda.is_available():
        assert {row.status for row in missing} == {"unsupported"}
        assert "CUDA" in missing[0].reason
    for row in rows:
        json.dumps(row.case)
        append_row(tmp_path / "rows.jsonl", row)
    again = read_rows([tmp_path / "rows.jsonl"])
    assert len(again) == len(rows)  # no two have one case
    text = DriftReport(tuple(again)).markdown()
    assert text == DriftReport(tuple(rows)).markdown()
    for said in ("packed-alone", "block 1", "documents that moved most", "worst parameter"):
        assert said in text


def test_dtypes_differ_by_arithmetic_alone(llama):
    rows = drift(llama, comparisons="dtype", train=False)
    measures = of_batch(rows)
    case = rows[0].case
    assert (case["dtype"], case["other_dtype"], case["other"]) == ("bfloat16", "float32", None)
    assert measures["first_layer"] == 0  # embeddings are of the same rounded weights
    assert 1e-3 < measures["logits_relative"] < 0.1
    half = drift(llama, comparisons="dtype", train=False, dtype=torch.bfloat16)
    assert of_batch(half)["logits_relative"] == measures["logits_relative"]


def test_backend_without_a_backward_gives_a_forward_and_says_why(llama):
    if torch.cuda.is_available():
        pytest.skip("flex has a backward there")
    measures = of_batch(drift(llama, "flex", "backend-backend"))
    assert "gradient_cosine" not in measures
    assert "backward" in measures["why_no_gradients"]
    assert 0 < measures["logits_relative"] < 1e-4


class KernelError(Exception):
    """As some kernel packages have: no RuntimeError."""


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ValueError, KernelError])
def test_what_breaks_is_a_row(llama, monkeypatch, kind):
    def broken(*args, **kwargs):
        raise kind("the kernel broke\nsomewhere")

    monkeypatch.setattr("flexvarlen.drift.model.comparisons.run_alone", broken)
    rows = drift(llama, comparisons=["packed-alone", "packed-padded"], train=False)
    assert (rows[0].status, rows[0].reason) == ("failed", f"{kind.__name__}: the kernel broke")
    assert {row.status for row in rows[1:]} == {"ok"}
    assert f"failed: {kind.__name__}" in DriftReport(tuple(rows)).markdown()


def test_journal_that_cannot_be_written_is_no_finding(llama):
    def full(row):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        drift(llama, train=False, append=full)


# ---- what is not finite ----


def test_nan_everywhere_is_called_the_same_bits():
    model, _ = build_model("llama")
    model.model.norm.weight.data.fill_(math.nan)
    rows = drift(model, comparisons="backend-backend")
    whole = rows[0]
    assert whole.measures["logits_equal"] == 1  # the same NaN
    assert whole.status == "wrong"
    assert whole.reason.startswith("not finite: 100% of the logits, ")
    assert "of the gradients of the run; 100% of the logits" in whole.reason
    assert whole.reason in DriftReport(tuple(rows)).markdown()


def test_one_gradient_that_is_not_finite_is_wrong(llama):
    variant, batch = variant_of(llama)
    truth = run_packed(variant, batch)
    assert why_not_finite(truth, truth) is None
    gradients = {name: gradient.clone() for name, gradient in truth.gradients.items()}
    next(iter(gradients.values())).view(-1)[0] = math.inf
    found = ModelRun(truth.logits, truth.hidden, truth.loss, gradients)
    for pair, who in (((found, truth), "the run"), ((truth, found), "what it is held against")):
        reason = why_not_finite(*pair)
        assert reason.startswith("not finite: ")
        assert reason.endswith(f"of the gradients of {who}.")
        assert "logits" not in reason


def test_one_hidden_state_that_is_not_finite_is_wrong(llama):
    variant, batch = variant_of(llama, train=False)
    truth = run_packed(variant, batch)
    hidden = [state.clone() for state in truth.hidden]
    hidden[1][40] = math.nan
    reason = why_not_finite(ModelRun(truth.logits, tuple(hidden), truth.loss), truth)
    share = 100 / (TOKENS * len(hidden))
    assert reason == f"not finite: {share:.3g}% of the hidden states of the run."


def test_compiler_is_the_one_asked_for(llama):
    rows = drift(llama, comparisons="eager-compiled", train=False, compiler="no_such_compiler")
    assert [row.status for row in rows] == ["failed"]
    assert "no_such_compiler" in rows[0].reason


def test_on_the_cpu_all_leaves_out_what_compiles_long(llama):
    rows = model_drift(llama, new_batch(), comparisons=["eager-compiled"], train=False)
    if llama.device.type == "cpu":
        by = {r.case["backend"]: r for r in rows if r.case["scope"] == "batch"}
        assert by["sdpa"].status == "ok"
        for name in ("flex", "reference", "transformers:sdpa"):
            assert by[name].status == "skipped"
            assert name in by[name].reason


@pytest.mark.parametrize("backend", ["flex", "reference"])
def test_names_that_remain_of_all_are_not_told_to_be_lean(llama, backend):
    options = {"comparisons": ["eager-compiled"], "train": False}
    (row,) = model_drift(llama, new_batch(), [backend], lean=True, **options)
    assert row.status == "skipped"


def test_unknown_option_is_ignored(llama):
    with pytest.raises(TypeError, match="unknown options: sed"):
        drift(llama, sed=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"comparisons": "packed"}, "comparisons must be all"),
        ({"backends": "fa9"}, "backends must be all"),
        ({"baseline": "fa9"}, "backends must be all"),
    ],
)
def test_unknown_names_raise_a_sentence(llama, options, said):
    with pytest.raises(ValueError, match=said):
        drift(llama, **options)
