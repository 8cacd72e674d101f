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
# # 3. Packed fine-tuning with Trainer, from text to a saved model
#
# Does a model learn the same from packed rows? To see, we train three times with transformers' own
# `Trainer`:
#
# - **unpacked**: one document a row, padded, on the model as transformers made it;
# - **packed**: the same documents in each step, in one row without padding;
# - **another seed**: unpacked again, from other initial weights. How far this curve is from the
#   first is noise: a smaller difference means nothing.
#
# Weights are random, so nothing is downloaded and the model learns from scratch. To fine-tune a
# trained one, replace `new_model` by `AutoModelForCausalLM.from_pretrained(name)`.

# %%
import math
import os
import tempfile
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several, Trainer would use DataParallel

import matplotlib.pyplot as plt
import numpy as np
import torch
from accelerate.utils import send_to_device
from matplotlib.ticker import FuncFormatter, MaxNLocator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

import flexvarlen as fv
from flexvarlen.report.figure import STYLES
from flexvarlen.verify.corpus import read_documents, train_tokenizer

logging.disable_progress_bar()

FULL = torch.cuda.is_available()  # the same cells, at a larger size
DEVICE = "cuda" if FULL else "cpu"
BACKEND = "auto" if FULL else "sdpa"
ROW = 4096 if FULL else 512  # tokens of a packed row: the documents of one step
STEPS = 300 if FULL else 32
VOCABULARY = 4096 if FULL else 512
SHAPE = (
    {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    if FULL
    else {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
)
PAD = 0


def new_model(seed):
    """A small Llama, not yet trained."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=4, **SHAPE
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE)


# %% [markdown]
# ## Data
#
# Each paragraph of Python's help topics is a document; those longer than half a row are cut. Some
# are held out. The others are packed: each row is a list of documents, and one training step.

# %%
texts = tuple(text for topic in read_documents() for text in topic.split("\n\n") if text.strip())
tokenizer = train_tokenizer(texts, VOCABULARY)
paragraphs = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
pieces = [
    paragraphs[piece.document][piece.start : piece.stop]
    for piece in fv.split_long([len(ids) for ids in paragraphs], ROW // 2)
    if piece.stop - piece.start > 1  # a single token predicts nothing
]
pieces = [pieces[i] for i in np.random.default_rng(0).permutation(len(pieces))]

HELD_OUT = 40
held_out, training = pieces[:HELD_OUT], pieces[HELD_OUT:]
# They are shuffled; packing them in this order keeps each step's documents random.
packed_rows = fv.pack([len(ids) for ids in training], ROW, strategy="in_order")
rows = [[training[i] for i in row] for row in packed_rows]
print(f"{len(training)} documents in {len(rows)} rows of {ROW} tokens; {len(held_out)} held out")

# %% [markdown]
# ## Two collators, the same documents
#
# Trainer gives the collator the rows of a step, here one. Packed, `fv.PackedCollator` does the
# rest. Unpacked, each document becomes a row of its own, padded to the longest. In both, the first
# token of a document has no label, since no token of its document predicts it.

# %%
packed = fv.PackedCollator(total_tokens=ROW, pad_token_id=PAD)


def padded(rows):
    """The documents of the rows, one a row, padded at the right."""
    documents = [document for row in rows for document in row]
    shape = len(documents), max(map(len, documents))
    batch = {
        "input_ids": torch.full(shape, PAD),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
    }
    for i, document in enumerate(documents):
        ids, end = torch.tensor(document), len(document)
        batch["input_ids"][i, :end] = ids
        batch["attention_mask"][i, :end] = 1
        batch["labels"][i, 1:end] = ids[1:]
    return batch


a, b = packed(rows[:1]), padded(rows[:1])
print("packed  ", tuple(a["input_ids"].shape), "labels:", (a["labels"] != -100).sum().item())
print("unpacked", tuple(b["input_ids"].shape), "labels:", (b["labels"] != -100).sum().item())

# %% [markdown]
# ## Three training runs
#
# The packed one needs two more lines: `fv.patch_model` and the collator. `fv.IsolationCallback` is
# an optional check: before the first step it replaces documents by others and verifies that no bit
# of their neighbours changes, in any layer or gradient.


# %%
class Clock(TrainerCallback):
    """Seconds from one step's loss to the next's; reading a loss waits for the step's kernels."""

    def __init__(self):
        self.read = []

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.read.append(time.perf_counter())

    def median_step_s(self):
        return float(np.median(np.diff(self.read)))


def train(model, collate, *callbacks):
    """Trainer's log: the loss of each step, and the tokens computed until then."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,  # a row: several documents
            learning_rate=1e-3 if FULL else 5e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            include_num_input_tokens_seen="all",  # padding included
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            bf16=FULL,
            use_cpu=not FULL,
            dataloader_pin_memory=FULL,
            seed=0,  # of the order of the rows: the same for all
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[clock, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        done = trainer.train()
    whole_s = done.metrics["train_runtime"]
    print(f"{clock.median_step_s() * 1e3:6.1f} ms a step (median), {whole_s:.1f} s in all")
    return [log for log in trainer.state.log_history if "loss" in log]


logs = {
    "unpacked": train(new_model(0), padded),
    "another seed": train(new_model(1), padded),
}
model = fv.patch_model(new_model(0), backend=BACKEND)
check = fv.IsolationCallback(examples=1)  # on one row
logs["packed"] = train(model, packed, check)

losses = {name: [log["loss"] for log in found] for name, found in logs.items()}
tokens = {name: [log["num_input_tokens_seen"] for log in found] for name, found in logs.items()}
print(check.reports[0].sentence())
for name, found in losses.items():
    print(f"{name:13} loss {found[0]:.3f} to {found[-1]:.3f}; {tokens[name][-1]:,} tokens")

# %% [markdown]
# ## The curves
#
# On the left, by step: packed and unpacked coincide. On the right, by tokens computed: packed needs
# fewer, since unpacked computes padding too.

# %%
LOOK = {
    "another seed": STYLES["transformers:sdpa"].line() | {"marker": "none"},
    "unpacked": STYLES["reference"].line() | {"marker": "none", "linewidth": 4, "alpha": 0.35},
    "packed": STYLES["flex"].line() | {"marker": "none"},
}
figure = plt.figure(figsize=(8, 3), dpi=80, layout="constrained")
panels = figure.subplots(1, 2, sharey=True)
for name, look in LOOK.items():
    panels[0].plot(range(1, STEPS + 1), losses[name], label=name, **look)
    if name != "another seed":
        panels[1].plot(tokens[name], losses[name], label=name, **look)
for axes, by in zip(panels, ("step", "tokens computed, padding included"), strict=True):
    axes.set_xlabel(by)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.grid(True, color="#E4E4E4", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
panels[0].set_title("Packed and unpacked learn the same", loc="left", fontsize=10)
panels[1].set_title("and packed needs fewer tokens", loc="left", fontsize=10)
panels[0].set_ylabel("loss")
plt.show()


def distance(one, other):
    """Mean distance of two curves."""
    return float(np.abs(np.subtract(losses[one], losses[other])).mean())


gap, noise = distance("packed", "unpacked"), distance("another seed", "unpacked")
print(f"packed is {gap:.1e} from unpacked on average, another seed {noise:.1e}")
norms = [logs[name][0]["grad_norm"] for name in ("packed", "unpacked")]
print(f"gradients of the first step: norms {norms[0]:.6f} and {norms[1]:.6f}")
print(f"unpacked computed {tokens['unpacked'][-1] / tokens['packed'][-1]:.1f} times the tokens")

# %% [markdown]
# ## Save it, and use it without us
#
# Patching changes no weight. The saved model is an ordinary one, which transformers loads without
# flexvarlen. On the held-out documents, one document a call, it gives the loss that the packed
# model gives in a single call.


# %%
@torch.no_grad()
def loss_alone(model):
    """The loss of the held-out documents, each in a call of its own."""
    total = count = 0
    for ids in held_out:
        row = torch.tensor([ids], device=DEVICE)
        predicted = len(ids) - 1
        total += model.eval()(row, labels=row).loss.item() * predicted
        count += predicted
    return total / count


@torch.no_grad()
def loss_packed(model):
    """The same in one packed row."""
    batch = send_to_device(fv.PackedCollator()(held_out), DEVICE)
    return model.eval()(**batch).loss.item()


in_one_row = loss_packed(model)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    tokenizer.save(f"{folder}/tokenizer.json")
    loaded = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
untrained, one_by_one = loss_alone(new_model(0)), loss_alone(loaded)
print(f"held-out loss {untrained:.3f} before, {one_by_one:.3f} after (packed: {in_one_row:.3f})")
print(f"a guess among {VOCABULARY} tokens has {math.log(VOCABULARY):.3f}")

# %% [markdown]
# ## Checks

# %%
# Both runs take the same steps: the same documents, the same labels.
assert (a["labels"] != -100).sum() == (b["labels"] != -100).sum()
assert len(losses["packed"]) == len(losses["unpacked"]) == STEPS

# Packed learns the same as unpacked, on fewer tokens. Losses and gradients of the first step agree
# to rounding, and here the curves stay together. In bfloat16, on a GPU, rounding is far coarser and
# grows over hundreds of steps, at most to the noise between seeds.
first = [losses[name][0] for name in ("packed", "unpacked")]
assert abs(first[0] / first[1] - 1) < (1e-3 if FULL else 1e-4), first
assert abs(norms[0] / norms[1] - 1) < (1e-2 if FULL else 1e-4), norms
assert gap < (1.2 * noise if FULL else noise / 100), (gap, noise)
assert tokens["packed"][-1] < tokens["unpacked"][-1]
assert np.mean(losses["packed"][-5:]) < losses["packed"][0] - 0.5

# Nothing leaked, and the saved model is the trained one.
assert check.reports[0].gradients is not None
assert abs(one_by_one - in_one_row) < (1e-2 if FULL else 1e-5)
assert one_by_one < untrained - 0.5
print("all checks passed")
