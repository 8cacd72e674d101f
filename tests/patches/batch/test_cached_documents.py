"""With a cache that holds or makes room for other tokens, a row holds one document, or it raises.

Such a forward goes to transformers' own sdpa, which would let documents see one another.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

import flexvarlen as fv
from flexvarlen.patches.batch import unpacked_rows
from flexvarlen.patches.batch.unpacked_rows import check_one_document
from tests.patches.batch.models import HOW, NAME, model_of
from tests.patches.batch.test_found_once import count
from tests.tiny_models import documents, new_model, shared_model

CACHED, NEW, ROOM = 4, 12, 32


def cache_of(kind: str, model) -> tuple[DynamicCache | StaticCache, int]:
    """A cache and the number of tokens in it."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=ROOM), 0
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(1, 2, CACHED, 16), torch.ones(1, 2, CACHED, 16), layer)
    return cache, CACHED


POSITIONS = {
    "restarts": [*range(5), *range(7)],
    "restarts_higher": [*range(5), *range(100, 107)],
    "documents_of_one_token": [0] * NEW,
    "one_token_after_padding": [0, 0, 0, 0, *range(8)],
}
IDS = {
    "document_ids": [1] * 5 + [2] * 7,
    "ids_with_padding_between": [1] * 5 + [0] * 3 + [2] * 4,
    "one_token_documents": list(range(1, NEW + 1)),
}


def positions_of(form: str, seen: int) -> dict[str, Tensor]:
    mask = torch.ones(1, seen + NEW, dtype=torch.long)
    if form == "one_token_after_padding":  # documents of one token behind the padding too
        mask[:, seen : seen + 2] = 0
    return {"position_ids": torch.tensor([POSITIONS[form]]), "attention_mask": mask}


def refused(how: str, kind: str, new: int = NEW, **inputs):
    """New tokens in this number beside a cache of this kind raise, whatever model they go to."""
    model = model_of(how)
    cache, _ = cache_of(kind, model)
    ids = torch.ones(1, new, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match="packed batch"):
        model(ids, past_key_values=cache, **inputs)


@pytest.mark.pairwise(
    form=POSITIONS,
    kind=["filled", "static"],
    masked=[False, True],
    how=[*HOW, "flexvarlen_auto"],
)
def test_positions_of_several_documents(form, kind, masked, how):
    inputs = positions_of(form, CACHED if kind == "filled" else 0)
    if not masked:
        del inputs["attention_mask"]
    refused(how, kind, **inputs)


@pytest.mark.pairwise(form=IDS, kind=["filled", "static"], room=[False, True])
def test_a_mask_of_document_ids(form, kind, room):
    seen = CACHED if kind == "filled" else 0
    row = [1] * seen + IDS[form] + [0] * (ROOM - seen - NEW if room else 0)
    refused("patched", kind, attention_mask=torch.tensor([row]))


@pytest.mark.parametrize("new", [1, NEW])
def test_a_mask_that_numbers_the_cache_and_the_new_tokens_apart(new):
    mask = torch.tensor([[1] * CACHED + [2] * new])
    refused("patched", "filled", new, attention_mask=mask)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("positions", [[*range(5), 0, 0, *range(5)], [*range(12)], None])
def test_padding_between_documents(positions, how):
    """Without a cache it ends a document, so beside one it must not join two."""
    given = {} if positions is None else {"position_ids": torch.tensor([positions])}
    refused(how, "static", attention_mask=torch.tensor([[1] * 5 + [0] * 2 + [1] * 5]), **given)


# ---- one document per row goes on ----


def test_a_document_that_starts_anywhere_goes_on():
    model = shared_model("llama")
    cache, seen = cache_of("filled", model)
    ids, positions = torch.ones(1, NEW, dtype=torch.long), torch.arange(100, 100 + NEW)[None]
    mask = torch.full((1, seen + NEW), 3)  # one document, whatever its number
    with torch.no_grad():
        with fv.patched(model, "sdpa"):
            ours = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        expected = model(ids, position_ids=positions, past_key_values=cache_of("filled", model)[0])
    torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=1e-4)


# Rows of 12 tokens, 0 at padding.
PADDED = {
    "right": [1] * 8 + [0] * 4,
    "left": [0] * 4 + [1] * 8,
    "both_sides": [0] * 2 + [1] * 7 + [0] * 3,
    "one_token": [1] + [0] * 11,
    "none_real": [0] * 12,
}


def _padded(model, kind: str, form: str) -> Tensor:
    """Logits of the real tokens of two rows, one padded, beside a cache; pads have position 0."""
    rows = torch.tensor([PADDED[form], [1] * NEW])
    positions = (rows.cumsum(-1) - 1).masked_fill(rows == 0, 0)
    cache, seen = DynamicCache(), 0
    if kind.startswith("static"):
        cache = StaticCache(config=model.config, max_cache_len=ROOM)
    else:
        ids = torch.stack([documents()[1][:CACHED], documents()[2][:CACHED]])
        with torch.no_grad():
            model(ids, past_key_values=cache)
        seen = CACHED
    ids = torch.stack([documents()[1][:NEW], documents()[2][:NEW]])
    mask = torch.cat([torch.ones(2, seen, dtype=torch.long), rows], dim=1)
    if kind == "static_of_all":
        mask = torch.nn.functional.pad(mask, (0, ROOM - NEW), value=1)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions + seen, past_key_values=cache)
    return out.logits[rows.bool()]


@pytest.mark.pairwise(
    name=["llama", "qwen3_windows"], form=PADDED, kind=["static", "static_of_all", "filled"]
)
def test_padding_beside_a_cache_is_no_document(name, form, kind):
    """Pads see the tokens before them, in the mask that transformers makes.

    Prefill in chunks, and steps: tests/fuzz.py and attention/test_generate.py.
    """
    expected = _padded(shared_model(name), kind, form)
    for how in HOW:
        ours = _padded(model_of(how, name), kind, form)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["patched", pytest.param(NAME, marks=pytest.mark.slow)])
def test_a_static_cache_in_a_graph(how):
    """Right padding is no document, and documents raise, in the graph that serves padding."""
    torch._dynamo.reset()
    expected = _padded(new_model("llama", num_hidden_layers=1), "static", "right")
    model = model_of(how, num_hidden_layers=1)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for form in ("right", "left", "right"):
        ours = _padded(compiled, "static", form)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert counter.frame_count == 1
    given = {name: x.repeat(2, 1) for name, x in positions_of("restarts", 0).items()}
    cache, _ = cache_of("static", model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="flexvarlen: a packed batch"):
        compiled(torch.ones(2, NEW, dtype=torch.long), past_key_values=cache, **given)


# Masks of 4 new tokens, of 9 columns; the positions have a restart at the third.
SQUARE = torch.ones(4, 4, dtype=torch.bool).tril()
MASKS_4D = {
    "causal_in_a_static_cache": torch.nn.functional.pad(SQUARE, (2, 3), value=False),
    "causal_in_a_full_cache": torch.nn.functional.pad(SQUARE, (5, 0), value=True),
    "bidirectional": torch.ones(4, 9, dtype=torch.bool),
    "prefix": torch.nn.functional.pad(SQUARE | (torch.arange(4) < 3), (0, 5), value=False),
    "one_row_for_all": torch.ones(1, 9, dtype=torch.bool),
    "documents": torch.nn.functional.pad(
        torch.block_diag(*[torch.ones(2, 2).tril()] * 2).bool(), (1, 4), value=False
    ),
}


@pytest.mark.parametrize("form", MASKS_4D)
def test_a_4d_mask_hides_no_document(form):
    mask, positions = MASKS_4D[form][None, None], torch.tensor([[3, 4, 0, 1]])
    with pytest.raises(ValueError, match="packed batch"):
        check_one_document(4, position_ids=positions, attention_mask=mask, with_what="a cache")


def test_which_columns_are_the_new_tokens():
    """A mask has a column for each cached token too; pads among these say nothing of the new."""
    mask, positions = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
    given = {"position_ids": positions, "with_what": "a cache"}
    for seen in (5, torch.tensor(5)):
        with pytest.raises(ValueError, match="packed batch"):
            check_one_document(4, attention_mask=mask, seen=seen, **given)
        padded = mask.flip(1)  # here the new tokens are pads, and the cached ones are not
        check_one_document(4, attention_mask=padded, seen=seen, **given)
        padded_4d = padded.bool()[None, None]
        check_one_document(4, attention_mask=padded_4d, seen=seen, **given)
        with pytest.raises(ValueError, match="packed batch"):
            check_one_document(4, attention_mask=mask.bool()[None, None], seen=seen, **given)


@pytest.mark.parametrize("mask", ["none", "ones", "left_padding"])
def test_a_new_document_behind_a_cached_one(mask):
    """It goes on by 1 in itself, and would attend to what is cached."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    cache, _ = cache_of("filled", model)
    given = {"position_ids": torch.arange(NEW)[None]}
    if mask != "none":
        given["attention_mask"] = torch.ones(1, CACHED + NEW, dtype=torch.long)
    if mask == "left_padding":
        given["attention_mask"][0, CACHED : CACHED + 2] = 0
        given["position_ids"] = (given["position_ids"] - 2).clamp(min=0)
    ids = torch.ones(1, NEW, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match="begin at 0 after cached tokens"):
        model(ids, past_key_values=cache, **given)


def test_a_first_document_behind_cached_padding():
    """A chunk of prefill of a row that was padding so far."""
    mask = torch.tensor([[0] * 5 + [0, 1, 1, 1], [1] * 9])
    positions = torch.tensor([[0, 0, 1, 2], [5, 6, 7, 8]])
    for seen in (5, torch.tensor(5)):
        given = {"attention_mask": mask, "with_what": "a cache", "seen": seen}
        check_one_document(4, position_ids=positions, **given)
        with pytest.raises(ValueError, match="begin at 0"):
            check_one_document(4, position_ids=positions[[0, 0]], **given)


def test_a_sliding_layer_without_room_before_one_with_room():
    """The first layer alone looks as if the cache held nothing but the new tokens.

    Several documents there: test_caches.py.
    """
    model = new_model("qwen3_windows", layer_types=["sliding_attention", "full_attention"])
    expected = _padded(model, "static", "right")
    fv.patch_model(model, "sdpa")
    torch.testing.assert_close(_padded(model, "static", "right"), expected, rtol=0, atol=1e-4)


def test_a_patched_model_looks_once_a_forward(monkeypatch):
    """The wrapper of the base model and the layers trust the one of the whole model."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    reads = count(monkeypatch, unpacked_rows, "raise_or_assert")
    cache, _ = cache_of("filled", model)
    with torch.no_grad():
        model(torch.ones(1, NEW, dtype=torch.long), past_key_values=cache)
        assert len(reads) == 0  # no positions, no mask
        mask = torch.ones(1, CACHED + NEW + 1, dtype=torch.long)
        given = {"attention_mask": mask, "position_ids": torch.tensor([[16]])}
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache, **given)
    assert len(reads) == 1


def test_no_read_for_each_layer(monkeypatch):
    """By the name alone the first layer looks at the positions, for all."""
    model = new_model("llama", implementation="flexvarlen_doc", num_hidden_layers=4)
    reads, counts = count(monkeypatch, Tensor, "__bool__"), []
    for tokens in (1, NEW, NEW):
        cache, _ = cache_of("static", model)
        reads.clear()
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
        counts.append(len(reads))
    assert counts[1] == counts[2] <= counts[0] + 1
