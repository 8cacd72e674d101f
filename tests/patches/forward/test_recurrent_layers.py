"""Hybrid models: documents reach recurrent layers, or the layers raise; caches are per row.

That packed equals one by one is tested for all families in patches/models/test_families.py.
"""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
from accelerate.utils import compile_regions
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.patches.forward.recurrent_layers import _dispatching
from flexvarlen.patches.models.layers import recurrent_layers
from tests.tiny_models import (
    LENGTHS,
    VOCABULARY,
    new_model,
    one_row,
    padded_rows,
    shared_model,
)
from tests.trees import Tree

pytestmark = pytest.mark.filterwarnings(
    "ignore:flexvarlen. recurrent layers run one document after another"
)
PACKED = {"input_ids": one_row().ids, "position_ids": one_row().position_ids}
SAMPLE = ("qwen3_5_text", "lfm2", "mamba2", "falcon_h1")


@pytest.fixture(params=SAMPLE)
def model(request):
    return fv.patch_model(new_model(request.param), "sdpa")


def test_a_bit_of_another_document(model):
    """In the outputs, and in the gradients of the embeddings."""
    assert fv.verify_isolation(model, PACKED, documents=2).gradients


def test_padding(model):
    """What stands at padding changes nothing, and nothing flows back to it."""
    batch = padded_rows(left=True, packed=True)
    ids = batch.ids.clone()
    ids[batch.document_ids == 0] = 5
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    found = model(inputs_embeds=embeddings, attention_mask=batch.document_ids, use_cache=False)
    with torch.no_grad():
        same = model(input_ids=batch.ids, attention_mask=batch.document_ids, use_cache=False)
    assert torch.equal(batch.of_documents(found.logits), batch.of_documents(same.logits))
    batch.of_documents(found.logits).square().sum().backward()
    assert not embeddings.grad[batch.document_ids == 0].any()


def test_a_layer_by_hand(model):
    layer = recurrent_layers(model)[0]
    hidden = torch.randn(1, 8, model.config.hidden_size)
    with pytest.raises(ValueError, match="must get its documents from the model's own forward"):
        layer(hidden)
    fv.unpatch_model(model)
    assert torch.equal(layer(hidden), recurrent_layers(copy.deepcopy(model))[0](hidden))


def test_a_pickle_forgets_the_documents(model):
    """A loaded model has no wrapper that would find them."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ValueError, match="call patch_model again"):
        loaded(PACKED["input_ids"], use_cache=False)
    fv.patch_model(loaded, "sdpa")
    assert torch.equal(loaded(**PACKED).logits, model(**PACKED).logits)


def test_a_deep_copy(model):
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**PACKED).logits, model(**PACKED).logits)
    fv.unpatch_model(twin)
    assert not any(x._forward_pre_hooks or x._forward_hooks for x in recurrent_layers(twin))
    assert all(x._forward_pre_hooks for x in recurrent_layers(model))


def test_a_hook_of_the_user():
    """One that was there before sees the tokens in the order of the row, before and after."""
    model, tree = new_model("qwen3_5_text"), Tree((9, 3, 4, 5), (-1, 0, 1, 0))
    layer, seen = recurrent_layers(model)[0], []
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    layer.register_forward_hook(lambda *given: seen.append(given[-1]))
    fv.patch_model(model, "sdpa")
    batch = tree.batch(VOCABULARY)
    path = batch["input_ids"][:, tree.path_of(3)]
    for inputs in (batch, {"input_ids": path, "use_cache": False}):
        model(**inputs)
    for whole, alone in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(whole[:, tree.path_of(3)], alone, atol=1e-4, rtol=1e-4)


def test_a_packed_prefill(model):
    with pytest.raises(ValueError, match=r"rows of one document each.*use_cache=False"):
        model(**PACKED, use_cache=True)
    out = model(**PACKED)  # the config's default is True
    assert getattr(out, "past_key_values", getattr(out, "cache_params", None)) is None


def test_unpatched_models_of_the_class(model):
    """They keep transformers' own functions, while another one is patched, and after."""
    plain, ids = shared_model(model.config.model_type), PACKED["input_ids"]
    before = plain(input_ids=ids, use_cache=False).logits
    model(**PACKED)
    assert torch.equal(plain(input_ids=ids, use_cache=False).logits, before)
    fv.unpatch_model(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_kernels_of_the_hub():
    model = new_model("lfm2")
    model._use_kernels = True
    with pytest.raises(NotImplementedError, match="use_kernels=True"):
        fv.patch_model(model, "sdpa")


def test_a_layer_that_calls_other_functions():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1d = torch.nn.Conv1d(2, 2, 4)

        def forward(self, x):
            return self.conv1d(x)

    model = new_model("lfm2")
    model.model.layers[0].conv = Own()
    with pytest.raises(NotImplementedError, match=r"causal_conv1d_fn.*got a Own"):
        fv.patch_model(model, "sdpa")
    assert not fv.is_patched(model)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "lfm2", "qwen3_5_text"])
@pytest.mark.sampled(1)
def test_compiled_with_breaks_at_the_loop(name):
    """On a CPU the scans break the graph, and other documents are still right."""
    torch._dynamo.reset()
    model = new_model(name, **{"num_hidden_layers": 1} if name == "mamba2" else {})
    compiled = torch.compile(fv.patch_model(model, "sdpa"), backend="eager")
    for lengths in ((30, 90, 11, 1), (100, 60, 7)):
        layout = fv.PackedLayout.from_lengths(lengths, total_tokens=256, capacity=8)
        inputs = {"input_ids": one_row().ids, "packed_layout": layout}
        with torch.no_grad():
            found, expected = compiled(**inputs).logits, model(**inputs).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "seq_idx", "runs"),
    [
        (torch.float32, None, "kernel"),
        (torch.float64, None, "plain torch"),
        # The kernel keeps these documents apart, or transformers refuses; plain torch does not.
        (torch.float64, torch.zeros(1, 4), "kernel"),
    ],
)
def test_kernels_get_no_float64(dtype, seq_idx, runs):
    """Without documents, as in the reference of `compare`."""

    def plain(x, seq_idx=None):
        return "plain torch"

    @functools.wraps(plain)
    def kernel(x, seq_idx=None):
        return "kernel"

    call = _dispatching(kernel, plain)
    assert call(torch.zeros(1, 4, dtype=dtype), seq_idx=seq_idx) == runs


def test_a_wrapped_convolution_hides_the_layer():
    """PEFT's modules_to_save, before patch_model."""
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["conv1d"])
    patched = fv.patch_model(get_peft_model(new_model("qwen3_5_text"), config), "sdpa")
    assert fv.verify_isolation(patched, PACKED, documents=2)


def test_a_layer_that_the_search_misses():
    """As in a model from a repository with other names for its parts."""
    model = new_model("qwen3_5_text")
    layer = model.model.layers[0].linear_attn
    layer.short_conv = layer._modules.pop("conv1d")
    with pytest.raises(NotImplementedError, match=r"config.layer_types, 1, got 0"):
        fv.patch_model(model, "sdpa")


def test_a_kind_of_layer_that_no_verified_family_has():
    """Its convolution may have any name, so counting those of known names would find none."""
    model = new_model("llama")
    model.config.layer_types = ["full_attention", "gated_conv"]
    with pytest.raises(NotImplementedError, match="are verified, got 'gated_conv'"):
        fv.patch_model(model, "sdpa")


def test_a_class_from_a_repository():
    """Its model_type is a verified one, its code is not transformers'."""
    plain = new_model("llama")
    own = type("LlamaForCausalLM", (PreTrainedModel,), {"__module__": "transformers_modules.x"})
    model = own.__new__(own)
    vars(model).update(vars(plain))
    with pytest.raises(NotImplementedError, match="must be of a class of transformers"):
        fv.patch_model(model, "sdpa")


def test_other_documents_compile_nothing_again_layer_by_layer():
    """With padding in some rows and not in others; the convolution traces on a CPU."""
    torch._dynamo.reset()
    model = fv.patch_model(compile_regions(new_model("lfm2"), backend="eager"), "sdpa")
    counts = []
    for lengths in (LENGTHS, (100, 60, 7), (256,), (100, 156)):
        layout = fv.PackedLayout.from_lengths(
            lengths, total_tokens=256, capacity=8, max_seqlen_bound=256
        )
        with watch_compilation() as stats, torch.no_grad():
            model(input_ids=one_row().ids, packed_layout=layout)
        counts.append(stats.compilations)
    assert counts[1:] == [0, 0, 0]
