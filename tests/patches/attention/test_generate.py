"""A patched model generates what the unpatched one does, and decodes no packed documents."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from tests.tiny_models import VOCABULARY, documents, new_model, one_row, shared_model

NEW = 6
# As many tokens in every prefill as in the other tests' rows, 256: flex compiles for each T.
STRATEGIES = {
    "greedy": (4, {"do_sample": False}),
    "beams": (2, {"do_sample": False, "num_beams": 2}),
    "sampling": (4, {"do_sample": True, "top_k": 20}),
    "static_cache": (4, {"do_sample": False, "cache_implementation": "static"}),
    "in_chunks": (4, {"do_sample": False, "prefill_chunk_size": 16}),
    "no_cache": (4, {"do_sample": False, "use_cache": False, "max_new_tokens": 2}),
}


def _prompts(count: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of 61, 64, 40 and 1 tokens, `[count, 64]`."""
    ids = torch.zeros(count, 64, dtype=torch.long)
    tokens = torch.cat(documents()[1:3])
    for row, length in enumerate((61, 64, 40, 1)[:count]):
        ids[row, 64 - length :] = tokens[row : row + length]
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


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


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("prefill", [(12,), (6, 6)])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3_windows", "gemma2", "phi3", "llama4_text", "qwen2_5_vl", "gpt_oss"]
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


def _generate(model, strategy: str) -> torch.Tensor:
    count, settings = STRATEGIES[strategy]
    torch.manual_seed(5)
    return model.generate(
        **_prompts(count), **{"max_new_tokens": NEW, "pad_token_id": 0, **settings}
    )


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
    """By each strategy after training: test_generate_after_training.py."""
    model = shared_model(kind)
    expected = _generate(model, "greedy")
    with fv.patched(model, backend):
        assert torch.equal(_generate(model, "greedy"), expected)
    assert torch.equal(_generate(model, "greedy"), expected)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("unpad", [True, False])
def test_a_prompt_that_ends_in_padding_raises(unpad, cached):
    """Its next token would be read from padding, where hidden states are zero: always token 0."""
    model = fv.patch_model(new_model("llama"), "sdpa", unpad=unpad)
    settings = {"max_new_tokens": 2, "do_sample": False, "use_cache": cached, "pad_token_id": 0}
    left = _prompts(3)
    lengths = left["attention_mask"].sum(1)
    right = {name: torch.zeros_like(x) for name, x in left.items()}
    for row, length in enumerate(lengths):
        for name, x in left.items():
            right[name][row, :length] = x[row, 64 - length :]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got padding on the right; set tokenizer\.padding"):
            model.generate(**right, **settings)
        expected = shared_model("llama").generate(**left, **settings)
        assert torch.equal(model.generate(**left, **settings), expected)
    whole = {name: x[1:2] for name, x in right.items()}  # without padding
    assert model.generate(**whole, **settings).shape == (1, 66)


# ---- by a plugin name alone ----


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generates_the_same_tokens_by_the_name_alone(strategy):
    """Also after a packed forward: its cache is another one."""
    model, batch = new_model("qwen3_windows", implementation="flexvarlen_doc"), one_row()
    with torch.no_grad():
        kept = model(batch.ids, position_ids=batch.position_ids).past_key_values
    assert torch.equal(
        _generate(model, strategy), _generate(shared_model("qwen3_windows"), strategy)
    )
    assert kept.get_seq_length() == 256
