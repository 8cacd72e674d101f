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
# # 7. Share the prompt
#
# In GRPO and DPO several answers follow one prompt. Packed as documents, each answer computes its
# prompt again. Here a row holds the prompt once, and the answers branch from it: a tree. A token of
# an answer sees the prompt and its own answer, nothing of the others.
#
# We look at the mask, compute a DPO and a GRPO loss both ways, compare losses and every gradient,
# and run the same tree through a hybrid, Qwen3.5. Weights are random and nothing is downloaded.

# %%
import copy
import warnings

import torch
from IPython.display import Image, display
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config, logging

import flexvarlen as fv

FULL = torch.cuda.is_available()  # the same cells, at a larger size
DEVICE = "cuda" if FULL else "cpu"
BACKEND = "auto" if FULL else "sdpa"
DTYPE = torch.bfloat16 if FULL else torch.float32
PROMPT_TOKENS, ANSWER_TOKENS = (2048, 256) if FULL else (192, 24)
NUM_ANSWERS = 8
SHAPE = (
    {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
    | {"num_attention_heads": 16, "num_key_value_heads": 8}
    if FULL
    else {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2}
)

# %% [markdown]
# ## Samples, and what they share
#
# A sample is a prompt with one answer, as token ids. `fv.share_prefixes` finds what samples have in
# common, to any depth; nobody has to say where the prompt ends. Each answer repeats
# the prompt's last token, because its label differs.

# %%
torch.manual_seed(0)
VOCABULARY = 512
lengths = torch.randint(ANSWER_TOKENS // 2, ANSWER_TOKENS + 1, (NUM_ANSWERS,)).tolist()
prompt = torch.randint(VOCABULARY, (PROMPT_TOKENS,)).tolist()
answers = [torch.randint(VOCABULARY, (n,)).tolist() for n in lengths]
samples = [prompt + answer for answer in answers]

shared = fv.share_prefixes(samples, device=DEVICE)
repeated = fv.PackedLayout.from_lengths([len(x) for x in samples], device=DEVICE)
print(shared.layout)
print(f"{repeated.total_tokens:,} tokens with the prompt in each sample, ", end="")
print(f"{shared.layout.total_tokens:,} with the prompt once")

# %% [markdown]
# The mask: queries go down, keys to the right. On the left all answers see the prompt; the small
# triangles are the answers, which do not see each other.

# %%
mask = fv.DocumentMask.of(shared.layout)
picture = mask.save_picture("tree.png", block_size=PROMPT_TOKENS // 48)
display(Image(picture.read_bytes(), width=460))

# %% [markdown]
# ## One model, two ways
#
# Both patched models have the same weights. One runs all samples as packed documents, the other the
# tree. `shared.unfold` gives each sample its own logits again, in the order of the samples, so any
# loss of single samples can be computed from them. A gradient that reaches a token of the prompt is
# the sum over its samples.

# %%
config = Qwen3Config(vocab_size=VOCABULARY, initializer_range=0.05, **SHAPE)
untrained = AutoModelForCausalLM.from_config(config, dtype=DTYPE).to(DEVICE)
models = {
    variant: fv.patch_model(copy.deepcopy(untrained), BACKEND) for variant in ("repeated", "tree")
}


def logits_of_samples(variant):
    """What the model predicts along each sample, `[L, vocabulary]` each."""
    if variant == "tree":
        ids, layout = shared.input_ids, shared.layout
        return shared.unfold(models[variant](input_ids=ids, packed_layout=layout).logits)
    ids = torch.tensor([[token for sample in samples for token in sample]], device=DEVICE)
    return models[variant](input_ids=ids, packed_layout=repeated).logits[0].split(repeated.lengths)


def logprobs_of_answers(variant):
    """The log-probability of each token of each answer."""
    found = []
    for logits, answer in zip(logits_of_samples(variant), answers, strict=True):
        ids = torch.tensor(answer, device=DEVICE)
        predicted = logits[PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
        found.append(predicted.gather(1, ids[:, None])[:, 0])
    return found


# %% [markdown]
# ## The losses
#
# DPO prefers the even answers to the odd ones. GRPO weighs each token's ratio by its answer's
# advantage. The reference, and the policy that sampled the answers, are the untrained model with a
# little noise on its log-probabilities: a stand-in, the same for both ways.

# %%
rewards = torch.randn(NUM_ANSWERS, device=DEVICE)
advantages = (rewards - rewards.mean()) / rewards.std()
with torch.no_grad():
    reference = [x + 0.1 * torch.randn_like(x) for x in logprobs_of_answers("repeated")]


def dpo(logprobs, beta=0.1):
    margins = [(now - old).sum() for now, old in zip(logprobs, reference, strict=True)]
    return -logsigmoid(beta * (torch.stack(margins[::2]) - torch.stack(margins[1::2]))).mean()


def grpo(logprobs, epsilon=0.2):
    losses = []
    for now, old, advantage in zip(logprobs, reference, advantages, strict=True):
        ratio = (now - old).exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage).mean())
    return torch.stack(losses).mean()


def step(variant, loss):
    """Forward and backward: the loss, and the gradient of every parameter."""
    models[variant].zero_grad()
    value = loss(logprobs_of_answers(variant))
    value.backward()
    gradients = {name: p.grad.float() for name, p in models[variant].named_parameters()}
    return value.item(), gradients


gaps = {}
for loss in (dpo, grpo):
    (value, gradients), (tree_value, tree_gradients) = step("repeated", loss), step("tree", loss)
    largest = max(gradient.norm() for gradient in gradients.values())
    errors = [
        ((tree_gradients[name] - gradient).norm() / (gradient.norm() + 1e-3 * largest)).item()
        for name, gradient in gradients.items()
    ]
    gaps[loss.__name__] = abs(value - tree_value), max(errors)
    print(f"{loss.__name__}: loss {value:.6f}, as a tree {tree_value:.6f}; ", end="")
    print(f"{len(errors)} gradients differ by at most {max(errors):.1e} of their norm")

# %% [markdown]
# ## The same tree through a hybrid
#
# In Qwen3.5 most layers are recurrent: each token updates a state, which no mask reaches. An answer
# starts from the state that the prompt leaves, and its convolution reads the prompt's last tokens.
# Against each sample alone in the unpatched model:

# %%
warnings.filterwarnings("ignore", "flexvarlen: recurrent layers")  # on a CPU: slow, and right
logging.set_verbosity_error()
hybrid_config = Qwen3_5TextConfig(
    vocab_size=VOCABULARY,
    layer_types=["linear_attention", "full_attention"] * (SHAPE["num_hidden_layers"] // 2),
    initializer_range=0.05,
    **SHAPE,
)
hybrid = AutoModelForCausalLM.from_config(hybrid_config, dtype=DTYPE).to(DEVICE)
with torch.no_grad():
    alone = [hybrid(torch.tensor([sample], device=DEVICE)).logits[0] for sample in samples]
    fv.patch_model(hybrid, BACKEND)
    logits = hybrid(input_ids=shared.input_ids, packed_layout=shared.layout).logits
hybrid_error = max(
    ((found - expected).norm() / expected.norm()).item()
    for found, expected in zip(shared.unfold(logits), alone, strict=True)
)
print(f"the logits of {NUM_ANSWERS} samples differ by at most {hybrid_error:.1e} of their norm")

# %% [markdown]
# [The guide](../docs/shared-prefixes.md) covers training with the model's own loss
# (`shared.batch()`), deeper trees, and TRL's trainers, in which
# `fv.patch_trainer(trainer, share_prefixes=True)` does all this inside the model.
#
# ## Checks

# %%
assert shared.layout.total_tokens == PROMPT_TOKENS + sum(lengths) + NUM_ANSWERS - 1
assert [x.tolist() for x in shared.unfold(shared.input_ids)] == samples
assert max(gap for gap, _ in gaps.values()) < (1e-2 if FULL else 1e-5), gaps
assert max(error for _, error in gaps.values()) < (5e-2 if FULL else 1e-4), gaps
assert hybrid_error < (5e-2 if FULL else 1e-5)
assert repeated.total_tokens > 4 * shared.layout.total_tokens
print("all checks passed")
