"""Threads that run patched models at once get what each would get alone."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

import flexvarlen as fv
from flexvarlen.attention.backends import compiled_flex
from flexvarlen.patches.attention.without_patch import _is_first_unpacked
from tests import forms
from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import batch_of, config_of, exact_and_baseline, new_model

# As many tokens in each: only the documents tell them apart.
BATCHES = [
    batch_of((docs,), row_tokens=256)
    for docs in [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 3, 4), (1, 5, 0, 4, 2, 3)]
]
ROUNDS = 12


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    """Every 10 µs, not 5 ms: a whole forward of a tiny model would go undisturbed."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def at_once(count, work):
    """What `work(i)` gives in `count` threads that start together."""
    barrier = threading.Barrier(count)

    def started(i):
        barrier.wait(timeout=60)
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))


BESIDE = {"cu_seq_lens": ("positions",)}


def patched(kind, backend="sdpa"):
    return fv.patch_model(new_model(kind), backend)


def by_name(kind):
    return new_model(kind, implementation="flexvarlen_doc")


def logits_of(model, i, form="position_ids"):
    """Of a few forwards, one after another: of this thread's batch, mostly."""
    with torch.no_grad():
        outs = []
        for n in range(ROUNDS):
            batch = BATCHES[(i + n % 3) % len(BATCHES)]
            given = forms.given(form, batch, *BESIDE.get(form, ()))
            outs.append((batch, model(batch.ids, **given).logits[0]))
    return outs


def check(kind, outs):
    for batch, logits in outs:
        exact, baseline = exact_and_baseline(kind, batch.order)
        assert_as_accurate(logits, exact.logits, baseline.logits, 2)


@pytest.mark.parametrize(
    ("kind", "form", "make"),
    [
        ("llama", "position_ids", (patched,)),
        ("qwen3_windows", "document_ids", (patched,)),
        ("llama", "cu_seq_lens", (patched,)),
        # layers find there what the first one left behind
        ("qwen3_windows", "position_ids", (by_name,)),
        ("llama", "cu_seq_lens", (by_name,)),
        # of other backends
        ("qwen3_windows", "position_ids", (patched, partial(patched, backend="reference"))),
    ],
)
def test_forwards_at_once(kind, form, make):
    models = [each(kind) for each in make]
    for outs in at_once(4, lambda i: logits_of(models[i % len(models)], i, form)):
        check(kind, outs)


def test_flex_calls_its_compiled_kernel_in_one_thread_at_a_time(monkeypatch):
    """torch 2.13 counts what fullgraph=True compiled for all threads together."""
    inside, most = [], []

    def kernel(q, *args):
        inside.append(q)
        most.append(len(inside))
        time.sleep(0.02)  # another thread's turn
        inside.pop()
        return q, None

    monkeypatch.setattr(compiled_flex, "_compiled", lambda *args: kernel)
    layout, q = fv.PackedLayout.from_lengths([9, 7]), torch.randn(16, 1, 16)
    with torch.no_grad():
        at_once(3, lambda i: fv.packed_attention(q, q, q, layout, backend="flex"))
    assert most == [1, 1, 1]


def test_gradients_of_two_models():
    """Both in training, of other documents."""
    models = [patched("qwen3").train() for _ in range(2)]

    def learn(i):
        batch, made = BATCHES[i], []
        for _ in range(4):
            models[i].zero_grad()
            out = models[i](batch.ids, labels=batch.ids, position_ids=batch.position_ids)
            out.loss.backward()
            made.append({name: p.grad.clone() for name, p in models[i].named_parameters()})
        return made

    for batch, made in zip(BATCHES, at_once(2, learn), strict=False):
        exact, baseline = exact_and_baseline("qwen3", batch.order)
        for gradients in made:
            assert_gradients_as_accurate(gradients, exact.gradients, baseline.gradients)


def test_one_model_patched_and_unpatched_beside_another():
    """The second shares nothing with the first but the process."""
    steady = patched("llama")
    plain = new_model("qwen3")

    def work(i):
        if i:
            return logits_of(steady, i)
        for n in range(ROUNDS):
            with fv.patched(plain, ("sdpa", "reference")[n % 2]):
                logits_of(plain, 0)
        return []

    for outs in at_once(3, work):
        check("llama", outs)
    assert plain.config._attn_implementation == "sdpa"


class AskedLlamaForCausalLM(LlamaForCausalLM):
    """Calls `asked`, once, when somebody asks for its config."""

    asked = None

    def __getattribute__(self, name):
        if name == "config":
            asked, AskedLlamaForCausalLM.asked = AskedLlamaForCausalLM.asked, None
            if asked is not None:
                asked()
        return super().__getattribute__(name)


@pytest.mark.parametrize("does", ["patch", "unpatch"])
def test_two_models_patched_or_unpatched_at_once(does):
    """While one thread looks at the patched models, another adds one, or takes one away."""
    asked, other = AskedLlamaForCausalLM(config_of("llama")), new_model("llama")
    fv.patch_model(asked, "sdpa")
    if does == "unpatch":
        fv.patch_model(other, "sdpa")
    work = fv.unpatch_model if does == "unpatch" else lambda model: fv.patch_model(model, "sdpa")
    thread = threading.Thread(target=work, args=(other,))

    def meanwhile():
        thread.start()
        thread.join(timeout=2)  # it may have to wait for us

    AskedLlamaForCausalLM.asked = meanwhile
    try:
        fv.patch_model(new_model("qwen3"), "sdpa")
    finally:
        AskedLlamaForCausalLM.asked = None
        thread.join()


def test_one_trains_while_another_generates():
    model, plain = patched("qwen3"), new_model("qwen3")
    prompt = BATCHES[0].ids[:, 5:25]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(prompt, **settings)
    other = copy.deepcopy(model)

    def work(i):
        if i:
            return [other.generate(prompt, **settings) for _ in range(3)]
        return logits_of(model, 0)

    outs, tokens = at_once(2, work)
    check("qwen3", outs)
    for x in tokens:
        assert torch.equal(x, expected)


FIRST_USE = """
import sys, threading
sys.setswitchinterval(1e-5)
import torch, transformers
import flexvarlen as fv
config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
models = [transformers.LlamaForCausalLM(config).eval() for _ in range(4)]
positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
barrier, done, one_by_one = threading.Barrier(4), [], threading.Lock()

def work(i):
    barrier.wait()
    with one_by_one:  # two at once: the test above
        fv.patch_model(models[i], ("sdpa", "reference")[i % 2])
    barrier.wait()
    with torch.no_grad():
        done.append(models[i](torch.full((1, 12), 3), position_ids=positions).logits)

threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(done) == 4, len(done)
"""


def test_a_layer_of_one_thread_goes_on_from_that_of_another():
    """Then its forward's rows are not looked at."""
    layers = new_model("llama").model.layers
    assert _is_first_unpacked(layers[0].self_attn)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(_is_first_unpacked, layers[1].self_attn).result()
    assert not _is_first_unpacked(layers[1].self_attn)


def test_first_use_in_many_threads():
    """Backends are imported on first use, and models of one config tell each other."""
    run = [sys.executable, "-c", FIRST_USE]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
