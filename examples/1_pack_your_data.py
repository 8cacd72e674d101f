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
# # 1. Pack your data, and see what padding wasted
#
# A batch is a tensor: all its rows have the same number of tokens. Documents do not. There are two
# solutions:
#
# - **Padding**: one document a row, filled up to the length of the longest with padding tokens. The
#   model computes on them too.
# - **Packing**: several documents in one row, with nothing between them. The attention must then
#   know where one document ends and the next begins, or they see each other.
#
# This notebook measures what the first costs, does the second, and shows what the model gets. It
# needs no GPU and downloads nothing: the texts are Python's own help topics.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image, display
from matplotlib.ticker import FuncFormatter

import flexvarlen as fv
from flexvarlen.packing import efficiency
from flexvarlen.report.figure import STYLES
from flexvarlen.verify.corpus import read_documents, train_tokenizer

FULL = torch.cuda.is_available()  # the same cells, at a larger size
ROW = 8192 if FULL else 4096  # tokens of a row
VOCABULARY = 8192 if FULL else 1024
ROWS_A_BATCH = 8
MILLION = 1_000_000 if FULL else 50_000  # lengths for the timing at the end

REAL, WASTE, INK = STYLES["fa2"].color, STYLES["flex"].color, "#222222"
plt.rcParams.update({"font.size": 9, "figure.dpi": 80, "axes.edgecolor": "#A0A0A0"})

# %% [markdown]
# ## How long are the documents?
#
# With your own files: `read_documents(["notes.txt"])`. Any lists of token ids will do.

# %%
texts = read_documents()
tokenizer = train_tokenizer(texts, VOCABULARY)  # a small byte-level BPE, trained on the texts
documents = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
lengths = np.array([len(ids) for ids in documents])

print(f"{len(documents)} documents, {lengths.sum():,} tokens")
print(f"shortest {lengths.min()}, median {np.median(lengths):.0f}, longest {lengths.max():,}")


def plain(axes, title):
    """The style of all figures here."""
    axes.set_title(title, loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return axes


axes = plain(plt.figure(figsize=(7, 2.6), layout="constrained").subplots(), "Lengths of documents")
edges = 2.0 ** np.arange(np.floor(np.log2(lengths.min())), np.ceil(np.log2(lengths.max())) + 0.5)
axes.hist(lengths, bins=edges, color=REAL, edgecolor="white")
axes.set_xscale("log", base=2)
axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
axes.set_xlabel("tokens")
axes.set_ylabel("documents")
plt.show()

# %% [markdown]
# The axis is logarithmic: the longest document is hundreds of times as long as the shortest.
#
# A model has a maximum row length. Longer documents must be cut in any case; `split_long` says
# where.

# %%
pieces = fv.split_long(lengths, ROW)
sizes = np.array([piece.stop - piece.start for piece in pieces])
print(f"{len(documents)} documents became {len(pieces)} pieces of at most {ROW:,} tokens")
print(f"the longest document is {lengths.max() / lengths.min():.0f} times the shortest")

# %% [markdown]
# ## What padding costs
#
# Documents in random order, eight in a batch, each batch padded to its longest document. A common
# remedy is to sort by length first, so that a batch holds documents of similar length. That wastes
# less, but batches are no longer random, and the last ones hold all the longest documents.


# %%
def padded_tokens(order):
    """Tokens of all batches, padding included."""
    batches = [sizes[order[i : i + ROWS_A_BATCH]] for i in range(0, len(order), ROWS_A_BATCH)]
    return sum(len(batch) * batch.max() for batch in batches)


shuffled = np.random.default_rng(0).permutation(len(sizes))
rows = fv.pack(sizes, ROW)

computed = {
    "padded, random order": padded_tokens(shuffled),
    "padded, sorted by length": padded_tokens(np.argsort(sizes)),
    "packed": len(rows) * ROW,
}
real = sizes.sum()
for name, tokens in computed.items():
    print(f"{name:25} {tokens:9,} tokens computed, {1 - real / tokens:6.1%} of them wasted")

# %% [markdown]
# `pack` takes the documents longest first and puts each into the fullest row in which it fits
# ("best fit decreasing"). None is cut. Two other strategies keep more of the order.

# %%
for strategy in ("best_fit_decreasing", "first_fit", "in_order"):
    found = fv.pack(sizes, ROW, strategy=strategy)
    print(f"{strategy:20} {len(found):4} rows, {efficiency(sizes, found, ROW):6.1%} full")

# %% [markdown]
# ## Before and after
#
# The first two padded batches, and the same documents packed. Each shade is a document; padding is
# hatched. The computation grows with the area.


# %%
def draw_rows(axes, drawn):
    """A bar a row, a segment a document; the rest of its width is hatched."""
    for y, (row, width) in enumerate(drawn):
        start = 0
        for number, length in enumerate(row):
            shade = ("#0072B2", "#56B4E9", "#80B5D8")[number % 3]
            axes.barh(y, length, left=start, height=0.86, color=shade, edgecolor="white", lw=0.5)
            start += length
        axes.barh(y, width - start, left=start, height=0.86, color="white", edgecolor=WASTE)
        axes.patches[-1].set(hatch="////", linewidth=0.4)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, ROW)
    axes.set_yticks([])


sample = sizes[shuffled[: 2 * ROWS_A_BATCH]]
batches = [sample[:ROWS_A_BATCH], sample[ROWS_A_BATCH:]]
before = [([length], batch.max()) for batch in batches for length in batch]
after = [(sample[row].tolist(), ROW) for row in fv.pack(sample, ROW)]

figure = plt.figure(figsize=(7, 4.6), layout="constrained")
panels = figure.subplots(2, 1, sharex=True, height_ratios=[len(before), len(after)])
for axes, name, drawn in zip(panels, ("Padded", "Packed"), (before, after), strict=True):
    share = sample.sum() / sum(width for _, width in drawn)
    plain(axes, f"{name}: {len(sample)} documents in {len(drawn)} rows, {share:.0%} full")
    draw_rows(axes, drawn)
panels[1].set_xlabel("token of the row")
plt.show()

# %% [markdown]
# ## What the model gets
#
# `PackedCollator` makes a batch from the documents of a row. It adds three things to the tokens:
#
# - `position_ids` restart at 0 in each document.
# - `labels` are -100 (no loss) at each document's first token, which the previous document must not
#   predict.
# - `packed_layout` says where the documents are. The attention needs it.
#
# Here is the boundary between the first two documents of the row with the most documents.

# %%
most = max(rows, key=len)
chosen = [documents[pieces[i].document][pieces[i].start : pieces[i].stop] for i in most]
collate = fv.PackedCollator(total_tokens=ROW)
packed = collate(chosen)
layout = packed["packed_layout"]
boundary = int(layout.cu_seqlens[1])

print("shapes:", {name: tuple(packed[name].shape) for name in ("input_ids", "labels")})
print("documents:", [len(ids) for ids in chosen])
print(f"\n{'token':>6}  {'text':12} {'position':>8} {'label':>6}")
for i in range(boundary - 3, boundary + 3):
    token = int(packed["input_ids"][0, i])
    position, label = int(packed["position_ids"][0, i]), int(packed["labels"][0, i])
    print(f"{i:6}  {tokenizer.decode([token])!r:12} {position:8} {label:6}")
    if i == boundary - 1:
        print("  ---- here one document ends, and the next begins ----")

# %% [markdown]
# ## Who may see whom
#
# The mask of a packed row: one triangle per document, in which each token sees those before it, and
# nothing between documents. Attention is computed in blocks, and a kernel skips the empty ones.

# %%
mask = fv.DocumentMask.of(layout)
picture = mask.save_picture("mask.png", block_size=ROW // 64)
display(Image(picture.read_bytes(), width=460))

# %% [markdown]
# In most models image tokens are causal, as text is. In Gemma 3 and 4 the tokens of an image see
# one another in both directions: a square on the diagonal. Here are two documents of 24 tokens;
# the first has an image of 12 tokens.

# %%
two = fv.PackedLayout.from_lengths([24, 24])
is_image = torch.zeros(48, dtype=torch.bool)
is_image[6:18] = True
of_image = fv.DocumentMask.of(two, runs=is_image)
picture = of_image.save_picture("image_mask.png", block_size=1)
display(Image(picture.read_bytes(), width=460))

# %% [markdown]
# So packing saves work twice: no token is padding, and no pair of tokens from different documents
# is computed. A row packed without such a mask pays for all those pairs and gives wrong results:
# notebook 4 shows how wrong.

# %%
own = np.array([len(ids) for ids in chosen])
pairs = {
    "each document alone": int((own * (own + 1) // 2).sum()),
    "packed, with the mask": mask.num_pairs(),
    "packed, one triangle": fv.DocumentMask.of(fv.PackedLayout.from_lengths([ROW])).num_pairs(),
    "padded": len(own) * int(own.max()) * (int(own.max()) + 1) // 2,
}
for name, count in pairs.items():
    print(f"{name:22} {count:12,} pairs of tokens")

# %% [markdown]
# ## Is packing slow?
#
# It runs once, on the host, on the lengths alone. Here are many more lengths, drawn from a
# log-normal distribution.

# %%
many = np.random.default_rng(0).lognormal(6, 1, MILLION).astype(int).clip(1, ROW)
begin = time.perf_counter()
many_rows = fv.pack(many, ROW)
took = time.perf_counter() - begin
filled = efficiency(many, many_rows, ROW)
print(f"{MILLION:,} documents into {len(many_rows):,} rows in {took:.2f} s, {filled:.2%} full")

# %% [markdown]
# For an endless stream, `fv.StreamPacker` packs within a bounded buffer. On several GPUs,
# `fv.BalancedSampler` gives the ranks rows of similar cost in each step.
#
# ## Checks

# %%
# No piece is lost or repeated, and no row is too long.
assert sorted(i for row in rows for i in row) == list(range(len(pieces)))
assert max(sizes[row].sum() for row in rows) <= ROW

# Packing wastes least: at most one row more than if documents could be cut anywhere.
assert computed["packed"] < computed["padded, sorted by length"] < computed["padded, random order"]
assert len(rows) <= -(-real // ROW) + 1

# The batch says where documents start: positions restart there, and there is no label.
starts = layout.cu_seqlens[: len(chosen)].long()
assert (packed["position_ids"][0, starts] == 0).all()
assert (packed["labels"][0, starts] == -100).all()
assert packed["input_ids"][0, : own.sum()].tolist() == [token for ids in chosen for token in ids]

# The mask keeps exactly the pairs that the documents alone have.
assert pairs["packed, with the mask"] == pairs["each document alone"] < pairs["padded"]
seen = of_image.to_dense()
assert seen[6:18, 6:18].all()
assert not seen[:24, 24:].any()
assert filled > 0.99
print("all checks passed")
