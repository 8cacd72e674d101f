"""A cache that a packed batch filled cannot be decoded from, whatever has become of it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import flexvarlen as fv
from flexvarlen.attention.backends.registry import get_backend
from flexvarlen.patches.attention.context import PackedForward
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from tests.tiny_models import new_model, shared_model

IDS = torch.arange(3, 15)[None]
POSITIONS = torch.tensor([[*range(5), *range(7)]])
TOKEN = {"input_ids": torch.tensor([[7]]), "position_ids": torch.tensor([[7]])}
REFUSED = "one document per row"


def model_of(how: str, kind: str = "llama", **changes):
    """A patched model, or one that has the plugin name only."""
    if how == "name":
        return new_model(kind, implementation="flexvarlen_doc", **changes)
    return fv.patch_model(new_model(kind, **changes), "sdpa")


def prefill(model, cache=None):
    """The cache of a packed forward."""
    with torch.no_grad():
        out = model(IDS, position_ids=POSITIONS, past_key_values=cache, use_cache=True)
    return out.past_key_values


def refuses(model, cache):
    """Decoding from the cache raises, now and again."""
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSED):
            model(**TOKEN, past_key_values=cache)


NAMES = ("cache", "past_key_values")
# transformers 5.24 takes both; before, a layer refuses `cache`, which is that of paged attention.
SERVED = NAMES if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else NAMES[1:]


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
            packed = DynamicCache()
            model(IDS, position_ids=POSITIONS, **{name: packed})
            for _ in range(2):
                with pytest.raises(ValueError, match=REFUSED):
                    model(**TOKEN, **{name: packed})


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_another_kind(name):
    keys = torch.ones(1, 2, 4, 16)
    with fv.patched(shared_model("llama"), "sdpa") as model:
        for cache in (((keys, keys),), object()):
            with pytest.raises(ValueError, match=f"{name} must be a transformers.Cache, got"):
                model(IDS, **{name: cache})


def _rebuilt(cache, change=lambda x: x):
    rebuilt = DynamicCache()
    for index, layer in enumerate(cache.layers):
        rebuilt.update(change(layer.keys), change(layer.values), index)
    return rebuilt


def _saved(cache):
    file = io.BytesIO()
    torch.save([(layer.keys, layer.values) for layer in cache.layers], file)
    file.seek(0)
    return DynamicCache(torch.load(file, weights_only=False))


REMADE = {
    "as_it_is": lambda cache: cache,
    "rebuilt": _rebuilt,
    "cloned": lambda cache: _rebuilt(cache, torch.clone),
    "cropped": lambda cache: _rebuilt(cache, lambda x: x[:, :, :-2]),
    "ddp_data": lambda cache: DynamicCache([(x.keys, x.values) for x in cache.layers]),
    "saved": _saved,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "copied": copy.deepcopy,
}
SLIDING = {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize("remade", REMADE)
@pytest.mark.parametrize(
    ("how", "kind", "changes"),
    [
        ("patched", "llama", {}),
        ("name", "llama", {}),
        ("patched", "qwen3_windows", {}),
        ("patched", "qwen3_windows", SLIDING),
    ],
)
def test_a_cache_made_of_the_old_ones_tensors(how, kind, changes, remade):
    model = model_of(how, kind, **changes)
    refuses(model, REMADE[remade](prefill(model)))


@pytest.mark.parametrize("twin", ["unpatched", "name", "patched"])
@pytest.mark.parametrize("how", ["patched", "name"])
def test_another_model_goes_on(how, twin):
    cache = prefill(model_of(how))
    refuses(shared_model("llama") if twin == "unpatched" else model_of(twin), cache)


@pytest.mark.parametrize("changes", [{}, SLIDING])
@pytest.mark.parametrize("where", ["next_layer", "kernel", "output_attentions"])
def test_a_forward_that_failed_midway(where, changes, monkeypatch):
    """The layers before the failure have filled the cache already."""
    kind = "qwen3_windows" if changes else "llama"
    model = model_of("patched", kind, **changes)
    cache = DynamicCache(config=model.config)
    extra, error = {}, ZeroDivisionError
    with monkeypatch.context() as patch:
        if where == "next_layer":
            hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        elif where == "kernel":
            patch.setattr(get_backend("sdpa"), "attend", lambda *args: 1 / 0)
        else:
            extra, error = {"output_attentions": True}, NotImplementedError
        with torch.no_grad(), pytest.raises(error):
            model(IDS, position_ids=POSITIONS, past_key_values=cache, **extra)
        if where == "next_layer":
            hook.remove()
    assert cache.get_seq_length() == 12
    refuses(model, cache)
    if not changes:
        refuses(shared_model("llama"), cache)


def test_a_failure_before_the_first_layer_leaves_an_empty_cache_of_use():
    model, cache = model_of("patched"), DynamicCache()
    hook = model.model.layers[0].register_forward_pre_hook(lambda *args: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(IDS, position_ids=POSITIONS, past_key_values=cache)
    hook.remove()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        assert model(**TOKEN, past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("how", ["patched", "name"])
def test_a_static_cache_that_was_reset_is_of_use_again(how):
    """A packed batch fills it to the last token; then one document, shorter than it."""
    model, cache = model_of(how), StaticCache(config=shared_model("llama").config, max_cache_len=12)
    with torch.no_grad():
        expected = shared_model("llama")(IDS[:, :8]).logits
        for _ in range(2):
            prefill(model, cache)
            cache.reset()
            logits = model(IDS[:, :8], past_key_values=cache).logits
            assert type(logits) is Tensor
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
            cache.reset()


@pytest.mark.parametrize("how", ["patched", "name"])
@pytest.mark.sampled(1)
def test_compiled_decoding_from_a_rebuilt_cache(how):
    """The unpatched model, too."""
    cache = prefill(model_of(how))
    for model in (model_of(how), new_model("llama")):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"flexvarlen: .*{REFUSED}"):
            compiled(**TOKEN, past_key_values=_rebuilt(cache))


@pytest.mark.parametrize("how", ["patched", "name"])
def test_a_row_of_padding_does_not_make_room_for_a_document_in_another(how):
    model = model_of(how)
    mask = torch.tensor([[0] * 12, [1] * 12])
    positions = torch.cat([torch.zeros_like(POSITIONS), POSITIONS])
    with torch.no_grad():
        cache = model(
            IDS.expand(2, -1), attention_mask=mask, position_ids=positions, use_cache=True
        ).past_key_values
        with pytest.raises(ValueError, match=REFUSED):
            model(torch.full((2, 1), 7), past_key_values=cache)


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


def test_no_read_of_the_device_in_training_nor_at_each_step(monkeypatch):
    """What a prefill finds out, decoding does not ask again."""
    model = model_of("patched")
    reads = []
    read = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda x: reads.append(x) or read(x))
    monkeypatch.setattr(
        "flexvarlen.patches.forward.steps.one_document_per_row", lambda *args: 1 / 0
    )
    model.train()(IDS, position_ids=POSITIONS)
    model.eval()(IDS, position_ids=POSITIONS, use_cache=False)
    monkeypatch.undo()
    cache = model(IDS).past_key_values
    monkeypatch.setattr(Tensor, "__bool__", lambda x: reads.append(x) or read(x))
    reads.clear()
    with torch.no_grad():
        model(TOKEN["input_ids"], past_key_values=cache)
    ours = len(reads)
    fv.unpatch_model(model)
    reads.clear()
    with torch.no_grad():
        model(TOKEN["input_ids"], past_key_values=cache)
    assert ours <= len(reads)


def test_a_static_cache_that_was_reset_is_of_use_in_a_compiled_forward():
    model = model_of("patched")
    cache = prefill(model, StaticCache(config=model.config, max_cache_len=IDS.shape[1]))
    cache.reset()
    forward = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = forward(IDS[:, :4], past_key_values=cache).logits
        alone = model(IDS[:, :4], use_cache=False).logits
    torch.testing.assert_close(found, alone)


def test_layers_compiled_one_by_one_mark_no_keys():
    """In a graph; the cache that the forward gives is marked behind it."""
    model = model_of("patched")
    with torch.no_grad():
        expected = model(IDS, position_ids=POSITIONS, use_cache=False).logits
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="eager")
        out = model(IDS, position_ids=POSITIONS, use_cache=True)
    torch.testing.assert_close(out.logits, expected)
    refuses(model, out.past_key_values)


def test_only_tokens_behind_tokens_are_refused():
    """What else is made of the keys is no business of ours."""
    keys = prefill(model_of("patched")).layers[0].keys
    assert torch.cat([keys, keys], 0).shape[0] == 2  # more rows
    assert type(keys.norm(dim=-1)) is Tensor
    for append in (torch.cat, torch.concat, torch.concatenate):
        with pytest.raises(ValueError, match=REFUSED):
            append([keys, torch.zeros(1, 2, 1, 16)], -2)
        with pytest.raises(ValueError, match=REFUSED):
            append((keys, keys), dim=2)
    with pytest.raises(ValueError, match=REFUSED):
        torch.cat([keys, keys], axis=2)


def test_saved_keys_load_without_pickles():
    keys = prefill(model_of("patched")).layers[0].keys
    file = io.BytesIO()
    torch.save(keys, file)
    file.seek(0)
    assert torch.equal(torch.load(file), keys)


@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("how", ["patched", "name"])
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
