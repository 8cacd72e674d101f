"""Conversations of 20 turns, of 8 rollouts: what a row keeps beside its tokens is bounded."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import cross_entropy

import flexvarlen as fv
from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS
from flexvarlen.attention.backends.cu_seqlens.levels import Levels
from tests.attention.backends.plain_kernel import backend, call_of  # noqa: F401
from tests.oracle import random_qkv
from tests.tiny_models import VOCABULARY, new_model

SIZES = {"reasoning": 3, "words": 2, "results": 2}


def samples_of(turns, rollouts, *, strips=True, prompt=30, times=1):
    """The turns of all rollouts, by token ids; later prompts leave out the reasoning."""
    rng = random.Random(0)

    def draw(name):
        return [rng.randrange(3, VOCABULARY) for _ in range(times * SIZES[name])]

    start, samples = [rng.randrange(3, VOCABULARY) for _ in range(prompt)], []
    for _ in range(rollouts):
        seen = start
        for _ in range(turns):
            thought, words = draw("reasoning"), draw("words")
            labels = [-100] * len(seen) + thought + words
            samples.append({"input_ids": [*seen, *thought, *words], "labels": labels})
            seen = [*seen, *([] if strips else thought), *words, *draw("results")]
    return samples


def kept(layout):
    """Bytes of the tables that all layers share."""
    segments = layout.segments
    tables = [segments.table, segments.by_level.table, segments.by_level.levels]
    return sum(x.nbytes for x in [*tables, Levels.of(segments).above])


@pytest.mark.parametrize(("turns", "rollouts"), [(2, 8), (20, 8), (60, 2)])
def test_tables_are_bounded_by_samples_and_levels(turns, rollouts):
    """Of tokens five times as many they are the same."""
    samples, longer = (samples_of(turns, rollouts, times=n) for n in (1, 5))
    sizes = {"capacity": 2 * len(samples), "max_depth": turns + 1}
    layout = fv.share_prefixes(samples, **sizes).layout
    assert turns <= len(layout.segments.by_level.levels) - 1 <= turns + 1
    assert len(layout.segments.lengths) < 2 * len(samples)
    bound = (32 + 16 * sizes["max_depth"]) * (layout.capacity + 1)  # as docs/agents.md says
    assert bound / 2 < kept(layout) <= bound
    assert kept(fv.share_prefixes(longer, **sizes).layout) == kept(layout)


def test_the_tables_of_20_turns_of_8_rollouts():
    assert kept(fv.share_prefixes(samples_of(20, 8)).layout) <= 176 * 1024  # as docs/agents.md says


def test_a_block_mask_is_as_wide_as_that_of_a_document():
    layout = fv.share_prefixes(samples_of(20, rollouts=8)).layout
    document = fv.PackedLayout.from_lengths([layout.total_tokens])
    mine, theirs = (
        fv.DocumentMask.of(x).tables((128, 128), compact=True) for x in (layout, document)
    )
    assert [x.shape for x in mine] == [x.shape for x in theirs]


def test_a_chat_that_keeps_its_reasoning_is_one_document():
    shared = fv.share_prefixes(samples_of(20, 1, strips=False))
    assert shared.layout.segments is None
    assert len(shared.paths) == 20


@pytest.mark.usefixtures("backend")
def test_attention_keeps_no_tensor_of_tokens_for_each_level():
    """For the backward pass; in the forward pass a level's output is added up and let go."""

    def saved(turns):
        layout = fv.share_prefixes(samples_of(turns, 1), total_tokens=400, max_depth=turns).layout
        mask, kernel, of_tokens = fv.DocumentMask.of(layout), KERNELS["plain"], []
        *qkv, _ = (x.requires_grad_() for x in random_qkv(400, 6, 2, 16))

        def note(x):
            of_tokens.append(400 in x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kernel.attend(*qkv, None, call_of(*qkv[:2], mask), mask, kernel.plan(mask))
        return sum(of_tokens)

    assert saved(20) == saved(3) <= 5


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_a_deep_tree_is_exact(family):
    samples, model = samples_of(20, 1), new_model(family)
    losses = []
    for sample in samples:
        ids, labels = torch.tensor([sample["input_ids"], sample["labels"]])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses.append(cross_entropy(logits[:-1], labels[1:]))
    expected = torch.stack(losses).mean()  # all answers are as long
    expected.backward()
    shared = fv.share_prefixes(samples)
    packed = fv.patch_model(new_model(family), "sdpa")
    loss = packed(**shared.batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for (name, mine), theirs in zip(packed.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max())
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-5 * scale, msg=name)
