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
# # 4. Leaks: how plain packing goes wrong, and how to find out
#
# In a packed row, documents are next to each other. If the attention ignores the boundaries, a
# document sees its neighbours. Nothing crashes and the loss falls, but the model learns from text
# that it will not have in use. This notebook makes leaks, shows them, measures what they do, and
# ends with the call that finds them: `fv.verify_isolation`.

# %%
import copy
import warnings

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, logging

import flexvarlen as fv
from flexvarlen.report.figure import STYLES

FULL = torch.cuda.is_available()  # the same cells, at a larger size
DEVICE = "cuda" if FULL else "cpu"
BACKEND = "flex" if FULL else "sdpa"
LENGTHS = [60, 132, 12, 96, 84] if FULL else [10, 22, 2, 16, 14]
SHAPE = (
    {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    if FULL
    else {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    initializer_range=0.04 if FULL else 0.15,  # so that attention is far from uniform
    **SHAPE,
)
# float32 on a GPU too: differences are then leaks, not rounding.
plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(DEVICE).eval()
patched = fv.patch_model(copy.deepcopy(plain), backend=BACKEND)

TOTAL = sum(LENGTHS)
ids = torch.randint(config.vocab_size, (1, TOTAL), device=DEVICE)
layout = fv.PackedLayout.from_lengths(LENGTHS, device=DEVICE)
print(f"{len(LENGTHS)} documents of {LENGTHS} tokens in one row of {TOTAL}")

# %% [markdown]
# ## Five ways to say where documents are
#
# All of these occur in practice, and all are meant to say the same. Both transformers and a patched
# model get each of them. The error is the distance from each document alone, in float64.


# %%
def joined(each):
    """One value or tensor per document, as a row `[1, TOTAL]`."""
    return torch.cat([torch.as_tensor(x) for x in each]).to(DEVICE)[None]


positions = joined(torch.arange(n) for n in LENGTHS)  # from 0 again in each document
numbers = joined(torch.full((n,), i + 1) for i, n in enumerate(LENGTHS))
ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
boundaries |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}

FORMS = {
    "position_ids, use_cache=False": {"position_ids": positions, "use_cache": False},
    "position_ids": {"position_ids": positions},
    "position_ids and a mask of ones": {
        "position_ids": positions,
        "attention_mask": torch.ones_like(positions),
        "use_cache": False,
    },
    "position_ids and cu_seq_lens": {"position_ids": positions, **boundaries},
    "a mask of document numbers": {
        "position_ids": positions,
        "attention_mask": numbers,
        "use_cache": False,
    },
}


@torch.no_grad()
def alone(model):
    """Logits of each document in a call of its own, one after another."""
    return torch.cat([model(part[None]).logits[0] for part in ids[0].split(LENGTHS)])


reference = alone(copy.deepcopy(plain).double())


@torch.no_grad()
def error(model, form, reference=reference):
    """Largest distance of a packed row's logits from the reference."""
    return (model(input_ids=ids, **form).logits[0] - reference).abs().max().item()


rounding = (alone(plain) - reference).abs().max().item()
error(patched, FORMS["position_ids"])  # on a GPU torch compiles here, with warnings of its own
with warnings.catch_warnings():
    warnings.simplefilter("error")  # a warning would end the cell
    errors = {name: (error(plain, form), error(patched, form)) for name, form in FORMS.items()}
print(f"logits reach {reference.abs().max().item():.1f}; rounding alone is {rounding:.1e}\n")
print(f"{'':32} {'transformers':>12} {'patched':>9}")
for name, (theirs, ours) in errors.items():
    print(f"{name:32} {theirs:12.1e} {ours:9.1e}")

# %% [markdown]
# No call raised or warned. transformers looks for boundaries in `position_ids` only when there is
# neither a mask nor a cache, and by default it makes a cache. The first line is right, up to
# rounding; the others are off by about as much as the logits are large. Patched, all five mean the
# same.

# %%
look = {"plain": STYLES["transformers:sdpa"], "patched": STYLES[BACKEND]}
figure = plt.figure(figsize=(7, 2.4), dpi=80, layout="constrained")
axes = figure.subplots()
for y, found in enumerate(errors.values()):
    for value, (name, style) in zip(found, look.items(), strict=True):
        label = {"plain": "transformers", "patched": "patched"}[name] if y == 0 else None
        size = 12 if name == "plain" else 7  # where both are right, one lies in the other
        marker = style.line() | {"linestyle": "none", "markersize": size}
        axes.plot([value], [y], label=label, **marker)
axes.axvspan(rounding / 4, 4 * rounding, color="#E3F1E6", zorder=0)
axes.text(rounding, len(errors) - 0.45, "rounding", ha="center", fontsize=8, color="#3F7A4C")
axes.set_xscale("log")
axes.set_yticks(range(len(errors)), errors)
axes.set_ylim(len(errors) - 0.3, -0.5)
axes.set_xlabel("largest error of the logits (log)")
axes.grid(True, axis="x", color="#E4E4E4")
axes.set_axisbelow(True)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper center", fontsize=8)
plt.show()

# %% [markdown]
# ## Who sees whom
#
# To see whether token k reaches token q, change token k and look whether the logits of q change.
# Doing that for each k gives a picture of the model, whatever happens inside it. White is *exactly*
# zero: no bit changed.

# %%
AMBIGUOUS, RIGHT = FORMS["position_ids"], {"packed_layout": layout}


@torch.no_grad()
def influence(model, form):
    """`[TOTAL, TOTAL]`: how much the logits of token q change with token k."""
    before = model(input_ids=ids, **form).logits[0]
    moved = []
    for k in range(TOTAL):
        other = ids.clone()
        other[0, k] = (ids[0, k] + 1) % config.vocab_size
        moved.append((model(input_ids=other, **form).logits[0] - before).abs().amax(-1))
    return torch.stack(moved, dim=1).cpu()


allowed = fv.DocumentMask.of(layout).to_dense().cpu()
reached = {
    "transformers, position_ids": influence(plain, AMBIGUOUS),
    "patched": influence(patched, RIGHT),
}

figure = plt.figure(figsize=(8, 3.2), dpi=80, layout="constrained")
panels = figure.subplots(1, 3, sharey=True)
panels[0].imshow(allowed, cmap="Greys", vmax=1.6, interpolation="nearest")
panels[0].set_title("what should be", loc="left", fontsize=10)
scale = LogNorm(1e-2, max(float(moved.max()) for moved in reached.values()))
for axes, (name, moved) in zip(panels[1:], reached.items(), strict=True):
    drawn = axes.imshow(
        moved.where(moved > 0, torch.nan), cmap="viridis_r", norm=scale, interpolation="nearest"
    )
    axes.set_title(name, loc="left", fontsize=10)
figure.colorbar(drawn, ax=panels, label="change of the logits", shrink=0.7)
for axes in panels:
    for boundary in ends.tolist()[1:-1]:
        axes.axhline(boundary - 0.5, color="#222222", lw=0.4)
        axes.axvline(boundary - 0.5, color="#222222", lw=0.4)
    axes.set_xlabel("token that we change")
panels[0].set_ylabel("token whose logits change")
plt.show()

leaked = {name: int((moved[~allowed] > 0).sum()) for name, moved in reached.items()}
for name, count in leaked.items():
    print(f"{name:28} {count:6,} of {int((~allowed).sum()):,} forbidden pairs leak")

# %% [markdown]
# ## What it does to training
#
# The gradient is what the model learns. Here is the angle between the gradient of one packed row
# and that of the same documents one by one. The labels are the same; only the attention differs.

# %%
labels = ids.clone()
labels[0, ends[:-1].long()] = -100  # nothing in a document predicts its first token


def gradient(calls):
    """All gradients as one vector, summed over calls (model, arguments, weight of the loss)."""
    calls = list(calls)
    calls[0][0].zero_grad()
    for model, arguments, weight in calls:
        (model(**arguments).loss * weight).backward()
    return torch.cat([p.grad.flatten() for p in calls[0][0].parameters()]).double()


def cosine(one, other):
    """The cosine of the angle between two vectors: 1 if they have the same direction."""
    return (one @ other / one.norm() / other.norm()).item()


counted = (labels != -100).sum().item()
documents = [part[None] for part in ids[0].split(LENGTHS)]
right = gradient(
    (plain, {"input_ids": part, "labels": part}, (part.numel() - 1) / counted) for part in documents
)
inputs = {"input_ids": ids, "labels": labels}
agree = {
    "transformers, position_ids": cosine(gradient([(plain, inputs | AMBIGUOUS, 1)]), right),
    "patched": cosine(gradient([(patched, inputs | RIGHT, 1)]), right),
}
for name, value in agree.items():
    print(f"{name:28} cosine with the right gradient: {value:.6f}")

# %% [markdown]
# ## `verify_isolation`: the check
#
# It takes any transformers model, patched or not, and a batch like those you train on. It replaces
# some documents by others and watches every layer's outputs, the logits and the gradients of all
# other documents. If a bit changes, it raises and says where.

# %%
try:
    fv.verify_isolation(plain, {"input_ids": ids, **AMBIGUOUS})
except fv.IsolationError as leak:
    caught = leak
print(caught)

# %%
report = fv.verify_isolation(patched, {"input_ids": ids, **RIGHT})
print(report.sentence())

# %% [markdown]
# It also finds small leaks. Suppose that a data loader counts one token too many, so that a single
# boundary is off by one. The loss hardly shows it. (`layout=` gives the true boundaries.)

# %%
off_by_one = list(LENGTHS)
off_by_one[0] += 1
off_by_one[1] -= 1
wrong = fv.PackedLayout.from_lengths(off_by_one, device=DEVICE)
with torch.no_grad():
    for name, used in {"right boundaries": layout, "one off by one": wrong}.items():
        print(f"{name:16} loss {patched(**inputs, packed_layout=used).loss.item():.3f}")

try:
    fv.verify_isolation(patched, {"input_ids": ids, "packed_layout": wrong}, layout=layout)
except fv.IsolationError as leak:
    small = leak
print(small)

# %% [markdown]
# ## Hybrid models
#
# Qwen3.5, Granite 4, Nemotron-H and others have few attention layers. The others mix tokens in two
# ways that no attention mask reaches: a convolution over the last few tokens, and a state that is
# passed on from token to token. Both run into the next document. Here is a tiny Qwen3.5, one layer
# of each kind, with the same five batches.

# %%
logging.set_verbosity_error()  # transformers says which kernels are not installed
warnings.filterwarnings("ignore", "flexvarlen: recurrent layers")  # on a CPU: slow, and right

torch.manual_seed(0)
hybrid_config = Qwen3_5TextConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    initializer_range=0.15,
)
hybrid = AutoModelForCausalLM.from_config(hybrid_config, dtype=torch.float32).to(DEVICE).eval()
patched_hybrid = fv.patch_model(copy.deepcopy(hybrid), backend=BACKEND)
hybrid_reference = alone(copy.deepcopy(hybrid).double())
hybrid_rounding = (alone(hybrid) - hybrid_reference).abs().max().item()


def error_or_refusal(model, form):
    """The error, or None where the model refuses the batch."""
    try:
        return error(model, form, hybrid_reference)
    except ValueError:
        return None


hybrid_errors = {
    name: [error_or_refusal(model, form) for model in (hybrid, patched_hybrid)]
    for name, form in FORMS.items()
}
print(f"logits reach {hybrid_reference.abs().max().item():.1f}; ", end="")
print(f"rounding alone is {hybrid_rounding:.1e}\n")
print(f"{'':32} {'transformers':>12} {'patched':>9}")
for name, found in hybrid_errors.items():
    theirs, ours = ("raises" if x is None else f"{x:.1e}" for x in found)
    print(f"{name:32} {theirs:>12} {ours:>9}")

# %% [markdown]
# In plain transformers no form is right, not even the first one. To keep documents apart it needs
# two keywords, `cu_seq_lens_q` for the state and `seq_idx` for the convolution, and the packages of
# their kernels; with the first keyword alone, documents leak through the convolution. The check
# names the layer.

# %%
try:
    fv.verify_isolation(hybrid, {"input_ids": ids, **FORMS["position_ids, use_cache=False"]})
except fv.IsolationError as leak:
    state = leak
print(state)

# %%
hybrid_report = fv.verify_isolation(patched_hybrid, {"input_ids": ids, **RIGHT})
print(hybrid_report.sentence())

# %% [markdown]
# ## Where to put the check
#
# - once by hand, with your model and a batch from your own collator, as above;
# - in training: `fv.IsolationCallback`, see notebook 3;
# - in your tests: the pytest fixture of `flexvarlen.verify.isolation.fixture`;
# - in a shell: `flexvarlen verify --help`.
#
# [Verification](../docs/verification.md) has the details.
#
# ## Checks

# %%
first, *others = errors.values()
assert first[0] < 4 * rounding  # transformers is right in this one form
assert all(theirs > 1000 * rounding for theirs, _ in others)
assert all(ours < 4 * rounding for _, ours in errors.values())

# Not one forbidden pair, to the last bit, and the picture is not empty.
assert leaked["patched"] == 0 < leaked["transformers, position_ids"]
assert (reached["patched"][allowed] > 0).float().mean() > 0.9

assert agree["patched"] > 0.999999 > 0.99 > agree["transformers, position_ids"]

assert caught.layer == 0
assert caught.kind == "attention"
assert small.source != small.target
assert report.num_docs == len(LENGTHS)

# The hybrid: transformers leaks or raises in every form; patched, no form does.
assert all(
    theirs is None or theirs > 1000 * hybrid_rounding for theirs, _ in hybrid_errors.values()
)
assert all(ours < 4 * hybrid_rounding for _, ours in hybrid_errors.values())
assert (state.layer, state.kind) == (0, "linear attention")
assert hybrid_report.num_docs == len(LENGTHS)
assert FULL or hybrid_report.gradients == "bits"
print("all checks passed")
