"""The acceptance rule over the results of a run."""

import math
from dataclasses import replace

import torch

from flexvarlen.reference.acceptance import Error
from flexvarlen.verify.compare.accuracy import limit_measures
from flexvarlen.verify.experiment.alone import Alone, Errors, why_one_is_wrong
from flexvarlen.verify.experiment.batch import PackedBatch


def test_a_baseline_exact_by_luck():
    """The gradient of one parameter in two layers, of which the second is 10 times as large."""
    lucky, plain = Error(1e-6, 1e-6, 1e-6, 1.0, 1.0), Error(1.0, 0.5, 0.1, 10.0, 5.0)
    baseline = Errors(gradients={"0.a": lucky, "1.a": plain, "0.b": lucky})
    found = Error(0.1, 0.1, 0.1, 1.0, 1.0)
    errors = Errors(gradients={"0.a": found, "0.b": found})
    in_a_layer, alone = errors.beside(baseline)
    assert why_one_is_wrong([in_a_layer], torch.float32) is None
    assert "0.b" in why_one_is_wrong([alone], torch.float32)


def test_rule_names_what_is_too_far_off():
    small = Error(1e-5, 1e-6, 1e-6, 1.0, 0.5)
    right = Errors(small, (), 1.0, small, {"w": small})
    reference = Alone(
        PackedBatch(torch.zeros(1, 3, dtype=torch.int64), (3,)),
        (0,),
        "logits",
        torch.float32,
        None,
        right,
    )
    assert reference.why_wrong(right) is None
    assert limit_measures(reference, right)["worst_gradient_ratio"] < 1 / 2.9
    large, nan = replace(small, mean_abs=1e-4), replace(small, max_abs=math.nan)
    for wrong, words in (
        (replace(right, outputs=large), "logits"),
        (replace(right, loss=large), "the loss"),
        (replace(right, gradients={"w": large}), "the gradient of w"),
        (replace(right, gradients={"w": nan}), "the gradient of w"),
        (replace(right, gradients={"w": Error.missing()}), "the gradient of w"),
    ):
        assert words in reference.why_wrong(wrong)
