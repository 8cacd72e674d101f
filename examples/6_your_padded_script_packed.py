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
# # 6. Your padded script, packed
#
# TRL's DPOTrainer pads: prompts and answers differ in length, and each batch is padded to its
# longest sequence. The model computes the padding too. `fv.patch_trainer(trainer)` changes that in
# one line: batches stay padded, for the trainer and its loss, but the layers run the real tokens as
# one packed row.
#
# Here the same DPO training runs twice, with and without `fv.patch_trainer`. We compare the loss
# and every gradient, and count the tokens that the layers saw. The same line serves TRL's
# RewardTrainer, KTOTrainer and GRPOTrainer, and padded tasks of `Trainer`.
#
# Weights are random and the texts are Python's own help topics, so nothing is downloaded.

# %%
import copy
import os
import random
import tempfile
import warnings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several, Trainer would use DataParallel
warnings.filterwarnings("ignore", category=FutureWarning)  # TRL uses older names of transformers

import datasets
import matplotlib.pyplot as plt
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    TrainerCallback,
)
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer

import flexvarlen as fv
from flexvarlen.report.figure import STYLES
from flexvarlen.verify.corpus import read_documents, train_tokenizer

logging.disable_progress_bar()
logging.set_verbosity_error()
datasets.disable_progress_bars()

FULL = torch.cuda.is_available()  # the same cells, at a larger size
BACKEND = "auto" if FULL else "sdpa"
STEPS = 20 if FULL else 4
PAIRS = 8  # of a batch: 16 rows
LONGEST = 512 if FULL else 64  # words of an answer
SHAPE = (
    {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    | {"num_attention_heads": 8, "num_key_value_heads": 4}
    if FULL
    else {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2}
)

# %% [markdown]
# ## The data: answers of very different lengths
#
# The chosen answer is a text, the rejected one has the same words in another order.

# %%
texts = read_documents()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=train_tokenizer(texts, 1024), eos_token="<end>", pad_token="<pad>"
)
rng, pairs = random.Random(0), []
for _ in range(PAIRS * STEPS):
    words = rng.choice(texts).split()
    answer = words[4 : 4 + round(LONGEST ** rng.uniform(0.3, 1))]
    mixed = rng.sample(answer, len(answer))
    chosen, rejected = (" " + " ".join(each) for each in (answer, mixed))
    pairs.append({"prompt": " ".join(words[:4]), "chosen": chosen, "rejected": rejected})
print(f"{len(pairs)} pairs; for example {pairs[0]}")

# %% [markdown]
# ## The script
#
# An ordinary DPO script. The only addition is a callback that keeps the gradients of the first step
# and counts the tokens that reach the layers.

# %%
torch.manual_seed(0)
config = Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.05, **SHAPE)
untrained = AutoModelForCausalLM.from_config(config)


class Recorder(TrainerCallback):
    """Gradients of the first step, and the tokens of each forward of the policy."""

    def __init__(self, model):
        self.tokens, self.gradients = [], {}
        layer = model.model.layers[0].mlp.gate_proj
        layer.register_forward_pre_hook(lambda _, x: self.tokens.append(x[0][..., 0].numel()))

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.gradients:
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


def new_trainer():
    """A DPOTrainer and its recorder."""
    policy = copy.deepcopy(untrained)
    trainer = DPOTrainer(
        policy,
        ref_model=copy.deepcopy(untrained),
        args=DPOConfig(
            tempfile.mkdtemp(),
            max_steps=STEPS,
            per_device_train_batch_size=PAIRS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,  # it would run each layer twice
            logging_steps=1,
            bf16=False,
            use_cpu=not FULL,
            dataloader_pin_memory=FULL,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    recorder = Recorder(policy)
    trainer.add_callback(recorder)
    trainer.remove_callback(PrinterCallback)
    return trainer, recorder


padded_trainer, padded = new_trainer()
padded_trainer.train()
print("padded: loss", [log["loss"] for log in padded_trainer.state.log_history if "loss" in log])

# %% [markdown]
# ## The one line
#
# It patches the policy and the reference model.

# %%
packed_trainer, packed = new_trainer()
fv.patch_trainer(packed_trainer, BACKEND)  # the one line
packed_trainer.train()
print("packed: loss", [log["loss"] for log in packed_trainer.state.log_history if "loss" in log])

# %% [markdown]
# ## The same loss, the same gradients
#
# Not the same bits: sums are taken in another order. We measure each gradient's distance from the
# padded run's, relative to its norm.


# %%
def curve(trainer, name):
    """What a trainer logged in each step."""
    return [log[name] for log in trainer.state.log_history if name in log]


losses = [curve(trainer, "loss") for trainer in (padded_trainer, packed_trainer)]
margins = [curve(trainer, "rewards/margins") for trainer in (padded_trainer, packed_trainer)]
largest = max(gradient.norm() for gradient in padded.gradients.values())
errors = {
    name: ((packed.gradients[name] - gradient).norm() / (gradient.norm() + 1e-3 * largest)).item()
    for name, gradient in padded.gradients.items()
}
worst = max(errors, key=errors.get)
gap = max(abs(a - b) for a, b in zip(*losses, strict=True))
print(f"losses differ by at most {gap:.1e}")
print(f"{len(errors)} gradients differ by at most {errors[worst]:.1e} of their norm ({worst})")

# %% [markdown]
# ## The tokens saved
#
# A bar is a batch: the tokens that the layers of the policy computed. The reference model saves the
# same again. Logits keep the padded shape.

# %%
figure = plt.figure(figsize=(7, 2.6), dpi=80, layout="constrained")
axes = figure.subplots()
steps = range(1, len(padded.tokens) + 1)
axes.bar(steps, padded.tokens, color=STYLES["flex"].color, label="padding")
axes.bar(steps, packed.tokens, color=STYLES["fa2"].color, label="real tokens")
axes.set_xticks(list(steps))
axes.set_xlabel("step")
axes.set_ylabel("tokens")
ratio = sum(padded.tokens) / sum(packed.tokens)
axes.set_title(f"The padded run computed {ratio:.1f} times the tokens", loc="left", fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
print(f"{sum(padded.tokens):,} tokens padded, {sum(packed.tokens):,} packed")

# %% [markdown]
# Your own batches: if this ratio is near 1, as for texts of equal length, nothing is gained.
# [The guide](../docs/preference.md) covers memory, errors and `torch.compile`.
#
# ## Checks

# %%
# The line patched both models, and the layers saw the real tokens alone.
assert fv.is_patched(packed_trainer.model)
assert fv.is_patched(packed_trainer.ref_model)
batches = list(packed_trainer.get_train_dataloader())
assert sum(packed.tokens) == sum(int(batch["attention_mask"].sum()) for batch in batches)
assert ratio > 1.3

# The same training, to rounding in fp32. Over many steps of AdamW rounding grows.
assert abs(losses[0][0] - losses[1][0]) < 1e-4
assert gap < (1e-2 if FULL else 1e-3), gap
assert errors[worst] < (1e-2 if FULL else 1e-4), (worst, errors[worst])
assert max(abs(a - b) for a, b in zip(*margins, strict=True)) < (5e-2 if FULL else 1e-3)
print("all checks passed")
