"""An engine's record of experts becomes a row for each token, or is refused by what is wrong."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
import torch

import flexvarlen as fv

TOKENS, LAYERS, TOP_K, EXPERTS = 6, 3, 2, 8
SIZES = {"num_experts": EXPERTS, "num_layers": LAYERS, "top_k": TOP_K}


def record(start=0, tokens=TOKENS):
    """int64 `[tokens - 1 - start, 3, 2]`."""
    rng = np.random.default_rng(start)
    return rng.random((tokens - 1 - start, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]


def changed(at, value):
    found = record()
    found[at] = value
    return found


FORMATS = {
    **{
        name: lambda x, name=name: x.astype(name)
        for name in ("uint8", "int8", "uint16", "int16", "int32", "int64")
    },
    "tensor": torch.from_numpy,
    "lists": np.ndarray.tolist,
    "base64": lambda x: base64.b64encode(x.astype("<i4").tobytes()).decode(),
    "bytes": lambda x: base64.b64encode(x.astype("<i4").tobytes()),
}


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_for_each_token(form, start):
    given = record(start)
    found = fv.engine_routes(FORMATS[form](given), TOKENS, start=start, **SIZES)
    assert found.dtype == torch.int16
    assert found.shape == (TOKENS, LAYERS, TOP_K)
    assert (found[:start] == -1).all()
    assert (found[-1] == -1).all()
    assert np.array_equal(found[start:-1].numpy(), given)


REFUSED = [
    (
        "must have a row for each of tokens 0 to 4, 5 without the last token, got 6",
        record(0, 7),
        {},
    ),
    ("must have a row for each of tokens 0 to 4, 5 without the last token, got 4", record(1), {}),
    ("must have a row for each of tokens 2 to 4, 3 without", record(), {"start": 2}),
    ("must have shape [tokens, 3, 2]: layers with experts", record()[:, 1:], {}),
    ("must have shape [tokens, 3, 2]: layers with experts", record()[..., :1], {}),
    ("must be integers [tokens, layers, experts], got float64", record().astype(float), {}),
    ("must be integers [tokens, layers, experts], got bool", record() > 0, {}),
    ("must be integers [tokens, layers, experts], got int64 of shape [30]", record().ravel(), {}),
    ("must have as many layers and experts for each token", [[[0, 1]], [[0]]], {}),
    ("must be base64 where it is text", "not base64!", {}),
    ("bytes, got 20 bytes", base64.b64encode(bytes(20)), {}),
    ("must be from 0 to 7, logical ids, got [8, ", changed((3, 1, 0), 8), {}),
    ("at token 3 in layer 1", changed((3, 1, 0), -1), {}),
    ("must be different experts of a token", changed((4, 2), 5), {}),
    ("got [5, 5] at token 4 in layer 2", changed((4, 2), 5), {}),
    ("start must be below num_tokens=6, got 6", record(), {"start": 6}),
    ("num_experts must be from top_k=2 to 32767, got 1", record(), {"num_experts": 1}),
]


@pytest.mark.parametrize(("words", "given", "changes"), REFUSED)
def test_refused(words, given, changes):
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        fv.engine_routes(given, TOKENS, **SIZES | changes)
    sentence = str(raised.value)
    assert "; " in sentence
    assert sentence.endswith(".")


# ---- collators and trees ----


def sample(length, seed):
    ids = torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed))
    routes = fv.engine_routes(record(0, length), length, **SIZES)
    return {"input_ids": ids, "routed_experts": routes}


def test_a_packed_row():
    given = [sample(6, 0), sample(4, 1)]
    found = fv.PackedCollator(total_tokens=12)(given)["routed_experts"]
    assert found.shape == (1, 12, LAYERS, TOP_K)
    assert torch.equal(found[0, :10], torch.cat([x["routed_experts"] for x in given]))
    assert (found[0, 10:] == -1).all()


def test_padding_of_a_document_is_dropped_with_its_experts():
    given = sample(6, 0)
    mask = torch.tensor([0, 1, 1, 1, 1, 0])
    found = fv.PackedCollator()([given | {"attention_mask": mask}])["routed_experts"]
    assert torch.equal(found[0], given["routed_experts"][1:5])


@pytest.mark.parametrize("collate", [fv.PackedCollator(), fv.TreeCollator(), fv.share_prefixes])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: {"input_ids": x["input_ids"]}, "must be given for all samples or for none"),
        (
            lambda x: x | {"routed_experts": x["routed_experts"][:-1]},
            "must have a (row|value) for each of 4 tokens",
        ),
        (
            lambda x: x | {"routed_experts": x["routed_experts"][:, 1:]},
            "must have the same layers and experts in all samples",
        ),
        (lambda x: x | {"routed_experts": x["routed_experts"].float()}, "must be integers"),
    ],
)
def test_columns_that_do_not_fit(collate, change, words):
    with pytest.raises(ValueError, match=words):
        collate([sample(6, 0), change(sample(4, 1))])
