"""Documents with images, packed into rows of two limits: tokens and patches."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import flexvarlen as fv
from tests.packing.test_pieces import of_arrow, of_list, of_tensors, of_transform
from tests.patches.models import images
from tests.tiny_models import new_model

PACKERS = (fv.PackedDataset, fv.StreamPacker)
SIZES = ((30, 8), (12, 0), (20, 16), (9, 16), (50, 24), (7, 0), (30, 12), (12, 0), (30, 8))


def example(number, tokens, patches):
    """Patches tell whose they are."""
    given = {"input_ids": [100 * number + i for i in range(tokens)]}
    given["mm_token_type_ids"] = [int(0 < i <= patches // 4) for i in range(tokens)]
    given["pixel_values"] = [[float(number)] * 3] * patches or None
    given["image_grid_thw"] = [[1, 2, patches // 2]] if patches else None
    return given


EXAMPLES = [example(i, *size) for i, size in enumerate(SIZES)]


def check(rows, max_patches):
    """Each document once, with its own patches, and no row beyond a limit."""
    found = []
    for row in rows:
        assert sum(x["input_ids"].size for x in row) <= 64
        patches = sum(len(x.get("pixel_values", ())) for x in row)
        assert patches <= (max_patches or 1000)
        for document in row:
            number = int(document["input_ids"][0]) // 100
            found.append(number)
            tokens, patches = SIZES[number]
            own = np.asarray(document.get("pixel_values", np.ones((0, 3))))
            assert document["input_ids"].size == tokens
            assert (own == number).all()
            assert len(own) == patches
    assert sorted(found) == list(range(len(SIZES)))
    return len(rows)


@pytest.mark.parametrize("source", [of_list, of_arrow, of_tensors, of_transform])
@pytest.mark.parametrize("max_patches", [None, 24])
def test_rows_hold_each_document_with_its_images(source, max_patches):
    rows = fv.PackedDataset(source(EXAMPLES), 64, max_patches=max_patches)
    lengths = rows.row_lengths
    for epoch in (0, 1, 2):
        rows.set_epoch(epoch)
        check(list(rows), max_patches)
        assert [[x["input_ids"].size for x in row] for row in rows] == lengths
    assert rows.num_long == rows.num_dropped == 0


def test_the_second_limit_takes_rows():
    packed = [fv.PackedDataset(EXAMPLES, 64, max_patches=most) for most in (None, 24)]
    fewer, more = (check(list(rows), most) for rows, most in zip(packed, (None, 24), strict=True))
    assert fewer < more
    assert fewer == len(fv.pack([tokens for tokens, _ in SIZES], 64))


@pytest.mark.parametrize("max_patches", [None, 24])
def test_a_stream(max_patches):
    check(list(fv.StreamPacker(EXAMPLES, 64, buffer=4, max_patches=max_patches)), max_patches)


def test_a_state_of_another_limit_is_refused():
    state = fv.StreamPacker(EXAMPLES, 64, max_patches=24).state_dict()
    with pytest.raises(
        ValueError, match="max_patches must be 24, as when the state was saved, got 30"
    ):
        fv.StreamPacker(EXAMPLES, 64, max_patches=30).load_state_dict(state)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("limits", [{"tokens": 45}, {"tokens": 64, "max_patches": 20}])
@pytest.mark.parametrize("long", ["split", "truncate"])
def test_images_are_never_cut(packer, limits, long):
    with pytest.raises(ValueError, match=r"4\]? .*must fit into a row.* got 50 tokens and 24 pat"):
        list(packer(EXAMPLES, long=long, **limits))
    texts = [EXAMPLES[1], {"input_ids": list(range(100))}]
    assert list(packer(texts, long=long, **limits))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("limits", [{"tokens": 45}, {"tokens": 64, "max_patches": 20}])
def test_images_that_are_too_large_are_dropped(packer, limits):
    rows = packer(EXAMPLES, long="drop", **limits)
    kept = {int(x["input_ids"][0]) // 100 for row in rows for x in row}
    assert kept == set(range(len(SIZES))) - {4}
    assert rows.num_long == 1


def test_tiles_count_as_patches():
    """Of SmolVLM, `[1, images, ...]`, and of LLaVA-NeXT, `[images, tiles, ...]`."""
    mask = {"pixel_attention_mask": np.ones((1, 4, 8, 8))}
    for pixels, others in (
        ((1, 4, 3, 8, 8), mask),
        ((2, 2, 3, 8, 8), {"image_sizes": [[8, 8]] * 2}),
    ):
        one = {"input_ids": [1, 2], "labels": [1, 2], "pixel_values": np.ones(pixels), **others}
        rows = list(fv.PackedDataset([one] * 3, 100, max_patches=8))
        assert sorted(map(len, rows)) == [1, 2]
        batch = fv.PackedCollator()(max(rows, key=len))
        assert batch["pixel_values"].numel() == 2 * np.prod(pixels)
        assert len(batch["pixel_values"]) == (1 if others is mask else 4)


# ---- time ----


def large_feature(rng, pixels):
    """As a processor returns it, with up to 4 images of 256 to 1,500 tokens, views of one store."""
    ids, grid = [rng.integers(100, 1000, rng.integers(50, 400))], []
    for _ in range(rng.integers(0, 5)):
        height, width = 2 * rng.integers(16, 39, 2)
        ids += [[images.BEGIN], [images.IMAGE] * (height * width // 4), [images.END]]
        grid.append((1, height, width))
    ids = torch.from_numpy(np.concatenate(ids))[None]
    types = (ids == images.IMAGE).long()
    found = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    patches = sum(height * width for _, height, width in grid)
    more = {"pixel_values": pixels[:patches], "image_grid_thw": torch.tensor(grid)}
    return found | more if grid else found


def least_s(call):
    """Seconds of a core, the best of three runs: other processes share the machine."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


@pytest.mark.slow
def test_ten_thousand_documents_with_images():
    """2 s of a core to pack, and 20 ms to collate a row of 8,192 tokens.

    The pixels are narrow: those of a model take as long to join as the memory takes to copy them.
    """
    rng, pixels = np.random.default_rng(0), torch.zeros(4 * 76 * 76, 4)
    documents = [large_feature(rng, pixels) for _ in range(10_000)]
    pack_s = least_s(lambda: fv.PackedDataset(documents, 8192))
    row = fv.PackedDataset(documents, 8192)[3]
    collate = fv.PackedCollator(total_tokens=8192, model=new_model("qwen3_vl"))
    collate_s = least_s(lambda: collate(row))
    print(f"pack {pack_s:.2f} s; collate {len(row)} documents {1e3 * collate_s:.0f} ms")
    assert pack_s < 2
    assert collate_s < 0.020
