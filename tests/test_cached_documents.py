"""With a cache that holds or makes room for other tokens, a row holds one document, or it raises.

Such a forward goes to transformers' own sdpa, which would let documents see one another.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import flexvarlen as fv
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


@pytest.mark.parametrize("kind", ["filled", "static"])
@pytest.mark.parametrize("form", POSITIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_positions_of_several_documents(form, kind, masked):
    model = shared_model("llama")
    cache, seen = cache_of(kind, model)
    inputs = positions_of(form, seen)
    if not masked:
        del inputs["attention_mask"]
    ids = torch.ones(1, NEW, dtype=torch.long)
    with fv.patched(model, "sdpa"), pytest.raises(ValueError, match="packed batch"):
        model(ids, past_key_values=cache, **inputs)


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("kind", ["filled", "static"])
@pytest.mark.parametrize("form", IDS)
def test_a_mask_of_document_ids(form, kind, room):
    model = shared_model("llama")
    cache, seen = cache_of(kind, model)
    row = [1] * seen + IDS[form] + [0] * (ROOM - seen - NEW if room else 0)
    ids = torch.ones(1, NEW, dtype=torch.long)
    with fv.patched(model, "sdpa"), pytest.raises(ValueError, match="packed batch"):
        model(ids, past_key_values=cache, attention_mask=torch.tensor([row]))


@pytest.mark.parametrize("new", [1, NEW])
def test_a_mask_that_numbers_the_cache_and_the_new_tokens_apart(new):
    model = shared_model("llama")
    cache, seen = cache_of("filled", model)
    mask = torch.tensor([[1] * seen + [2] * new])
    ids = torch.ones(1, new, dtype=torch.long)
    with fv.patched(model, "sdpa"), pytest.raises(ValueError, match="packed batch"):
        model(ids, past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("form", POSITIONS)
@pytest.mark.parametrize("kind", ["filled", "static"])
@pytest.mark.parametrize("name", ["flexvarlen_doc", "flexvarlen_auto"])
def test_positions_of_several_documents_by_the_name_alone(name, kind, form):
    model = new_model("llama", implementation=name)
    cache, seen = cache_of(kind, model)
    ids = torch.ones(1, NEW, dtype=torch.long)
    for inputs in (positions_of(form, seen), {"position_ids": torch.tensor([POSITIONS[form]])}):
        with torch.no_grad(), pytest.raises(ValueError, match="packed batch"):
            model(ids, past_key_values=cache, **inputs)


# ---- one document a row goes on ----


def _left_padded(pad_position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions of two rows of 16 and 5 tokens, `[2, 16]`."""
    ids = torch.stack([documents()[1][:16], documents()[2][:16]])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :11] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, pad_position)
    return ids, mask, positions


def _in_chunks(model, kind: str, chunk: int, mask_tokens: str, pad_position: int) -> Tensor:
    """The logits of the real tokens, prefilled chunk by chunk."""
    ids, mask, positions = _left_padded(pad_position)
    dynamic = kind == "filled"
    cache = DynamicCache() if dynamic else StaticCache(config=model.config, max_cache_len=ROOM)
    logits = []
    for start in range(0, 16, chunk):
        end = start + chunk
        given = {
            "seen": mask[:, :end],
            "all": torch.nn.functional.pad(mask, (0, ROOM - 16), value=1),
        }[mask_tokens]
        with torch.no_grad():
            out = model(
                ids[:, start:end],
                attention_mask=given,
                position_ids=positions[:, start:end],
                past_key_values=cache,
            )
        logits.append(out.logits)
    return torch.cat(logits, dim=1)[mask.bool()]


@pytest.mark.parametrize("pad_position", [0, 1])
@pytest.mark.parametrize("how", ["patched", "name"])
@pytest.mark.parametrize(
    ("kind", "mask_tokens"), [("filled", "seen"), ("static", "seen"), ("static", "all")]
)
@pytest.mark.parametrize("chunk", [4, 1])
def test_a_left_padded_prefill_in_chunks(kind, mask_tokens, chunk, how, pad_position):
    model = shared_model("qwen3")
    settings = (kind, chunk, mask_tokens, pad_position)
    expected = _in_chunks(model, *settings)
    if how == "patched":
        with fv.patched(model, "sdpa"):
            ours = _in_chunks(model, *settings)
    else:
        ours = _in_chunks(new_model("qwen3", implementation="flexvarlen_doc"), *settings)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


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


def test_no_read_for_each_layer(monkeypatch):
    """By the name alone the first layer looks at the positions, for all."""
    model = new_model("llama", implementation="flexvarlen_doc", num_hidden_layers=4)
    reads = []
    read = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda x: reads.append(x) or read(x))
    counts = []
    for tokens in (1, NEW, NEW):
        cache, _ = cache_of("static", model)
        reads.clear()
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
        counts.append(len(reads))
    assert counts[1] == counts[2] <= counts[0] + 1
