"""The contract of every verified family: patched, packed equals one by one, and nothing is left.

Also: isolated to the bit, one graph for any documents, generation as before, and what is refused.
Llama, Qwen2 and Qwen3 stand in patches/forward/test_packed_models.py, with all forms of a batch.
What is special to a kind of model is in a file of its own: encoders, images, longrope, Gemma 4.
"""

from __future__ import annotations

import copy

import pytest
import torch

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.parts import ModelParts
from tests.backends import ON_GPU, skip_if_refused
from tests.pairwise import sampled
from tests.patches.models.contract import (
    CASES,
    DECODERS,
    ENCODERS,
    Text,
    check,
    forget_positions,
)
from tests.tiny_models import LENGTHS, new_model, one_row, shared_model

IMAGES = [name for name in CASES if name.endswith("images")]
TEXT = [*DECODERS, *ENCODERS]
# On a CPU their scans break the graph: see forward/test_recurrent_layers.py.
SCANS = [name for name, x in BY_TYPE.items() if "delta rule" in x.has or "Mamba-2" in x.has]
EXPERTS = [name for name, family in BY_TYPE.items() if "experts" in family.has]


def on_the_cpu(name):
    """The backend that serves all layers of a family there."""
    return "reference" if name in ("gemma2", "gpt_oss") else "sdpa"


def refusal(name, form, dtype):
    """The error that a form must raise instead, and its first words; or None."""
    if (name, form) == ("gemma4_text", "checkpointing_reentrant"):
        return NotImplementedError, "gradient checkpointing must not be reentrant"
    if (name, form) == ("gemma4_text", "inputs_embeds") and dtype == torch.bfloat16:
        # transformers looks for the tokens of embeddings, which bfloat16 has rounded.
        return RuntimeError, "do not exactly match"
    return None


def check_or_refused(name, backend, form, **where):
    refused = refusal(name, form, where.get("dtype"))
    if refused is None:
        check(CASES[name], backend, form, **where)
    else:
        with pytest.raises(refused[0], match=refused[1]):
            check(CASES[name], backend, form, **where)


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("--all-forms")
    if metafunc.function is test_packed_equals_one_by_one:
        rows = [
            (form, name)
            for name, case in CASES.items()
            for form in (case.forms if whole or name == "qwen2_5_vl, images" else case.sample)
        ]
        metafunc.parametrize(("form", "name"), rows)
    elif metafunc.function is test_packed_equals_one_by_one_in_bf16:
        forms_of = {tuple(DECODERS): Text.forms, tuple(ENCODERS): Text.sample}
        forms_of[tuple(IMAGES)] = ["cu_seq_lens"]
        rows = [
            row
            for names, forms in forms_of.items()
            for row in sampled({"name": names, "backend": ON_GPU, "form": forms}, whole=whole)
        ]
        metafunc.parametrize(("name", "backend", "form"), rows)


def test_packed_equals_one_by_one(name, form):
    """Another's keys, a position of the row, a masked label, a gradient that is lost."""
    check_or_refused(name, on_the_cpu(name), form)


@pytest.mark.gpu
@skip_if_refused
def test_packed_equals_one_by_one_in_bf16(name, backend, form):
    """A kernel that misreads the layout, or a window or head_dim of the family."""
    where = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 64}
    check_or_refused(name, backend, form, **where)


# ---- isolation, undo ----


def logits(model, **given):
    with torch.no_grad():
        return model(one_row().ids, **given).logits


@pytest.mark.parametrize("name", TEXT)
def test_no_bit_of_another_document_changes(name):
    model, batch = shared_model(name), one_row()
    row = {"input_ids": batch.ids, "cu_seq_lens_q": batch.cu_seqlens}
    experts = model.get_experts_implementation()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # rounds each token by itself
    with fv.patched(model, on_the_cpu(name)):
        fv.verify_isolation(model, row, documents=[2], gradients=False)
    model.set_experts_implementation(experts)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", TEXT)
def test_unpatching_gives_back_the_same_bits(name):
    model = shared_model(name)
    before, attributes = logits(model), {n: set(vars(m)) for n, m in model.named_modules()}
    fv.patch_model(model, on_the_cpu(name))
    logits(model, packed_layout=fv.PackedLayout.from_lengths(LENGTHS))
    fv.unpatch_model(model)
    assert torch.equal(logits(model), before)
    assert not any("flexvarlen" in key for m in model.modules() for key in vars(m))
    extra = {n: set(vars(m)) - attributes[n] for n, m in model.named_modules()}
    assert not any("forward" in keys for keys in extra.values())


@pytest.mark.parametrize("name", ["phi3", "llama4_text", "qwen3_vl, images"])
def test_a_copy_packs_by_its_own_weights(name):
    model = fv.patch_model(new_model(CASES[name].family), on_the_cpu(name))
    row = CASES[name].inputs("packed_layout")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = twin(**row).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(**row).logits, expected)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", TEXT)
def test_kind_of_layer_unlike_its_calls(name, monkeypatch):
    """A window or a head_dim of the config, not of the layer: another call is checked than made."""
    routed, route = set(), PackedForward.route

    def noting(self, kind, *args):
        routed.add(kind)
        return route(self, kind, *args)

    monkeypatch.setattr(PackedForward, "route", noting)
    model = shared_model(name)
    with fv.patched(model, on_the_cpu(name)):
        logits(model, cu_seq_lens_q=one_row().cu_seqlens)
    assert routed == set(ModelParts.of(model).kinds)


# ---- the plugin name alone ----

PATCHED_ONLY = {"phi3": "longrope"} | {
    name: "outside the attention layers"
    for name, family in BY_TYPE.items()
    if not family.by_name_alone
}


# Mamba-2 has no attention layer that would notice.
@pytest.mark.parametrize("name", [name for name in TEXT if name != "mamba2"])
def test_by_the_plugin_name_alone(name):
    """What reaches a layer is enough, or it is refused, however documents are given."""
    model, case = shared_model(name), CASES[name]
    # BERT embeds its positions before any layer is called; ModernBERT's layers get none.
    given = ("default_use_cache", "cu_seq_lens_alone", "packed_layout")
    rows = [
        {**case.inputs(form), "labels": None, "use_cache": False}
        for form in (given if name in ENCODERS else given[:1])
    ]
    backend = on_the_cpu(name)
    with torch.no_grad(), fv.patched(model, backend):
        expected = model(**rows[0]).logits
    model.set_attn_implementation(f"flexvarlen_{backend}")
    try:
        for row in rows:
            if name in PATCHED_ONLY:
                with pytest.raises(NotImplementedError, match=f"{PATCHED_ONLY[name]}.*patch_model"):
                    model(**row)
            else:
                with torch.no_grad():
                    torch.testing.assert_close(model(**row).logits, expected, atol=1e-4, rtol=1e-4)
    finally:
        model.set_attn_implementation("eager")


# ---- one graph, generation ----


@pytest.mark.parametrize("name", [name for name in TEXT if name not in (*EXPERTS, *SCANS)])
@pytest.mark.sampled(1)
def test_one_graph_for_any_documents(name):
    """Others by default: test_encoders.py, test_kinds.py and forward/test_compiled_models.py."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model(name), on_the_cpu(name))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = one_row().ids
    sizes = {"total_tokens": 256, "capacity": 8, "max_seqlen_bound": 256}
    with watch_compilation() as stats, torch.no_grad():
        for lengths in (LENGTHS, (256,), (100, 60, 7)):
            layout = fv.PackedLayout.from_lengths(lengths, **sizes)
            found = compiled(input_ids=ids, packed_layout=layout).logits
            expected = model(input_ids=ids, packed_layout=layout).logits
            real = layout.real_tokens()
            torch.testing.assert_close(found[0, real], expected[0, real], atol=1e-3, rtol=1e-3)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", [*DECODERS, *IMAGES])
def test_generates_as_the_unpatched_model(name):
    """Softcap, sinks, windows and images in decoding too."""
    model = shared_model(CASES[name].family)
    prompt = {"input_ids": one_row().ids[:, :20]}
    if name in IMAGES:
        prompt = CASES[name].prompt()
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    forget_positions(model)
    before = model.generate(**prompt, output_logits=True, **how)
    forget_positions(model)
    with fv.patched(model, on_the_cpu(name)):
        after = model.generate(**prompt, output_logits=True, **how)
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "static") for name in ("gemma2", "gpt_oss", "llama4_text", "gemma4_text")),
        ("gemma4_text", "dynamic"),
    ],
)
def test_generates_from_a_left_padded_batch(name, cache):
    """Static caches of a window or a chunk hand over as many keys as queries, beside full ones.

    Gemma 4 asks for the last logits alone, from a prompt longer than the window.
    """
    ids = one_row().ids[0]
    prompts = torch.stack([ids[:20], ids[40:60]])
    mask = torch.ones_like(prompts)
    mask[1, :7] = prompts[1, :7] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    how |= {"attention_mask": mask, "pad_token_id": 0}
    model = new_model(name, floor_scale=512) if name == "llama4_text" else new_model(name)
    try:
        before = model.generate(prompts, **how)
    except TypeError as error:  # transformers 5.17 of chunks: create_chunked_causal_mask
        pytest.skip(f"transformers itself cannot: {error}")
    assert torch.equal(fv.patch_model(model, on_the_cpu(name)).generate(prompts, **how), before)
