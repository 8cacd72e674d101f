"""The acceptance rule over the results of a run."""

import math
from dataclasses import replace

import torch

from flexvarlen.reference.acceptance import Error
from flexvarlen.verify.compare.accuracy import limit_measures
from flexvarlen.verify.experiment.alone import Alone, Errors
from flexvarlen.verify.experiment.batch import PackedBatch


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
