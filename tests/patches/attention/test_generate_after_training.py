"""After packed training a patched model generates, in every way, what an unpatched one would."""

from __future__ import annotations

from functools import cache

import peft
import pytest
import torch
from transformers import DynamicCache

import flexvarlen as fv
from tests.tiny_models import batch_of, documents, new_model

BATCH = batch_of(((0, 1, 3, 5),), row_tokens=128)
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams_sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "static_cache": {"cache_implementation": "static"},
    "static_cache_beams": {"cache_implementation": "static", "num_beams": 2},
    "in_chunks": {"prefill_chunk_size": 7},
    "no_cache": {"use_cache": False},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "many": {"num_return_sequences": 3, "do_sample": True},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
ONE_ROW = {"prompt_lookup"}  # takes no batch


def prompts(padding: str) -> dict[str, torch.Tensor]:
    """Three prompts of 17, 20 and 1 tokens, padded on the left, or one of 20."""
    tokens = torch.cat(documents()[1:3])
    if padding == "none":
        return {"input_ids": tokens[None, :20]}
    ids = torch.zeros(3, 20, dtype=torch.long)
    for row, length in enumerate((17, 20, 1)):
        ids[row, 20 - length :] = tokens[row : row + length]
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def generate(model, way: str, padding: str) -> torch.Tensor:
    torch.manual_seed(5)
    settings = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False, **WAYS[way]}
    out = model.generate(**prompts(padding), **settings)
    return out if isinstance(out, torch.Tensor) else out.sequences


def learn(model, steps: int = 2, **inputs):
    """A few steps of SGD on a packed row."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        model(BATCH.ids, labels=BATCH.ids, **(inputs or {"position_ids": BATCH.position_ids}))[
            "loss"
        ].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@cache
def trained(kind: str):
    """A patched model after packed training, and an unpatched one of the same weights."""
    model = learn(fv.patch_model(new_model(kind), "sdpa"))
    plain = new_model(kind)
    plain.load_state_dict(model.state_dict())
    untrained = new_model(kind)
    assert not torch.equal(plain.lm_head.weight, untrained.lm_head.weight)
    return model, plain


@pytest.mark.parametrize(
    ("kind", "way"),
    [("llama", "greedy"), ("qwen3", "greedy"), *(("qwen2_windows", way) for way in WAYS)],
)
def test_each_way(kind, way):
    model, plain = trained(kind)
    for padding in ("none",) if way in ONE_ROW else ("none", "left"):
        assert torch.equal(generate(model, way, padding), generate(plain, way, padding)), padding


def test_the_tokens_are_those_of_the_training():
    """Of other weights others: what the tests above compare is no constant."""
    _, plain = trained("llama")
    assert not torch.equal(
        generate(plain, "greedy", "left"), generate(new_model("llama"), "greedy", "left")
    )


def test_another_model_drafts():
    """Assisted generation: a few tokens at once beside a cache that is not empty."""
    (model, plain), draft = trained("qwen3"), new_model("qwen3", num_hidden_layers=1)
    expected = generate(plain, "greedy", "none")
    for assistant in (draft, fv.patch_model(new_model("qwen3", num_hidden_layers=1), "sdpa")):
        torch.manual_seed(5)
        out = model.generate(
            **prompts("none"),
            assistant_model=assistant,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
        )
        assert torch.equal(out, expected)


def test_from_embeddings():
    model, plain = trained("qwen3")
    made = []
    for each in (model, plain):
        given = prompts("left")
        embeddings = each.get_input_embeddings()(given.pop("input_ids"))
        made.append(each.generate(inputs_embeds=embeddings, **given, max_new_tokens=5))
    assert torch.equal(*made)


def test_a_conversation_goes_on():
    """A second turn on the cache of the first, several new tokens at once."""
    made = []
    for model in trained("llama"):
        cache, ids = DynamicCache(config=model.config), prompts("none")["input_ids"]
        for _ in range(2):
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
            ids = torch.cat([ids, documents()[2][None, :4]], dim=1)
        made.append(ids)
    assert torch.equal(*made)


def test_between_steps_of_training():
    """Generation neither ends packed training nor is ended by it; nor by evaluation."""
    model, twin = (fv.patch_model(new_model("qwen3"), "sdpa") for _ in range(2))
    for _ in range(2):
        learn(model, 1)
        generate(model, "greedy", "left")
        with torch.no_grad():
            model(BATCH.ids, position_ids=BATCH.position_ids)
    learn(twin, 2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(generate(model, "static_cache", "left"), generate(twin, "greedy", "left"))


def test_after_checkpointed_lora():
    """Merged and not, against the unpatched model of the same adapters."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = new_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = learn(peft.get_peft_model(fv.patch_model(model, "sdpa"), config))
    plain = peft.get_peft_model(new_model("qwen3"), config)
    plain.load_state_dict(model.state_dict())
    plain.eval()
    for way in ("greedy", "beams", "static_cache"):
        assert torch.equal(generate(model, way, "left"), generate(plain, way, "left"))
    merged, plain = model.merge_and_unload(), plain.merge_and_unload()
    assert torch.equal(generate(merged, "greedy", "left"), generate(plain, "greedy", "left"))
    with torch.no_grad():  # and it is patched still
        packed = merged(BATCH.ids, attention_mask=BATCH.document_ids).logits[0]
        alone = [plain(documents()[i][None]).logits[0] for i, _ in BATCH.order]
    packed = BATCH.of_documents(packed[None])
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_of_a_model_whose_layers_are_compiled():
    model, plain = (new_model("llama", num_hidden_layers=1) for _ in range(2))
    fv.patch_model(model, "sdpa")
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    learn(model, 1)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(generate(model, "greedy", "left"), generate(plain, "greedy", "left"))
    torch._dynamo.reset()


def test_with_a_whole_model_that_is_compiled():
    torch._dynamo.reset()
    model, plain = (new_model("llama", num_hidden_layers=1) for _ in range(2))
    fv.patch_model(model, "sdpa")
    compiled = torch.compile(model, backend="eager")
    learn(compiled, 1)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(generate(compiled, "greedy", "left"), generate(plain, "greedy", "left"))
    torch._dynamo.reset()
