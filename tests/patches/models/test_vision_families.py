"""Models of text and images: packed equals one by one.

Text alone is in test_families, the vision towers in test_vision_towers. The oracle is the unpatched
model in fp64, a document at a time with its own images; the baseline is the same in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import config_of, new_model

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
IMAGE, _, BEGIN, END = (90, 91, 92, 93)
# Images of each document, as frames, height and width: none, one, two, one of two frames.
GRIDS = ([(1, 8, 4)], [], [(1, 4, 4), (1, 12, 6)], [(2, 6, 4)], [])
TEXT = (7, 30, 11, 5, 1)


@dataclass(frozen=True)
class Document:
    """A text of L tokens, some of which stand for images.

    Attributes:
        ids, types: `[L]`; types are 1 at tokens of images.
        grid: `[images, 3]`.
        patches: `[patches, 96]`, fp32.
    """

    ids: Tensor
    types: Tensor
    grid: Tensor
    patches: Tensor


@cache
def documents() -> tuple[Document, ...]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for tokens, images in zip(TEXT, GRIDS, strict=True):
        ids = torch.randint(3, 80, (tokens,), generator=generator).tolist()
        types = [0] * tokens
        for frames, height, width in images:
            own = frames * height * width // 4
            ids += [BEGIN, *[IMAGE] * own, END, 5, 6]
            types += [0, *[1] * own, 0, 0, 0]
        grid = torch.tensor(images, dtype=torch.long).view(-1, 3)
        patches = torch.randn(int(grid.prod(-1).sum()), 96, generator=generator)
        made.append(Document(torch.tensor(ids), torch.tensor(types), grid, patches))
    return tuple(made)


LENGTHS = [len(x.ids) for x in documents()]


def inputs_of(some, dtype=torch.float32):
    """The processor's keywords for these documents in one row."""
    inputs = {
        "input_ids": torch.cat([x.ids for x in some])[None],
        "mm_token_type_ids": torch.cat([x.types for x in some])[None],
    }
    grid = torch.cat([x.grid for x in some])
    if len(grid):
        inputs["pixel_values"] = torch.cat([x.patches for x in some]).to(dtype)
        inputs["image_grid_thw"] = grid
    return inputs


@cache
def one_by_one(name, dtype):
    """Logits, mean loss and gradients of the documents, and their positions `[3, T]`."""
    model = new_model(name).to(dtype)
    logits, losses, positions = [], [], []
    for document in documents():
        model.model.rope_deltas = None  # of the document before
        inputs = inputs_of([document], dtype)
        out = model(**inputs, use_cache=False).logits[0]
        losses.append(cross_entropy(out[:-1], document.ids[1:], reduction="sum"))
        logits.append(out.detach())
        own = torch.arange(len(document.ids)).expand(3, -1)
        if len(document.grid):
            taken = (inputs["input_ids"], inputs["mm_token_type_ids"])
            own = model.model.get_rope_index(*taken, image_grid_thw=document.grid)[0][:, 0]
        positions.append(own)
    loss = torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(logits), loss.detach(), gradients, torch.cat(positions, dim=1)


ROW = forms.row_of(LENGTHS)
TEXT_POSITIONS, IDS, CU = ROW.position_ids, ROW.document_ids, ROW.cu_seqlens


def layout():
    return fv.PackedLayout.from_lengths(LENGTHS)


def four_rows(rope):
    return torch.cat([TEXT_POSITIONS, rope])[:, None]


FORMS = {
    "four_rows": lambda rope: {"position_ids": four_rows(rope)},
    "packed_layout": lambda rope: forms.given("packed_layout", ROW),
    "cu_seq_lens": lambda rope: forms.given("cu_seq_lens", ROW, "cu_seq_lens_k"),
    "three_rows_and_layout": lambda rope: {
        **forms.given("packed_layout", ROW),
        "position_ids": rope[:, None],
    },
    "document_id_mask": lambda rope: forms.given("document_ids", ROW),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "packed_layout") for name in KINDS), *(("qwen2_5_vl", form) for form in FORMS)],
)
def test_packed_equals_one_by_one(name, form):
    """Positions of the row, an image of another document, a tower told the text's boundaries."""
    exact, baseline = one_by_one(name, torch.float64), one_by_one(name, torch.float32)
    model = fv.patch_model(new_model(name), "sdpa").train(form == "packed_layout")
    inputs = {**inputs_of(documents()), **FORMS[form](exact[3])}
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    logits = out.logits[0].detach()
    assert_as_accurate(logits, exact[0], baseline[0], 2, "logits")
    moved = 2 * (logits.double() - exact[0]).abs().max().item()
    assert abs(out.loss.item() - exact[1].item()) <= moved + 1e-6 * exact[1].item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == exact[2].keys()
    for name, gradient in gradients.items():
        assert_as_accurate(gradient, exact[2][name], baseline[2][name], 3, name)


@pytest.mark.pairwise(name=KINDS, rows=[((0,), (2,)), ((0, 1), (2, 3))], left=[False, True])
def test_padded_rows(name, rows, left):
    """Padding between images, one document per row or two."""
    exact, baseline = one_by_one(name, torch.float64)[0], one_by_one(name, torch.float32)[0]
    width = max(sum(LENGTHS[i] for i in row) for row in rows) + 3
    ids, types, mask = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
    for row, indices in enumerate(rows):
        at = width - sum(LENGTHS[i] for i in indices) if left else 0
        for number, index in enumerate(indices):
            tokens = slice(at, at + LENGTHS[index])
            ids[row, tokens] = documents()[index].ids
            types[row, tokens] = documents()[index].types
            mask[row, tokens] = number + 1
            at += LENGTHS[index]
    order = [index for row in rows for index in row]
    inputs = {**inputs_of([documents()[i] for i in order]), "attention_mask": mask}
    inputs |= {"input_ids": ids, "mm_token_type_ids": types}
    with torch.no_grad():
        logits = fv.patch_model(new_model(name), "sdpa")(**inputs, use_cache=False).logits
    expected = (torch.cat([x.split(LENGTHS)[i] for i in order]) for x in (exact, baseline))
    assert_as_accurate(logits[mask > 0], *expected, 2)


REFUSED = {
    "three_rows_alone": (lambda rope: {"position_ids": rope[:, None]}, r"\[4, B, S\]"),
    "text_positions_on_images": (lambda rope: {"position_ids": TEXT_POSITIONS}, "4 rows"),
    "five_rows": (lambda rope: {"position_ids": rope[[0, 0, 1, 1, 2]][:, None]}, "text row"),
    "types_left_out": (
        lambda rope: {"packed_layout": layout(), "mm_token_type_ids": None},
        "mm_token_type_ids",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_positions_that_tell_no_documents(case):
    make, words = REFUSED[case]
    model = fv.patch_model(new_model("qwen2_5_vl"), "sdpa")
    inputs = {**inputs_of(documents()), **make(one_by_one("qwen2_5_vl", torch.float64)[3])}
    with pytest.raises(ValueError, match=words):
        model(**inputs)


def test_a_classifier_of_images():
    """One document per row has its images; packed rows may hold text alone."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of("qwen3_5", num_labels=2))
    model.eval()
    some, texts = documents()[:2], [x.ids[x.types == 0] for x in documents()]

    @torch.no_grad()
    def logits(**inputs):
        model.model.rope_deltas = None  # of the document before
        return model(**inputs).logits

    alone = torch.cat([logits(**inputs_of([x])) for x in some])
    texts_alone = torch.cat([logits(input_ids=x[None]) for x in texts])
    fv.patch_model(model, "sdpa")
    row = {**inputs_of(documents()), "packed_layout": layout()}
    with pytest.raises(NotImplementedError, match="must hold text alone"):
        logits(**row)
    padded = {
        "input_ids": pad_sequence([x.ids for x in some], batch_first=True),
        "mm_token_type_ids": pad_sequence([x.types for x in some], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x.ids) for x in some], batch_first=True),
    }
    torch.testing.assert_close(logits(**{**inputs_of(some), **padded}), alone)
    text_layout = fv.PackedLayout.from_lengths([len(x) for x in texts])
    found = logits(input_ids=torch.cat(texts)[None], packed_layout=text_layout)
    torch.testing.assert_close(found, texts_alone)


@pytest.mark.parametrize("name", KINDS)
def test_generates_from_images_as_the_unpatched_model(name):
    model, inputs = new_model(name), inputs_of(documents()[:1])
    how = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(**inputs, **how)
    model.model.rope_deltas = None
    assert torch.equal(fv.patch_model(model, "sdpa").generate(**inputs, **how), before)


@pytest.mark.parametrize("name", KINDS)
def test_decoding_from_where_the_images_end(name):
    """Positions that nobody passes go on from those that were made for the prompt."""
    model, inputs = new_model(name), inputs_of(documents()[:1])

    def decode():
        model.model.rope_deltas = None
        with torch.no_grad():
            cache = model(**inputs, use_cache=True).past_key_values
            return model(torch.tensor([[7]]), past_key_values=cache).logits

    before = decode()
    fv.patch_model(model, "sdpa")
    torch.testing.assert_close(decode(), before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_text_tower_alone(name):
    exact, baseline = new_model(name).double().model.language_model, new_model(name).model
    baseline, rope = baseline.language_model, one_by_one(name, torch.float64)[3]
    ids = torch.cat([x.ids for x in documents()])[None]
    alone = []
    with torch.no_grad():
        for tower in (exact, baseline):
            pieces = zip(ids.split(LENGTHS, 1), rope[:, None].split(LENGTHS, 2), strict=True)
            out = [tower(x, position_ids=at, use_cache=False)[0][0] for x, at in pieces]
            alone.append(torch.cat(out))
        out = fv.patch_model(baseline, "sdpa")(ids, position_ids=four_rows(rope)).last_hidden_state
    assert_as_accurate(out[0], *alone, 2)
