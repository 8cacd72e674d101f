"""Three documents in one row that do not see each other: `python examples/quickstart.py`.

Runs on the CPU, with random weights: nothing is downloaded.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import flexvarlen as fv

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = AutoModelForCausalLM.from_config(config).eval()

lengths = [50, 1, 77]
input_ids = torch.randint(config.vocab_size, (1, sum(lengths)))
layout = fv.PackedLayout.from_lengths(lengths)

# One document a row, on the model as transformers made it: what packing must reproduce.
with torch.no_grad():
    alone = torch.cat([model(ids[None]).logits[0] for ids in input_ids[0].split(lengths)])

fv.patch_model(model, backend="sdpa")  # "flex" or "fa2" on a GPU
with torch.no_grad():
    packed = model(input_ids=input_ids, packed_layout=layout).logits[0]
error = (packed - alone).abs().max().item()
print(f"largest difference from each document alone: {error:.1e}")
assert error < 1e-5

fv.verify_isolation(model, {"input_ids": input_ids, "packed_layout": layout})
print("no document sees another")

model.train()
loss = model(input_ids=input_ids, packed_layout=layout, labels=input_ids).loss
loss.backward()
print(f"loss {loss.item():.3f}; no label crosses a boundary")
