"""The loss of an LM head is that of transformers, whatever its chunks."""

import pytest
import torch

from flexvarlen.bench.suites.model.geometries import GeometryCase
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment import step
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.step import HeadLoss

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows_at_once", [5, 4096])
def test_the_loss_is_that_of_transformers(rows_at_once, monkeypatch):
    monkeypatch.setattr(step, "LOSS_ROWS", rows_at_once)
    torch.manual_seed(0)
    lm = GeometryCase("qwen3-tiny", None, dtype="float64").new_causal_lm(CPU)
    ids = torch.randint(128, (1, 32))
    labels = PackedBatch(ids, (12, 20)).next_tokens()
    theirs = ids.clone()
    theirs[:, [0, 12]] = IGNORE_INDEX  # transformers shifts by itself
    lm(ids, labels=theirs).loss.backward()
    expected = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    hidden = lm.base_model(ids).last_hidden_state
    hidden.backward(HeadLoss(lm.lm_head.weight, counted=30).of(hidden, labels))
    for name, parameter in lm.named_parameters():  # transformers takes the logits to fp32
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7)
