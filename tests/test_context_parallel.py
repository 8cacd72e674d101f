"""accelerate cuts a row's tokens over ranks: a patched model refuses to run there."""

from __future__ import annotations

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

import flexvarlen as fv
from tests.tiny_models import VOCABULARY, new_model

WORDS = "must not run under accelerate's context parallelism"


@pytest.fixture
def batch():
    layout = fv.PackedLayout.from_lengths([5, 7])
    return {"input_ids": torch.randint(VOCABULARY, (1, 12)), "packed_layout": layout}


def configured(monkeypatch, **sizes):
    config = ParallelismConfig(**sizes)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", config)


@pytest.mark.parametrize(
    ("compiler", "size"), [(None, "cp_size"), ("eager", "cp_size"), (None, "sp_size")]
)
def test_a_patched_model_refuses_a_shard(monkeypatch, batch, compiler, size):
    model = fv.patch_model(new_model("llama"), "sdpa")
    torch._dynamo.reset()
    called = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
    configured(monkeypatch, **{size: 2})
    # Dynamo wraps what is raised while it traces.
    with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException), match=WORDS):
        called(**batch)


def test_without_it_nothing_is_refused(monkeypatch, batch):
    model = fv.patch_model(new_model("llama"), "sdpa")
    configured(monkeypatch, cp_size=1)
    assert model(**batch).logits.shape[1] == 12
    fv.unpatch_model(model)
    configured(monkeypatch, cp_size=2)
    assert model(input_ids=batch["input_ids"]).logits.shape[1] == 12
