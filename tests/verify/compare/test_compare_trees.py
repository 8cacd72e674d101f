"""`compare` over trees: each sample alone is the reference, and segments are what may leak."""

import copy

import pytest
import torch

import flexvarlen as fv
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.compare import accuracy, compare
from flexvarlen.verify.compare.accuracy import reference_of
from flexvarlen.verify.experiment.tree_batch import TreeBatch, row_from
from tests.planted import ignore_branches, plant, with_gradient
from tests.tiny_models import VOCABULARY, new_model, shared_model, texts_alone
from tests.trees import EXAMPLES
from tests.verify.planted import SAMPLES, trees

pytestmark = pytest.mark.usefixtures("timed_briefly")


def measured(backend="sdpa", **options):
    """The measures of a backend that bugs are planted in."""
    return compare(shared_model("llama"), trees(), backend, **options).record(backend).measures


def test_reference_is_the_samples_one_by_one():
    """Twins count twice; the gradients of a shared prefix are summed over its samples."""
    model = copy.deepcopy(shared_model("llama"))
    row = row_from(trees(), model)
    found = reference_of(model, row, train=True, seed=0)
    model.set_attn_implementation("eager")
    exact = texts_alone(model.double(), [(torch.tensor(text), 0) for text in SAMPLES])
    assert found.results.loss == pytest.approx(float(exact.loss), rel=1e-6)
    for name, gradient in exact.gradients.items():
        torch.testing.assert_close(found.results.gradients[name], gradient, rtol=1e-5, atol=1e-6)
    logits = torch.cat([piece for _, _, piece in found.results.logits()])
    torch.testing.assert_close(logits, exact.logits[: len(logits)], rtol=1e-5, atol=1e-5)


def test_right_backends_are_right():
    names = ["reference", "sdpa", "transformers:sdpa"]
    report = compare(shared_model("llama"), trees(), names)
    assert report.passed
    assert report.sentence().startswith("Right, and no segment leaks: reference, sdpa on ")
    assert "in 4 samples of 6 segments (longest 40)" in report.markdown()
    for name in names[:2]:
        m = report.record(name).measures
        assert (m["verdict"], m["why"], m["other_packings"]) == ("right", None, 0)
        assert 0 < m["logits_max"] <= m["logits_limit"] < 1e-3
        assert m["worst_gradient_ratio"] <= 1
        assert m["leaked_outputs"] == m["leaked_gradients"] == 0
        assert m["backward_repeats"]
    assert report.verdict("transformers:sdpa") == "unsupported"
    assert "not support a packed_layout of trees" in report.record("transformers:sdpa").reason


def test_a_router_s_loss_over_all_documents_is_no_leak():
    """It is left out, in the copy that is compared."""
    model = new_model("mixtral", output_router_logits=True)
    model.set_experts_implementation("batched_mm")  # others round by how many tokens each gets
    assert compare(model, trees(), "sdpa").verdict("sdpa") == "right"
    assert model.config.output_router_logits
    fv.verify_isolation(fv.patch_model(model, "sdpa"), trees())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_trees_by_hand_have_a_loss_within_their_segments(name):
    row = EXAMPLES[name].batch(VOCABULARY)
    report = compare(shared_model("llama"), row, "sdpa", dtype=torch.bfloat16)
    assert report.verdict("sdpa") == "right"


def test_sample_of_the_samples_is_enough_of_a_reference(monkeypatch):
    monkeypatch.setattr(accuracy, "sample_documents", lambda *args, **kwargs: [0, 2])
    report = compare(shared_model("llama"), trees(), "sdpa")
    assert report.verdict("sdpa") == "right"
    assert "2 of 4 samples alone" in report.markdown()


def test_forward_alone_needs_no_labels():
    assert measured(train=False)["verdict"] == "right"


def turns():
    """Each learned at its own turn, and seen at the next; one ends where others go on."""
    found, seen = [], list(range(3, 20))
    for turn in range(3):
        answer = [20 + turn, 30 + turn, 40 + turn]
        labels = [IGNORE_INDEX] * len(seen) + answer
        found.append({"input_ids": seen + answer, "labels": labels})
        seen = [*seen, *answer[turn > 0 :], 50 + turn]
    return found


def test_labels_that_are_learned_in_some_samples_alone(monkeypatch):
    inputs = fv.share_prefixes(turns()).batch()
    assert set(inputs["label_counts"].unique().tolist()) == {0, 1}
    assert inputs["sample_counts"].max() == 3
    assert compare(shared_model("llama"), inputs, "sdpa").verdict("sdpa") == "right"
    own = TreeBatch.loss_inputs

    def as_often_as_shared(self, labels, counted):
        return own(self, labels, counted) | {"label_counts": inputs["sample_counts"]}

    monkeypatch.setattr(TreeBatch, "loss_inputs", as_often_as_shared)
    m = compare(shared_model("llama"), inputs, "sdpa").record("sdpa").measures
    assert (m["verdict"], "the loss" in m["why"]) == ("wrong", True)


def test_kernel_that_ignores_branches_leaks(monkeypatch):
    ignore_branches(monkeypatch)
    m = measured("reference")
    assert m["verdict"] == "leaks"
    assert m["leaked_outputs"] > 0
    assert "change with the tokens of segments off their paths" in m["why"]


def test_leak_into_a_prompts_gradient_is_found(monkeypatch):
    """By the tokens of an answer whose own loss is left out."""

    def leak(gradient, out):
        gradient[3] *= 1 + out[21].mean() * 1e-6
        return gradient

    def change(attend, *args):
        out, lse = attend(*args)
        return with_gradient(leak)(out), lse

    plant(monkeypatch, change)
    m = measured()
    assert (m["verdict"], m["leaked_outputs"], m["leaked_gradients"]) == ("leaks", 0, 1)
    assert m["why"].startswith("the token gradients of segment 0 depend on, or reach, segments")


def test_wrong_gradient_of_shared_keys_is_wrong(monkeypatch):
    """As if only half of the samples had added theirs."""
    plant(monkeypatch, lambda attend, q, k, *rest: attend(q, (k + k.detach()) / 2, *rest))
    m = measured()
    assert (m["verdict"], m["leaked_documents"]) == ("wrong", 0)
    assert "the gradient of" in m["why"]


def test_model_that_trees_do_not_go_with_is_unsupported():
    report = compare(new_model("phi3"), trees(), "reference", train=False)
    assert report.verdict("reference") == "unsupported"
    assert "longrope" in report.record("reference").reason
