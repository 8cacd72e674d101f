"""A patched model generates what the unpatched one does, before training and after it."""

from __future__ import annotations

from functools import cache

import peft
import pytest
import torch
from transformers import DynamicCache

import flexvarlen as fv
from tests.tiny_models import VOCABULARY, batch_of, documents, new_model, one_row, shared_model

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
BY_NAME = ("greedy", "beams", "sampling", "static_cache", "in_chunks", "no_cache")


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


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("llama", "sdpa"),
        ("qwen3", "auto"),
        ("qwen3_windows", "reference"),
        pytest.param("llama", "flex", marks=pytest.mark.slow),
    ],
)
def test_generates_the_same_tokens(kind, backend):
    model = shared_model(kind)
    expected = generate(model, "greedy", "left")
    with fv.patched(model, backend):
        assert torch.equal(generate(model, "greedy", "left"), expected)
    assert torch.equal(generate(model, "greedy", "left"), expected)


@pytest.mark.parametrize("way", BY_NAME)
def test_generates_the_same_tokens_by_the_name_alone(way):
    """Also after a packed forward: its cache is another one."""
    model, batch = new_model("qwen3_windows", implementation="flexvarlen_doc"), one_row()
    with torch.no_grad():
        kept = model(batch.ids, position_ids=batch.position_ids).past_key_values
    expected = generate(shared_model("qwen3_windows"), way, "left")
    assert torch.equal(generate(model, way, "left"), expected)
    assert kept.get_seq_length() == 256


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("unpad", [True, False])
def test_a_prompt_that_ends_in_padding_raises(unpad, cached):
    """Its next token would be read from padding, where hidden states are zero: always token 0."""
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=unpad)
    settings = {"max_new_tokens": 2, "do_sample": False, "use_cache": cached, "pad_token_id": 0}
    left = prompts("left")
    shifts = (20 - left["attention_mask"].sum(1)).tolist()
    right = {
        name: torch.stack([row.roll(-n) for row, n in zip(x, shifts, strict=True)])
        for name, x in left.items()
    }
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got padding on the right; set tokenizer\.padding"):
            model.generate(**right, **settings)
        expected = shared_model("llama").generate(**left, **settings)
        assert torch.equal(model.generate(**left, **settings), expected)
    whole = {name: x[1:2] for name, x in right.items()}  # without padding
    assert model.generate(**whole, **settings).shape == (1, 22)


# ---- step by step ----


def _steps_by_hand(model, *, prefill: tuple[int, ...], positions: bool) -> torch.Tensor:
    """Last logits of a left-padded batch after each chunk of the prefill and three cached steps."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (3, 15), generator=generator)
    mask = (torch.arange(15) >= torch.tensor([[0], [5], [9]])).long()
    logits, cache, seen = [], None, 0
    for count in (*prefill, 1, 1, 1):
        new = slice(seen, seen := seen + count)
        given = {"position_ids": mask.cumsum(1)[:, new].sub(1).clamp(min=0)} if positions else {}
        out = model(
            ids[:, new],
            attention_mask=mask[:, :seen],
            past_key_values=cache,
            use_cache=True,
            **given,
        )
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
    return torch.stack(logits[len(prefill) - 1 :])


@pytest.mark.pairwise(
    kind=["llama", "qwen3_windows", "gemma2", "phi3", "llama4_text", "qwen2_5_vl", "gpt_oss"],
    prefill=[(12,), (6, 6)],
    positions=[True, False],
)
def test_cached_steps_after_left_padding(kind, prefill, positions):
    """Without position_ids transformers counts the padding, in the prefill as in each step."""
    model = new_model(kind)
    with torch.no_grad():
        expected = _steps_by_hand(model, prefill=prefill, positions=positions)
        fv.patch_model(model, "reference")
        found = _steps_by_hand(model, prefill=prefill, positions=positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_cached_steps_after_left_padding_in_a_compiled_prefill():
    model, ids = new_model("llama", num_hidden_layers=1), documents()[2][:24].view(2, 12)
    mask = (torch.arange(13) >= torch.tensor([[0], [5]])).long()
    step = documents()[1][:2, None]

    def last_logits(prefill):
        with torch.no_grad():
            cache = prefill(ids, attention_mask=mask[:, :12], use_cache=True).past_key_values
            return model(step, attention_mask=mask, past_key_values=cache).logits

    expected = last_logits(model)
    fv.patch_model(model, "sdpa")
    torch._dynamo.reset()
    found = last_logits(torch.compile(model, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- after training ----


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
    of_other_weights = generate(new_model(kind), "greedy", "left")
    assert not torch.equal(generate(plain, "greedy", "left"), of_other_weights)
    return model, plain


@pytest.mark.parametrize(
    ("kind", "way"),
    [("llama", "greedy"), ("qwen3", "greedy"), *(("qwen2_windows", way) for way in WAYS)],
)
def test_each_way(kind, way):
    model, plain = trained(kind)
    for padding in ("none",) if way in ONE_ROW else ("none", "left"):
        assert torch.equal(generate(model, way, padding), generate(plain, way, padding)), padding


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


@pytest.mark.parametrize("how", ["whole", pytest.param("layers", marks=pytest.mark.slow)])
def test_of_a_compiled_model(how):
    torch._dynamo.reset()
    model, plain = (new_model("llama", num_hidden_layers=1) for _ in range(2))
    run = fv.patch_model(model, "sdpa")
    if how == "whole":
        run = torch.compile(model, backend="eager")
    else:
        model.model.layers[0].compile(backend="eager", dynamic=True)
    learn(run, 1)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(generate(run, "greedy", "left"), generate(plain, "greedy", "left"))
    torch._dynamo.reset()
