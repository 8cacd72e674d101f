# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Patch a model: three backends, the same outputs, different speeds
#
# A packed row holds several documents. `fv.patch_model(model)` makes a transformers model keep them
# apart, on the attention kernel (the **backend**) that you name. This notebook asks two questions
# of each backend: are the outputs those of each document alone, and how fast is it?
#
# Weights are random here, so nothing is downloaded. For yours,
# `AutoModelForCausalLM.from_pretrained`.

# %%
import copy
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Image, Markdown, display
from transformers import AutoModelForCausalLM, Qwen3Config

import flexvarlen as fv
from flexvarlen.measure import time_interleaved
from flexvarlen.report.figure import style_of
from flexvarlen.verify.corpus import packed_text

FULL = torch.cuda.is_available()  # the same cells, at a larger size
DEVICE = torch.device("cuda" if FULL else "cpu")
DTYPE = torch.bfloat16 if FULL else torch.float32
TOKENS = 8192 if FULL else 256
# Larger initial weights than the usual 0.02, with which attention would be almost uniform: now it
# matters what a token sees.
SHAPE = {"vocab_size": 1024, "initializer_range": 0.15, "max_position_embeddings": 32_768} | (
    {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "initializer_range": 0.04}
    if FULL
    else {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2}
)

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), dtype=DTYPE).to(DEVICE).eval()
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {DTYPE}")

# %% [markdown]
# One packed row of real text, and where its documents are.

# %%
batch = packed_text(vocabulary=SHAPE["vocab_size"], tokens=TOKENS).to(DEVICE)
ids, lengths = batch.input_ids, list(batch.lengths)
layout = fv.PackedLayout.from_lengths(lengths, device=DEVICE)
print(f"{len(lengths)} documents in one row of {ids.shape[1]:,} tokens: {lengths}")

# %% [markdown]
# ## The reference: each document alone
#
# The model as transformers made it, one document a call, twice:
#
# - in float64: this is the reference;
# - in the model's own dtype: its distance from the reference is **rounding**, which nobody can
#   avoid. A packed output is right if it is not much further away. We allow twice that, plus twice
#   the rounding of the largest logit.


# %%
@torch.no_grad()
def alone(model):
    """Logits of each document in a call of its own, one after another."""
    return torch.cat([model(part[None]).logits[0] for part in ids[0].split(lengths)])


reference = alone(copy.deepcopy(model).double())
before = alone(model)


def error(logits):
    """Largest distance from the reference."""
    return (logits - reference).abs().max().item()


rounding = error(before)
allowed = 2 * (rounding + torch.finfo(DTYPE).eps * reference.abs().max().item())
print(f"logits reach {reference.abs().max().item():.1f}; rounding moves them by {rounding:.1e}")

# %% [markdown]
# ## Which backends are there?
#
# `why_not` says in a sentence why a backend cannot run. We take the first three that can.

# %%
HEADS = {
    "num_heads": SHAPE["num_attention_heads"],
    "num_kv_heads": SHAPE["num_key_value_heads"],
    "head_dim": SHAPE["head_dim"],
}
kind = {"device": DEVICE, "dtype": DTYPE, "needs_grad": False, **HEADS}
for name in fv.BACKENDS:
    print(f"{name:10} {fv.why_not(name, **kind) or 'can run here'}")

wanted = ("fa3", "fa2", "flex", "varlen", "sdpa", "reference")
backends = [name for name in wanted if fv.why_not(name, **kind) is None][:3]
print("\nwe take:", ", ".join(backends))

# %% [markdown]
# ## Three backends, by hand
#
# `patched` patches a model within a `with` block; `patch_model` does it until `unpatch_model`. The
# call is transformers' own, with one more argument: `packed_layout`.

# %%
errors = {}
for name in backends:
    with fv.patched(model, backend=name), torch.no_grad():
        packed = model(input_ids=ids, packed_layout=layout).logits[0]
    errors[name] = error(packed)
    print(f"{name:10} error {errors[name]:.1e}, {errors[name] / rounding:.2f} × rounding")

with torch.no_grad():
    unaware = error(model(input_ids=ids).logits[0])
print(f"{'unpatched':10} error {unaware:.1e}, {unaware / rounding:,.0f} × rounding: one document")

# %% [markdown]
# Afterwards the model is as before: its outputs have the same bits.

# %%
after = alone(model)
print("bit for bit as before:", torch.equal(before, after))

# %% [markdown]
# ## How fast?
#
# The same documents in one call each, in one padded batch, and in a packed row on each backend.
# Calls take turns, so that other load on the machine affects all of them alike. Bars are medians,
# whiskers the 20th and 80th percentiles; padding does not count as tokens.
#
# A tiny model on a CPU says little about your GPU. Run it there: the cells then use larger sizes.

# %%
longest = max(lengths)
padded_ids = ids.new_zeros(len(lengths), longest)
padding_mask = torch.zeros_like(padded_ids)
for row, part in enumerate(ids[0].split(lengths)):
    padded_ids[row, : len(part)], padding_mask[row, : len(part)] = part, 1


def packed_call(name):
    """A call on a patched copy."""
    copied = fv.patch_model(copy.deepcopy(model), backend=name)
    return lambda: copied(input_ids=ids, packed_layout=layout)


calls = {
    "transformers:sdpa, alone": lambda: alone(model),
    "transformers:sdpa, padded": lambda: model(padded_ids, attention_mask=padding_mask),
    **{f"{name}, packed": packed_call(name) for name in backends},
}
with torch.no_grad():
    timings = time_interleaved(calls, device=DEVICE, warmup=2, repeats=15 if FULL else 9)

figure = plt.figure(figsize=(7, 2.6), dpi=80, layout="constrained")
axes = figure.subplots()
for y, (name, timing) in enumerate(timings.items()):
    speed = TOKENS / timing.ms_p50 * 1e3
    spread = [[speed - TOKENS / timing.ms_p80 * 1e3], [TOKENS / timing.ms_p20 * 1e3 - speed]]
    look = style_of(name.partition(",")[0])
    axes.barh(y, speed, xerr=spread, color=look.color, ecolor="#222222", height=0.7, capsize=2)
    print(f"{name:26} {speed:10,.0f} tokens/s")
axes.set_yticks(range(len(timings)), timings)
axes.invert_yaxis()
axes.set_xlabel("tokens of documents a second, forward")
axes.set_title(f"{len(lengths)} documents, {TOKENS:,} tokens, {DEVICE.type}", loc="left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

waste = 1 - TOKENS / padded_ids.numel()
print(f"\n{waste:.0%} of the padded batch is padding; a packed row has none")

# %% [markdown]
# ## The same in one line
#
# `fv.compare` does all this and more: gradients (here on a GPU only), transformers' own packing,
# leaks, peak memory. It says of each backend whether it is right.

# %%
theirs = ["transformers:sdpa", "transformers:sdpa@default_cache"]
report = fv.compare(model, batch, [*backends, *theirs], packings=0, train=FULL)
display(Markdown(report.markdown()))

# %%
with tempfile.TemporaryDirectory() as folder:
    *_, picture = report.save(folder)
    display(Image(Path(picture).read_bytes(), width=560))

# %% [markdown]
# Left of the dashed line is right. transformers' own attention is right too, with `position_ids`
# and `use_cache=False`. With the cache that it makes by default it is far to the right of the line:
# its documents see each other. Notebook 4 is about that.
#
# ## Checks

# %%
assert len(backends) == 3
assert all(found <= allowed for found in errors.values())
assert unaware > 5 * allowed
assert torch.equal(before, after)
assert waste > 0

assert report.passed
assert all(report.verdict(name) == "right" for name in backends)
assert [report.verdict(name) for name in theirs] == ["right", "leaks"]
print("all checks passed")
