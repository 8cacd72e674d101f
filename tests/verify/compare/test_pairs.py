"""`drift model`: a leak shows, a planted bug's layer is named, what is equal is called equal."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from flexvarlen.reference.model import own_parameters
from flexvarlen.runner.suite import Options
from flexvarlen.verify.compare import pairs
from flexvarlen.verify.compare.differences import (
    gradient_measures,
    run_measures,
    token_measures,
    why_not_finite,
)
from flexvarlen.verify.compare.model_run import ModelRun, Targets, run_model
from flexvarlen.verify.compare.pairs import COMPARISONS, ModelDrift, cases_of, model_drift
from flexvarlen.verify.experiment.variant import Sizes, make_variant
from flexvarlen.verify.models import NamedModels, build_model
from tests.planted import plant
from tests.verify.planted import (
    LENGTHS,
    TOKENS,
    KernelError,
    larger_gradient,
    new_batch,
    trees,
)


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


def drift(model, backends="sdpa", comparisons=("packed-alone",), **options):
    return model_drift(model, new_batch(), backends, comparisons=comparisons, **options)


def measures_of(records, status="ok"):
    (record,) = records
    assert record.status == status, record.reason
    return record.measures


def variant_of(model, batch=None, train=True):
    batch = batch or new_batch()
    base = own_parameters(model, model.dtype)
    return make_variant("sdpa", base, Sizes.of(batch), train=train, or_forward=True), batch


# ---- forms of a batch ----


def test_loss_or_order_differs_between_forms(llama):
    variant, batch = variant_of(llama)
    packed = run_model(variant, batch)
    logits = packed.logits.log_softmax(-1)
    targets = torch.cat(Targets.of(batch).labels)
    counted = targets >= 0
    assert int(counted.sum()) == TOKENS - len(LENGTHS)
    by_hand = -logits[counted].gather(1, targets[counted, None]).mean().item()
    assert packed.loss == pytest.approx(by_hand, rel=1e-6)
    for run in (run_model(variant, batch, "serial"), run_model(variant, batch, "padded")):
        assert run.loss == pytest.approx(packed.loss, rel=1e-5)
        assert torch.allclose(run.logits, packed.logits, atol=1e-3)
        assert len(run.hidden) == 3
        for ours, theirs in zip(run.hidden, packed.hidden, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-3)
        for name, gradient in packed.gradients.items():
            assert torch.allclose(run.gradients[name], gradient, atol=1e-4), name


def test_padded_rows_have_no_room_for_their_padding(llama):
    batch = new_batch((3, 4) * 7 + (3,))  # 13 rows in the first call, 7 of them padded
    variant, _ = variant_of(llama, batch, train=False)
    packed, padded = run_model(variant, batch), run_model(variant, batch, "padded")
    assert torch.allclose(padded.logits, packed.logits, atol=1e-3)


def test_hidden_states_are_behind_the_last_norm(llama):
    variant, batch = variant_of(llama)
    hooks = [len(module._forward_hooks) for module in variant.model.modules()]
    run = run_model(variant, batch)
    assert torch.equal(run.hidden[0], llama.get_input_embeddings()(batch.input_ids[0]))
    logits = llama.lm_head(llama.model.norm(run.hidden[-1]))
    assert torch.allclose(logits, run.logits, atol=1e-4)
    assert hooks == [len(module._forward_hooks) for module in variant.model.modules()]


# ---- measures ----


def test_kl_top_token_and_log_probabilities_by_hand():
    other = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.5, 0.3], [0.4, 0.1, 0.5]]).log()
    measures = token_measures(found, other, torch.tensor([1, -100, 0]))
    kl = [0.25 * math.log(2), 0.0, 0.1 * math.log(0.1 / 0.4) + 0.8 * math.log(0.8 / 0.5)]
    assert measures["kl_mean"] == pytest.approx(sum(kl) / 3)
    assert measures["kl_max"] == pytest.approx(max(kl))
    assert measures["top1"] == pytest.approx(2 / 3)
    assert measures["logprob_mean_abs"] == pytest.approx(1.5 * math.log(2))
    assert measures["logprob_max_abs"] == pytest.approx(math.log(4))
    assert "logprob_max_abs" not in token_measures(found, other, torch.full((3,), -100))


def test_pieces_of_logits_are_not_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    found, other = torch.randn(2, 37, 11, generator=generator)
    targets = torch.randint(11, (37,), generator=generator)
    whole = token_measures(found, other, targets)
    monkeypatch.setattr("flexvarlen.verify.compare.differences.PIECE_ELEMENTS", 55)
    assert token_measures(found, other, targets) == pytest.approx(whole, rel=1e-12)


def test_softmax_is_in_low_precision():
    logits = torch.tensor([[8.0, 8.0625, 0.0]], dtype=torch.bfloat16)
    measures = token_measures(logits, logits.float(), torch.tensor([0]))
    assert (measures["logprob_max_abs"], measures["kl_max"]) == (0, 0)


def test_gradients_and_worst_parameter_by_hand():
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = {"a": torch.tensor([0.0, 6.0]), "b": torch.tensor([8.0])}
    assert gradient_measures(found, other) == {
        "gradient_relative": pytest.approx(math.sqrt(45 + 16) / 5),
        "worst_parameter": "a",
        "worst_parameter_relative": pytest.approx(math.sqrt(5)),
    }
    assert gradient_measures(other, other)["worst_parameter"] is None
    broken = gradient_measures({**other, "b": torch.tensor([math.nan])}, other)
    assert broken["worst_parameter"] == "b"


def test_difference_in_the_head_alone_is_in_a_layer(llama):
    variant, batch = variant_of(llama, train=False)
    other = run_model(variant, batch)
    moved = other.logits.clone()
    moved[35, 7] += 1
    measures = run_measures(ModelRun(moved, other.hidden, other.loss), other, batch)
    assert (measures["first_layer"], measures["first_part"]) == (None, "head")
    assert "gradient_relative" not in measures
    assert measures["layers_relative"] == [0, 0, 0]
    assert [i for i, x in enumerate(measures["documents_relative"]) if x] == [2]


@pytest.mark.parametrize("part", ["gradients", "hidden states"])
def test_one_number_that_is_not_finite_is_right(llama, part):
    variant, batch = variant_of(llama)
    other = run_model(variant, batch)
    assert why_not_finite(other, other) is None
    gradients = {name: gradient.clone() for name, gradient in other.gradients.items()}
    hidden = [state.clone() for state in other.hidden]
    changed = next(iter(gradients.values())) if part == "gradients" else hidden[1]
    changed.view(-1)[0] = math.inf
    found = ModelRun(other.logits, tuple(hidden), other.loss, gradients)
    assert why_not_finite(found, other).endswith(f"of the {part} of the run.")
    assert why_not_finite(other, found).endswith(f"of the {part} of what it is compared with.")


# ---- comparisons ----


def test_identical_runs_differ(llama):
    measures = measures_of(drift(llama, comparisons=["backend-backend"]))  # sdpa, run to run
    zero = ("logits_max_abs", "kl_mean", "kl_max", "logprob_max_abs", "logprob_p99")
    zero += ("loss_difference", "gradient_relative", "worst_parameter_relative")
    assert {name: measures[name] for name in zero} == dict.fromkeys(zero, 0)
    assert measures["logits_equal"] == measures["top1"] == 1
    assert measures["first_part"] is measures["worst_parameter"] is None
    assert measures["layers_relative"] == [0, 0, 0]


def test_leak_looks_like_rounding(llama):
    right = drift(llama, "transformers:sdpa", ["packed-alone", "packed-padded", "dtype"])
    assert [record.status for record in right] == ["ok"] * 3
    assert max(record.measures["logits_relative"] for record in right[:2]) < 1e-5
    cached = "transformers:sdpa@default_cache"
    for record in drift(llama, cached, ["packed-alone", "packed-padded"]):
        assert (record.status, record.reason[:7]) == ("wrong", "logits:")
        measures = record.measures
        assert (measures["first_layer"], measures["first_part"]) == (0, "block 0")
        assert min(measures["logits_relative"], measures["kl_mean"]) > 0.1
        assert measures["gradient_relative"] > 0.3
        first, *others = measures["documents_relative"]
        assert first < 1e-5  # nothing stands before it
        assert min(others) > 0.1


def test_bug_in_one_layer_is_seen_in_another():
    def wrong_where_packed(module, args, output):
        if output.shape[1] == TOKENS:
            output[:, 40] += 0.5

    model, _ = build_model("llama@3")
    model.double()  # rounding must not move the layers before it by much
    model.model.layers[1].register_forward_hook(wrong_where_packed)
    measures = measures_of(drift(model, train=False), "wrong")
    sizes = measures["layers_relative"]
    assert max(sizes[:2]) < 1e-13 < 1e-3 < min(sizes[2:])
    worst = max(range(len(LENGTHS)), key=measures["documents_relative"].__getitem__)
    assert worst == 2  # token 40 is in the third: 30 + 1 <= 40 < 48


def test_bug_of_the_compiled_model_is_not_seen():
    class Compiled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            out = self.inner(*args, **kwargs)
            return out * 1.01 if torch.compiler.is_compiling() else out

    model, _ = build_model("llama")
    model.model.layers[1].mlp = Compiled(model.model.layers[1].mlp)
    measures = measures_of(drift(model, comparisons=["eager-compiled"], train=False), "wrong")
    assert (measures["first_layer"], measures["first_part"]) == (1, "block 1")
    assert measures["compiler"] == "aot_eager"


def test_every_comparison_has_records_and_leaves_the_model_alone(llama):
    before = {name: p.detach().clone() for name, p in llama.named_parameters()}
    # The tests of a compiled bug and of trees compile.
    eager = [name for name in COMPARISONS if name != "eager-compiled"]
    records = drift(llama, "sdpa,fa2", eager)
    for name, parameter in llama.named_parameters():
        assert torch.equal(before[name], parameter)
        assert parameter.grad is None
    assert llama.config._attn_implementation == "sdpa"
    ran = [record for record in records if record.case["variant"] == "sdpa"]
    assert [record.case["comparison"] for record in ran] == eager
    for record in ran:
        json.dumps(record.case)
        assert record.measures["documents"] == 5
        assert record.measures["top1"] > 0.9
        assert record.measures["gradient_relative"] < 0.05
    if not torch.cuda.is_available():
        missing = [record for record in records if record.case["variant"] == "fa2"]
        assert {record.status for record in missing} == {"unsupported"}
        assert "CUDA" in missing[0].reason


def test_dtypes_differ_by_their_weights(llama):
    measures = measures_of(drift(llama, comparisons=["dtype"], train=False))
    assert measures["first_layer"] == 0  # embeddings are of the same rounded weights
    assert 1e-3 < measures["logits_relative"] < 0.1
    half = own_parameters(llama, torch.bfloat16)
    again = measures_of(drift(half, comparisons=["dtype"], train=False))
    assert again["logits_relative"] == measures["logits_relative"]


def test_what_breaks_ends_the_run(llama, monkeypatch):
    def broken(variant, row, batching="packed"):
        if batching == "serial":
            raise KernelError("the kernel broke\nsomewhere")
        return run_model(variant, row, batching)

    monkeypatch.setattr(pairs, "run_model", broken)
    first, second = drift(llama, comparisons=["packed-alone", "packed-padded"], train=False)
    assert (first.status, first.reason) == ("failed", "KernelError: the kernel broke")
    assert second.status == "ok"


def test_wrong_gradient_alone_is_ok(llama, monkeypatch):
    plant(monkeypatch, larger_gradient)
    (record,) = drift(llama, comparisons=["backend-backend"])
    assert record.status == "wrong"
    assert record.reason.startswith("the gradient of")


def test_nan_everywhere_is_right():
    model, _ = build_model("llama")
    model.model.norm.weight.data.fill_(math.nan)
    (record,) = drift(model, comparisons=["backend-backend"])
    assert record.status == "wrong"
    assert record.reason.startswith("not finite: 100% of the logits of the run, ")


# ---- trees ----


def test_a_comparison_takes_no_trees_or_transformers_own_some():
    model, _ = build_model("llama@1")
    records = model_drift(model, trees(), "sdpa,transformers:sdpa")
    ran = [record for record in records if record.case["variant"] == "sdpa"]
    assert {record.status for record in ran} == {"ok"}
    assert [record.case["comparison"] for record in ran] == list(COMPARISONS)
    assert max(record.measures["gradient_relative"] for record in ran) < 0.05
    for record in ran[:2]:  # the paths of the trees, and the samples alone or padded
        measures = record.measures
        assert measures["documents"] == len(measures["documents_relative"]) == 4
        assert measures["logits_relative"] < 1e-5
        assert 0 < measures["gradient_relative"] < 1e-4
        assert measures["loss"] == pytest.approx(measures["other_loss"], rel=1e-6)
        assert measures["top1"] == 1
    others = [record for record in records if record not in ran]
    assert {record.status for record in others} == {"unsupported"}
    assert "not support a packed_layout of trees" in others[0].reason


# ---- cases ----


def test_recurrent_block_is_left_out():
    (record,) = drift(build_model("qwen3_5_text")[0], comparisons=["packed-alone"], train=False)
    assert len(record.measures["layers_relative"]) == 3  # the embeddings, a delta rule, attention


def test_all_compiles_on_the_cpu():
    shared = {"model": "m", "dtype": "float32", "tokens": 8, "train": False, "seed": 0}
    suite = ModelDrift(cases_of(["all"], load=lambda: None, **shared))
    chosen = Options(torch.device("cpu"))
    names = {case.comparison: suite.variants(case, chosen) for case in suite.cases(chosen)}
    assert names["eager-compiled"] == ["sdpa"]
    assert "flex" not in names["packed-alone"]
    assert {"reference", "transformers:sdpa"} <= set(names["packed-alone"])


def test_comparisons_of_a_model_build_it_again(monkeypatch, tmp_path):
    built, text = [], tmp_path / "text"
    text.write_text("a short text")

    def build(*args, **kwargs):
        built.append((args, kwargs["dtype"]))
        return build_model(*args, **kwargs)

    monkeypatch.setattr("flexvarlen.verify.models.build_model", build)
    named = NamedModels(["qwen3@1"], [text], torch.device("cpu"))
    dtypes = [torch.float32] * 2 + [torch.bfloat16] * 2
    loaded = [named.load("qwen3@1", dtype, 48, 0)[0].dtype for dtype in dtypes]
    assert loaded == dtypes
    assert len(built) == 2
