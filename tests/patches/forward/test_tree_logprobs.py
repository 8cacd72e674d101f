"""`tree_logprobs`: log-probabilities of a tree, whole or in parts, for any loss."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

import flexvarlen as fv
from flexvarlen.reference.model import Float64
from tests.contract_oracle import gradients_of
from tests.patches.forward.test_tree_parts import assert_equal, new
from tests.patches.forward.test_trees import samples


def policy_loss(logprobs, old):
    """That of GRPO, clipped on one side: a mean over samples of a mean over tokens."""
    losses = []
    for index, (own, before) in enumerate(zip(logprobs, old, strict=True)):
        ratio = (own[:-1] - before[:-1]).exp()
        advantage = (-1) ** index * (1 + index)
        losses.append(-torch.minimum(ratio, ratio.clamp(max=1.1)).mean() * advantage)
    return torch.stack(losses).mean()


def kept_after(text, vocabulary):
    """What an engine kept of the vocabulary: some tokens beside each that it sampled."""
    return [[(3 * token + 1) % vocabulary, token, (token + 7) % vocabulary] for token in text[1:]]


def logprobs_alone(model, text, temperature, kept=None):
    ids = torch.tensor(text)
    logits = model(ids[None], use_cache=False).logits[0] / temperature
    if kept is not None:
        cut = torch.full_like(logits[:-1], -torch.inf).scatter(1, torch.tensor(kept), 0)
        logits = torch.cat([logits[:-1] + cut, logits[-1:]])
    own = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([own, own.new_zeros(1)])


@pytest.mark.parametrize(("temperature", "cut"), [(1.0, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("max_tokens", [None, 25])
def test_a_policy_loss(max_tokens, temperature, cut):
    """As of each sample alone; `cut`: normalised over the tokens that the engine kept."""
    model, plain, shared = new("llama", "reference"), new("llama"), fv.share_prefixes(samples())
    kept, mask = [None] * len(samples()), None
    if cut:
        kept = [kept_after(text, plain.config.vocab_size) for text in samples()]
        mask = shared.fold(fv.sampling_masks(kept, prompt_tokens=[1] * len(kept)), -1)
    forward = model.model.forward

    def in_float64(*args, **kwargs):
        with Float64():  # also in a backward, which no mode enters
            return forward(*args, **kwargs)

    model.model.forward = in_float64
    with Float64():
        alone = [
            logprobs_alone(plain, text, temperature, ids)
            for text, ids in zip(samples(), kept, strict=True)
        ]
        old = [x.detach() + 0.05 * (index % 3) for index, x in enumerate(alone)]
        expected = policy_loss(alone, old)
        expected.backward()
        found = fv.tree_logprobs(
            model,
            shared,
            max_tokens=max_tokens,
            temperature=temperature,
            sampling_mask=mask,
        )
        loss = policy_loss(shared.unfold(found), old)
        loss.backward()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-12)
    assert_equal(gradients_of(model), gradients_of(plain), 1e-12)


def test_logprobs_without_gradients():
    model, shared = new("llama", "sdpa"), fv.share_prefixes(samples())
    with torch.no_grad():
        whole = fv.tree_logprobs(model, shared)
        found = fv.tree_logprobs(model, shared, max_tokens=25)
    assert not found.requires_grad
    torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10)


def test_what_has_no_logprobs_in_parts_raises():
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa")
    for temperature in (0, float("inf"), "1"):
        with pytest.raises(ValueError, match="temperature must be a positive number"):
            fv.tree_logprobs(model, shared, temperature=temperature)
    with pytest.raises(ValueError, match=r"shared must be what fv\.share_prefixes returns"):
        fv.tree_logprobs(model, samples())
    for max_tokens in (None, 25):
        with pytest.raises(ValueError, match="model must be patched, got LlamaForCausalLM"):
            fv.tree_logprobs(new("llama"), shared, max_tokens=max_tokens)
    loss = fv.tree_logprobs(model, shared, max_tokens=25).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs backward once"):
        loss.backward()


@pytest.mark.usefixtures("fresh_accelerate")
def test_what_is_around_a_forward_is_not_lost():
    """The base model is called, so what wraps the model's own forward would not run."""
    shared, model = fv.share_prefixes(samples()), new("llama", "sdpa", torch.float32)
    with pytest.raises(NotImplementedError, match=r"compile\(\) on the base model"):
        fv.tree_logprobs(torch.compile(model, backend="eager"), shared)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with pytest.raises(ValueError, match=r"inside accelerator\.autocast\(\)"):
        fv.tree_logprobs(prepared, shared, max_tokens=25)
