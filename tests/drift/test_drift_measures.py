"""The measures of two runs of a model, on tiny logits and gradients, by hand."""

import math

import pytest
import torch

from flexvarlen.drift.model.measures import BIN_EDGES, TokenDrift, gradient_measures, histogram

TARGETS = torch.tensor([1, -100, 0])


def tiny_drift(found, truth, **options):
    logs = [torch.tensor(rows).log() for rows in (found, truth)]
    return TokenDrift.between(*logs, TARGETS, **options)


def test_kl_top_tokens_and_log_probabilities_by_hand():
    truth = [[0.5, 0.25, 0.25], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]
    found = [[0.25, 0.5, 0.25], [0.2, 0.5, 0.3], [0.4, 0.1, 0.5]]
    found_drift = tiny_drift(found, truth)
    kl = [0.25 * math.log(2), 0.0, 0.1 * math.log(0.1 / 0.4) + 0.8 * math.log(0.8 / 0.5)]
    assert found_drift.kl.tolist() == pytest.approx(kl, abs=1e-6)
    assert found_drift.same_top1.tolist() == [False, True, True]
    assert found_drift.logprob[[0, 2]].tolist() == pytest.approx([math.log(2), math.log(4)])
    measures = found_drift.measures()
    assert measures["kl_mean"] == pytest.approx(sum(kl) / 3)
    assert measures["kl_max"] == pytest.approx(max(kl))
    assert measures["top1"] == pytest.approx(2 / 3)
    assert measures["logprob_mean_abs"] == pytest.approx(1.5 * math.log(2))
    assert measures["logprob_max_abs"] == pytest.approx(math.log(4))
    assert measures["logprob_p50"] == pytest.approx(1.5 * math.log(2))
    assert sum(measures["logprob_histogram"]["counts"]) == 2  # the token without a label is not in


def test_top5_counts_the_tokens_that_both_have():
    truth = torch.arange(8.0)[None]  # 7, 6, 5, 4, 3
    found = truth.clone()
    found[0, 0], found[0, 7] = 9.0, -9.0  # 0, 6, 5, 4, 3
    measures = TokenDrift.between(found, truth, torch.tensor([-100])).measures()
    assert measures["top5"] == pytest.approx(4 / 5)
    assert measures["top1"] == 0
    assert "logprob_mean_abs" not in measures


def test_chunks_equal_the_whole():
    generator = torch.Generator().manual_seed(0)
    truth, found = torch.randn(2, 37, 11, generator=generator)
    targets = torch.randint(11, (37,), generator=generator)
    targets[[3, 36]] = -100
    whole = TokenDrift.between(found, truth, targets, chunk=37)
    pieces = TokenDrift.between(found, truth, targets, chunk=5)
    for name in ("logprob", "kl", "same_top1", "top5", "counted"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name


def test_low_precision_logits_are_widened_before_the_softmax():
    logits = torch.tensor([[8.0, 8.0625, 0.0]], dtype=torch.bfloat16)
    same = TokenDrift.between(logits, logits.float(), torch.tensor([0]))
    assert (same.logprob.item(), same.kl.item()) == (0, 0)


def test_histogram_is_symmetric_and_counts_zeros_and_nans_apart():
    values = torch.tensor([0.0, 0.0, float("nan"), 3e-3, -3e-3, 1e9, -1e9, 1e-12])
    found = histogram(values)
    counts, edges = found["counts"], found["edges"]
    assert (found["zeros"], found["nans"], sum(counts)) == (2, 1, 5)
    assert edges == [-edge for edge in reversed(edges)]
    assert len(counts) == len(edges) - 1
    assert (counts[0], counts[-1], counts[len(BIN_EDGES) - 1]) == (1, 1, 1)
    place = next(i for i in range(len(counts)) if edges[i] <= 3e-3 < edges[i + 1])
    assert (counts[place], counts[-1 - place]) == (1, 1)


def test_gradient_cosine_and_worst_parameter_by_hand():
    truth = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = {"a": torch.tensor([0.0, 6.0]), "b": torch.tensor([8.0])}
    measures = gradient_measures(found, truth)
    assert measures["gradient_cosine"] == pytest.approx(32 / 50)
    assert measures["gradient_relative"] == pytest.approx(math.sqrt(45 + 16) / 5)
    assert measures["worst_parameter"] == "a"
    assert measures["worst_parameter_relative"] == pytest.approx(math.sqrt(5))
    same = gradient_measures(truth, truth)
    assert (same["gradient_cosine"], same["gradient_relative"]) == (1, 0)
    assert same["worst_parameter"] is None
    broken = gradient_measures({**truth, "b": torch.tensor([math.nan])}, truth)
    assert broken["worst_parameter"] == "b"
