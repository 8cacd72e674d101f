"""`drift train`: equal attentions agree; what leaks, has a wrong scale or gives NaN does not."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from flexvarlen.runner.run import records_of
from flexvarlen.runner.suite import Options
from flexvarlen.verify.corpus import pack, read_documents, tokenize
from flexvarlen.verify.experiment.gradient_angles import GradientLog, degrees_between
from flexvarlen.verify.experiment.seed_noise import (
    BEYOND,
    NOT_ROUNDING,
    WITHIN,
)
from flexvarlen.verify.experiment.training import (
    TrainingCase,
    TrainingDrift,
    _MasterAdamW,
    angle_steps,
    nudge,
    shuffled,
    step_of,
)
from flexvarlen.verify.models import build_model
from tests.verify.planted import KernelError, leak, nan, plant, raising, wrong_scale

TOKENS, STEPS = 128, 8
PACKED = {"baseline": "sdpa", "steps": 4}
"""Where neither documents alone nor learning matters: in a tenth of the time."""


@cache
def batches():
    documents = tokenize(read_documents(), vocabulary=1024)
    return [pack(documents, TOKENS, seed, "topics") for seed in range(4)]


def make_model(seed, dtype=torch.float32):
    return build_model("qwen3@1", seed=seed, dtype=dtype)[0]


def new_case(**options):
    shared = {"steps": STEPS, "seeds": (0, 1, 2), "lr": 1e-3, "baseline": "unpacked"}
    shared |= {"make_model": make_model, "make_batches": batches} | options
    return TrainingCase("tiny", "float32", TOKENS, **shared)


def compared(*variants, **options):
    """The records by variant."""
    suite = TrainingDrift([new_case(**options)])
    records = records_of(suite, Options(torch.device("cpu"), variants=variants))
    return {record.case["variant"]: record for record in records}


def test_equal_attentions_are_beyond_seed_noise():
    found = compared("sdpa", "reference")
    assert list(found) == ["unpacked", "rounding", "sdpa", "reference"]
    for name in ("sdpa", "reference"):
        measures = found[name].measures
        assert (found[name].status, measures["verdict"]) == ("ok", WITHIN)
        assert measures["sigmas"] < 1e-3
        assert len(measures["losses"]) == len(measures["angles"]) == STEPS
        assert 0 <= measures["angles"][0] < 1e-3
        assert measures["angle_steps"] == list(range(STEPS))
    baseline = found["unpacked"].measures
    assert len(baseline["seed_losses"]) == 3
    assert baseline["sigma"] > 0
    # It learns, else equal losses would say nothing.
    assert baseline["losses"][-1] < baseline["losses"][0] - 0.1


def test_run_depends_on_more_than_its_seed():
    options = PACKED | {"baseline": "reference"}
    found, again = compared("unpacked", **options), compared("sdpa", **options)
    losses = [records["reference"].measures["losses"] for records in (found, again)]
    assert losses[0] == losses[1]
    assert found["unpacked"].measures["verdict"] == WITHIN


@pytest.mark.parametrize(
    ("bug", "verdict"), [(leak, NOT_ROUNDING), (wrong_scale, NOT_ROUNDING), (nan, BEYOND)]
)
def test_planted_bug_passes_as_seed_noise(monkeypatch, bug, verdict):
    plant(monkeypatch, bug)
    found = compared("unpacked", "reference", **PACKED)
    assert found["unpacked"].measures["verdict"] == WITHIN
    wrong = found["reference"]
    assert (wrong.status, wrong.measures["verdict"]) == ("wrong", verdict)
    assert wrong.reason.startswith(f"{verdict}, ")


def test_backend_that_cannot_train_has_no_record():
    found = compared("flex", "reference", **PACKED)
    assert found["flex"].status == "unsupported"
    assert "flex has no backward on the CPU" in found["flex"].reason
    assert found["reference"].status == "ok"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KernelError])
def test_kernel_that_raises_ends_the_comparison(monkeypatch, kind):
    plant(monkeypatch, raising(kind("no such kernel\nmore")))
    found = compared("reference", "unpacked", **PACKED)
    assert found["reference"].status == "failed"
    assert found["reference"].reason == f"{kind.__name__}: no such kernel"
    assert found["unpacked"].status == "ok"


def test_unpacked_loss_is_the_packed_loss():
    """The mean over all labels, not a mean of means; gradients of the same loss."""
    model, batch = make_model(0), batches()[0]
    loss = step_of("unpacked", model, [batch])(batch)
    gradients = [p.grad.clone() for p in model.parameters()]
    packed = make_model(0)
    assert step_of("reference", packed, [batch])(batch) == pytest.approx(loss, rel=1e-6)
    assert degrees_between([p.grad for p in packed.parameters()], gradients) < 1e-3


def test_every_seed_has_the_same_rows_in_another_order():
    orders = [shuffled(4, 10, seed) for seed in range(5)]
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        assert len(order) == 10
        assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert shuffled(4, 10, 3) == orders[3]


def test_angles():
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert degrees_between([x], [x.clone()]) == 0.0
    assert degrees_between([x], [2 * x]) == 0.0
    assert degrees_between([x], [-x]) == pytest.approx(180)
    assert degrees_between([x, None], [None, y]) == pytest.approx(90)
    assert degrees_between([x + y], [x]) == pytest.approx(math.degrees(math.atan2(4, 3)))
    tiny = torch.tensor([1.0, 1e-9], dtype=torch.float64)  # an arccosine would say 0
    assert degrees_between([tiny], [tiny * torch.tensor([1.0, 0.0])]) == pytest.approx(
        math.degrees(1e-9), rel=1e-6
    )
    assert math.isnan(degrees_between([x], [0 * x]))
    assert math.isnan(degrees_between([x * math.nan], [x]))


def test_kept_gradient_changes_with_the_parameters_own():
    gradient = torch.tensor([1.0, 2.0])
    log = GradientLog([0])
    log.keep(0, [gradient])
    log.keep(1, [gradient])
    gradient[0] = -1.0
    assert log.angle(0, [torch.tensor([1.0, 2.0])]) == 0.0
    assert log.angle(1, [gradient]) is None


def test_gradients_of_a_large_model_fill_the_memory():
    assert list(angle_steps(8, 1)) == list(range(8))
    assert list(angle_steps(25, 1)) == [0, 3, 6, 9, 12, 15, 18, 21, 24]
    assert list(angle_steps(20, 5 * 2**30)) == [0, 7, 14]
    assert list(angle_steps(20, 17 * 2**30)) == []


def test_small_updates_of_half_precision_are_rounded_away():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = _MasterAdamW([parameter], lr=1e-4)
    for _ in range(60):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.tolist() == [0.9921875] * 4  # 60 updates of 1e-4, in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_twin_moves_by_more_than_rounding(dtype):
    model, twin = make_model(0, dtype), make_model(0, dtype)
    nudge(twin, 0)
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        gap = (old.double() - new.double()).abs()
        assert (gap <= 2.01 * torch.finfo(dtype).eps * old.double().abs() + 1e-7).all()
        assert (gap > 0).float().mean() > 0.8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 3}, "steps must be at least 4"),
        ({"seeds": (0, 1)}, "seeds must be at least 3"),
        ({"seeds": (0, 1, 1)}, "seeds must be at least 3"),
        ({"baseline": "flsh"}, "baseline must be"),
        ({"baseline": "flex"}, "baseline must be a variant that trains here, got 'flex'"),
    ],
)
def test_mistake_is_taken(options, words):
    with pytest.raises(ValueError, match=words):
        compared("sdpa", **options)
