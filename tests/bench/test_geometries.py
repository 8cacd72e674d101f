"""Geometries are those that were published; documents are drawn as they should be."""

from __future__ import annotations

import pytest
import torch

from flexvarlen.bench.suites.model.geometries import GeometryCase, log_normal_lengths


def test_lengths_fill_the_row_and_repeat_with_the_seed():
    lengths = log_normal_lengths(32_768, 2048, 1.0, seed=0)
    assert sum(lengths) == 32_768
    assert min(lengths) >= 1
    assert lengths == log_normal_lengths(32_768, 2048, 1.0, seed=0)
    assert lengths != log_normal_lengths(32_768, 2048, 1.0, seed=1)
    many = log_normal_lengths(2**24, 2048, 1.0, seed=0)
    assert 0.9 < sum(many) / len(many) / 2048 < 1.1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 0.596e9),
        ("qwen3-1.7b", 1.72e9),
        ("qwen3-4b", 4.02e9),
        ("llama-3.2-1b", 1.24e9),
        ("qwen3.5-2b", 1.88e9),
        ("llama-3.1-8b", 8.03e9 - 128_256 * 4096),  # the head is not the base model's
    ],
)
def test_geometries_have_the_published_number_of_parameters(name, parameters):
    built = GeometryCase(name, None).new_base_model(torch.device("meta"))
    assert sum(p.numel() for p in built.parameters()) == pytest.approx(parameters, rel=0.01)
