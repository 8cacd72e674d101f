"""The picture of a mask: the right block in the right place, a PNG, sentences for refusals."""

import matplotlib as mpl
import pytest
import torch
from matplotlib.image import imread

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.mask.picture import (
    COLORS,
    EMPTY,
    FULL,
    PARTIAL,
    block_states,
    boundaries,
    default_block_size,
)

LENGTHS = [40, 1, 0, 90, 33]
KEYS = [10, 5, 7, 120, 0]
OPTIONS = [
    {},
    {"causal": False},
    {"window": 17},
    {"causal": False, "window": (3, 30)},
    {"chunk": 16},
    {"prefix": 20},
    {"layout_k": PackedLayout.from_lengths(KEYS, total_tokens=150)},
]


def by_brute_force(mask, block_size):
    """0, 1, 2 of each block, from its pairs; one cut off by the row's end is never full."""
    dense = mask.to_dense()
    block_q, block_k = block_size
    num_q, num_k = -(-dense.shape[0] // block_q), -(-dense.shape[1] // block_k)
    states = torch.full((num_q, num_k), EMPTY, dtype=torch.int8)
    for i in range(num_q):
        for j in range(num_k):
            pairs = dense[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            whole = pairs.numel() == block_q * block_k
            if pairs.any():
                states[i, j] = FULL if whole and pairs.all() else PARTIAL
    return states


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_size", [(16, 16), (32, 8)])
def test_each_block_is_what_its_pairs_say(options, block_size):
    mask = DocumentMask.of(PackedLayout.from_lengths(LENGTHS, total_tokens=170), **options)
    states = block_states(mask, block_size)
    assert torch.equal(states, by_brute_force(mask, block_size))
    assert 100.0 * (1 - states.count_nonzero().item() / states.numel()) == pytest.approx(
        mask.sparsity(block_size)
    )


def test_png_shows_each_state_where_it_is(tmp_path):
    # 128 queries: document 0 full below its diagonal, document 1 too; nothing between them.
    layout = PackedLayout.from_lengths([64, 64])
    path = DocumentMask.of(layout).save_picture(tmp_path / "new" / "mask.png", block_size=16)
    assert path.read_bytes().startswith(b"\x89PNG")
    picture = imread(path)[..., :3]
    shares = []
    for color in COLORS:
        near = abs(picture - mpl.colors.to_rgb(color)).max(-1) < 0.02
        shares.append(near.mean())
        assert near.mean() > 0.02, color
    full, partial = shares[FULL], shares[PARTIAL]
    assert full > partial  # 2 · 6 blocks full, 2 · 4 partial


def test_no_state_of_pyplot_is_left(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    DocumentMask.of(PackedLayout.from_lengths([5, 7])).save_picture(tmp_path / "a.png")
    assert pyplot.get_fignums() == before


def test_default_block_grows_with_the_row(tmp_path):
    short = DocumentMask.of(PackedLayout.from_lengths([100]))
    assert default_block_size(short) == (128, 128)
    assert default_block_size(DocumentMask.of(PackedLayout.from_lengths([65_536]))) == (128, 128)
    long = DocumentMask.of(PackedLayout.from_lengths([65_537, 200_000]))
    assert default_block_size(long) == (1024, 1024)
    assert long.save_picture(tmp_path / "long.png").exists()


def test_longer_keys_count_for_the_default_block(tmp_path):
    keys = PackedLayout.from_lengths([100_000])
    mask = DocumentMask.of(PackedLayout.from_lengths([64]), layout_k=keys)
    assert default_block_size(mask) == (256, 256)
    assert mask.save_picture(tmp_path / "cross.png").exists()


def test_documents_too_many_to_draw(tmp_path):
    mask = DocumentMask.of(PackedLayout.from_lengths([1] * 1000))
    assert mask.save_picture(tmp_path / "many.png").exists()


def test_boundaries_are_inside_the_row_and_once_each():
    assert boundaries(PackedLayout.from_lengths([3, 0, 2], total_tokens=9)) == [3, 5]
    assert boundaries(PackedLayout.from_lengths([3])) == []


def test_sentences_for_what_cannot_be_drawn(tmp_path):
    mask = DocumentMask.of(PackedLayout.from_lengths([20_000]))
    with pytest.raises(ValueError, match=r"must end in \.png"):
        mask.save_picture(tmp_path / "mask.pdf")
    with pytest.raises(ValueError, match="at most 8192 blocks a side"):
        mask.save_picture(tmp_path / "mask.png", block_size=1)
    with pytest.raises(ValueError, match="block_size must be"):
        mask.save_picture(tmp_path / "mask.png", block_size=0)
    nothing = DocumentMask.of(PackedLayout.from_lengths([0]))
    with pytest.raises(ValueError, match="nothing to draw"):
        nothing.save_picture(tmp_path / "mask.png")
    assert list(tmp_path.iterdir()) == []
