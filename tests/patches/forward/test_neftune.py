"""NEFTune's noise: bounded by alpha / sqrt(tokens · width), of a document or of the padded row."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import Trainer, TrainingArguments
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

import flexvarlen as fv
from tests.contract_training import settings
from tests.tiny_models import new_model

LENGTHS = (60, 7, 20)
WIDTH, ALPHA = 48, 5.0
DOCUMENTS = [list(range(3, 3 + n)) for n in LENGTHS]
PADDED = torch.tensor([each + [0] * (60 - len(each)) for each in DOCUMENTS])
BATCHES = {
    "packed": fv.PackedCollator(total_tokens=100)(DOCUMENTS),
    "padded": {"input_ids": PADDED, "attention_mask": (PADDED > 0).long(), "labels": PADDED},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def noises(model, run):
    """The noise of each document in each forward that `run` makes."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    run()
    hook.remove()
    table = model.get_input_embeddings().weight.detach()
    for states in seen:
        real = states.flatten(0, 1) if states.shape[0] == 1 else states[PADDED > 0]
        yield [
            part - table[ids]
            for part, ids in zip(real[: sum(LENGTHS)].split(LENGTHS), DOCUMENTS, strict=True)
        ]


def check(model, run, tokens):
    """That the bound is that of rows or documents of N tokens each."""
    count = 0
    for found in noises(model, run):
        for noise, n in zip(found, tokens, strict=True):
            bound = ALPHA / (n * WIDTH) ** 0.5
            assert 0.9 * bound < noise.abs().max().item() <= bound * 1.001, n
        count += 1
    return count


@pytest.mark.parametrize("how", ["packed", "padded", "unpad"])
def test_in_trainer(how, tmp_path):
    """Which adds the hook when training starts, and takes it off again."""
    model = new_model("llama")
    batch = BATCHES["packed" if how == "packed" else "padded"]
    arguments = settings(tmp_path, learning_rate=0.0, neftune_noise_alpha=ALPHA)
    trainer = Trainer(
        model, TrainingArguments(**arguments), train_dataset=[0] * 8, data_collator=lambda _: batch
    )
    fv.patch_model(model, "sdpa", unpad=how == "unpad")
    tokens = LENGTHS if how == "packed" else (60, 60, 60)
    assert check(model, trainer.train, tokens) == 2
    assert not model.get_input_embeddings()._forward_hooks


def test_added_before_the_patch_and_used_after_it():
    model = new_model("llama").train()
    handle = activate_neftune(model, ALPHA)
    run = {name: lambda batch=batch: model(**batch) for name, batch in BATCHES.items()}
    plain = {"input_ids": torch.tensor([DOCUMENTS[0] + DOCUMENTS[1] + DOCUMENTS[2]])}
    fv.patch_model(model, "sdpa")
    for _ in range(2):
        check(model, run["packed"], LENGTHS)
        check(model, run["padded"], (60, 60, 60))
        check(model, lambda: model(**plain), (87, 87, 87))
    fv.unpatch_model(model)
    check(model, run["padded"], (60, 60, 60))
    check(model, lambda: model(**plain), (87, 87, 87))
    deactivate_neftune(model, handle)
    assert not model.get_input_embeddings()._forward_hooks
    fv.patch_model(model, "sdpa")
    assert all(not noise.any() for noise in next(noises(model, run["packed"])))


def test_there_is_none_in_evaluation():
    model = fv.patch_model(new_model("llama"), "sdpa")
    activate_neftune(model, ALPHA)
    found = next(noises(model, lambda: model(**BATCHES["packed"])))
    assert all(not noise.any() for noise in found)


def test_trees():
    model = fv.patch_model(new_model("llama"), "sdpa").train()
    activate_neftune(model, ALPHA)
    tree = fv.PackedLayout.from_tree([4, 2, 3], [-1, 0, 0])
    with pytest.raises(NotImplementedError, match=r"neftune_noise_alpha needs .* got trees"):
        model(torch.arange(3, 12)[None], packed_layout=tree)


def replace_embeddings(model):
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))


def add_adapter(model):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["embed_tokens"]), model)


def break_the_graph(model):
    model.model.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        *((change, False) for change in (replace_embeddings, add_adapter, break_the_graph)),
        (break_the_graph, True),  # the others change nothing that Dynamo sees otherwise
    ],
)
def test_a_model_that_changed_after_the_patch(change, compiled):
    """A graph breaks where the model has noise."""
    model = fv.patch_model(new_model("llama", num_hidden_layers=1), "sdpa").train()
    change(model)
    activate_neftune(model, ALPHA)
    run = torch.compile(model, backend="eager") if compiled else model
    check(model, lambda: run(**BATCHES["packed"]), LENGTHS)


def test_compiled_until_it_is_unpatched():
    """Then transformers' own noise is there again, and nothing is left that refuses it."""
    model = fv.patch_model(new_model("llama", num_hidden_layers=1), "sdpa").train()
    activate_neftune(model, ALPHA)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"noise_alpha must be used without torch\.compile"):
        compiled(**BATCHES["packed"])
    fv.unpatch_model(model)
    ids = torch.tensor([DOCUMENTS[0]])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # which its own noise needs
        first, second = (compiled(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert not torch.equal(first, second)
