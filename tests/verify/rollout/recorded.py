"""Responses that transformers sampled from a tiny model, as an engine would record them.

`python -m tests.verify.rollout.recorded FOLDER` writes the model, and 16 responses of 64 tokens by
`generate` and by continuous batching, each with two attentions, for `flexvarlen drift rollout`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from flexvarlen.verify.models import build_model
from flexvarlen.verify.rollout.responses import Response

PROMPTS, PROMPT, COMPLETION = 8, 12, 32


@cache
def peaked_model(seed=0, head_scale=3):
    """A model of random weights that is as sure of its next token as a trained one.

    The entropy of the initialised head is near the logarithm of the vocabulary.
    """
    model = build_model("qwen3", dtype=torch.bfloat16, seed=seed)[0].eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(head_scale)
    return model


@cache
def generated(attention, temperature=1.0, head_scale=3, number=PROMPTS, tokens=COMPLETION):
    """Responses by `generate`, with the log-probabilities of its own logits."""
    model = peaked_model(head_scale=head_scale)
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1024, (number, PROMPT), generator=generator)
    torch.manual_seed(0)
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = out.sequences[:, PROMPT:]
    logprobs = (torch.stack(out.logits, 1).float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(2, ids[..., None])[..., 0]
    return [
        Response(line, *(x.tolist() for x in of_one), temperature)
        for line, of_one in enumerate(zip(prompts, ids, chosen, strict=True), 1)
    ]


def continuous(attention, number=PROMPTS, tokens=COMPLETION):
    """Responses by continuous batching, which returns its log-probabilities."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = peaked_model()
    model.set_attn_implementation(attention)
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    how = ContinuousBatchingConfig(return_logprobs=True, num_blocks=64, max_batch_tokens=256)
    prompts = [list(range(i, 3 * i + 9)) for i in range(number)]
    torch.manual_seed(0)
    found = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=how, progress_bar=False
    )
    return [
        Response(line, list(x.prompt_ids), list(x.generated_tokens), list(x.logprobs), 1.0)
        for line, x in enumerate(found.values(), 1)
    ]


def from_token(responses, line, change):
    """The responses with one line, or all from it on if negative, changed by `change`."""
    return [
        change(each) if each.line == line or 0 < -line <= each.line else each for each in responses
    ]


def later(token):
    """One log-probability is missing from this token on: each is that of the token after."""
    return lambda each: replace(
        each, logprobs=[*each.logprobs[:token], *each.logprobs[token + 1 :], -1.0]
    )


def earlier(each):
    """Each log-probability is that of the token before."""
    return replace(each, logprobs=[-1.0, *each.logprobs[:-1]])


def retokenized(token):
    """Other ids from this token on."""
    return lambda each: replace(
        each,
        completion=[
            x if at < token else (x * 7 + at) % 1024 for at, x in enumerate(each.completion)
        ],
    )


def at_temperature(temperature):
    return lambda each: replace(each, temperature=temperature)


def write(folder):
    peaked_model().save_pretrained(folder / "qwen3-tiny")
    for attention in ("sdpa", "eager"):
        for engine in (generated, continuous):
            lines = [
                {
                    "prompt_ids": each.prompt,
                    "completion_ids": each.completion,
                    "logprobs": each.logprobs,
                    "temperature": each.temperature,
                }
                for each in engine(attention, number=16, tokens=64)
            ]
            file = folder / f"{engine.__name__}-{attention}.jsonl"
            file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
