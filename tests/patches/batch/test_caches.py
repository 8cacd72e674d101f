"""Rows that hold several documents fill no cache, and rows of one document keep theirs."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import flexvarlen as fv
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.forward import make_row
from tests.patches.batch.models import HOW, model_of
from tests.patches.batch.test_found_once import count
from tests.tiny_models import new_model, shared_model

IDS = torch.arange(3, 15)[None]
POSITIONS = torch.tensor([[*range(5), *range(7)]])
TOKEN = {"input_ids": torch.tensor([[7]]), "position_ids": torch.tensor([[7]])}
REFUSED = "rows of one document each"

DOCUMENTS = {
    "position_ids": {"position_ids": POSITIONS},
    "document_ids": {"attention_mask": torch.tensor([[1] * 5 + [2] * 7])},
    "layout": {"packed_layout": fv.PackedLayout.from_lengths([5, 7])},
    "cu_seq_lens": {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
}
CACHES = {
    "use_cache": lambda config: {"use_cache": True},
    "dynamic": lambda config: {"past_key_values": DynamicCache()},
    "of_config": lambda config: {"past_key_values": DynamicCache(config=config)},
    "static": lambda config: {
        "past_key_values": StaticCache(config=config, max_cache_len=IDS.shape[1])
    },
}
MODELS = ("llama", "qwen3_windows", "lfm2")

NAMES = ("cache", "past_key_values")
# transformers 5.24 takes both; before, a layer refuses `cache`, which is that of paged attention.
SERVED = NAMES if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else NAMES[1:]


def tokens_in(cache):
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(int(layer.get_seq_length()) for layer in layers)


@pytest.mark.pairwise(name=MODELS, documents=DOCUMENTS, asked=CACHES)
def test_a_packed_row_is_refused_before_it_fills_a_cache(name, documents, asked):
    """Also the second time; the cache is still empty, and of use for one document."""
    model = fv.patch_model(new_model(name), "sdpa")
    given = CACHES[asked](model.config)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSED):
            model(IDS, **DOCUMENTS[documents], **given)
    cache = given.get("past_key_values")
    if cache is None:
        return
    assert tokens_in(cache) == 0
    if (name, asked) != ("lfm2", "dynamic"):  # transformers needs the config for its layers
        with torch.no_grad():
            found = model(IDS[:, :8], past_key_values=cache).logits
            expected = shared_model(name)(IDS[:, :8], use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_fills_one_from_rows_of_one_document_alone(name):
    model = fv.patch_model(new_model(name), "sdpa")
    assert model.config.use_cache
    with torch.no_grad():
        for mask in (torch.ones(12), torch.arange(12) >= 4, torch.arange(12) < 8):
            assert tokens_in(model(IDS, attention_mask=mask.long()[None]).past_key_values) > 0
        assert model(IDS, position_ids=POSITIONS).past_key_values is None
        base = model.base_model
        assert base(IDS, position_ids=POSITIONS).past_key_values is None
        with pytest.raises(ValueError, match=REFUSED):
            base(IDS, position_ids=POSITIONS, use_cache=True)


def test_a_row_of_padding_makes_no_room_for_a_document_in_another():
    model = fv.patch_model(new_model("llama"), "sdpa")
    mask = torch.tensor([[0] * 12, [1] * 12])
    positions = torch.cat([torch.zeros_like(POSITIONS), POSITIONS])
    with torch.no_grad(), pytest.raises(ValueError, match=REFUSED):
        model(IDS.expand(2, -1), attention_mask=mask, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("name", SERVED)
def test_a_cache_under_each_of_its_names(name):
    """A patched model that overlooks it takes the next token for one of a packed batch."""
    model = shared_model("llama")
    ids = IDS[:, :9]
    with torch.no_grad():
        expected = model(ids).logits
        with fv.patched(model, "sdpa"):
            cache = DynamicCache()
            for part in ids.split([5, 1, 3], 1):
                logits = model(part, **{name: cache}).logits
            torch.testing.assert_close(logits, expected[:, 6:], atol=1e-5, rtol=1e-5)
            for _ in range(2):
                with pytest.raises(ValueError, match=REFUSED):
                    model(IDS, position_ids=POSITIONS, **{name: DynamicCache()})


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_another_kind(name):
    keys = torch.ones(1, 2, 4, 16)
    with fv.patched(shared_model("llama"), "sdpa") as model:
        for cache in (((keys, keys),), object()):
            with pytest.raises(ValueError, match=f"{name} must be a transformers.Cache, got"):
                model(IDS, **{name: cache})


@pytest.mark.parametrize("asked", ["use_cache", "dynamic"])
@pytest.mark.sampled(1)
def test_a_compiled_packed_row_is_refused(asked):
    """By the device, in a graph that serves rows of one document as well."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model("llama", num_hidden_layers=1), "sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for positions, refused in ((POSITIONS, True), (torch.arange(12)[None], False)) * 2:
            given = CACHES[asked](model.config) | {"position_ids": positions}
            if refused:
                with pytest.raises(RuntimeError, match=f"flexvarlen: .*{REFUSED}"):
                    compiled(IDS, **given)
            else:
                cache = compiled(IDS, **given).past_key_values
                assert model(**TOKEN, past_key_values=cache).logits.isfinite().all()


def test_a_compiled_recurrent_layer_fills_no_cache():
    """In a graph its state could be that of several documents."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model("lfm2"), "sdpa")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match=REFUSED):
        compiled(IDS, position_ids=POSITIONS, use_cache=True)


@pytest.mark.parametrize(
    ("lengths", "batch", "one"),
    [
        ([12], 1, True),
        ([5, 7], 1, False),
        ([6, 6], 2, True),
        ([0, 6, 0, 6], 2, True),
        ([6, 2, 4], 2, False),
        ([2, 4], 2, False),  # the second row is padding
        ([], 2, True),
        ([0], 1, True),
    ],
)
def test_one_document_a_row(lengths, batch, one):
    layout = fv.PackedLayout.from_lengths(lengths, total_tokens=12, capacity=8)
    assert bool(one_document_per_row(layout, batch)) == one


def test_training_does_not_ask_how_many_documents_a_row_has(monkeypatch):
    model = fv.patch_model(new_model("llama"), "sdpa")
    monkeypatch.setattr(make_row, "one_document_per_row", lambda *args: 1 / 0)
    model.train()(IDS, position_ids=POSITIONS)
    model.eval()(IDS, position_ids=POSITIONS, use_cache=False)


def test_a_step_of_decoding_reads_no_more_than_an_unpatched_one(monkeypatch):
    """What a prefill finds out, decoding does not ask again."""
    model = fv.patch_model(new_model("llama"), "sdpa")
    cache, counts = model(IDS).past_key_values, []
    for _ in range(2):
        with torch.no_grad(), monkeypatch.context() as context:
            reads = count(context, torch.Tensor, "__bool__")
            model(TOKEN["input_ids"], past_key_values=cache)
        counts.append(len(reads))
        fv.unpatch_model(model)
    assert counts[0] <= counts[1]


@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("how", HOW)
def test_a_prefill_of_which_some_layers_have_room_left(how, first):
    """A layer that slides may hold just the row, and be packed; the next one is not."""
    second = {"sliding_attention": "full_attention"}.get(first, "sliding_attention")
    changes = {"layer_types": [first, second], "sliding_window": 4, "use_sliding_window": True}
    model = model_of(how, "qwen2_windows", **changes)
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 6)
    with torch.no_grad(), pytest.raises(ValueError, match="do not increase by 1"):
        model(IDS, position_ids=POSITIONS, past_key_values=cache)


def test_a_layer_with_no_room_left_keeps_what_patch_model_was_told(monkeypatch):
    """It packs its own tokens, beside layers that decode: with the model's own settings."""
    changes = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    model = new_model("qwen2_windows", **changes, sliding_window=IDS.shape[1])
    fv.patch_model(model, "sdpa", deterministic=True, batch_invariant=True)
    seen = []
    make_route = PackedForward._make_route

    def noted(packed, *args):
        route = make_route(packed, *args)
        seen.append((route.backend.name, route.call.deterministic, route.call.batch_invariant))
        return route

    monkeypatch.setattr(PackedForward, "_make_route", noted)
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 6)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    assert seen == [("sdpa", True, True)]
