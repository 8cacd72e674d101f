"""`same_bits`: a document's bits are those of every row of one size, or patching raises."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import linear
from torch.nn.functional import pad as pad_tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForSequenceClassification

import flexvarlen as fv
from flexvarlen.layout.token_map import Padding
from flexvarlen.packing.collator import PackedCollator
from flexvarlen.packing.prefixes import share_prefixes
from flexvarlen.patches import verification
from flexvarlen.patches.forward.row_size import longer
from flexvarlen.patches.isolation.same_bits import rows_of
from tests.patches.padded_trainers import DPO, GRPO
from tests.planted import with_gradient
from tests.sentences import failed_refusals
from tests.tiny_models import config_of, new_model

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


# ---- compiled ----


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


# ---- the check ----


def by_offset(module, args, output):
    """A difference that depends on where a token is in its row."""
    return output * (1 + torch.arange(output.shape[1])[:, None] % 7 * 1e-6)


@pytest.fixture
def checks_again(monkeypatch):
    """A model of a kind that has passed, as what is planted on an instance is no other kind."""
    monkeypatch.setattr(verification, "_passed", set())


def test_offsets_that_matter_are_found(checks_again):
    model = new_model("qwen3").eval()
    handle = model.model.layers[1].mlp.register_forward_hook(by_offset)
    with pytest.raises(fv.SameBitsError, match="must have outputs of the same bits") as raised:
        fv.patch_model(model, "sdpa", same_bits=SIZE)
    assert raised.value.row == "in reverse order"
    assert not fv.is_patched(model)
    assert "forward" not in vars(model.lm_head)
    handle.remove()
    fv.patch_model(model, "sdpa", same_bits=SIZE)
    assert fv.verify_isolation(model, packed(documents()), same_bits=True).same_bits == "outputs"
    model.model.layers[1].mlp.register_forward_hook(by_offset)
    with pytest.raises(fv.SameBitsError, match=r"backend 'sdpa', torch\.float32, cpu"):
        fv.verify_isolation(model, packed(documents()), same_bits=True, gradients=False)


def test_neighbours_that_matter_are_found(checks_again):
    """Bits of a document that depend on the others alone, as a mixture's experts might."""
    model = new_model("qwen3").eval()
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, __, out: out * (1 + (out[0, :, 0] > 0).sum() * 1e-6)
    )
    with pytest.raises(fv.SameBitsError):
        fv.patch_model(model, "sdpa", same_bits=SIZE)


def test_matrix_products_that_depend_on_the_row_are_found():
    """Of float32 rows of few tokens, on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, weight = torch.randn(10, 48), torch.randn(64, 48)
        if torch.equal(linear(x.flip(0), weight), linear(x, weight).flip(0)):
            pytest.skip("these matrix products have the same bits at every offset")
        with pytest.raises(fv.SameBitsError):
            fv.patch_model(new_model("qwen3").eval(), "sdpa", same_bits=10)
    finally:
        torch.set_num_threads(threads)


def test_input_gradients_keep_their_bits_if_deterministic():
    model = new_model("qwen3").eval()
    fv.patch_model(model, "sdpa", same_bits=TOKENS, deterministic=True)
    report = fv.verify_isolation(model, packed(documents()), same_bits=True, gradients=True)
    assert report.same_bits == "outputs and input gradients"
    assert "outputs and input gradients kept their bits" in report.sentence()


def test_gradients_that_depend_on_the_offset_are_found():
    model = new_model("qwen3").eval()
    fv.patch_model(model, "sdpa", same_bits=TOKENS, deterministic=True)
    shifted = with_gradient(lambda grad, _: by_offset(None, None, grad))
    model.model.layers[0].register_forward_hook(lambda _, __, out: shifted(out))
    batch = packed(documents())
    assert fv.verify_isolation(model, batch, same_bits=True).same_bits == "outputs"
    with pytest.raises(fv.SameBitsError, match="input gradients of the same bits") as raised:
        fv.verify_isolation(model, batch, same_bits=True, gradients=True)
    assert raised.value.gradients


@pytest.mark.parametrize("same_bits", [None, 64])
def test_trees_are_rearranged_whole(same_bits):
    tree = fv.PackedLayout.from_tree([9, 4, 2, 3, 8, 5], [-1, 0, 1, 0, -1, -1])
    batch = {"input_ids": torch.arange(3, 34)[None], "packed_layout": tree}
    model = fv.patch_model(new_model("qwen3").eval(), "sdpa", same_bits=same_bits)
    assert fv.verify_isolation(model, batch, same_bits=True).same_bits


def test_each_document_is_in_another_row():
    for count in (1, 2, 3, 8):
        rows = rows_of(count)
        for document in range(count):
            held = [row for row in rows if document in row.documents]
            assert any(row.documents != tuple(range(count)) for row in held)
        assert {-1} <= {x for row in rows for x in row.documents}


def test_checked_once_for_a_kind_of_model(monkeypatch):
    config = config_of("qwen3", intermediate_size=80)
    first, second = (new_model("qwen3", intermediate_size=80).eval() for _ in range(2))
    assert first.config.intermediate_size == config.intermediate_size
    fv.patch_model(first, "sdpa", same_bits=SIZE)
    monkeypatch.setattr(
        "flexvarlen.patches.verification.compare_bits", lambda _: pytest.fail("checked again")
    )
    fv.patch_model(second, "sdpa", same_bits=SIZE)


# ---- patching ----


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


# ---- refusals ----


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


# ---- trainers ----


def scores(trainer, completion=24):
    """Log-probabilities of eight samples in micro-batches of 1, 2, 4 and 8."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (8, 40 + completion), generator=rng)
    mask = torch.ones_like(ids)
    for row in range(8):
        mask[row, : row * 3] = 0
        mask[row, 64 - row % 5 :] = 0
    counted = mask[:, -completion:].bool()
    found = {}
    for batch in (1, 2, 4, 8):
        with torch.no_grad():
            logps = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids * mask, mask, completion, batch_size=batch
            )[0]
        found[batch] = logps[counted]
    return found


@pytest.fixture
def tiles_by_rows(monkeypatch):
    """TRL's fused head, whose tiles depend on their number of rows."""
    module = pytest.importorskip("trl.kernels.chunked_logprob")
    own = module._forward_tile

    def by_rows(tile, *args, **kwargs):
        own(tile.mul_(1 + len(tile) / 1e4), *args, **kwargs)

    monkeypatch.setattr(module, "_forward_tile", by_rows)


def test_grpo_scores_a_sample_alone_as_among_eight(tmp_path, tiles_by_rows):
    differ = {}
    for same_bits in (None, 512):
        trainer = GRPO.make(tmp_path)
        for layer in trainer.model.model.layers:
            layer.mlp.down_proj.__class__ = ByRows
        fv.patch_trainer(trainer, "sdpa", same_bits=same_bits)
        found = scores(trainer)
        differ[same_bits] = [int((x != found[1]).sum()) for x in found.values()]
        trainer.train()
    assert min(differ[None][1:]) > 0
    assert differ[512] == [0, 0, 0, 0]


def test_sizes_of_trainers(tmp_path):
    dpo = DPO.make(tmp_path, max_length=64)
    fv.patch_trainer(dpo, same_bits=True)
    assert {x.__dict__["_flexvarlen_patch"].same_bits for x in (dpo.model, dpo.ref_model)} == {1024}
    grpo = GRPO.make(tmp_path)
    unknown = "same_bits=True needs a trainer that limits the tokens of a row"
    cases = [
        (unknown, (grpo, {"same_bits": True})),
        ("same_bits, which is for", (grpo, {"same_bits": 64, "context_parallel": 2})),
        (
            "same_bits, which is for",
            (grpo, {"same_bits": 64, "share_prefixes": True, "tokens_per_part": 9}),
        ),
    ]
    assert failed_refusals(cases, lambda given: fv.patch_trainer(given[0], **given[1])) == []


def test_patched_before_the_trainer_was_made(tmp_path):
    """TRL's fused head then calls the base model by itself, in tiles of any size."""
    made = replace(GRPO, model=lambda **_: fv.patch_model(GRPO.model(), "sdpa", same_bits=512))
    trainer = made.make(tmp_path)
    with pytest.raises(ValueError, match="same_bits must be set after TRL's trainer was made"):
        scores(trainer)
