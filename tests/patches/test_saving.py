"""What a patched model saves loads, and runs, where there is no flexvarlen."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from tests.tiny_models import lora, new_model

IDS = torch.arange(3, 40)[None]

LOADS = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flexvarlen":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
try:
    import flexvarlen
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("flexvarlen is there")

import json
import pathlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

root = pathlib.Path(sys.argv[1])
ids = torch.arange(3, 40)[None]
made = {}
for folder in sorted(x for x in root.iterdir() if x.is_dir()):
    try:
        if (folder / "adapter_config.json").exists():
            import peft

            model = AutoModelForCausalLM.from_pretrained(root / "patched")
            model = peft.PeftModel.from_pretrained(model, folder)
        elif (folder / "weights.pt").exists():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root / "patched"))
            model.load_state_dict(torch.load(folder / "weights.pt"))
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
        model.eval()
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            made[folder.name] = model(ids).logits, model.generate(ids, **settings)
    except Exception as error:
        made[folder.name] = f"{type(error).__name__}: {error}"
assert not any(name.split(".")[0] == "flexvarlen" for name in sys.modules)
torch.save(made, root / "made.pt")
"""


def patched(backend="sdpa"):
    return fv.patch_model(new_model("qwen3_windows"), backend)


def trained():
    """A zero gradient: the weights stay, all else is as after training."""
    model = patched("auto").train()
    (0 * model(IDS, labels=IDS, position_ids=IDS - 3).loss).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def loaded_by_name(folder):
    """What was saved before, loaded with our name, and patched."""
    named = {"attn_implementation": "flexvarlen_doc"}
    model = AutoModelForCausalLM.from_pretrained(folder / "patched", **named)
    return fv.patch_model(model, "reference")


MIXED = {"full_attention": "sdpa", "sliding_attention": "reference"}
SAVED = {
    "patched": lambda _: patched(),
    "mapping": lambda _: patched(MIXED),
    "name_alone": lambda _: new_model("qwen3_windows", implementation="flexvarlen_doc"),
    "after_training": lambda _: trained(),
    "compiled": lambda _: torch.compile(patched(), backend="eager"),
    "unpatched": lambda _: fv.unpatch_model(patched()),
    "twice": loaded_by_name,
    "adapter": lambda _: lora(patched()),
    "merged": lambda _: lora(patched()).merge_and_unload(),
}
"""What makes a model to save, of the folder where those before it are."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By what was saved: logits and tokens of the loaded model, or why there are none."""
    root = tmp_path_factory.mktemp("saved")
    for name, make in SAVED.items():
        make(root).save_pretrained(root / name)
    (root / "state_dict").mkdir()
    torch.save(patched().state_dict(), root / "state_dict" / "weights.pt")
    done = subprocess.run([sys.executable, "-c", LOADS, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(root / "made.pt")


@pytest.mark.parametrize("name", [*SAVED, "state_dict"])
def test_loads_where_there_is_no_flexvarlen(made, name):
    plain = new_model("qwen3_windows")
    if name in ("adapter", "merged"):
        plain = lora(plain)
    if name == "merged":
        plain = plain.merge_and_unload()
    assert not isinstance(made[name], str), made[name]
    logits, tokens = made[name]
    with torch.no_grad():
        torch.testing.assert_close(logits, plain(IDS).logits, rtol=1e-5, atol=1e-5)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(tokens, plain.generate(IDS, **settings))


def test_nothing_of_ours_is_among_the_weights():
    model = new_model("qwen3_windows")
    names = list(model.state_dict())
    assert list(fv.patch_model(model, "sdpa").state_dict()) == names
    model(IDS, position_ids=IDS - 3).logits.sum().backward()
    assert list(model.state_dict()) == names


def test_weights_of_an_unpatched_model_load_into_a_patched_one(tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    other = new_model("qwen3")
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=1e-4, atol=1e-3)
