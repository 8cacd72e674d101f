"""Every verified family: packed equals one by one, compiles whole, generates as before.

A layer sees no form of a batch: of those of patches/forward/test_packed_models.py each family gets
padding, and boundaries without positions under checkpointing. `--all-forms` runs them all.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.parts import ModelParts
from tests.backends import ON_GPU
from tests.oracle import assert_as_accurate
from tests.patches.forward import test_packed_models
from tests.patches.forward.test_packed_models import check
from tests.tiny_models import KINDS, LENGTHS, exact_and_baseline, new_model, one_row, shared_model

# Without position_ids a row of one document counts its left padding, as in transformers: Llama 4
# scales queries by that position, so the document alone is another computation.
FORMS = {name: x for name, x in test_packed_models.FORMS.items() if name != "left_padding"}
SAMPLE = ("left_padding_packed", "checkpointing")
# Those in KINDS, and encoders, have tests of their own.
OTHERS = [name for name, x in BY_TYPE.items() if name not in KINDS and x.task != "MaskedLM"]
# On a CPU their scans break the graph: see forward/test_recurrent_layers.py.
SCANS = [name for name, x in BY_TYPE.items() if "delta rule" in x.has or "Mamba-2" in x.has]
EXPERTS = [name for name, family in BY_TYPE.items() if "experts" in family.has]


def pytest_generate_tests(metafunc):
    if metafunc.function is test_packed_equals_one_by_one:
        whole = metafunc.config.getoption("--all-forms")
        metafunc.parametrize("form", FORMS if whole else SAMPLE)


def check_or_refused(name, backend, form, **where):
    refusal = nullcontext()
    if (name, form) == ("gemma4_text", "checkpointing_reentrant"):
        refusal = pytest.raises(NotImplementedError, match="must not be reentrant")
    elif (name, form) == ("gemma4_text", "inputs_embeds") and where:
        # transformers looks for the tokens of embeddings, which bfloat16 has rounded.
        refusal = pytest.raises(RuntimeError, match="do not exactly match")
    with refusal:
        check(name, backend, FORMS[form], grad=True, **where)


def on_the_cpu(name):
    """The backend that serves all layers of a family there."""
    return "reference" if name in ("gemma2", "gpt_oss") else "sdpa"


@pytest.mark.parametrize("name", OTHERS)
def test_packed_equals_one_by_one(name, form):
    check_or_refused(name, on_the_cpu(name), form)


@pytest.mark.gpu
@pytest.mark.pairwise(name=OTHERS, backend=ON_GPU, form=FORMS)
def test_packed_equals_one_by_one_in_bf16(name, backend, form):
    where = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 64}
    try:
        check_or_refused(name, backend, form, **where)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


PATCHED_ONLY = {"phi3": "longrope"} | {
    name: "outside the attention layers"
    for name, family in BY_TYPE.items()
    if not family.by_name_alone
}


# Mamba-2 has no attention layer that would notice.
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "mamba2"])
def test_by_the_plugin_name_alone(name):
    """What reaches a layer is enough, or it is refused."""
    model, batch = shared_model(name), one_row()
    exact, baseline = exact_and_baseline(name, batch.order)
    implementation = {"sdpa": "flexvarlen_doc", "reference": "flexvarlen_reference"}
    model.set_attn_implementation(implementation[on_the_cpu(name)])

    def run():
        with torch.no_grad():
            return model(batch.ids, position_ids=batch.position_ids, use_cache=False).logits[0]

    try:
        if name in PATCHED_ONLY:
            with pytest.raises(NotImplementedError, match=f"{PATCHED_ONLY[name]}.*patch_model"):
                run()
        else:
            assert_as_accurate(run(), exact.logits, baseline.logits, 2)
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("name", OTHERS)
def test_kind_of_layer_unlike_its_calls(name, monkeypatch):
    """A window or a head_dim of the config, not of the layer: another call is checked than made."""
    routed, route = set(), PackedForward.route

    def noting(self, kind, *args):
        routed.add(kind)
        return route(self, kind, *args)

    monkeypatch.setattr(PackedForward, "route", noting)
    model, batch = fv.patch_model(new_model(name), on_the_cpu(name)), one_row()
    with torch.no_grad():
        model(batch.ids, position_ids=batch.position_ids)
    assert routed == set(ModelParts.of(model).kinds)


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in (*EXPERTS, *SCANS)])
@pytest.mark.sampled(2)
def test_one_graph_for_any_documents(name):
    torch._dynamo.reset()
    model = fv.patch_model(new_model(name), on_the_cpu(name))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = one_row().ids
    sizes = {"total_tokens": 256, "capacity": 8, "max_seqlen_bound": 256}
    with watch_compilation() as stats:
        for lengths in (LENGTHS, (256,), (100, 60, 7)):
            layout = fv.PackedLayout.from_lengths(lengths, **sizes)
            with torch.no_grad():
                found = compiled(input_ids=ids, packed_layout=layout).logits
                expected = model(input_ids=ids, packed_layout=layout).logits
            real = layout.real_tokens()
            torch.testing.assert_close(found[0, real], expected[0, real], atol=1e-3, rtol=1e-3)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


@pytest.mark.parametrize("name", OTHERS)
def test_generates_as_the_unpatched_model(name):
    """Softcap, sinks and windows in decoding too."""
    model = new_model(name)
    prompt = one_row().ids[:, :20]
    how = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    before = model.generate(prompt, output_logits=True, **how)
    fv.patch_model(model, on_the_cpu(name))
    after = model.generate(prompt, output_logits=True, **how)
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4_text"])
def test_generates_from_a_left_padded_batch_with_a_static_cache(name):
    """Layers of a window or a chunk hand over as many keys as queries, beside full ones."""
    ids = one_row().ids[0]
    prompts = torch.stack([ids[:20], ids[40:60]])
    mask = torch.ones_like(prompts)
    mask[1, :7] = prompts[1, :7] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    how |= {"attention_mask": mask, "pad_token_id": 0}
    model = new_model(name, floor_scale=512) if name == "llama4_text" else new_model(name)
    try:
        before = model.generate(prompts, **how)
    except TypeError as error:  # transformers 5.17 of chunks: create_chunked_causal_mask
        pytest.skip(f"transformers itself cannot: {error}")
    assert torch.equal(fv.patch_model(model, on_the_cpu(name)).generate(prompts, **how), before)
