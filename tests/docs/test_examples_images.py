"""examples/image_chat_sft.py: what it learns and saves."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
import typer

import flexvarlen as fv
from tests.packing.chat_processors import Qwen3VLWithoutVideos, image, processor_of

COLOURS = ("red", "blue")


def save_tiny_model(folder, processor):
    """A Qwen3-VL model for the tokens of a processor."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = processor.tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {"vocab_size": len(processor.tokenizer), "rope_parameters": rope, **sizes, **heads}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"patch_size": 14, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, **dict(zip(special, ids, strict=True))
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model, and chats about images of two colours, the last without any."""
    processor = processor_of("qwen3_vl", tmp_path)
    own = Qwen3VLWithoutVideos.from_pretrained
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", own)
    save_tiny_model(tmp_path, processor)
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
    documents = script.Documents(script.read_chats(data), Qwen3VLWithoutVideos.from_pretrained(out))
    assert len(documents) == 13
    base = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    base.load_adapter(out)
    assert not fv.is_patched(base)
    trained = {name for name, _ in base.named_parameters() if "lora" in name}
    assert trained
    assert not any("visual" in name for name in trained)
    held_out = [documents[0], documents[10]]
    found = []
    for document in held_out:
        inputs = {name: torch.as_tensor(value) for name, value in document.items()}
        inputs |= {name: inputs[name][None] for name in ("input_ids", "mm_token_type_ids")}
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
