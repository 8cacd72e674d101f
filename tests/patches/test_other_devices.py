"""Devices that are not the current, the default, or the only one."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.measure import time_interleaved
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.find_layout import find_layout
from flexvarlen.patches.batch.given_documents import GivenDocuments
from flexvarlen.patches.isolation.model_run import _State
from flexvarlen.patches.isolation.verify import verify_isolation
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.verify.models import build_model
from tests import forms

LENGTHS = (9, 16, 15)
IDS = torch.arange(5, 45)[None]
ROW = forms.row_of(LENGTHS, IDS)
CU_SEQ_LENS = ROW.cu_seqlens
FORMS = {
    "cu_seq_lens": forms.given("cu_seq_lens", ROW, "cu_seq_lens_k", "max_length"),
    "position_ids": forms.given("position_ids", ROW),
    "plain": {},
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# ---- another default device ----


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_cpu_model_under_another_default_device(backend):
    """As after torch.set_default_device("cuda"): what is on the CPU stays there."""
    model = fv.patch_model(build_model("llama")[0].eval(), backend)
    with torch.device("meta"):
        layout = fv.PackedLayout.from_lengths(LENGTHS, device="cpu")
        for form in ({"packed_layout": layout}, *FORMS.values()):
            loss = model(input_ids=IDS, labels=IDS, **form).loss
            loss.backward()
            assert loss.isfinite()
        row = fv.PackedCollator(total_tokens=32)([{"input_ids": [5] * n} for n in (9, 12)])
        assert verify_isolation(model, row).gradients == "bits"


def test_masks_under_another_default_device():
    with torch.device("meta"):
        layout = fv.PackedLayout.from_lengths(LENGTHS, device="cpu")
        dense = fv.DocumentMask.of(layout, window=4).to_dense()
        found = fv.packed_attention(*torch.ones(3, 40, 2, 16, device="cpu"), layout, window=4)
    assert dense.device == found.device == torch.device("cpu")


# ---- a layout elsewhere ----


def test_a_layout_that_a_wrapper_left_behind_follows_the_tokens():
    """DDP and FSDP move the tensors of a batch, and nothing else."""
    layout = fv.PackedLayout.from_lengths(LENGTHS)
    meta = torch.device("meta")
    found = find_layout(GivenDocuments(1, 40, meta, packed_layout=layout))
    assert found.device.type == "meta"
    with pytest.raises(ValueError, match="packed_layout must cover"):
        find_layout(GivenDocuments(1, 48, meta, packed_layout=layout))


def packed_forward():
    layout = fv.PackedLayout.from_lengths(LENGTHS)
    return PackedForward(layout, "sdpa", deterministic=False, batch_invariant=False)


def test_layers_elsewhere_share_a_copy():
    """What accelerate does with the keyword arguments of a layer that lies on another device."""
    packed = packed_forward()
    packed.recurrent = RecurrentDocuments(packed.layout, for_any_row=True)
    first, second = (send_to_device({"packed": packed}, "meta")["packed"] for _ in range(2))
    assert first is second
    assert first.layout.device.type == "meta"
    assert first.routes is not packed.routes
    assert first.recurrent.layout is first.layout
    assert first.recurrent.for_any_row
    for here in ("cpu", None):  # None: of a layer that accelerate leaves where it is
        assert send_to_device({"packed": packed}, here)["packed"] is packed


def test_a_copy_goes_with_its_forward():
    packed = packed_forward()
    moved = weakref.ref(packed.to("meta").layout)
    gc.disable()
    try:
        del packed
        assert moved() is None  # and with it its plans, gigabytes perhaps
    finally:
        gc.enable()


def test_an_offloaded_model_is_verified():
    model = fv.patch_model(build_model("llama")[0].eval(), "sdpa")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    row = fv.PackedCollator(total_tokens=32)([{"input_ids": [5] * n} for n in (9, 12)])
    assert verify_isolation(model, row, gradients=False).num_docs == 2


def test_random_states_of_all_gpus_are_kept(monkeypatch):
    kept, given = [], []
    fake = SimpleNamespace(get_rng_state=kept.append, set_rng_state=lambda _, d: given.append(d))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch, "get_device_module", lambda device: fake)
        _State(build_model("llama")[0]).restore()
    assert set(kept) == set(given) == {torch.device("cuda:0"), torch.device("cuda:1")}


# ---- two GPUs ----


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("backend", [*fv.BACKENDS, "auto"])
def test_a_device_that_is_not_current(backend):
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": torch.bfloat16}
    where = torch.device("cuda:1")
    if backend != "auto" and (reason := fv.why_not(backend, device=where, **heads)):
        pytest.skip(reason)
    torch.manual_seed(0)
    qkv = [torch.randn(512, h, 64, dtype=torch.bfloat16) for h in (8, 4, 4)]
    found = []
    for device in ("cuda:0", "cuda:1"):
        layout = fv.PackedLayout.from_lengths([200, 1, 311], device=device)
        leaves = [x.to(device).requires_grad_() for x in qkv]
        out = fv.packed_attention(*leaves, layout, backend=backend)
        out.sum().backward()
        torch.cuda.synchronize(device)
        found.append([x.float().cpu() for x in (out, *(leaf.grad for leaf in leaves))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_a_model_over_two_gpus(backend, tmp_path):
    build_model("llama")[0].save_pretrained(tmp_path)
    parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    parts |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    logits = []
    for device_map in ({"": 0}, parts):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map).eval()
        fv.patch_model(model, backend)
        layout = fv.PackedLayout.from_lengths(LENGTHS)
        logits.append(model(input_ids=IDS.to("cuda:0"), packed_layout=layout).logits.cpu())
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    report = verify_isolation(model, {"input_ids": IDS, "packed_layout": layout})
    assert report.layers > 0


@pytest.mark.gpu
@two_gpus
def test_the_clock_of_a_device_that_is_not_current():
    x = torch.randn(8192, 8192, device="cuda:1")
    timing = time_interleaved({"": lambda: x @ x}, device=torch.device("cuda:1"), repeats=5)[""]
    assert timing.ms_p50 > 5  # 1.1e12 operations: 0.2 ms would be the launch alone
