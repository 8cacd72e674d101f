"""`same_bits`: a document's bits are those of every row of one size."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import pad as pad_tensor
from torch.overrides import TorchFunctionMode

import flexvarlen as fv
from flexvarlen.layout.token_map import Padding
from flexvarlen.packing.collator import PackedCollator
from flexvarlen.patches.forward.row_size import longer
from tests.tiny_models import new_model

LENGTHS = (40, 70, 12, 64, 3, 90, 33, 50)
TOKENS = sum(LENGTHS)  # 362
SIZE = 512

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class ByRows(nn.Linear):
    """A linear layer whose results depend on the number of rows, as kernels are chosen by it."""

    def forward(self, x):
        return super().forward(x) * (1 + x.numel() // x.shape[-1] / 1e4)


def model_by_rows(kind="qwen3"):
    """Of which neither the layers nor the head give equal bits in rows of other sizes."""
    torch.manual_seed(0)
    model = new_model(kind).eval()
    model.model.layers[0].mlp.down_proj.__class__ = ByRows
    model.lm_head.__class__ = ByRows
    return model


def documents():
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(5, 97, (n,), generator=rng) for n in LENGTHS]


def padded(rows, *, left=False, row_tokens=90):
    """As a tokenizer pads."""
    side = (lambda n: (row_tokens - n, 0)) if left else (lambda n: (0, row_tokens - n))
    ids = torch.stack([pad_tensor(x, side(len(x))) for x in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.stack([pad_tensor(torch.ones_like(x), side(len(x))) for x in rows]),
    }


def packed(rows, total_tokens=None):
    layout = fv.PackedLayout.from_lengths([len(x) for x in rows], total_tokens=total_tokens)
    ids = torch.cat(list(rows))
    return {
        "input_ids": pad_tensor(ids, (0, layout.total_tokens - len(ids)))[None],
        "packed_layout": layout,
    }


def by_document(model, batch):
    """The logits of each document."""
    with torch.no_grad():
        logits = model(**batch).logits
    if "packed_layout" in batch:
        return batch["packed_layout"].split(logits[0])
    return [x[m.bool()] for x, m in zip(logits, batch["attention_mask"], strict=True)]


def collated(rows):
    return PackedCollator()([x.tolist() for x in rows])


FORMS = {
    "padded right": (padded, {"unpad": True}),
    "padded left": (partial(padded, left=True), {"unpad": True}),
    "padded, no unpad": (padded, {}),
    "packed": (packed, {}),
    "packed, unpad": (packed, {"unpad": True}),
    "packed, with padding": (partial(packed, total_tokens=400), {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_micro_batch_of_one_has_the_bits_of_one_of_eight(name):
    make, settings = FORMS[name]
    size = 1024 if name == "padded, no unpad" else SIZE
    rows, model = documents(), model_by_rows()
    differ = {}
    for same_bits in (None, size):
        fv.patch_model(model, "sdpa", same_bits=same_bits, **settings)
        together = by_document(model, make(rows))
        alone = [by_document(model, make([x]))[0] for x in rows]
        pairs = zip(together, alone, strict=False)
        differ[same_bits] = sum(not torch.equal(a, b) for a, b in pairs)
    everything = 0 if name == "packed, with padding" else len(rows)  # which has one size already
    assert differ == {None: everything, size: 0}


@pytest.mark.parametrize("kind", ["qwen3_windows", "phi3", "qwen3_5_text"])
def test_each_kind_of_model(kind):
    rows, model = documents(), model_by_rows(kind)
    fv.patch_model(model, "sdpa", same_bits=SIZE)
    alone = [by_document(model, packed([x]))[0] for x in rows]
    assert all(map(torch.equal, alone, by_document(model, packed(rows))))


def test_samples_that_share_a_prefix_are_one_document():
    """Those of one prompt have the same bits beside those of others, and in another order."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 97, (40,), generator=rng) for _ in range(3)]
    groups = [
        [torch.cat([x, torch.randint(5, 97, (n,), generator=rng)]) for n in (9, 30, 17)]
        for x in prompts
    ]
    model = model_by_rows()
    fv.patch_model(model, "sdpa", same_bits=SIZE, unpad=True, share_prefixes=True)
    together = by_document(model, padded([x for group in groups for x in group]))
    in_reverse = by_document(model, padded([x for group in groups[::-1] for x in group]))
    alone = [by_document(model, padded(group)) for group in groups]
    assert all(map(torch.equal, together, [x for group in alone for x in group]))
    assert all(map(torch.equal, in_reverse, [x for group in alone[::-1] for x in group]))


def test_every_form_has_the_same_bits():
    rows, model = documents(), model_by_rows()
    found = {}
    for name, (make, settings) in FORMS.items():
        fv.patch_model(model, "sdpa", same_bits=1024, **settings)
        found[name] = by_document(model, make(rows))
    for name, logits in found.items():
        assert all(map(torch.equal, logits, found["packed"])), name


@pytest.mark.parametrize("name", ["padded right", "padded left", "packed"])
def test_outputs_loss_and_gradients_are_those_without(name):
    make, settings = FORMS[name]
    plain = new_model("qwen3")
    ours = fv.patch_model(copy.deepcopy(plain), "sdpa", same_bits=SIZE, **settings)
    without = fv.patch_model(plain, "sdpa", **settings)
    batch = make(documents())
    labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(1)) == 0, -100)
    found, expected = (model(**batch, labels=labels) for model in (ours, without))
    torch.testing.assert_close(found.loss, expected.loss)
    if name != "packed":
        padding = batch["attention_mask"] == 0
        assert found.logits[padding].eq(0).all()
    for out in (found, expected):
        out.loss.backward()
    for ours_, without_ in zip(ours.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, without_.grad, atol=1e-4, rtol=1e-3)


def test_full_rows_are_not_copied(monkeypatch):
    model = fv.patch_model(new_model("qwen3").eval(), "sdpa", same_bits=TOKENS)
    seen = []
    monkeypatch.setattr(Padding, "enter", lambda *_: pytest.fail("a row was copied"))
    model.model.norm.register_forward_hook(lambda _, __, out: seen.append(out))
    own = type(model.lm_head).forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: seen.append(x) or own(self, x))
    model(**packed(documents()))
    assert seen[-1].data_ptr() == seen[-2].data_ptr()
    assert seen[-1].shape == (1, TOKENS, model.config.hidden_size)


def test_padding_is_a_document_of_no_gradient():
    model = fv.patch_model(new_model("qwen3"), "sdpa", same_bits=SIZE)
    batch = packed(documents())
    embedded = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: embedded.append(out) or out.retain_grad()
    )
    model(**batch).logits.square().sum().backward()
    (rows,) = embedded
    assert rows.shape[1] == SIZE
    assert rows.grad[0, TOKENS:].eq(0).all()
    assert rows.grad[0, :TOKENS].ne(0).any()


class LinearRows(TorchFunctionMode):
    """The rows of all products of linear layers."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            self.rows.append(args[0].flatten(0, -2).shape[0])
        return function(*args, **(kwargs or {}))


def test_a_generated_cache_is_left_alone():
    plain = new_model("qwen3").eval()
    ids = documents()[0][None]
    expected = plain.generate(ids, max_new_tokens=3, do_sample=False)
    ours = fv.patch_model(plain, "sdpa", same_bits=SIZE)
    with LinearRows() as linear:
        assert torch.equal(ours.generate(ids, max_new_tokens=3, do_sample=False), expected)
    assert max(linear.rows) == ids.shape[1]


def test_compiled_rows_keep_their_bits_in_one_graph():
    sizes = {"capacity": 8, "max_seqlen_bound": 128}
    model = new_model("qwen3", num_hidden_layers=1).eval()
    fv.patch_model(model, "sdpa", same_bits=SIZE, **sizes)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rows = documents()

    def logits(*order):
        lengths = [len(rows[i]) for i in order]
        layout = fv.PackedLayout.from_lengths(lengths, total_tokens=400, **sizes)
        ids = torch.cat([rows[i] for i in order])
        batch = {"input_ids": pad_tensor(ids, (0, 400 - len(ids)))[None], "packed_layout": layout}
        return dict(zip(order, by_document(compiled, batch), strict=False))

    first = logits(*range(8))
    for order in ((7, 6, 5, 4, 3, 2, 1, 0), (3, 1), (5,)):
        assert all(torch.equal(x, first[i]) for i, x in logits(*order).items())
    assert counters["stats"]["unique_graphs"] == 1


def test_unpatched_and_patched_with_another_size():
    model = model_by_rows()
    before, state = dict(vars(model.lm_head)), model(documents()[1][None]).logits
    fv.patch_model(model, "auto", same_bits=SIZE)
    rows = []
    model.lm_head.register_forward_hook(lambda _, args, out: rows.append(out.shape))
    copied = copy.deepcopy(model)
    for size in (SIZE, 1024):
        fv.patch_model(model, "sdpa", same_bits=size)
        assert by_document(model, packed(documents()))[0].shape == (40, 97)
    fv.patch_model(model, "sdpa")
    assert vars(model.lm_head).keys() == before.keys()
    fv.unpatch_model(model)
    assert torch.equal(model(documents()[1][None]).logits, state)
    alone, together = (by_document(copied, packed(x))[0] for x in (documents()[:1], documents()))
    assert torch.equal(alone, together)
    with fv.patched(model, "sdpa", same_bits=SIZE):
        with fv.patched(model, "sdpa"):
            pass
        assert fv.is_patched(model)
    assert not fv.is_patched(model)


def test_a_base_model():
    base = model_by_rows().model
    fv.patch_model(base, "sdpa", same_bits=SIZE)
    rows = documents()
    batch = packed(rows)
    with torch.no_grad():
        together = batch["packed_layout"].split(base(**batch).last_hidden_state[0])
        alone = [base(**packed([x])).last_hidden_state[0] for x in rows]
    assert all(map(torch.equal, together, alone))


def test_a_longer_layout():
    layout = longer(fv.PackedLayout.from_lengths([3, 2], total_tokens=6), 9)
    assert layout.real_tokens().tolist() == [True] * 5 + [False] * 4
    inside = fv.PackedLayout.from_starts(
        torch.tensor([1, 0, 1, 1]).bool(), padding_T=torch.tensor([0, 0, 1, 0]).bool()
    )
    assert longer(inside, 6).real_tokens().tolist() == [True, True, False, True, False, False]
