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
# # 5. Choosing a backend: auto, explain, drift
#
# A backend is an attention kernel. All of them compute the same thing, so there are three
# questions: which can run here, which is fastest for *my* shapes, and how much do their results
# differ? `why_not`, `explain` and `drift` answer them on your machine.

# %%
import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

import flexvarlen as fv
from flexvarlen.measure import time_interleaved
from flexvarlen.report.figure import STYLES, style_of
from flexvarlen.report.table import markdown
from flexvarlen.verify.compare.drift_report import DriftReport
from flexvarlen.verify.compare.pairs import model_drift
from flexvarlen.verify.experiment.operator import operator_drift
from flexvarlen.verify.experiment.operator_cases import OpCase
from flexvarlen.verify.models import build_model

FULL = torch.cuda.is_available()  # the same cells, at a larger size
DEVICE = torch.device("cuda" if FULL else "cpu")
DTYPE = torch.bfloat16
HEADS = (
    {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    if FULL
    else {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
)
TOKENS = 32_768 if FULL else 512
MODEL, MODEL_TOKENS = ("qwen3:0.6b@8", 8192) if FULL else ("llama:tiny@6", 256)

# %% [markdown]
# ## Which can run here?
#
# It depends on the machine, on what is installed, and on what you ask for. A backend that you name
# never silently falls back to another: it raises the sentence that `why_not` returns.

# %%
here = {"device": DEVICE, "dtype": DTYPE, **HEADS}
asked = {
    "plain": {},
    "forward only": {"needs_grad": False},
    "window": {"window": 128},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "deterministic": {"deterministic": True},
    "batch invariant": {"batch_invariant": True},
}
why = {
    name: {what: fv.why_not(name, **(here | options)) for what, options in asked.items()}
    for name in fv.BACKENDS
}
cells = [[name, *("no" if reason else "yes" for reason in why[name].values())] for name in why]
display(Markdown(markdown(["backend", *asked], cells)))

refused = {reason for reasons in why.values() for reason in reasons.values() if reason}
for reason in sorted(refused):
    print("-", reason)

# %% [markdown]
# ## Which is the fastest? It depends on the documents
#
# Attention computes on pairs of tokens. The same number of tokens has far fewer pairs in many short
# documents. Kernels differ in how much time that saves.

# %%
slow_by_design = ("reference", "nested") if FULL else ()
timed = [name for name in fv.available_backends(**here) if name not in slow_by_design]
counts = [1, 4, 16, 64]  # documents that share the row


def inputs():
    """q, k, v as `[T, H, D]`, with gradients."""
    heads = (HEADS["num_heads"], HEADS["num_kv_heads"], HEADS["num_kv_heads"])
    shapes = [(TOKENS, count, HEADS["head_dim"]) for count in heads]
    made = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(shape, generator=made, device=DEVICE, dtype=DTYPE).requires_grad_()
        for shape in shapes
    ]


q, k, v = inputs()
layouts = {
    count: fv.PackedLayout.from_lengths([TOKENS // count] * count, device=DEVICE)
    for count in counts
}


def step(name, layout):
    """A forward and a backward."""
    out = fv.packed_attention(q, k, v, layout, backend=name)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


timings = {
    count: time_interleaved(
        {name: lambda name=name, layout=layout: step(name, layout) for name in timed},
        device=DEVICE,
        warmup=2 if FULL else 1,
        repeats=20 if FULL else 5,
    )
    for count, layout in layouts.items()
}
pairs = {count: fv.DocumentMask.of(layout).num_pairs() for count, layout in layouts.items()}
header = ["documents", "pairs of tokens", *(f"{name}, ms" for name in timed)]
cells = [
    [str(count), f"{pairs[count]:,}", *(f"{timings[count][name].ms_p50:.2f}" for name in timed)]
    for count in counts
]
display(Markdown(markdown(header, cells)))

# %%
figure = plt.figure(figsize=(7, 3), dpi=80, layout="constrained")
axes = figure.subplots()
lengths = [TOKENS // count for count in counts]
for name in timed:
    of = [timings[count][name] for count in counts]
    look = style_of(name)
    axes.plot(lengths, [t.ms_p50 for t in of], label=name, **look.line())
    axes.fill_between(
        lengths, [t.ms_p20 for t in of], [t.ms_p80 for t in of], color=look.color, alpha=0.2, lw=0
    )
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
axes.yaxis.set_minor_locator(NullLocator())
axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
axes.set_xlabel(f"tokens of a document; {TOKENS:,} in all")
axes.set_ylabel("ms, forward and backward")
axes.set_title(f"median, and 20th to 80th percentile; {DEVICE.type}, bfloat16", loc="left")
axes.grid(True, color="#E4E4E4", linewidth=0.7)
axes.set_axisbelow(True)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)


# %% [markdown]
# ## Let it choose: `backend="auto"`
#
# On a GPU it takes the kernel that was fastest for such calls in the records that ship with
# flexvarlen, and on a CPU a fixed order. `explain` says which backend that is and why. With
# `measure=True` it times the kernels on your GPU and keeps the times in a file, which then decides.

# %%
layout = layouts[16]
explanation = fv.explain(layout, dtype=DTYPE, **HEADS, measure=True)
print(explanation.sentence())
for candidate in explanation.candidates:
    timing = candidate.timing
    ms = f"{timing.device.ms_p50:.3f} ms on the device" if timing else candidate.reason
    print(f"{candidate.name:10} {ms}")

by_auto = fv.packed_attention(q, k, v, layout, backend="auto")
by_name = fv.packed_attention(q, k, v, layout, backend=explanation.chosen)
print("\nauto gives the same bits as the backend it chose:", torch.equal(by_auto, by_name))

# %% [markdown]
# ## How far do they differ? `drift`
#
# Two kernels sum in different orders, so their results differ in a few bits. Drift is how far they
# are apart. First, attention alone:
#
# - against each document alone in float64: the **ratio** is the error over what we allow, which is
#   twice that of plain torch in the same dtype. Above 1 is wrong;
# - all documents in one call against one call for each: what packing itself changes;
# - the same call again.

# %%
lengths = (TOKENS // 4, 7, TOKENS // 16, 1, TOKENS // 8)
case = OpCase(lengths, causal=True, label="mixed lengths", **HEADS)
rows = operator_drift(
    [case],
    timed,
    device=DEVICE,
    dtypes=[DTYPE],
    comparisons=("exact", "batch-serial", "run-run", "backend-backend"),
)
attention = DriftReport(tuple(rows))
for sentence in attention.sentences():
    print("-", sentence)
for table in attention.tables():
    display(Markdown(table.markdown()))

# %% [markdown]
# ## The same in a whole model, layer by layer
#
# Differences in the first layers pass through all layers behind them. This is what rounding and a
# bug look like:
#
# - **another backend**: rounding in bfloat16;
# - **bfloat16 against float32**: rounding, of everything and not of attention alone;
# - **a leak**: transformers' own attention with its default cache, whose documents see each other
#   (notebook 4).

# %%
model, _ = build_model(MODEL, device=DEVICE, dtype=DTYPE)
model.eval()
other = next(name for name in timed if name != "sdpa")
ways = {
    f"{other} against sdpa": (other, "backend-backend"),
    f"{other}, bfloat16 against float32": (other, "dtype"),
    "a leak: sdpa, default cache": ("transformers:sdpa@default_cache", "packed-alone"),
}
found = {
    name: model_drift(
        model, None, [backend], comparisons=[comparison], tokens=MODEL_TOKENS, train=False
    )
    for name, (backend, comparison) in ways.items()
}
looks = [style_of(other), STYLES["auto"], STYLES["transformers:sdpa"]]

depth = {
    name: list(enumerate(record.measures["layers_relative"], -1))
    for name, (record,) in found.items()
}
figure = plt.figure(figsize=(7, 3), dpi=80, layout="constrained")
axes = figure.subplots()
for (name, values), look in zip(depth.items(), looks, strict=True):
    above = [(layer, value) for layer, value in values if value > 0]  # on a log axis
    axes.plot(*zip(*above, strict=True), label=name, **look.line())
axes.set_yscale("log")
axes.xaxis.set_major_locator(MaxNLocator(integer=True))
axes.set_xlabel("after layer")
axes.set_ylabel("relative difference")
axes.set_title("Hidden states: rounding, and a bug", loc="left")
axes.grid(True, color="#E4E4E4", linewidth=0.7)
axes.set_axisbelow(True)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=8)


# %%
whole = {name: record.measures for name, (record,) in found.items()}
header = ["", "logits, relative", "log-probability, mean", "same most likely token"]
cells = [
    [
        name,
        *(f"{m[key]:.1e}" for key in ("logits_relative", "logprob_mean_abs")),
        f"{m['top1']:.1%}",
    ]
    for name, m in whole.items()
]
display(Markdown(markdown(header, cells)))

# %% [markdown]
# So use `auto`; call `explain` if the speed surprises you, and `drift` if the numbers do. In a
# shell, with your own model and text: `flexvarlen drift model --model ./my-model --text notes.txt`.
# [Verification](../docs/verification.md#drift-rounding-or-a-bug) explains the measures.
#
# ## Checks

# %%
assert explanation.chosen in timed
assert torch.equal(by_auto, by_name)

# A refusal is a sentence, and every backend either runs or gives one.
assert all(reason.endswith(".") for reason in refused)
assert set(timed) <= {name for name, reasons in why.items() if reasons["plain"] is None}

# The same tokens in more documents: fewer pairs.
assert sorted(pairs.values(), reverse=True) == list(pairs.values())

# Every kernel is right by the acceptance rule, and a leak is much larger than rounding.
assert attention.passed
exact = [row for row in attention.records if row.case["comparison"] == "exact"]
ratios = [row.measures["ratio_out"] for row in exact]
assert len(ratios) == len(timed)
assert max(ratios) <= 1

rounding, everything, leak = (values[-1][1] for values in depth.values())
assert rounding < 0.2 * leak
assert everything < 0.2 * leak
print("all checks passed")
