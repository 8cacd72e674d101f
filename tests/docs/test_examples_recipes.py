"""examples/chat_sft.py, generate.py and embeddings.py: what they learn, save and refuse."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
import torch
import typer
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    ModernBertConfig,
)

import flexvarlen as fv
from tests.docs.scripts import ROOT, TINY, save_tiny_model

MARKED = """{% for message in messages %}<{{ message.role }}>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<e>{% endgeneration %}
{% else %}{{ message.content }}<e>
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
TEXT = "packed rows of many documents, a mask and a kernel"
ANSWERS = ["packed " * count for count in range(1, 31)]


def chat_of(*contents):
    """A user's and an assistant's messages, in turn."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny chat model, and chats of very different lengths."""
    folder = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    tokens = {"eos_token": "<e>", "pad_token": "<p>", "chat_template": MARKED}
    save_tiny_model(folder / "tiny", (TEXT, MARKED), **tokens)
    lines = [json.dumps({"messages": chat_of("say it", each)}) for each in ANSWERS]
    (folder / "chats.jsonl").write_text("\n\n".join(lines))
    return folder


def mean_loss(model, documents):
    """Of the tokens that are learned, each document alone in float64."""
    losses = []
    for each in documents:
        ids, mask = (torch.tensor(each[name]) for name in ("input_ids", "assistant_masks"))
        logits = model.double()(ids[None]).logits[0, :-1]
        losses.append(cross_entropy(logits, ids[1:], reduction="none")[mask[1:] == 1])
    return torch.cat(losses).mean().item()


def answers(load, capsys, model, questions):
    """What generate.py prints."""
    capsys.readouterr()
    load("generate").main(str(model), questions, max_new_tokens=8)
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"lora": 0, "checkpointing": True}], ids=["lora", "whole"])
def test_chats_are_learned_and_what_is_saved_loads_alone(load, folder, tmp_path, capsys, options):
    """And the losses that it prints are means over the tokens of each held-out chat alone."""
    out, data = tmp_path / "out", folder / "chats.jsonl"
    sft = load("chat_sft")
    inputs = {"model": str(folder / "tiny"), "data": data, "tokens": 256}
    sft.main(**inputs, **options, learning_rate=1e-2, out=out)
    said = capsys.readouterr().out
    printed = [float(x) for x in re.search(r"token: (\d+\.\d+), then (\d+\.\d+)", said).groups()]

    chats = sft.read_chats(data, AutoTokenizer.from_pretrained(out))
    held_out = [document for chat in chats[::10] for document in chat]
    found = []
    for path in (folder / "tiny", out):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert not fv.is_patched(model)
        with torch.no_grad():
            found.append(mean_loss(model, held_out))
    assert printed == pytest.approx(found, abs=2e-4)
    assert printed[1] < printed[0] - 0.1
    assert "flexvarlen" not in "".join(path.read_text() for path in out.glob("*.json"))
    weights = {path.name for path in out.glob("*.safetensors")}
    assert weights == {"model.safetensors" if options else "adapter_model.safetensors"}

    # Padding of the shorter question changes nothing.
    questions = ["rows", "many documents, a mask and a kernel"]
    together = answers(load, capsys, out, questions)
    assert together == "".join(answers(load, capsys, out, [each]) for each in questions)
    assert all(re.search(rf"> {question}\n\S", together) for question in questions)


GOOD = json.dumps({"messages": chat_of("a", "b")})
PAIR = {"anchor": "a", "positive": "b"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        *(
            ([GOOD, "", line, GOOD], r"cannot train on line 3 of .*file\.jsonl")
            for line in ("{'messages': 1}", '{"messages": []}', '{"text": "no chat"}', "[1]")
        ),
        ([], "two chats, as one is held out, got 0"),
        ([GOOD], "two chats, as one is held out, got 1"),
    ],
)
def test_chats_that_are_none_are_refused(load, folder, tmp_path, lines, message):
    file, tokenizer = tmp_path / "file.jsonl", AutoTokenizer.from_pretrained(folder / "tiny")
    file.write_text("\n".join(lines))
    with pytest.raises(typer.BadParameter, match=message):
        load("chat_sft").read_chats(file, tokenizer)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "two pairs, as one is held out, got 0"),
        ([PAIR], "two pairs, as one is held out, got 1"),
        ([{"question": "a", "answer": "b"}] * 2, r"'anchor' and 'positive', got \['question'"),
        ([PAIR, {"anchor": "c"}], "'positive', got none in object 2"),
    ],
)
def test_pairs_that_are_none_are_refused(load, tmp_path, pairs, message):
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    with pytest.raises(typer.BadParameter, match=message):
        load("embeddings").read_pairs(tmp_path / "pairs.jsonl")


def test_the_template_of_the_page_trains_the_answers(folder):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    template = re.search(r"^    {% for message.*?\n\n", page, re.MULTILINE | re.DOTALL)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    chat = chat_of("rows", "many documents") + chat_of("a mask", "and a kernel")
    tokenizer.chat_template = textwrap.dedent(template)
    (found,) = fv.tokenize_chat(chat, tokenizer)
    end = tokenizer.eos_token
    answers = [x for x, y in zip(*found.values(), strict=True) if y]
    assert tokenizer.decode(answers) == f"many documents{end}and a kernel{end}"


def test_no_file_and_no_template_are_refused(load, folder, tmp_path):
    inputs = {"model": str(tmp_path / "plain"), "out": tmp_path / "out"}
    with pytest.raises(typer.BadParameter, match=r"--data must be a file, got .*nothing\.jsonl"):
        load("chat_sft").main(**inputs, data=tmp_path / "nothing.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(typer.BadParameter, match="pass one: --chat-template"):
        load("chat_sft").main(**inputs, data=folder / "chats.jsonl")


def test_chats_that_are_cut_are_counted(load, folder, tmp_path, capsys):
    lines = [chat_of("say it " * count, "packed " * 5) for count in (1, 1, 3, 30, 60)]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({"messages": each}) for each in lines))
    sft = load("chat_sft")
    _, *learned = sft.read_chats(data, AutoTokenizer.from_pretrained(folder / "tiny"))
    sizes = [len(document["input_ids"]) for (document,) in learned]
    tokens = sizes[1] - 1  # the second loses the end of its answer, two others all of it
    sft.main(str(folder / "tiny"), data, tokens=tokens, out=tmp_path / "out")
    said = capsys.readouterr().out
    assert "Documents cut: 3; left out: 2." in said


def test_four_bits_need_bitsandbytes(load, folder, monkeypatch):
    sft = load("chat_sft")
    monkeypatch.setattr(sft, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(typer.BadParameter, match="pip install bitsandbytes"):
        sft.load_model(str(folder / "tiny"), 4, qlora=True)


def test_embeddings_learn_the_same_padded_and_packed(load, folder, tmp_path, capsys, monkeypatch):
    """The same losses and gradients; what is saved loads in sentence-transformers alone."""
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    tokenizer.save_pretrained(tmp_path / "encoder")
    ids = dict.fromkeys(("bos_token_id", "cls_token_id", "sep_token_id", "eos_token_id"), 1)
    sizes = {name: size for name, size in TINY.items() if name != "head_dim"}
    config = ModernBertConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, pad_token_id=0, **sizes, **ids
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "encoder")
    texts = [TEXT[i:] + TEXT[: i % 7] for i in range(34)]
    pairs = [{"positive": text[len(text) // 2 :], "anchor": text} for text in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    embeddings = load("embeddings")
    inputs = {"model": str(tmp_path / "encoder"), "data": tmp_path / "pairs.jsonl"}
    logs, vectors, patched = [], [], []
    patch = fv.patch_model
    monkeypatch.setattr(
        fv,
        "patch_model",
        lambda *args, **options: patched.append((patch(*args, **options), options)),
    )
    for padded in (True, False):
        out = tmp_path / f"out-{padded}"
        embeddings.main(**inputs, batch=3, learning_rate=1e-3, padded=padded, out=out)
        said = capsys.readouterr().out
        logs.append([float(x) for x in re.findall(r"'(?:loss|grad_norm)': '([^']+)'", said)])
        vectors.append(st.SentenceTransformer(str(out), device="cpu").encode(texts[:5]))
    ((model, options),) = patched
    assert fv.is_patched(model)
    assert options == {"unpad": True}
    assert len(logs[0]) == 2  # of the tenth step
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)
    assert cosine_similarity(*map(torch.tensor, vectors)).min() > 0.9999
