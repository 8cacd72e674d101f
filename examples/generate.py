"""Let a chat model or its adapter answer, without flexvarlen: `python examples/generate.py --help`.

Questions of different lengths share a batch: padded on the left, each in a row of its own.

    python examples/generate.py --model chat --ask "What is packing?" --ask "Why?"
"""

from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(
    model: Annotated[str, typer.Option(help="A model, or an adapter: a folder or a hub name.")],
    ask: Annotated[list[str], typer.Option(help="A question; may be repeated.")],
    max_new_tokens: int = 256,
) -> None:
    """Print an answer to each question."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # of an adapter's folder this loads the model that it was trained on too
    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map=device)
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": each}] for each in ask],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device)
    found = network.generate(**inputs, max_new_tokens=max_new_tokens)
    for question, tokens in zip(ask, found[:, inputs["input_ids"].shape[1] :], strict=True):
        print(f"> {question}\n{tokenizer.decode(tokens, skip_special_tokens=True).strip()}\n")


if __name__ == "__main__":
    typer.run(main)
