"""examples/image_chat_sft.py: what it learns and saves."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
import typer

import flexvarlen as fv
from tests.packing.chat_processors import image, processor_of
from tests.slow import with_slow

COLOURS = ("red", "blue")


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def qwen3_vl(tokenizer):
    """A Qwen3-VL model for the tokens of a tokenizer."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {"vocab_size": len(tokenizer), "rope_parameters": rope, **SIZES, **HEADS}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"patch_size": 14, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, **dict(zip(special, ids, strict=True))
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def gemma3(tokenizer):
    """A Gemma 3 model for the tokens of a tokenizer."""
    layers = ["sliding_attention", "full_attention"]
    text = {"vocab_size": len(tokenizer), "layer_types": layers, "sliding_window": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text | SIZES | HEADS,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.fixture(params=with_slow([qwen3_vl, gemma3], [gemma3]))
def folder(request, tmp_path, monkeypatch):
    """A tiny model, and chats about images of two colours, the last without any."""
    processor = processor_of(request.param.__name__, tmp_path)
    own = type(processor).from_pretrained  # AutoProcessor needs torchvision for videos
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", own)
    torch.manual_seed(0)
    request.param(processor.tokenizer).save_pretrained(tmp_path)
    chats = []
    for count, colour in enumerate(COLOURS * 6):
        path = tmp_path / f"{colour}.png"
        image(30, 20, colour).save(path)
        asked = [{"type": "image", "path": str(path)}, {"type": "text", "text": "which colour?"}]
        answer = [{"type": "text", "text": f"it is {colour} " * (1 + count % 4)}]
        chats.append([("user", asked), ("assistant", answer)])
    chats.append([("user", "a question"), ("assistant", "it is red")])
    lines = [
        json.dumps({"messages": [{"role": role, "content": x} for role, x in chat]})
        for chat in chats
    ]
    (tmp_path / "chats.jsonl").write_text("\n\n".join(lines))
    return tmp_path


def test_chats_with_images_are_learned_and_what_is_saved_loads_alone(load, folder, capsys):
    out, script = folder / "out", load("image_chat_sft")
    data = folder / "chats.jsonl"
    script.main(str(folder), data, lora=4, tokens=128, learning_rate=1e-2, epochs=3, out=out)
    said = re.search(r"rows: (\d+\.\d+), then (\d+\.\d+)", capsys.readouterr().out)
    before, after = map(float, said.groups())
    assert after < before - 0.2
    documents = script.Documents(
        script.read_chats(data), transformers.AutoProcessor.from_pretrained(out)
    )
    assert len(documents) == 13
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    base.load_adapter(out)
    assert not fv.is_patched(base)
    trained = {name for name, _ in base.named_parameters() if "lora" in name}
    assert trained
    assert not any("visual" in name or "vision" in name for name in trained)
    held_out = [documents[0], documents[10]]
    found = []
    for document in held_out:
        inputs = {name: torch.as_tensor(value) for name, value in document.items()}
        per_token = ("input_ids", "mm_token_type_ids", "token_type_ids")
        inputs |= {name: inputs[name][None] for name in per_token if name in inputs}
        is_answer = inputs.pop("assistant_masks")[None] == 1
        labels = inputs["input_ids"].masked_fill(~is_answer, -100)
        with torch.no_grad():
            found.append((base(**inputs, labels=labels).loss.item(), is_answer.sum().item()))
    mean = sum(loss * count for loss, count in found) / sum(count for _, count in found)
    assert mean == pytest.approx(after, abs=2e-4)


def test_one_chat_is_refused(load, folder):
    (folder / "one.jsonl").write_text((folder / "chats.jsonl").read_text().split("\n")[0])
    with pytest.raises(typer.BadParameter, match="needs two chats, as one is held out, got 1"):
        load("image_chat_sft").read_chats(folder / "one.jsonl")
