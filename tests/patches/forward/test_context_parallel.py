"""accelerate or torch cuts a row's tokens over ranks: a patched model refuses to run there."""

from __future__ import annotations

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

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


def test_a_name_alone_refuses_a_shard(monkeypatch, batch):
    model = new_model("llama")
    model.set_attn_implementation("flexvarlen_doc")
    positions = batch["packed_layout"].position_ids()[None]
    configured(monkeypatch, cp_size=2)
    with pytest.raises(NotImplementedError, match=WORDS):
        model(input_ids=batch["input_ids"], position_ids=positions)


@pytest.mark.usefixtures("process_group")
def test_torch_s_own_is_refused(batch):
    model = fv.patch_model(new_model("llama"), "sdpa")
    mesh = init_device_mesh("cpu", (1,))
    shard = context_parallel(mesh, buffers=[torch.zeros(1, 12)], buffer_seq_dims=[1])
    with shard, pytest.raises(NotImplementedError, match="torch's context_parallel"):
        model(**batch)
    assert model(**batch).logits.shape[1] == 12


def test_without_it_nothing_is_refused(monkeypatch, batch):
    model = fv.patch_model(new_model("llama"), "sdpa")
    configured(monkeypatch, cp_size=1)
    assert model(**batch).logits.shape[1] == 12
    fv.unpatch_model(model)
    configured(monkeypatch, cp_size=2)
    assert model(input_ids=batch["input_ids"]).logits.shape[1] == 12
