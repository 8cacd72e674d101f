"""Training drift: equal attentions agree; what leaks, has a wrong scale or gives NaN does not."""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.drift.training.run import (
    GradientLog,
    Schedule,
    _MasterAdamW,
    degrees_between,
    nudge,
    step_of,
)
from flexvarlen.drift.training.tables import training_grids, training_sentences
from flexvarlen.drift.training.variants import angle_steps, training_drift
from flexvarlen.drift.training.verdict import (
    BEYOND,
    BY_LOSSES,
    NOT_ROUNDING,
    PASSED,
    SUITE,
    WITHIN,
    last_quarter,
    verdict_row,
)
from flexvarlen.equivalence.corpus import pack, read_documents, tokenize
from flexvarlen.equivalence.models import build_model
from flexvarlen.rows import Row

TOKENS, STEPS = 128, 8
PACKED = {"baseline": "sdpa", "steps": 4}
"""Where neither documents alone nor learning matters: in a tenth of the time."""


@pytest.fixture(scope="module")
def batches():
    documents = tokenize(read_documents(), vocabulary=1024)
    return [pack(documents, TOKENS, seed, "topics") for seed in range(4)]


def make_model(seed, dtype=torch.float32):
    return build_model("qwen3@1", seed=seed, dtype=dtype)[0]


def compared(batches, *variants, **options):
    options = {"steps": STEPS} | options
    rows = training_drift(make_model, batches, variants, model="tiny", **options)
    return rows, rows[-1].measures["variants"]


def test_equal_attentions_are_within_seed_noise(batches):
    seen = []
    rows, found = compared(batches, "sdpa", "reference", append=seen.append)
    assert [row.case["variant"] for row in rows] == [
        *["unpacked"] * 3,
        "rounding",
        "sdpa",
        "reference",
        "verdict",
    ]
    assert seen == rows
    assert [row.case["seed"] for row in rows] == [0, 1, 2, 0, 0, 0, 0]
    for entry in found.values():
        assert entry["verdict"] == WITHIN
        assert entry["sigmas"] < 1e-3
        assert 0 <= entry["angle"] < 1e-3
    assert rows[-1].status == "ok"
    assert rows[-1].measures["n"] == 3
    assert all(len(row.measures["losses"]) == STEPS for row in rows[:-1])
    assert rows[4].measures["angle_steps"] == list(range(STEPS))
    assert len(rows[4].measures["angles"]) == STEPS
    # It learns, else equal losses would say nothing.
    losses = rows[0].measures["losses"]
    assert losses[-1] < losses[0] - 0.1


def test_run_depends_on_more_than_its_seed(batches):
    options = PACKED | {"baseline": "reference"}
    rows, found = compared(batches, "reference", "unpacked", **options)
    again, _ = compared(batches, "sdpa", **options)
    assert rows[0].measures["losses"] == again[0].measures["losses"]
    assert rows[4].case["variant"] == "unpacked"
    assert found["unpacked"]["verdict"] == WITHIN


def plant(monkeypatch, change):
    attend = ReferenceBackend.attend

    def planted(self, q, k, v, sinks, call, mask, plan):
        return change(lambda plan, call: attend(self, q, k, v, sinks, call, mask, plan))(plan, call)

    monkeypatch.setattr(ReferenceBackend, "attend", planted)


@pytest.mark.parametrize("bug", ["leak", "scale", "nan"])
def test_planted_bug_passes_as_seed_noise(batches, monkeypatch, bug):
    def leak(attend):
        return lambda plan, call: attend(torch.ones_like(plan).tril(), call)

    def scale(attend):
        return lambda plan, call: attend(plan, call._replace(scale=1.5 * call.scale))

    def nan(attend):
        return lambda plan, call: (attend(plan, call)[0] * math.nan, None)

    plant(monkeypatch, {"leak": leak, "scale": scale, "nan": nan}[bug])
    rows, found = compared(batches, "unpacked", "reference", **PACKED)
    assert found["unpacked"]["verdict"] == WITHIN
    assert found["reference"]["verdict"] == (BEYOND if bug == "nan" else NOT_ROUNDING)
    assert rows[-1].status == "wrong"
    assert rows[-1].reason == f"reference: {found['reference']['verdict']}."
    said = " ".join(training_sentences(rows))
    assert f"reference against sdpa: {found['reference']['verdict']}" in said


def run_row(variant, seed, losses, angle=None):
    case = {"model": "m", "variant": variant, "seed": seed, "steps": 8, "tokens": 1, "dtype": "x"}
    measures = {"baseline": "unpacked", "losses": losses}
    if variant != "unpacked":
        measures["angles"] = [] if angle is None else [angle]
    return Row(SUITE, case, "ok", None, measures)


def judged(losses, angle=1.0, twin=1.0):
    """Last quarters of 1.0, 1.1 and 1.2 over the seeds: σ is 0.1, the band 0.2."""
    rows = [run_row("unpacked", seed, [9.0] * 6 + [1 + seed / 10] * 2) for seed in range(3)]
    rows += [run_row("rounding", 0, [9.0] * 6 + [1.0] * 2, twin)]
    return verdict_row([*rows, run_row("sdpa", 0, losses, angle)])


@pytest.mark.parametrize(
    ("losses", "angle", "twin", "verdict"),
    [
        ([9.0] * 6 + [1.19, 1.19], 1.0, 1.0, WITHIN),
        ([9.0] * 6 + [1.21, 1.21], 1.0, 1.0, BEYOND),
        ([9.0] * 6 + [0.79, 0.79], 1.0, 1.0, BEYOND),
        ([0.0] * 6 + [1.0, 1.0], 1.0, 1.0, WITHIN),  # the last quarter alone counts
        ([math.nan] + [9.0] * 5 + [1.0] * 2, 1.0, 1.0, BEYOND),
        ([math.inf] + [9.0] * 5 + [1.0] * 2, 1.0, 1.0, BEYOND),
        ([9.0] * 6 + [1.0, math.nan], 1.0, 1.0, BEYOND),
        ([9.0] * 6 + [1.0, 1.0], 2.9, 1.0, WITHIN),
        ([9.0] * 6 + [1.0, 1.0], 3.1, 1.0, NOT_ROUNDING),
        ([9.0] * 6 + [1.0, 1.0], math.nan, 1.0, NOT_ROUNDING),
        ([9.0] * 6 + [1.0, 1.0], None, None, BY_LOSSES),
        ([9.0] * 6 + [1.0, 1.0], 9.0, None, BY_LOSSES),
        ([9.0] * 6 + [1.0, 1.0], None, 1.0, BY_LOSSES),
        ([9.0] * 6 + [1.21, 1.21], None, None, BEYOND),
    ],
)
def test_rule_of_the_verdict(losses, angle, twin, verdict):
    row = judged(losses, angle, twin)
    assert row.measures["sigma"] == pytest.approx(0.1)
    assert row.measures["band"] == pytest.approx(0.2)
    assert row.measures["variants"]["sdpa"]["verdict"] == verdict
    assert row.status == ("ok" if verdict in PASSED else "wrong")
    assert f"sdpa against unpacked: {verdict}." in training_sentences([row])[0]


def test_backend_that_cannot_train_has_a_row_with_its_reason(batches):
    rows, found = compared(batches, "flex", "reference", **PACKED)
    assert rows[4].status == "unsupported"
    assert "flex has no backward on the CPU" in rows[4].reason
    assert list(found) == ["reference"]
    assert "flex" in training_grids(rows)[0].markdown()


class KernelError(Exception):
    """As some kernel packages have: no RuntimeError."""


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ValueError, KernelError])
def test_kernel_that_raises_ends_the_comparison(batches, monkeypatch, kind):
    def raises(attend):
        def run(plan, options):
            raise kind("no such kernel\nmore")

        return run

    plant(monkeypatch, raises)
    rows, _ = compared(batches, "reference", "unpacked", **PACKED)
    assert (rows[4].status, rows[4].reason) == ("failed", f"{kind.__name__}: no such kernel")
    assert rows[5].status == "ok"


def test_unpacked_loss_is_the_packed_loss(batches):
    """The mean over all labels, not a mean of means; gradients of the same loss."""
    model, batch = make_model(0), batches[0]
    sizes = Schedule((batch,), 4, 1e-3).sizes()
    loss = step_of("unpacked", model, sizes)(batch)
    gradients = [p.grad.clone() for p in model.parameters()]
    packed = make_model(0)
    assert step_of("reference", packed, sizes)(batch) == pytest.approx(loss, rel=1e-6)
    assert degrees_between([p.grad for p in packed.parameters()], gradients) < 1e-3


def test_every_seed_has_the_same_rows_in_another_order(batches):
    schedule = Schedule(tuple(batches), 10, 1e-3)
    orders = [schedule.order(seed) for seed in range(5)]
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        assert len(order) == 10
        assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert schedule.order(3) == orders[3]


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
    assert list(angle_steps(8, None, 1)) == list(range(8))
    assert list(angle_steps(25, None, 1)) == [0, 3, 6, 9, 12, 15, 18, 21, 24]
    assert list(angle_steps(20, None, 5 * 2**30)) == [0, 7, 14]
    assert list(angle_steps(20, None, 17 * 2**30)) == []
    assert list(angle_steps(20, 10, 2**40)) == [0, 10]


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


def test_last_quarter_is_rounded_up():
    assert last_quarter([9.0, 9.0, 9.0, 1.0]) == 1.0
    assert last_quarter([9.0, 9.0, 9.0, 1.0, 3.0]) == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 3}, "steps must be at least 4"),
        ({"seeds": (0, 1)}, "seeds must be at least 3"),
        ({"seeds": (0, 1, 1)}, "seeds must be at least 3"),
        ({"every": 0}, "every must be"),
        ({"variants": ("flsh",)}, "backends must be"),
        ({"variants": ("all",)}, "variants must be names"),
        ({"baseline": "flex"}, "baseline must be a variant that trains here, got 'flex'"),
    ],
)
def test_mistake_is_a_sentence(batches, options, words):
    with pytest.raises(ValueError, match=words):
        training_drift(make_model, batches, model="tiny", **options)


def test_no_rows_is_a_sentence():
    with pytest.raises(ValueError, match="batches must hold"):
        training_drift(make_model, [], model="tiny")
