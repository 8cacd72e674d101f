"""`fa2`, `fa3` and `fa4` on kernels of the Hub: from the disk, checked, and asked what they can."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import warnings
from pathlib import Path

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention import choose
from flexvarlen.attention.backends import registry
from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.backends.registry import our_name
from tests.attention.backends.hub_repositories import BACKENDS, lay_out, results, tensors
from tests.tiny_models import new_model

LENGTHS = [5, 1, 9]
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
KINDS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "deterministic": {"deterministic": True},
    "chunk": {"chunk": 4},
    "sinks": {},
}


def layout_of(*lengths):
    lengths = lengths or LENGTHS
    return fv.PackedLayout.from_lengths(lengths, total_tokens=max(18, sum(lengths)))


def run(backend, **options):
    """Its results for one row."""
    layout = layout_of()
    return results(backend, layout, tensors(layout), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_kernel_of_the_hub_computes_what_the_reference_does(local_kernels, name, kind):
    """Sinks too: vllm-flash-attn3 takes them and gives them no gradient, so they are ours."""
    local_kernels(name)
    layout = layout_of()
    leaves = tensors(layout, sinks=kind == "sinks")
    expected = results("reference", layout, leaves, **KINDS[kind])
    for found in (results(name, layout, leaves, **KINDS[kind]) for _ in range(2)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert hub.origin(name).startswith(str(hub.REPOSITORIES[name]))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.sampled(1)
def test_compiled_it_is_an_operator(local_kernels, name):
    """The first call of a process: the kernel is loaded and checked while the graph is traced."""
    local_kernels(name)
    torch._dynamo.reset()
    compiled = torch.compile(fv.packed_attention, backend="aot_eager")
    for lengths in (LENGTHS, [7, 8]):
        layout = layout_of(*lengths)
        leaves = tensors(layout)
        found, expected = (
            results(backend, layout, leaves, attend=attend)
            for backend, attend in ((name, compiled), ("reference", fv.packed_attention))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_model_trains_on_it_as_on_the_reference(local_kernels, kind):
    """gpt-oss would silently not have trained its sinks on vllm-flash-attn3's own."""
    local_kernels("fa3")
    model = new_model(kind).train()
    ids = torch.arange(1, 19)[None]
    gradients = []
    for backend in ("reference", "kernels-community/vllm-flash-attn3"):
        fv.patch_model(model, backend)
        model.zero_grad()
        model(input_ids=ids, labels=ids, packed_layout=layout_of(7, 11)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    sinks = [grad for name, grad in gradients[1].items() if "sinks" in name]
    assert all(grad.abs().max() > 0 for grad in sinks)
    assert bool(sinks) == (kind == "gpt_oss")


WRONG_DK = ("x[at] = part.to(x.dtype)", "x[at] = part.to(x.dtype) * (1.5 if part is dk else 1)")
NO_SOFTCAP = ("if softcap:", "if False:")
OF_THE_OFFSET = ("= x.to(q.dtype)", "= x.to(q.dtype) * (1 + 1e-5 * rows.start)")
RANDOM = ("x[at] = part.to(x.dtype)", "x[at] = part.to(x.dtype) + 1e-5 * torch.rand(())")


@pytest.mark.parametrize(
    ("name", "change", "options", "reason", "trains"),
    [
        ("fa2", WRONG_DK, {}, "wrong results: its dk is off by 0.5", False),
        ("fa3", NO_SOFTCAP, {"softcap": 0.5}, "wrong results: its output is off", True),
        ("fa4", RANDOM, {"deterministic": True}, "not deterministic: two runs differ", True),
    ],
)
def test_a_named_kernel_that_is_wrong_serves_nothing_else(
    local_kernels, name, change, options, reason, trains
):
    """It was loaded, was named, and would have trained on wrong gradients without a word."""
    local_kernels(name, change)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=f"fails the check .*{reason}.*'flex'"):
            run(name, **options)
    layout = layout_of()
    q, k, v = (x.requires_grad_(trains) for x in tensors(layout))
    found = fv.packed_attention(q, k, v, layout, backend=name)
    expected = fv.packed_attention(q, k, v, layout, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("same_id", [False, True])
def test_what_was_found_right_is_kept_for_this_build_alone(
    local_kernels, monkeypatch, tmp_path, same_id
):
    """The second build of a repository has another id, or newer files, and is checked anew."""
    local_kernels("fa2")
    run("fa2")
    first = hub._loaded.pop("fa2").module.__name__
    for name in [x for x in sys.modules if x.startswith(first)]:  # as in another process
        monkeypatch.delitem(sys.modules, name)
    choose.clear_cache()
    monkeypatch.setattr(BACKENDS["fa2"], "_kernel", None)
    folder = lay_out(tmp_path / "newer", "fa2", WRONG_DK)
    if same_id:
        metadata = Path("build", "torch-universal", "metadata.json")
        shutil.copy(tmp_path / "fa2-repository" / metadata, folder / metadata)
    monkeypatch.setenv("LOCAL_KERNELS", f"{hub.REPOSITORIES['fa2'].name}={folder}")
    with pytest.raises(NotImplementedError, match="its dk is off"):
        run("fa2")


@pytest.mark.parametrize("change", [None, OF_THE_OFFSET])
@pytest.mark.parametrize("cross", [False, True])
def test_batch_invariance_is_checked(local_kernels, change, cross):
    """Results that depend on the offset are within the tolerance, and other bits."""
    local_kernels("fa3", *[change] * (change is not None))
    layout = layout_of()
    leaves = tensors(layout, sinks=True)
    options = {"batch_invariant": True, "return_lse": False}
    options |= {"layout_k": layout_of(5, 1, 9)} if cross else {}
    results("fa3", layout, leaves, **options | {"batch_invariant": False})
    if change is None:
        results("fa3", layout, leaves, **options)
        return
    with pytest.raises(NotImplementedError, match="is not batch invariant: in another row it dif"):
        results("fa3", layout, leaves, **options)


@pytest.mark.parametrize(
    ("name", "change", "call", "lacking"),
    [
        ("fa2", ("_varlen_backward(", "_backward("), {}, "has no backward"),
        ("fa3", ("bwd(Tensor", "another(Tensor"), {}, "has no backward"),
        ("fa2", ("    softcap=0.0,\n", ""), {"softcap": 1.0}, "no parameter softcap"),
        ("fa3", (", bool deterministic = False", ""), {"deterministic": True}, "deterministic"),
        ("fa4", ("_size_left=None", "=None"), {"window": 3}, "no parameter window_size_left"),
    ],
)
def test_why_not_asks_the_module(local_kernels, name, change, call, lacking):
    local_kernels(name, change, *[('impl("bwd"', 'impl("another"')] * ("bwd" in change[0]))
    kind = {**HEADS, **call}
    assert lacking in fv.why_not(name, **kind)
    without = {"needs_grad": False} if "backward" in lacking else {}
    assert fv.why_not(name, **HEADS, **without) is None


@pytest.fixture
def online(monkeypatch):
    """HF_HUB_OFFLINE is not set, any connection or download fails the test; gives `kernels`."""
    from huggingface_hub import constants

    def connect(*_, **__):
        raise AssertionError("the network was asked")

    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(kernels, "install_kernel", connect)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    return kernels


def cached(tmp_path, backend, commit):
    """Where the cache of the Hub keeps a commit of the backend's repository."""
    name = hub.REPOSITORIES[backend].name.replace("/", "--")
    return tmp_path / "hub" / f"kernels--{name}" / "snapshots" / commit


def test_auto_takes_what_is_on_disk_and_asks_no_network(local_kernels, online, monkeypatch):
    """An online get_kernel asks the Hub even for kernels that are cached."""
    monkeypatch.setitem(registry.AUTO_ORDER, "cpu", ("fa3", "sdpa"))
    layout = layout_of()
    assert fv.explain(layout, dtype=torch.float32, **HEADS).chosen == "sdpa"
    assert "is not on disk; run: flexvarlen doctor --install" in fv.why_not("fa3", **HEADS)
    run("auto")
    assert hub.origin("fa3") is None
    local_kernels("fa3")
    choose.clear_cache()
    run("auto")
    assert hub.origin("fa3") is not None
    assert fv.explain(layout, dtype=torch.float32, **HEADS).chosen == "fa3"


def test_auto_passes_over_a_wrong_kernel(local_kernels, monkeypatch):
    monkeypatch.setitem(registry.AUTO_ORDER, "cpu", ("fa3", "sdpa"))
    local_kernels("fa3", WRONG_DK)
    with pytest.warns(UserWarning, match="fa3 failed when auto tried it .*its dk is off"):
        found = run("auto")
    torch.testing.assert_close(found, run("sdpa"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longer = layout_of(50, 60)  # of another bucket of sizes
        results("auto", longer, tensors(longer))


@pytest.mark.parametrize("kept", ["branch", "commit", "another version", "cut off"])
def test_the_cache_of_the_hub(local_kernels, online, monkeypatch, tmp_path, kept):
    """`kernels` downloads the commit of a version, which leaves no branch in the cache."""
    repository = hub.REPOSITORIES["fa2"]
    version = repository.version + (kept == "another version")
    snapshot = lay_out(cached(tmp_path, "fa2", "a" * 40), "fa2", version=version)
    if kept == "branch":
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / f"v{repository.version}").write_text("a" * 40)
        shutil.copytree(snapshot, cached(tmp_path, "fa2", "b" * 40))
    elif kept == "cut off":
        (snapshot / "build" / "torch-universal" / "metadata.json").write_text("{")
    reason = fv.why_not("fa2", **HEADS)
    if kept in ("branch", "commit"):
        assert reason is None
        assert "/aaaa" in hub._loaded["fa2"].module.__file__
    else:
        assert f"{repository} is not on disk" in reason


@pytest.mark.parametrize("named", ["packed_attention", "patch_model"])
def test_a_named_backend_is_downloaded(local_kernels, online, monkeypatch, tmp_path, named):
    asked = []

    def install(name, *, revision, **_):
        asked.append((name, revision))
        return lay_out(cached(tmp_path, "fa3", "c" * 40), "fa3")

    monkeypatch.setattr(online, "install_kernel", install)
    assert fv.why_not("fa3", **HEADS) is not None
    assert asked == []
    if named == "patch_model":
        fv.patch_model(new_model("llama"), backend="kernels-community/vllm-flash-attn3")
    for _ in range(2):
        run("flash_attention_3")
    assert asked == [("kernels-community/vllm-flash-attn3", "v1")]


def test_offline_is_obeyed(local_kernels):
    with pytest.raises(NotImplementedError, match="unset HF_HUB_OFFLINE and run: flexvarlen doc"):
        run("fa4")


def test_transformers_switch_turns_kernels_of_the_hub_off(local_kernels, monkeypatch):
    local_kernels("fa3")
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    with pytest.raises(NotImplementedError, match="USE_HUB_KERNELS turns kernels of the Hub off"):
        run("fa3")


def test_a_download_that_fails_says_why_and_is_tried_again(local_kernels, online, monkeypatch):
    errors = [OSError("no route"), FileNotFoundError("Cannot find a build variant\nmore")]

    def install(*_, **__):
        raise errors.pop(0)

    monkeypatch.setattr(online, "install_kernel", install)
    for expected in ("OSError: no route", "FileNotFoundError: Cannot find a build variant"):
        with pytest.raises(NotImplementedError, match=rf"cannot be downloaded \({expected}\)"):
            run("fa2")
    assert errors == []


def test_a_named_backend_that_is_here_asks_no_network(local_kernels, online, tmp_path):
    """Refused for another reason, such as a prefix, it would have asked the Hub."""
    lay_out(cached(tmp_path, "fa2", "e"), "fa2")
    with pytest.raises(NotImplementedError, match="fa2 has no prefixes"):
        run("fa2", prefix=[1, 0, 2])


def test_a_build_of_another_torch_is_downloaded_for_this_one(
    local_kernels, online, monkeypatch, tmp_path
):
    """The snapshot in the cache has the one build that the torch of then asked for."""
    builds = lay_out(cached(tmp_path, "fa2", "d"), "fa2") / "build"
    (builds / "torch-universal").rename(builds / "torch20-cxx11-cu118-x86_64-linux")
    assert "does not load here (" in fv.why_not("fa2", **HEADS)
    here = lay_out(tmp_path / "elsewhere", "fa2") / "build" / "torch-universal"
    monkeypatch.setattr(online, "install_kernel", lambda *_, **__: shutil.move(here, builds))
    run("fa2")


def test_a_build_that_needs_other_kernels_is_left(local_kernels, online, tmp_path):
    """`kernels` 0.17 would load them from the Hub, for auto too."""
    local_kernels("fa2")
    (file,) = tmp_path.glob("fa2-repository/build/*/metadata.json")
    needs = {"kernel-depends": [{"repo-id": "a/b", "version": 1}]}
    file.write_text(json.dumps(json.loads(file.read_text()) | needs))
    assert "needs other kernels, which would be loaded" in fv.why_not("fa2", **HEADS)


def test_a_build_that_does_not_load_says_why(local_kernels):
    local_kernels("fa2", ("from . import attention", "import no_such_library"))
    reason = fv.why_not("fa2", **HEADS)
    assert "does not load here (ModuleNotFoundError: No module named 'no_such" in reason


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("kernels-community/vllm-flash-attn3", "fa3"),
        ("kernels-community/flash-attn3", "fa3"),
        ("kernels-community/flash-attn2@v3", "fa2"),
        ("kernels-community/flash-attn2:flash_attn_varlen_func", "fa2"),
        ("kernels-community/flash-attn4@main:flash_attn_varlen_func", "fa4"),
        ("someone/flash-attn4", "someone/flash-attn4"),
        ("kernels-community/vllm-flash-attn3/more", "kernels-community/vllm-flash-attn3/more"),
    ],
)
def test_a_name_of_the_hub_is_its_backend(name, backend):
    assert our_name(name) == backend


def test_the_names_are_those_of_the_installed_transformers():
    """5.17 has the versions in a function, 5.22 and later in a table; both answer here."""
    from transformers.integrations.hub_kernels import get_attn_kernel_version
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

    for number in (2, 3, 4):
        theirs = FLASH_ATTN_KERNEL_FALLBACK[f"flash_attention_{number}"]
        ours = hub.REPOSITORIES[f"fa{number}"]
        assert (ours.name, ours.version) == (theirs, get_attn_kernel_version(theirs))


def test_the_version_of_kernels_is_what_transformers_asks_for(monkeypatch):
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    asked = hub._requirement().specifier
    assert {KERNELS_MIN_VERSION, KERNELS_MAX_VERSION.removesuffix(".0")} == {
        x.version for x in asked
    }
    monkeypatch.setattr(hub, "find_spec", lambda name: name)
    monkeypatch.setattr(hub, "version", {"kernels": "0.1", "transformers": "5.24.0"}.get)
    problem = hub.problem_of_kernels("fa4")
    assert problem.reason == f"kernels is 0.1, and transformers 5.24.0 needs kernels{asked}"
    assert problem.remedy.startswith(f"pip install 'kernels[curated]{asked}'")
