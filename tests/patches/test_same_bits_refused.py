"""Models, sizes, rows and trainers that `same_bits` refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from flexvarlen.packing.prefixes import share_prefixes
from tests.patches.test_same_bits import SIZE, documents, packed, padded
from tests.sentences import failed_refusals
from tests.tiny_models import config_of, new_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def new():
    return new_model("qwen3").eval()


def patch(given):
    make, settings = given
    model = make()
    try:
        fv.patch_model(model, **settings)
    finally:
        assert not fv.is_patched(model)


def test_sizes_and_models_without():
    size = "same_bits must be the number of tokens of every row"
    cases = [
        *((size, (new, {"same_bits": x})) for x in (True, 0, -3, 1.5, "many")),
        (
            "unpad_to_multiple_of must not be given with same_bits",
            (new, {"same_bits": 64, "unpad": True, "unpad_to_multiple_of": 8}),
        ),
    ]
    assert failed_refusals(cases, patch) == []
    classifier = partial(AutoModelForSequenceClassification.from_config, config_of("llama"))
    of_text = "same_bits is for whole rows of a causal language model"
    offsets = "same_bits needs a backend that gives a document the same bits at every offset"
    refused = [
        (of_text, (classifier, {"same_bits": 64})),
        *(
            (of_text, (partial(new_model, x), {"same_bits": 64}))
            for x in ("qwen2_vl", "mixtral", "llama4_text")
        ),
        (of_text, (new, {"same_bits": 64, "sequence_parallel_group": "ranks"})),
        *((offsets, (new, {"same_bits": 64, "backend": x})) for x in ("flex", "reference")),
        (offsets, (partial(new_model, "gemma2"), {"same_bits": 64})),
    ]
    assert failed_refusals(refused, patch, NotImplementedError) == []


def test_rows_that_do_not_fit():
    first = documents()[0].tolist()
    tree = share_prefixes([first, [*first[:30], 7, 8]], min_tokens=4)
    cases = [
        ("a row must have at most same_bits tokens, got 362", (packed(documents()), {})),
        ("a row must have at most same_bits tokens, got 720", (padded(documents()), {})),
        ("the real tokens of a padded batch must be", (padded(documents()), {"unpad": True})),
        ("rows of fv.share_prefixes must have same_bits tokens", (tree.batch(), {})),
    ]

    def call(given):
        batch, settings = given
        fv.patch_model(new(), "sdpa", same_bits=128, **settings)(**batch)

    assert failed_refusals(cases, call) == []


def test_a_model_cast_or_moved_after_the_check():
    model = fv.patch_model(new(), "sdpa", same_bits=SIZE).to(torch.bfloat16)
    words = r"same_bits was checked on cpu in torch\.float32, got a forward on cpu in torch\.bfl"
    with pytest.raises(ValueError, match=words):
        model(**packed(documents()))
    with torch.autocast("cpu", torch.bfloat16):
        fv.patch_model(model.float(), "sdpa", same_bits=SIZE)
        model(**packed(documents()))


def test_isolation_of_a_model_that_is_not_patched_or_takes_more():
    batch = {"input_ids": documents()[0][None], "position_ids": torch.arange(40)[None] % 20}
    with pytest.raises(ValueError, match="same_bits=True needs a patched model"):
        fv.verify_isolation(new(), batch, documents=1, same_bits=True, layout=_halves())
    more = batch | {"token_type_ids": torch.zeros_like(batch["input_ids"])}
    first = documents()[0].tolist()
    one = share_prefixes([[*first, 5], [*first, 6]]).batch()
    one = {name: one[name] for name in ("input_ids", "packed_layout")}
    with pytest.raises(ValueError, match="at least two documents, or a row with room"):
        fv.verify_isolation(fv.patch_model(new(), "sdpa"), one, same_bits=True)
    with pytest.raises(ValueError, match="also has token_type_ids"):
        fv.verify_isolation(fv.patch_model(new(), "sdpa"), more, same_bits=True)


def _halves():
    return fv.PackedLayout.from_lengths([20, 20])
