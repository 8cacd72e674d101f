"""`patch_model(unpad=True, share_prefixes=True)`: what rows have in common runs once."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexvarlen as fv
from flexvarlen.layout.token_map import Padding
from flexvarlen.patches.batch import shared_rows
from flexvarlen.patches.batch.delivery import Delivery
from flexvarlen.patches.batch.padded_batch import (
    PaddedBatch,
    find_padding,
)
from flexvarlen.patches.batch.shared_rows import share_prefixes_of_rows
from flexvarlen.patches.state import ATTRIBUTE
from tests.backends import FLASH, gpu_param
from tests.patches.forward.padded_runs import (
    ENCODERS,
    TEXT,
    assert_as_accurate_as_padded,
    assert_same,
    model_with,
    next_tokens,
    pair,
    seen_tokens,
)
from tests.tiny_models import VOCABULARY, config_of, new_model

SHARING = [kind for kind in TEXT if kind not in ENCODERS]

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


def check(inputs, tokens, kind="llama", head="CausalLM", **settings):
    """Loss and gradients are the padded run's, of which the row has `tokens` tokens."""
    plain, ours, shapes = pair(head, kind, sharing)
    for model in (plain, ours):
        if settings:
            model.gradient_checkpointing_enable(settings)
    inputs = {"labels": next_tokens(inputs), **inputs}
    out, expected = assert_same(plain, ours, inputs)
    assert shapes == [(1, tokens)]
    return out, expected


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("side", ["right", "both"])
@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.sampled(8)
def test_loss_and_gradients_are_the_padded_run_s(kind, side):
    inputs = padded(side, pad=config_of(kind).get_text_config().pad_token_id)
    out, expected = check(inputs, TOKENS, kind)
    real = inputs["attention_mask"] == 1
    torch.testing.assert_close(out.logits[real], expected.logits[real], atol=1e-3, rtol=1e-3)


def test_rows_at_other_positions_share_nothing():
    inputs = padded("right")
    inputs["position_ids"] = torch.arange(ROW + 4)[None] + torch.arange(8)[:, None]
    check(inputs, sum(map(len, rows())))


@pytest.mark.parametrize("kind", ["llama", "llama4_text"])
def test_rows_that_begin_elsewhere_share_nothing(kind):
    """Llama 4 scales queries by their place in the row, whatever their position_ids."""
    inputs = padded("left", [rows()[0], rows()[1]])
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    check(inputs, len(rows()[0]) + len(rows()[1]), kind)


def test_only_rows_of_equal_token_types_share():
    """transformers adds the embedding of a token's type."""
    plain = model_with("CausalLM", "llama")

    class Typed(type(plain.model)):
        def forward(self, input_ids, token_type_ids, inputs_embeds=None, **kwargs):
            embedded = self.embed_tokens(input_ids)
            embedded = embedded + self.embed_tokens(token_type_ids)
            return super().forward(inputs_embeds=embedded, **kwargs)

    plain.model.__class__ = Typed
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    inputs = padded("right")
    inputs["token_type_ids"] = torch.arange(8)[:, None] % 2 + torch.zeros_like(inputs["input_ids"])
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, ours, inputs)
    assert TOKENS < shapes[0][1] < sum(map(len, rows()))


def test_a_head_that_gives_its_base_other_ids():
    plain = model_with("CausalLM", "llama")

    class Changing(type(plain)):
        def forward(self, input_ids, **kwargs):
            changed = input_ids.clone()
            changed[::2, 0] = 5
            return super().forward(input_ids=changed, **kwargs)

    plain.__class__ = Changing
    inputs = padded("right")
    inputs["labels"] = next_tokens(inputs)
    assert_same(plain, sharing(plain), inputs)


# Padding before a row, and its tokens, of few kinds, so that rows share a lot.
ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=6)), min_size=1, max_size=7
)


@given(ROWS, st.booleans(), st.integers(1, 3))
def test_a_prefix_is_computed_once_for_each_offset(rows, typed, multiple_of):
    ids = torch.arange(len(rows))[:, None].repeat(1, 8)  # of other padding in each row
    types = (torch.arange(len(rows)) % 2 * typed)[:, None].repeat(1, 8)
    mask = torch.zeros_like(ids)
    for row, (first, tokens) in enumerate(rows):
        ids[row, first : first + len(tokens)] = torch.tensor(tokens)
        mask[row, first : first + len(tokens)] = 1
    batch = find_padding(mask, None, multiple_of=multiple_of, even_without=True)
    inputs = {"input_ids": ids, "token_type_ids": types, "position_ids": torch.arange(8)[None]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_rows, "MIN_SHARED_TOKENS", 1)
        found = share_prefixes_of_rows(batch, inputs, multiple_of=multiple_of)
    prefixes = {
        (row % 2 * typed, first, *tokens[:stop])
        for row, (first, tokens) in enumerate(rows)
        for stop in range(1, 1 + len(tokens))
    }
    assert int((found.tokens.offsets < ids.numel()).sum()) == len(prefixes)
    total = max(-(-len(prefixes) // multiple_of), 1) * multiple_of
    assert found.layout.total_tokens == total
    assert torch.equal(
        found.tokens.leave(found.tokens.enter(ids), padding=-1), ids.where(mask == 1, -1)
    )
    positions = found.tokens.leave(found.layout.position_ids()[None], padding=-1)
    assert torch.equal(positions, (mask.cumsum(1) - 1).where(mask == 1, -1))
    assert (found.pads_left, found.has_empty_row) == (batch.pads_left, batch.has_empty_row)
    depth = found.layout.segments.max_depth if found.layout.segments else 1
    assert depth.bit_count() == 1


def test_gradients_of_shared_tokens_are_summed_in_fp32():
    ids = torch.arange(64).expand(8, -1)
    layout = fv.PackedLayout.from_lengths([64] * 8)
    batch = PaddedBatch(layout, Padding(torch.arange(512), 8, 64), False, Delivery())
    batch = share_prefixes_of_rows(batch, {"input_ids": ids}, multiple_of=1)
    x = torch.zeros(1, 64, 4, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(8, 64, 4).bfloat16()
    batch.tokens.leave(x).backward(gradient)
    assert torch.equal(x.grad[0], gradient.float().sum(0).bfloat16())


def test_a_batch_without_padding():
    inputs = padded("right", [torch.cat([rows()[0][:50], x[-10:]]) for x in rows()[:3]])
    check({name: x[:, :60] for name, x in inputs.items()}, 80)


def test_short_beginnings_and_rows_of_padding():
    first = rows()[0]
    check(padded("right", [first[:40], torch.cat([first[:31], first[:5]]), first[:0]]), 76)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_classifier(kind):
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    check({**padded("right"), "labels": labels}, TOKENS, kind, "SequenceClassification")


@pytest.mark.parametrize("form", ["seq_idx", "document ids", "mask and positions", "two rows"])
def test_a_classifier_of_packed_rows_with_padding(form):
    """Padding is among the documents of such a row, before others too, and has no row of logits."""
    plain = model_with("SequenceClassification", "mistral").eval()
    texts = rows()[:4]
    with torch.no_grad():
        alone = torch.cat([plain(input_ids=text[None]).logits for text in texts])
    ours = sharing(plain)
    shapes = seen_tokens(ours)
    ids, documents, positions = (torch.zeros(4, 120, dtype=torch.long) for _ in range(3))
    for row, text in enumerate(texts):  # padding follows each document
        ids[row, : len(text)], documents[row, : len(text)] = text, row + 1
        positions[row, : len(text)] = torch.arange(len(text))
    batch = (2, -1) if form == "two rows" else (1, -1)
    ids, documents, positions = (x.view(batch) for x in (ids, documents, positions))
    mask = (documents != 0).long()
    given = {
        "seq_idx": {"seq_idx": documents.int(), "attention_mask": mask},
        "mask and positions": {"attention_mask": mask, "position_ids": positions},
    }.get(form, {"attention_mask": documents})
    with torch.no_grad():
        logits = ours(input_ids=ids, **given).logits
    torch.testing.assert_close(logits, alone)
    assert shapes == [(1, SYSTEM + 2 * PROMPT + 9 + 20 + 3 + 10)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    check(padded("both"), TOKENS, "qwen3", use_reentrant=reentrant)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("llama", {"unpad": False}, "needs unpad=True"),
        ("phi3", {}, "share_prefixes=True is not supported with rope_type 'longrope'"),
        ("bert", {}, "share_prefixes=True is not supported with bidirectional attention"),
        ("llama", {"batch_invariant": True}, "is not supported with batch_invariant"),
        ("mistral", {"backend": "varlen"}, "varlen"),
    ],
)
def test_what_cannot_share(kind, arguments, words):
    model = new_model(kind)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        fv.patch_model(model, **{"unpad": True, "share_prefixes": True, **arguments})
    assert not fv.is_patched(model)


def test_embeddings_share_nothing():
    plain = model_with("CausalLM", "llama")
    inputs = padded("right")
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = plain.get_input_embeddings()(ids).detach()
    inputs["labels"] = next_tokens({"input_ids": ids, **inputs})
    assert_same(plain, sharing(plain), inputs)


def test_patched_restores_what_was_asked():
    model = sharing(new_model("llama"))
    with fv.patched(model, "sdpa"):
        assert not model.__dict__[ATTRIBUTE].share_prefixes
    assert model.__dict__[ATTRIBUTE].share_prefixes


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["right", "both"])
@pytest.mark.parametrize("backend", ["auto", *map(gpu_param, ("flex", "flex_fa4", *FLASH))])
def test_bf16_is_as_accurate_as_the_padded_run(backend, side):
    inputs = padded(side)
    inputs["labels"] = next_tokens(inputs)
    shapes = assert_as_accurate_as_padded("qwen3", "CausalLM", backend, inputs, share_prefixes=True)
    assert shapes == [(1, TOKENS)]
