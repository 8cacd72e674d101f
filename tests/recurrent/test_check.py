"""fla's kernels are compared with the recurrence before use, once; wrong ones are not used."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

import flexvarlen as fv
from flexvarlen.attention.auto.check_results import WrongResultError
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.forward import recurrent_layers
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_configs import fla_configs_are_used
from flexvarlen.recurrent.fla_kernels import check
from flexvarlen.recurrent.fla_kernels.check import Scan
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from flexvarlen.recurrent.layer_functions import mamba2_scan
from tests.recurrent.cases import CASES
from tests.tiny_models import new_model

CPU = torch.device("cpu")
SCANS = {
    "gated delta rule": ((2, 4), (8, 16), "gated_delta"),
    "Kimi's delta rule": ((2, 2), (8, 16), "kimi_delta"),
    "Mamba-2's scan": ((2, 4), (8, 16), "mamba2"),
}
pytestmark = pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document")


def scan_of(kind, trees=False, dtype=torch.float32):
    heads, dims, _ = SCANS[kind]
    return Scan(kind, heads, dims, dtype, trees)


def in_plain_torch(kind, factor=1.0):
    """What fla's operator gives, by transformers' function, one document after another."""
    run = CASES[SCANS[kind][2]]()[0]

    def operator(*given):
        count = len(Boundaries._fields)
        inputs, parents = given[:-count], Boundaries(*given[-count:]).parents
        sizes = {} if parents is None else {"parents": check.PARENTS}
        make = PackedLayout.from_lengths if parents is None else PackedLayout.from_tree
        documents = RecurrentDocuments(make(check.LENGTHS, **sizes))
        if kind != "Mamba-2's scan":
            return [run(documents, *inputs) * factor]
        C, B, v, g = inputs  # the step of time is the decay, and is taken out of the values
        return [_scan(documents, C, B, v, g) * factor]

    return operator


def _scan(documents, C, B, v, g):
    plain = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    decay = torch.full((v.shape[2],), -1.0)
    return mamba2_scan(plain, documents, v / -g[..., None], -g, decay, B, C, chunk_size=16)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("kind", SCANS)
def test_the_recurrence_is_transformers(kind, trees, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setitem(check.OPERATORS, kind, in_plain_torch(kind))
    scan = scan_of(kind, trees)
    documents = check._documents(scan, check.LENGTHS, CPU)
    check._compare(scan, documents)
    monkeypatch.setitem(check.OPERATORS, kind, in_plain_torch(kind, 1.05))
    with pytest.raises(WrongResultError, match=r"its output is off by 0\.0"):
        check._compare(scan, documents)


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The scans that are compared, on a machine of its own."""
    found = []
    monkeypatch.setenv("FLEXVARLEN_CACHE", str(tmp_path))
    monkeypatch.setattr(check.cache_keys, "machine", lambda device: "a machine")
    monkeypatch.setattr(check, "why_nothing_runs", lambda device: None)
    monkeypatch.setattr(check, "in_own_thread", lambda device, work: work())
    monkeypatch.setattr(check, "in_own_threads", lambda device, works: [x() for x in works])
    monkeypatch.setattr(check, "_documents", lambda scan, lengths, device: lengths)
    for step in ("_run_forward", "_run_backward"):
        monkeypatch.setattr(check, step, lambda scan, lengths: None)
    monkeypatch.setattr(check, "_compare", lambda scan, lengths: found.append(scan))
    monkeypatch.setattr(check, "_known", {})
    return found


def test_once_on_a_machine(compared):
    scan = scan_of("gated delta rule")
    for _ in range(2):
        assert check._why_wrong(*scan, 0) is None
        assert check._known.popitem()[1] is None  # another process
    assert compared == [scan]
    assert check.noted(CPU) == ["gated delta rule, 2/4 heads of 8/16, float32"]
    assert check._why_wrong(*scan_of("gated delta rule", trees=True), 0) is None
    assert len(compared) == 2


def test_what_is_wrong_does_not_run(compared, monkeypatch):
    def wrong(scan, device):
        compared.append(scan)
        raise WrongResultError("its dk is off by 3")

    monkeypatch.setattr(check, "_compare", wrong)
    with pytest.warns(UserWarning, match="its dk is off by 3.*plain torch runs it"):
        why = check._why_wrong(*scan_of("Mamba-2's scan"), 0)
    assert "failed a check of Mamba-2's scan" in why
    assert check._why_wrong(*scan_of("Mamba-2's scan"), 0) == why
    assert len(compared) == 1
    assert check.noted(CPU) == []


def test_a_kernel_that_is_tuned_on_the_small_row(compared, monkeypatch):
    """Triton tunes it at its first launch, for rows of all lengths."""
    for step in ("_run_forward", "_run_backward"):
        monkeypatch.setattr(check, step, lambda scan, lengths: compared.append(sum(lengths)))
    scan = scan_of("gated delta rule")
    assert check._why_wrong(*scan, 0) is None
    assert compared == [7168, 7168, scan]


def test_what_is_compiled_meanwhile(compared):
    """Once, where a scan is checked, and by nobody where it is known."""
    q, boundaries, ran = torch.ones(1, 4, 2, 8), Boundaries(CPU, CPU), []
    for _ in range(2):
        why = check.why_wrong("gated delta rule", q, q, boundaries, lambda: ran.append(1))
        assert why is None
    assert len(compared) == len(ran) == 1


def test_ours_fail_but_flas_own_are_right(compared, monkeypatch):
    """Then fla times its own, and what is noted is not about ours."""
    ours = [True]
    monkeypatch.setattr(check, "whose_configs", lambda: ", ours" * len(ours))
    monkeypatch.setattr(check, "let_fla_time_its_own", lambda: bool(ours and ours.pop()))

    def wrong_with_ours(scan, device):
        compared.append(scan)
        if ours:
            raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(check, "_compare", wrong_with_ours)
    scan = scan_of("gated delta rule")
    with pytest.warns(UserWarning, match="shared memory.*so fla times its own"):
        assert check._why_wrong(*scan, 0) is None
    assert compared == [scan, scan]
    assert check.noted(CPU) == [str(scan)]
    check._known.clear()
    ours.append(True)  # another process
    with pytest.warns(UserWarning, match="so fla times its own"):
        assert check._why_wrong(*scan, 0) is None
    assert compared == [scan] * 3


def test_heads_of_dynamic_shapes(compared):
    """Their number follows from that of the tokens, of which Dynamo knows no value."""

    def twice(x):
        q = x.reshape(1, x.shape[1], -1, 8)
        why = check.why_wrong("gated delta rule", q, q, Boundaries(x, x, None, None))
        return x * 2 if why is None else x

    compiled = torch.compile(twice, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (5, 6):
        x = torch.ones(1, tokens, 16)
        assert torch.equal(compiled(x), 2 * x)
    assert [scan.heads for scan in compared] == [(2, 2)]


def test_the_first_forward_leaves_attention_to_its_layers(monkeypatch):
    """Else its kernels would be compiled before those of the recurrent layers, not beside them."""
    model, prepared = fv.patch_model(new_model("qwen3_5_text")), []
    prepare = PackedForward.prepare

    def counted(packed, *args, **kwargs):
        prepared.append(packed)
        prepare(packed, *args, **kwargs)

    monkeypatch.setattr(PackedForward, "prepare", counted)
    row = {
        "input_ids": torch.arange(3, 40)[None],
        "packed_layout": PackedLayout.from_lengths([9, 28]),
    }
    expected = model(**row).logits
    monkeypatch.setattr(recurrent_layers, "is_first_forward", lambda device: True)
    assert torch.equal(model(**row).logits, expected)
    assert len(prepared) == 2
    assert prepared[1].recurrent.meanwhile is None


def kernels_that_are_timed(monkeypatch):
    """Names, from now on; Triton removes configurations before it times the others."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    names, prune_configs = set(), autotuner.prune_configs

    def noted(kernel, kwargs):
        names.add(kernel.base_fn.__name__)
        return prune_configs(kernel, kwargs)

    monkeypatch.setattr(autotuner, "prune_configs", noted)
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("kind", SCANS)
def test_on_a_gpu(kind, trees, monkeypatch):
    pytest.importorskip("fla")
    device = torch.device("cuda", 0)
    heads, dims = SCANS[kind][0], (64, 64)
    scan = Scan(kind, heads, dims, torch.bfloat16, trees)
    rows = [check._documents(scan, x, device) for x in (check.TUNED, check.LENGTHS)]
    timed = kernels_that_are_timed(monkeypatch)
    check._tune_and_compare(scan, *rows)
    if fla_configs_are_used():  # one that both threads launch must not be timed
        assert timed <= {"chunk_gla_fwd_kernel_o"}  # the forward's alone; it has no file
    right = check.OPERATORS[kind]
    monkeypatch.setitem(check.OPERATORS, kind, lambda *given: [right(*given)[0] * 1.2])
    with pytest.raises(WrongResultError, match=r"its output is off by 0\.2"):
        check._compare(scan, rows[1])
