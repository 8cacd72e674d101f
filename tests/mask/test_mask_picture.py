"""The picture of a mask: a PNG with the states of its blocks, and sentences for refusals.

`test_block_mask.py` holds the states of all blocks against brute force.
"""

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.mask.picture import (
    COLORS,
    FULL,
    PARTIAL,
    boundaries,
    default_block_size,
)


def test_png_shows_each_state_where_it_is(tmp_path):
    # 128 queries: document 0 full below its diagonal, document 1 too; nothing between them.
    layout = PackedLayout.from_lengths([64, 64])
    path = DocumentMask.of(layout).save_picture(tmp_path / "new" / "mask.png", block_size=16)
    assert path.read_bytes().startswith(b"\x89PNG")
    picture = imread(path)[..., :3]
    shares = [(abs(picture - to_rgb(color)).max(-1) < 0.02).mean() for color in COLORS]
    assert min(shares) > 0.02
    assert shares[FULL] > shares[PARTIAL]  # 2 · 6 blocks full, 2 · 4 partial


def test_no_state_of_pyplot_is_left(tmp_path):
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
