"""A rank with text alone keeps no rank waiting that has images, and both learn what one learns."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.forward.idle_tower import run_idle_tower
from flexvarlen.patches.state import ATTRIBUTE
from tests.patches import images_ranks
from tests.patches.images_ranks import CASES, QWEN, inputs_of, new
from tests.patches.models.tower_images import PROCESSORS
from tests.tiny_models import new_model


def assert_learned(rank, expected):
    assert rank["gradients"].keys() >= expected.keys()
    for name, gradient in rank["gradients"].items():
        exact = expected.get(name, torch.zeros_like(gradient))
        assert (gradient - exact).norm() <= 1e-5 * exact.norm() + 1e-7, name


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("family", "case"),
    [*((QWEN, case) for case in CASES), *((family, "fsdp2") for family in PROCESSORS)],
)
def test_one_rank_has_images(ranks, family, case):
    expected = images_ranks.alone(family, case)
    for rank in ranks.run(images_ranks.two_steps, family, case):
        assert_learned(rank, expected)


def test_images_beside_videos(ranks):
    expected = images_ranks.videos_alone()
    for rank in ranks.run(images_ranks.beside_videos):
        assert_learned(rank, expected)


def test_evaluation_of_sharded_weights(ranks):
    found = ranks.run(images_ranks.evaluated, 1)
    with torch.no_grad():
        for number, logits in enumerate(found):
            expected = new(QWEN).eval()(**inputs_of(QWEN, number)).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", [images_ranks.trained, images_ranks.trained_by_trl])
def test_trainers(ranks, by):
    """Of patched models alone, DDP does not look for parameters that a rank does not use."""
    expected, _ = ranks.run(by, False)
    for found in ranks.run(by, True):
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("kind", "has_it"), [("qwen3", False), ("gemma3", True), (QWEN, True)])
def test_only_models_with_images_have_the_stage(kind, has_it):
    patch = fv.patch_model(new_model(kind), "sdpa").model.__dict__[ATTRIBUTE]
    assert (run_idle_tower in patch.stages.arguments) == has_it
