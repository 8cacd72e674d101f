"""Packing of documents into rows of a fixed number of tokens, and of rows into batches.

| module | holds |
|---|---|
| `pack.py` | `pack` decides which documents share a row; `split_long`; `efficiency` |
| `dataset.py` | `PackedDataset`, a dataset of packed rows |
| `stream.py` | `StreamPacker`, the same for a stream |
| `stream_position.py` | where it is in a stream, for its state |
| `examples.py` | how both read examples and cut them |
| `chat.py` | `tokenize_chat` turns a chat into documents, `conversation_samples` into samples |
| `chat_template.py` | the prompt and the answer of a turn, as a chat template writes them |
| `chat_images.py` | the images and videos of a chat: a processor's tokens and tensors |
| `chat_messages.py` | the messages of a chat, and which answers are trained on |
| `prefixes.py` | `share_prefixes` and `TreeCollator` turn samples into trees |
| `tree_picture.py` | draws trees |
| `collator.py` | `PackedCollator` concatenates documents into one row of fixed shape |
| `columns.py` | the columns that `PackedCollator` accepts, as rows of arrays |
| `images.py` | the columns of images and videos: read, checked, joined |
| `rope_index.py` | positions of images' tokens, by a model's `get_rope_index` |
| `tree_images.py` | images that samples share |
| `row_cost.py` | `RowCost`: what documents cost a model, by token and by pair in attention |
| `sampler.py` | `BalancedSampler` shuffles rows so that ranks have equal work |
| `loader_pass.py` | the state of accelerate's data loader that the sampler and the collators need |
"""

from flexvarlen.packing.chat import conversation_samples, tokenize_chat
from flexvarlen.packing.collator import PackedCollator
from flexvarlen.packing.dataset import PackedDataset
from flexvarlen.packing.pack import efficiency, pack, split_long
from flexvarlen.packing.row_cost import RowCost
from flexvarlen.packing.sampler import BalancedSampler
from flexvarlen.packing.stream import StreamPacker
from flexvarlen.parallel.pieces import Piece

__all__ = [
    "BalancedSampler",
    "PackedCollator",
    "PackedDataset",
    "Piece",
    "RowCost",
    "StreamPacker",
    "conversation_samples",
    "efficiency",
    "pack",
    "split_long",
    "tokenize_chat",
]
