"""A model over trees gives what its samples give one by one: logits, loss, every gradient."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.reference.recurrences import plain_recurrences
from tests.contract_oracle import gradients_of
from tests.contract_training import settings
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import VOCABULARY, new_model, shared_model, texts_alone

# Windows, chunks, sinks, experts, soft caps, layers without RoPE, latent attention, and the scans.
FAMILIES = {
    "llama": "sdpa",
    "qwen3_windows": "sdpa",
    "gemma2": "reference",
    "gemma3_text": "sdpa",
    "gpt_oss": "reference",
    "llama4_text": "sdpa",
    "cohere2": "sdpa",
    "deepseek_v3": "sdpa",
    "gemma4_text": "sdpa",
    "ministral3": "sdpa",
    "qwen3_5_text": "sdpa",
    "kimi_linear": "sdpa",
    "granitemoehybrid": "sdpa",
    "falcon_h1": "sdpa",
    "lfm2": "sdpa",
    "mamba2": "sdpa",
}


def samples():
    """Three answers to a prompt, two of them alike at first; a prompt alone; another; a twin."""
    generator = torch.Generator().manual_seed(3)

    def draw(length):
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    prompt, other, start = draw(40), draw(9), draw(12)
    texts = [
        [*prompt, *start, *draw(20)],
        [*prompt, *start, *draw(5)],
        [*prompt, *draw(30)],
        prompt,
        other,
    ]
    texts.append(texts[1])
    return texts


def alone(model):
    """Logits of each sample, their mean loss and gradients, each sample in a forward of its own."""
    return texts_alone(model, [(torch.tensor(text), 0) for text in samples()])


@cache
def baseline_and_exact(family):
    """Of eager attention, in fp32 and in fp64."""
    plain = copy.deepcopy(shared_model(family))
    plain.set_attn_implementation("eager")
    return alone(plain), alone(plain.double())


CHECKPOINTED = ("llama", "deepseek_v3", "qwen3_5_text")
LOOP = "ignore:flexvarlen. recurrent layers run one document after another"


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *((family, False) for family in FAMILIES),
        *((family, True) for family in CHECKPOINTED),
        *(
            pytest.param(family, True, marks=pytest.mark.slow)
            for family in FAMILIES
            if family not in CHECKPOINTED
        ),
    ],
)
def test_each_sample_is_a_document(family, checkpointing):
    baseline, exact = baseline_and_exact(family)
    model = fv.patch_model(new_model(family), FAMILIES[family])
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    shared = fv.share_prefixes(samples(), total_tokens=160 if checkpointing else None)
    assert shared.layout.segments.max_depth == 3
    assert int((shared.sample_counts > 0).sum()) < 0.6 * sum(map(len, samples()))
    out = model(**shared.batch())
    out.loss.backward()
    logits = torch.cat(shared.unfold(out.logits.detach()))
    assert_as_accurate(logits, exact.logits, baseline.logits, 2, "logits")
    assert_as_accurate(out.loss.detach(), exact.loss, baseline.loss, 2, "loss")
    assert_gradients_as_accurate(gradients_of(model), exact.gradients, baseline.gradients)


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("chosen", [(0, 1, 2), (3, 4), (3,), (1, 5)])
def test_one_tree_or_nothing_shared(chosen, family):
    """A row without padding that is one document of the layout, or plain documents."""
    texts = [samples()[index] for index in chosen]
    plain = shared_model(family)
    with torch.no_grad():
        alone = [plain(torch.tensor(x)[None], use_cache=False).logits[0] for x in texts]
        shared = fv.share_prefixes(texts)
        out = fv.patch_model(new_model(family), "sdpa")(**shared.batch())
    for mine, theirs in zip(shared.unfold(out.logits), alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    labels = torch.cat([torch.tensor(text[1:]) for text in texts])
    expected = cross_entropy(torch.cat([x[:-1] for x in alone]), labels)
    torch.testing.assert_close(out.loss, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_windows", marks=pytest.mark.slow)])
def test_one_graph_for_batches_of_equal_sizes(family):
    """The last one without padding."""
    torch._dynamo.reset()
    model = fv.patch_model(new_model(family), "sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    sizes = {"total_tokens": 192, "capacity": 16, "max_seqlen_bound": 192, "max_depth": 4}
    texts = samples()
    left = 192 - fv.share_prefixes(texts).layout.total_tokens
    full = [*texts, [0, *[3] * left][:left]]
    with watch_compilation() as stats:
        for batch in (texts, texts[:3], full):
            inputs = fv.share_prefixes(batch, **sizes).batch()
            found, expected = compiled(**inputs), model(**inputs)
            torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert inputs["packed_layout"].has_padding is False
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"])
def test_a_hybrid_on_a_gpu(family):
    """fla's kernels in bf16, and the gradients of states that several segments start from."""
    pytest.importorskip("fla")
    plain = copy.deepcopy(shared_model(family, torch.bfloat16, "cuda", 64))
    plain.set_attn_implementation("eager")
    with plain_recurrences(plain):
        baseline, exact = alone(plain), alone(copy.deepcopy(plain).double())
    model = fv.patch_model(plain, "auto")
    sizes = {"total_tokens": 192, "capacity": 16, "max_seqlen_bound": 192, "max_depth": 4}
    shared = fv.share_prefixes(samples(), **sizes)
    out = model(**on_the_gpu(shared))
    out.loss.backward()
    logits = torch.cat(shared.unfold(out.logits.detach().cpu()))
    assert_as_accurate(logits, exact.logits.cpu(), baseline.logits.cpu(), 2, "logits")
    assert_gradients_as_accurate(gradients_of(model), exact.gradients, baseline.gradients)
    if family not in ("qwen3_5_text", "lfm2"):  # experts break graphs
        return
    torch._dynamo.reset()
    model(**on_the_gpu(shared)).loss.backward()  # compiles the step that fla refuses
    compiled, texts = torch.compile(model, fullgraph=True), samples()
    with watch_compilation() as stats:
        for batch in (texts, texts[:3], [*texts[2:], texts[0]]):
            inputs = on_the_gpu(fv.share_prefixes(batch, **sizes))
            found, expected = compiled(**inputs), model(**inputs)
            found.loss.backward()
            torch.testing.assert_close(found.loss, expected.loss, atol=2e-2, rtol=2e-2)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


def on_the_gpu(shared):
    return {name: x.to("cuda") if hasattr(x, "to") else x for name, x in shared.batch().items()}


def test_trainer(tmp_path):
    """A step gives the weights that the samples give one by one."""
    data = [{"input_ids": text} for text in samples()]
    sizes = {"max_steps": 1, "per_device_train_batch_size": len(data)}
    arguments = settings(tmp_path, remove_unused_columns=False, **sizes)
    model = new_model("llama")
    one_by_one = alone(copy.deepcopy(model))
    expected = {
        name: p.detach() - 0.01 * one_by_one.gradients[name] for name, p in model.named_parameters()
    }
    trainer = Trainer(
        model=fv.patch_model(model, "sdpa"),
        args=TrainingArguments(**arguments),
        train_dataset=data,
        data_collator=fv.TreeCollator(total_tokens=160),
    )
    found = trainer.train()
    assert abs(found.training_loss - one_by_one.loss.item()) < 1e-5
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=1e-6, rtol=1e-5)


# ---- what is refused ----


ROW = torch.ones(1, 160, dtype=torch.long)
BATCHES = [
    fv.share_prefixes(texts, total_tokens=160).batch() for texts in (samples(), [[5, 6, 7], [8, 9]])
]
"""The samples of the second happen to share nothing."""


BESIDE_ANY = (
    ({"labels": ROW}, "labels cannot be combined with a packed_layout of trees"),
    ({"use_cache": True}, "trees cannot fill a cache"),
    ({"position_ids": torch.arange(160)[None]}, "position_ids cannot be combined"),
    ({"shift_labels": None}, "must come with shift_labels"),
    ({"return_dict": False}, "return_dict must be True"),
    ({"logits_to_keep": 3}, "logits_to_keep must be 0"),
)
BESIDE_SHARED = (
    ({"attention_mask": ROW}, "attention_mask cannot be combined"),
    ({"label_counts": None}, "must come with label_counts"),
)


@pytest.mark.parametrize(
    ("batch", "changes", "words"),
    [
        *((batch, *case) for batch in BATCHES for case in BESIDE_ANY),
        *((BATCHES[0], *case) for case in BESIDE_SHARED),
    ],
)
def test_arguments_beside_a_tree(batch, changes, words):
    model = fv.patch_model(new_model("llama"), "sdpa")
    with pytest.raises(ValueError, match=words):
        model(**{**batch, **changes})


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("phi3", "longrope"),
        ("bert", "bidirectional attention"),
        ("mamba2", "batch_invariant"),  # without attention, whose backends refuse it
    ],
)
def test_models_without_trees(family, words):
    invariant = words == "batch_invariant"
    model = fv.patch_model(new_model(family), "sdpa", batch_invariant=invariant)
    shared = {name: BATCHES[0][name] for name in ("input_ids", "packed_layout")}
    for batch in (shared, BATCHES[1]):
        with pytest.raises(NotImplementedError, match=words):
            model(**batch)


def test_a_model_that_is_not_patched():
    model = new_model("llama", implementation="flexvarlen_doc")
    batch = BATCHES[0]
    with pytest.raises(ValueError, match="needs a patched model"):
        model(batch["input_ids"], packed_layout=batch["packed_layout"], use_cache=False)
