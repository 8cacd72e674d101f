"""Chat templates and tokenizers: all of TRL's package, ten other styles, three ways to tokenize."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<call>{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STYLES = {
    "chatml": CHATML,
    "chatml, prompts alike": CHATML[: CHATML.index("{% if add_generation_prompt")],
    "chatml, no end": CHATML.replace("<|im_end|>", ""),
    "chatml, reasoning of the last alone": CHATML.replace(
        "{% if m.reasoning_content", "{% if loop.last and m.reasoning_content"
    ),
    "chatml, first call alone": CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
    "chatml, true arguments alone": CHATML.replace(
        "{{ c.function | tojson }}",
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() if v %} {{ k }}={{ v }}"
        "{% endfor %}",
    ),
    "a space behind the prompt": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.function }}{% endfor %}</s> {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "instructions": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} </s>"
        "{% else %}<s>[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
    ),
    "headlines": (
        "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
    ),
    "a prompt of its own": CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
    "parts alone": CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}"),
    "marked in part": CHATML.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    ),
}
TEXT = (Path(__file__).parent / "random_chats.py").read_text(encoding="utf-8")
SPECIAL = re.compile(r"<[|/]?[\w|-]+>|\[/?[A-Z_]+\]")


@cache
def templates() -> dict[str, str]:
    """By name: TRL's files, and the styles above."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files} | STYLES


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Trained on text, with merges: "bytes", "words" (WordPiece) or "pieces" (SentencePiece's)."""
    special = sorted({x for template in templates().values() for x in SPECIAL.findall(template)})
    if kind == "bytes":
        words = Tokenizer(models.BPE())
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "pieces":
        words = Tokenizer(models.BPE(byte_fallback=True))
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        words.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        every = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=every, show_progress=False)
    else:
        words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        words.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=900, special_tokens=["[UNK]"], show_progress=False
        )
    words.train_from_iterator([TEXT, *templates().values()], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    strips = {"rstrip": True, "lstrip": True} if kind == "pieces" else {}  # rstrip as Phi-3's
    tokens = [(x, strips if x in ("<|end|>", "</s>") else {}) for x in special]
    tokenizer.add_tokens([AddedToken(x, special=True, normalized=False, **y) for x, y in tokens])
    return tokenizer


KINDS = ("bytes", "pieces", "words")
