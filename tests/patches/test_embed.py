"""`embed`: its vectors are those of sentence-transformers, on one model folder."""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.patches import embed as module
from flexvarlen.patches import embed_rows
from tests.tiny_models import VOCABULARY, config_of

KINDS = {
    "modernbert": {},
    "bert": {},
    "roberta": {},
    "qwen3": {},
    "gemma3_text": {"use_bidirectional_attention": True},
}
LONGEST = 40
embed = partial(fv.embed, progress=False)


def new_tokenizer():
    """Words t0, t1, ...; t2 begins a text and t3 ends it (t1 is padding to RoBERTa)."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="t3"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing("t2 $A t3", special_tokens=[("t2", 2), ("t3", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="t3", pad_token="t0", model_max_length=LONGEST
    )


def texts(count, longest=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (count,), generator=generator).tolist()
    draw = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"t{i}" for i in ids) for ids in draw]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, with random weights, as transformers saves it."""
    found = {}
    for kind, changes in KINDS.items():
        folder = found[kind] = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        model = AutoModel.from_config(config_of(kind, **changes))
        model.save_pretrained(folder)
        new_tokenizer().save_pretrained(folder)
    return found


def loaded(folder):
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def alone(model, tokenizer, text, pooling):
    """One text in a forward of its own, unpatched."""
    ids = tokenizer([text], truncation=True, max_length=LONGEST, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = model.eval()(input_ids=ids).last_hidden_state[0]
    return {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}.get(
        pooling, hidden.amax(0)
    )


def save_modules(folder, source, pooling, *, normalize=True, dense=(), prompts=None):
    """A copy of the model's folder with sentence-transformers' own files."""
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(source))
    width = transformer.get_embedding_dimension()
    chain = [transformer, modules.Pooling(width, pooling)]
    width *= len(pooling) if isinstance(pooling, tuple) else 1
    for out, activation in dense:
        chain.append(modules.Dense(width, out, activation_function=activation))
        width = out
    chain += [modules.Normalize()] if normalize else []
    st.SentenceTransformer(modules=chain, prompts=prompts, device="cpu").save(str(folder))
    return st.SentenceTransformer(str(folder), device="cpu")


def assert_same(ours, theirs):
    theirs = torch.as_tensor(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    assert ours.device.type == "cpu"
    assert cosine_similarity(ours, theirs, dim=-1).min() > 0.9999
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---- without sentence-transformers ----


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_has_the_vector_it_has_alone_and_keeps_its_place(folders, kind, monkeypatch):
    monkeypatch.setattr(embed_rows, "_CHUNK", 8)  # texts wait for the next chunk
    monkeypatch.setattr(module, "_READ_EVERY", 2)
    model, tokenizer = loaded(folders[kind])
    given = texts(30)
    for pooling in ("first", "mean", "last", "max"):
        ours = embed(model, given, tokenizer, pooling=pooling, tokens_per_row=96)
        expected = torch.stack([alone(model, tokenizer, text, pooling) for text in given])
        assert_same(ours, expected)
    assert not fv.is_patched(model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_of_a_gpu_are_those_of_the_cpu(folders, dtype):
    model, tokenizer = loaded(folders["modernbert"])
    given = texts(500)
    expected = embed(model, given, tokenizer, pooling="mean")
    model.to("cuda", dtype)
    ours = embed(model, given, tokenizer, pooling="mean", tokens_per_row=2048)
    least = 0.9999 if dtype == torch.float32 else 0.99
    assert cosine_similarity(ours, expected, dim=-1).min() > least


def test_a_compiled_model_is_compiled_once(folders):
    torch._dynamo.reset()  # else code that raised in a graph of another test is skipped
    model, tokenizer = loaded(folders["modernbert"])
    fv.patch_model(model)
    given = texts(60)
    eager = embed(model, given, tokenizer, pooling="cls", tokens_per_row=256)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with watch_compilation() as stats:
        ours = embed(compiled, given[:50], tokenizer, pooling="cls", tokens_per_row=256)
    assert stats.compilations <= 2  # the last row may be shorter
    assert_same(ours, eager[:50])


def test_long_and_many_short_texts(folders):
    model, tokenizer = loaded(folders["modernbert"])
    given = ["t5 " * 30, *["t7"] * 40, "t9 " * 37, ""]
    ours = embed(model, given, tokenizer, pooling="mean", tokens_per_row=16)
    expected = torch.stack([alone(model, tokenizer, text, "mean") for text in given])
    assert_same(ours, expected)


def test_no_texts_and_a_text_without_tokens(folders):
    model, _ = loaded(folders["bert"])
    tokenizer = new_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", special_tokens=[])
    ours = embed(model, ["", "t5 t6", ""], tokenizer, pooling="mean")
    assert not ours[0].any()
    assert not ours[2].any()
    assert_same(ours[1:2], alone(model, tokenizer, "t5 t6", "mean")[None])
    assert embed(model, [], tokenizer, pooling="mean").shape == (0, model.config.hidden_size)


def test_the_model_is_left_as_it_was(folders):
    model, tokenizer = loaded(folders["bert"])
    expected = embed(model, ["t4", "t5 t6"], tokenizer, pooling="mean")
    model.train()
    model.encoder.eval()
    model.embeddings.dropout.p = 0.5
    fv.patch_model(model, "sdpa")
    ours = embed(model, ["t4", "t5 t6"], tokenizer, pooling="mean")
    assert_same(ours, expected)
    assert model.training
    assert model.embeddings.training
    assert not model.encoder.training
    assert fv.is_patched(model)


def test_wrong_arguments_are_refused(folders):
    model, tokenizer = loaded(folders["bert"])
    head = AutoModelForMaskedLM.from_pretrained(folders["bert"])
    right = {"model": model, "texts": ["t4"], "tokenizer": tokenizer, "pooling": "mean"}
    wrong = (
        ("tokenizer must be the model's, got 'name'", {"tokenizer": "name"}),
        ("model must be, or wrap", {"model": "name"}),
        ("must be a base model", {"model": head}),
        ("texts must be a list", {"texts": "t4"}),
        ("texts must be a list", {"texts": 4}),
        ("pooling must be given", {"pooling": None}),
        ("pooling must be 'cls'", {"pooling": "sum"}),
        ("tokens_per_row must be", {"tokens_per_row": 0}),
        ("max_length must be", {"max_length": -1}),
        ("prompt_name must be one of", {"prompt_name": "query"}),
    )
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            embed(**right | change)
    assert embed(**right, tokens_per_row=np.int64(8)).shape[0] == 1


@pytest.mark.parametrize(("kind", "positions"), [("roberta", 30), ("bert", 32)])
def test_texts_are_cut_at_the_positions_that_the_model_has(kind, positions, tmp_path):
    """RoBERTa's table has padding_idx + 1 rows that no token takes."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config_of(kind, max_position_embeddings=32)).eval()
    model.save_pretrained(tmp_path)
    inner = new_tokenizer()
    inner.model_max_length = 10**30
    save_modules(tmp_path, tmp_path, "mean", normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 514}')
    for text_model in (model, AutoModel.from_pretrained(tmp_path)):
        given = {"pooling": "mean"}
        cut = embed(text_model, [" ".join(["t5"] * (positions - 2))], inner, **given)
        for more in (1, 100):
            text = " ".join(["t5"] * (positions - 2 + more))
            torch.testing.assert_close(embed(text_model, [text], inner, **given), cut)
        wanted = f"max_length must be at most {positions}, .* got {positions + 1}"
        with pytest.raises(ValueError, match=wanted):
            embed(text_model, ["t5"], inner, max_length=positions + 1, **given)
    for pad in (0, 3):  # the table itself is asked
        other = AutoModel.from_config(config_of(kind, max_position_embeddings=32, pad_token_id=pad))
        embed(other, [" ".join(["t5"] * 100)], inner, **given)


# ---- beside sentence-transformers ----


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_sentence_transformers(folders, kind, tmp_path):
    pooling = {"qwen3": "lasttoken", "bert": "cls", "roberta": "max"}.get(kind, "mean")
    dense = [(64, torch.nn.Identity()), (24, torch.nn.Tanh())] if kind == "gemma3_text" else ()
    prompts = {"query": "t9 t8 ", "document": "t7 "}
    theirs = save_modules(tmp_path, folders[kind], pooling, dense=dense, prompts=prompts)
    model, tokenizer = loaded(tmp_path)
    given = texts(40)
    ours = embed(model, given, tokenizer, tokens_per_row=128)
    assert_same(ours, theirs.encode(given))
    ours = embed(model, given, tokenizer, prompt_name="query")
    assert_same(ours, theirs.encode(given, prompt_name="query"))
    ours = embed(model, given, tokenizer, prompt="t11 ", max_length=12)
    theirs.max_seq_length = 12
    assert_same(ours, theirs.encode(given, prompt="t11 "))


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_patched_sentence_transformer_gives_equal_vectors(folders, kind, tmp_path):
    theirs = save_modules(tmp_path, folders[kind], "lasttoken" if kind == "qwen3" else "mean")
    given = texts(40)
    expected = theirs.encode(given)
    fv.patch_model(theirs[0].auto_model, unpad=True)
    assert_same(torch.as_tensor(theirs.encode(given)), expected)


def test_arguments_replace_what_the_folder_says(folders, tmp_path):
    theirs = save_modules(tmp_path, folders["bert"], ("cls", "mean"))
    model, tokenizer = loaded(tmp_path)
    given = texts(10)
    ours = embed(model, given, tokenizer)
    assert_same(ours, theirs.encode(given))
    assert_same(ours.norm(dim=-1), torch.ones(10))
    ours = embed(model, given, tokenizer, pooling="last", normalize=False)
    assert_same(ours, torch.stack([alone(model, tokenizer, text, "last") for text in given]))


def old_folder(folder, source, *kinds, pooling=None, sentence_bert=None):
    """A folder as sentence-transformers 2 to 5 saved it, written by hand."""
    model, tokenizer = loaded(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind.split('.')[-1]}" if i else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    flags = {"word_embedding_dimension": model.config.hidden_size, **(pooling or {})}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentence_bert or {}))
    return loaded(folder)


PREFIX = "sentence_transformers.models."
CHAIN = tuple(PREFIX + kind for kind in ("Transformer", "Pooling"))


def test_files_of_older_versions(folders, tmp_path):
    model, tokenizer = old_folder(
        tmp_path,
        folders["bert"],
        *CHAIN,
        PREFIX + "Normalize",
        pooling={"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
        sentence_bert={"max_seq_length": 16, "do_lower_case": False},
    )
    given = texts(10)
    ours = embed(model, given, tokenizer)
    cut = embed(model, given, tokenizer, pooling="mean", normalize=True, max_length=16)
    assert_same(ours, cut)
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    assert_same(ours, st.SentenceTransformer(str(tmp_path), device="cpu").encode(given))


def test_a_saved_model_is_not_read_without_sentence_transformers(folders, tmp_path, monkeypatch):
    model, tokenizer = old_folder(tmp_path, folders["bert"], *CHAIN)
    monkeypatch.setitem(sys.modules, "sentence_transformers.sentence_transformer.modules", None)
    with pytest.raises(ImportError, match="sentence-transformers must be installed"):
        embed(model, ["t4"], tokenizer, pooling="mean")


@pytest.mark.parametrize(
    ("kinds", "changes", "message"),
    [
        ((*CHAIN, PREFIX + "LayerNorm"), {}, "LayerNorm"),
        ((CHAIN[0], "custom.Pooling"), {}, "custom.Pooling"),
        (CHAIN, {"pooling": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        (CHAIN, {"sentence_bert": {"do_lower_case": True}}, "do_lower_case"),
    ],
)
def test_what_is_not_supported_is_named(folders, tmp_path, kinds, changes, message):
    model, tokenizer = old_folder(tmp_path, folders["bert"], *kinds, **changes)
    with pytest.raises(NotImplementedError, match=message):
        embed(model, ["t4"], tokenizer)
