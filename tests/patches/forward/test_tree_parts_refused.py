"""What cannot run in parts of a tree raises, and so does a loop that leaves out a call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import Dropout
from torch.nn.parallel import DistributedDataParallel

import flexvarlen as fv
from tests.patches.forward.test_tree_parts import new
from tests.patches.forward.test_trees import samples


def test_a_missing_backward_raises():
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    model(**next(parts))
    with pytest.raises(RuntimeError, match="each part of a tree must run backward before the next"):
        next(parts)


def test_a_second_backward_raises():
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    loss = model(**next(parts)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="must run backward once"):
        loss.backward()


def test_what_does_not_run_in_parts_raises(monkeypatch):
    shared = fv.share_prefixes(samples())
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1"):
        shared.parts(new("llama", "sdpa"), 0)
    with pytest.raises(ValueError, match="model must be patched to run a tree in parts"):
        next(shared.parts(new("llama"), 25))
    experts = new("qwen3_moe", "sdpa")
    experts.config.output_router_logits = True
    with pytest.raises(NotImplementedError, match="in parts with output_router_logits"):
        next(shared.parts(experts, 25))
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    for parts in (shared.parts, partial(fv.tree_logprobs, shared=shared)):
        with pytest.raises(NotImplementedError, match="cannot train in parts inside DDP's forward"):
            parts(new("llama", "sdpa"), max_tokens=25)


@pytest.mark.parametrize("draws", ["dropout", "noise"])
def test_a_model_that_draws_random_numbers_raises(draws):
    """Dropout, also that of functions: a segment would run twice with other numbers."""
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa")
    layer = Dropout(0.1) if draws == "dropout" else Noise()
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens, layer)
    with pytest.raises(ValueError, match="dropout must be 0 where a tree runs in parts, as some"):
        next(shared.parts(model.train(), 25))
    with pytest.raises(ValueError, match="dropout must be 0 where a tree runs in parts, as some"):
        fv.tree_logprobs(model, shared, max_tokens=25)
    next(shared.parts(model, 1000))  # one part, which runs once


class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_part_without_its_forward_or_backward_raises(reentrant):
    """Also one of a prompt alone, which has no labels."""
    prompt = [*range(5, 45)]
    turns = [
        {"input_ids": [*prompt, *[50 + i] * 6], "labels": [-100] * 40 + [50 + i] * 6}
        for i in range(4)
    ]
    model = new("llama", "sdpa")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for runs in (False, True):
        with pytest.raises((RuntimeError, ValueError), match=r"must run backward|run each part"):
            train_on_labels(model, fv.share_prefixes(turns).parts(model, 45), runs=runs)


def train_on_labels(model, parts, *, runs):
    """A loop that skips the backward of parts without labels; `runs`: not their forward."""
    for part in parts:
        has_labels = bool((part["shift_labels"] != -100).any())
        if runs or has_labels:
            loss = model(**part).loss
        if has_labels:
            loss.backward()


def test_a_second_forward_raises():
    """Of a reference model's, say: keys above are those of the first."""
    model = new("llama", "sdpa")
    parts = fv.share_prefixes(samples()).parts(model, 25)
    part = next(parts)
    model(**part)
    with torch.no_grad(), pytest.raises(RuntimeError, match="a part of a tree must run once, in"):
        model(**part)
    parts.close()
    with pytest.raises(RuntimeError, match="must run inside its loop"):
        model(**next(fv.share_prefixes(samples()).parts(model, 25)))


def test_autocast_around_the_forward_alone_raises():
    model, shared = new("llama", "sdpa", torch.float32), fv.share_prefixes(samples())
    parts = shared.parts(model, 25)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="in one dtype"):
        model(**next_outside_autocast(parts))


def next_outside_autocast(parts):
    with torch.autocast("cpu", enabled=False):
        return next(parts)


def test_an_unpatched_model_raises_without_gradients():
    model, shared = new("llama"), fv.share_prefixes(samples())
    with torch.no_grad():
        parts = shared.parts(model, 25)
        model(input_ids=next(parts)["input_ids"])
        with pytest.raises(ValueError, match="model must be patched to run a tree in parts"):
            next(parts)
