"""`patch_model(unpad=True, share_prefixes=True)`: what rows have in common runs once."""

from __future__ import annotations

import copy

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches.state import ATTRIBUTE
from tests.patches.forward.test_unpad import (
    ENCODERS,
    SCANS,
    TEXT,
    assert_same,
    model_with,
    next_tokens,
    seen_tokens,
)
from tests.tiny_models import VOCABULARY, new_model

SHARING = [kind for kind in TEXT if kind not in (*ENCODERS, *SCANS)]

ROW = 90
SYSTEM, PROMPT = 35, 33  # 32 tokens are shared, fewer are not


def rows(seed=0):
    """Two prompts after one beginning, a lone row, equal rows, one that continues another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randint(3, VOCABULARY, (count,), generator=generator)

    system = draw(SYSTEM)
    one, other = torch.cat([system, draw(PROMPT)]), torch.cat([system, draw(PROMPT)])
    answers = [draw(n) for n in (9, 20, 3)]
    groups = [torch.cat([one, answer]) for answer in answers] + [torch.cat([other, draw(10)])]
    return [*groups, torch.cat([other, draw(7)]), draw(15), groups[0], one]


TOKENS = SYSTEM + 2 * PROMPT + 9 + 20 + 3 + 10 + 7 + 15


def padded(side, texts=None, pad=0):
    """Prompts of one length begin at one position; "both" pads answers on the right, as GRPO."""
    texts = rows() if texts is None else texts
    ids = torch.full((len(texts), ROW + 4), pad)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        first = {"right": 0, "left": ROW + 4 - len(text), "both": 4}[side]
        ids[row, first : first + len(text)] = text
        mask[row, first : first + len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def sharing(model, backend="auto", **changes):
    changes = {"unpad": True, "share_prefixes": True, **changes}
    return fv.patch_model(copy.deepcopy(model), backend, **changes)


@pytest.mark.parametrize("side", ["right", "both"])
@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.sampled(6)
def test_loss_and_gradients_are_the_padded_run_s(kind, side):
    plain = model_with("CausalLM", kind)
    if kind == "gemma4_text":  # its scores are not scaled: too large for fp32 and this tolerance
        plain.double().set_attn_implementation("sdpa")
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded(side, pad=plain.config.get_text_config().pad_token_id)
    inputs["labels"] = next_tokens(inputs)
    out, expected = assert_same(plain, ours, inputs)
    assert shapes == [(1, TOKENS)]
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(out.logits[real], expected.logits[real], atol=1e-3, rtol=1e-3)


def test_rows_at_other_positions_share_nothing():
    plain = model_with("CausalLM", "llama")
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded("right")
    inputs["position_ids"] = torch.arange(ROW + 4)[None] + torch.arange(8)[:, None]
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, sum(map(len, rows())))]


def test_positions_that_skip_the_padding():
    """As trainers give them: then left padding moves nothing."""
    plain = model_with("CausalLM", "llama")
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded("left")
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, TOKENS)]


def test_a_batch_without_padding():
    plain = model_with("CausalLM", "llama")
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded("right", [torch.cat([rows()[0][:50], x[-10:]]) for x in rows()[:3]])
    inputs = {name: x[:, :60] for name, x in inputs.items()}
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, 80)]


def test_short_beginnings_and_rows_of_padding():
    plain = model_with("CausalLM", "llama")
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    first = rows()[0]
    inputs = padded("right", [first[:40], torch.cat([first[:31], first[:5]]), first[:0]])
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, ours, inputs)
    assert shapes == [(1, 76)]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_classifier(kind):
    plain = model_with("SequenceClassification", kind)
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded("right") | {"labels": torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])}
    assert_same(plain, ours, inputs)
    assert shapes == [(1, TOKENS)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    plain = model_with("CausalLM", "qwen3")
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = padded("both")
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, sharing(plain), inputs)


def test_other_trees_of_equal_sizes_compile_nothing_again():
    plain = model_with("CausalLM", "llama")
    ours = sharing(plain, "sdpa", unpad_to_multiple_of=128)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager")
    graphs = []
    for seed in range(4):
        inputs = padded("right", rows(seed))
        inputs["labels"] = next_tokens(inputs)
        torch.testing.assert_close(
            compiled(**inputs).loss, plain(**inputs).loss, rtol=1e-5, atol=1e-6
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 4


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("llama", {"unpad": False}, "needs unpad=True"),
        ("phi3", {}, "share_prefixes=True is not supported with rope_type 'longrope'"),
        ("lfm2", {}, "share_prefixes=True is not supported with recurrent layers"),
        ("bert", {}, "share_prefixes=True is not supported with bidirectional attention"),
    ],
)
def test_what_cannot_share(kind, arguments, words):
    model = new_model(kind)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        fv.patch_model(model, **{"unpad": True, "share_prefixes": True, **arguments})
    assert not fv.is_patched(model)


def test_embeddings_have_no_ids():
    model = sharing(new_model("llama"))
    inputs = padded("right")
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    with pytest.raises(NotImplementedError, match="share_prefixes=True needs input_ids"):
        model(**inputs)


def test_patching_again_keeps_what_is_asked():
    model = sharing(new_model("llama"))
    with fv.patched(model, "sdpa"):
        assert not model.__dict__[ATTRIBUTE].share_prefixes
    assert model.__dict__[ATTRIBUTE].share_prefixes
