"""Liger's fused linear cross-entropy under a patched model, whichever of the two came first.

On the CPU a stand-in for Liger's `forward` (0.8: its parameters, its ways of setting itself), which
makes no logits either. Liger's own kernels run on a GPU, or on the CPU under Triton's interpreter:
`TRITON_INTERPRET=1 pytest tests/patches/forward/test_liger.py`, with liger-kernel and triton.
"""

from __future__ import annotations

import copy
import importlib
import os
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType

import pytest
import torch
import transformers
from torch.nn.functional import linear
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

import flexvarlen as fv
from tests.contract_oracle import by_document, gradients_of
from tests.contract_training import documents, forget_accelerate, settings
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import new_model

KINDS = {"qwen3": "Qwen3", "llama": "Llama"}


def fused_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    output_attentions=None,
    output_hidden_states=None,
    cache_position=None,
    logits_to_keep=0,
    skip_logits=None,
    return_dict=None,
    **kwargs,
):
    """The loss of a few tokens' logits at a time; only in eval mode are all of them made."""
    states = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        output_attentions=bool(output_attentions),
        output_hidden_states=bool(output_hidden_states),
        cache_position=cache_position,
        **kwargs,
    )[0]
    shift_labels = kwargs.pop("shift_labels", None)
    if not (self.training if skip_logits is None else skip_logits):
        logits = self.lm_head(states)
        loss = None
        if labels is not None or shift_labels is not None:
            given = {"labels": labels, "shift_labels": shift_labels, "vocab_size": logits.shape[-1]}
            loss = self.loss_function(logits=logits, **given, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    pieces = zip(states[0].split(50), shift_labels[0].split(50), strict=True)
    total = sum(
        torch.nn.functional.cross_entropy(linear(x, self.lm_head.weight), y, reduction="sum")
        for x, y in pieces
    )
    count = kwargs.get("num_items_in_batch")
    return CausalLMOutputWithPast(
        loss=total / ((shift_labels != -100).sum() if count is None else count)
    )


def stand_in(model=None, *, model_class):
    """As `apply_liger_kernel_to_*` does it, on an instance or on the class."""
    if model is None:
        model_class.forward = fused_forward
    else:
        model.forward = MethodType(fused_forward, model)


@contextmanager
def classes_kept(kind):
    """Afterwards the family's module is as it was: Liger sets functions and classes there."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    model_class = getattr(module, f"{KINDS[kind]}ForCausalLM")
    with pytest.MonkeyPatch.context() as kept:
        for name in (f"{KINDS[kind]}RMSNorm", f"{KINDS[kind]}MLP", "apply_rotary_pos_emb"):
            kept.setattr(module, name, getattr(module, name))
        kept.setattr(model_class, "forward", model_class.forward)
        yield model_class


def before(model, apply):
    apply(model=model)
    fv.patch_model(model, "sdpa")


def after(model, apply):
    fv.patch_model(model, "sdpa")
    apply(model=model)
    fv.patch_model(model, "sdpa")


def class_before(model, apply):
    apply()
    fv.patch_model(model, "sdpa")


def class_after(model, apply):
    fv.patch_model(model, "sdpa")
    apply()


ORDERS = (before, after, class_before, class_after)

IDS = torch.tensor([[token for each in documents() for token in each]])
LENGTHS = [len(each) for each in documents()]
LAYOUT = fv.PackedLayout.from_lengths(LENGTHS)
FIRST = LAYOUT.position_ids()[None] == 0
COUNT = int((~FIRST).sum())
LABELS = {
    "of_all_tokens": {"labels": IDS},
    "of_the_collator": {"labels": IDS.masked_fill(FIRST, -100), "num_items_in_batch": COUNT},
    "shifted": {"shift_labels": torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)},
}


@cache
def one_by_one(kind):
    """Of the documents each alone, exact and of a low-precision baseline."""
    plain = new_model(kind)
    return by_document(copy.deepcopy(plain).double(), documents()), by_document(plain, documents())


def check(kind, order, apply, given, device="cpu"):
    """One packed row makes no logits, and the loss and gradients of its documents one by one."""
    exact, baseline = one_by_one(kind)
    model = new_model(kind).to(device)
    given = {k: v.to(device) if torch.is_tensor(v) else v for k, v in given.items()}
    with classes_kept(kind) as model_class:
        order(model, partial(apply, model_class=model_class))
        out = model.train()(IDS.to(device), packed_layout=LAYOUT.to(device), **given)
        assert out.logits is None
        out.loss.backward()
    assert_as_accurate(out.loss.cpu(), exact.loss, baseline.loss, 2, "loss")
    gradients = {name: x.cpu() for name, x in gradients_of(model).items()}
    assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)


@pytest.mark.parametrize(
    ("kind", "labels"), [("llama", "of_all_tokens"), *(("qwen3", each) for each in LABELS)]
)
@pytest.mark.parametrize("order", ORDERS)
def test_each_order_teaches_what_the_documents_one_by_one_do(order, kind, labels):
    check(kind, order, stand_in, LABELS[labels])


def test_logits_in_eval_mode_and_after_unpatching():
    model, plain = new_model("qwen3"), new_model("qwen3")
    with torch.no_grad():
        alone = torch.cat([plain(torch.tensor([x])).logits[0] for x in documents()])
    with classes_kept("qwen3") as model_class:
        class_after(model, partial(stand_in, model_class=model_class))
        with torch.no_grad():
            out = model(IDS, packed_layout=LAYOUT, labels=IDS)
            skipped = model(IDS, packed_layout=LAYOUT, labels=IDS, skip_logits=True)
            torch.testing.assert_close(out.logits[0], alone, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(skipped.loss, out.loss)
            assert skipped.logits is None  # as Trainer asks for in an evaluation
            fv.unpatch_model(model)
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert "forward" not in vars(model)


# ---- Trainer ----


def trainer(model, tmp_path, *callbacks):
    return Trainer(
        model,
        TrainingArguments(**settings(tmp_path)),
        train_dataset=[{"input_ids": x} for x in documents()],
        data_collator=fv.PackedCollator(total_tokens=160),
        callbacks=list(callbacks),
    )


class PatchAgain(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs):
        fv.patch_model(model, "sdpa")


@pytest.fixture(scope="module")
def loss_without(tmp_path_factory):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    yield trainer(model, tmp_path_factory.mktemp("without")).train().training_loss
    forget_accelerate()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("how", ["as_it_comes", "patched_again", "applied_before"])
def test_trainer_that_applies_it_as_training_starts(how, loss_without, tmp_path, monkeypatch):
    """Under `use_liger_kernel`, on the instance, when the model is patched already."""
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda x, _: of_trainer(x))
    of_trainer = partial(stand_in, model_class=None)
    model = new_model("qwen3")
    if how == "applied_before":
        of_trainer(model)
    fv.patch_model(model, "sdpa")
    ours = trainer(model, tmp_path, *[PatchAgain()] * (how == "patched_again"))
    ours.args.use_liger_kernel = how != "applied_before"
    if how == "as_it_comes":
        with pytest.raises(ValueError, match=r"apply Liger .* before patch_model"):
            ours.train()
    else:
        assert ours.train().training_loss == pytest.approx(loss_without, rel=1e-5)


# ---- Liger itself ----


def liger(model=None, *, model_class, **parts):
    apply = importlib.import_module("liger_kernel.transformers")
    name = model_class.__name__.removesuffix("ForCausalLM").lower()
    getattr(apply, f"apply_liger_kernel_to_{name}")(model=model, **parts)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        *(["cpu"] if os.environ.get("TRITON_INTERPRET") == "1" else []),
    ],
)
def test_liger_teaches_what_the_documents_one_by_one_do(device, kind, order):
    """All its kernels: rotary embedding, norms, MLP, loss."""
    pytest.importorskip("liger_kernel", reason="needs Liger: pip install liger-kernel")
    # The interpreter of Triton 3.9 fails in the norm's kernel and in the MLP's.
    apply = liger if device == "cuda" else partial(liger, rms_norm=False, swiglu=False)
    check(kind, order, apply, LABELS["of_all_tokens"], device)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_liger_saves_the_memory_of_the_logits(order):
    pytest.importorskip("liger_kernel", reason="needs Liger: pip install liger-kernel")
    tokens, vocabulary = 4096, 32_768
    ids = torch.arange(tokens, device="cuda")[None]
    layout = fv.PackedLayout.from_lengths([tokens // 4] * 4, device="cuda")
    peaks = {}
    for name in ("without", "with"):
        model = new_model("qwen3", vocab_size=vocabulary, max_position_embeddings=tokens)
        model.to("cuda", torch.bfloat16).train()
        with classes_kept("qwen3") as model_class:
            if name == "with":
                order(model, partial(liger, model_class=model_class))
            else:
                fv.patch_model(model, "sdpa")
            for _ in range(2):  # the first compiles Liger's kernels
                torch.cuda.reset_peak_memory_stats()
                model(ids, packed_layout=layout, labels=ids).loss.backward()
                model.zero_grad()
            peaks[name] = torch.cuda.max_memory_allocated()
        del model
    assert peaks["without"] - peaks["with"] >= tokens * vocabulary * 2  # bytes of bf16 logits
