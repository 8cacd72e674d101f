"""Responses that transformers sampled from a model, as an engine would record them.

`python -m tests.verify.rollout.recorded FOLDER` writes the model, and responses by `generate` and
continuous batching, with several attentions, for `flexvarlen drift rollout`: 16 of 64 tokens of a
tiny model, or on a GPU 32 of 256 tokens of 14 layers of the Qwen3-1.7B geometry.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from flexvarlen.bench.suites.model.geometries import GEOMETRIES
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


def large_model():
    """Its head is untied, as otherwise each token would follow itself."""
    torch.manual_seed(0)
    config = GEOMETRIES["qwen3-1.7b"](14)
    config.tie_word_embeddings = False
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    return model


@cache
def generated(attention, temperature=1.0, head_scale=3, number=PROMPTS, tokens=COMPLETION):
    """Responses by `generate`, with the log-probabilities of its own logits."""
    return sampled(peaked_model(head_scale=head_scale), attention, number, tokens, temperature)


def sampled(model, attention, number, tokens, temperature=1.0):
    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1024, (number, PROMPT), generator=generator).to(model.device)
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


def continuous(model, attention, number, tokens):
    """Responses by continuous batching, which returns its log-probabilities."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.set_attn_implementation(attention)
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    how = ContinuousBatchingConfig(
        return_logprobs=True, num_blocks=16 * number, max_batch_tokens=256
    )
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


ENGINES = {"generated": sampled, "continuous": continuous}
ON_GPU = [("generated", "sdpa"), ("generated", "eager"), ("continuous", "flash_attention_3")]
ON_CPU = [(engine, attention) for attention in ("sdpa", "eager") for engine in ENGINES]


def write(folder):
    on_gpu = torch.cuda.is_available()
    name, number, tokens = ("qwen3-1.7b", 32, 256) if on_gpu else ("qwen3-tiny", 16, 64)
    model = large_model() if on_gpu else peaked_model()
    model.save_pretrained(folder / name)
    for engine, attention in ON_GPU if on_gpu else ON_CPU:
        lines = [
            {
                "prompt_ids": each.prompt,
                "completion_ids": each.completion,
                "logprobs": each.logprobs,
                "temperature": each.temperature,
            }
            for each in ENGINES[engine](model, attention, number, tokens)
        ]
        file = folder / f"{engine}-{attention}.jsonl"
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
