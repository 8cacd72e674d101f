"""`python -m flexvarlen.bench.contract.leaks`: what leaks in plain transformers, and what here.

Tiny Llama and Qwen3 with random weights; the same documents in every form that a packed (or padded)
batch can take. Each form's logits are compared with those of each document alone in fp64, at the
same positions. A form is right if its largest error is at most 4 times that of each document alone
in the dtype of the run, at the positions the form has.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

import flexvarlen as fv
from flexvarlen.bench.contract.batch_forms import FORMS, LENGTHS, Form, documents_of
from flexvarlen.bench.contract.leaks_tables import leaks_section
from flexvarlen.measure import environment
from flexvarlen.rows import Row, append_row, one_line

SUITE = "leaks"
VOCABULARY = 97
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}

# Of the peer's error: two orders of the same sums, and a safety factor of 2.
FACTOR = 4.0


def tiny_model(name: str) -> PreTrainedModel:
    """Two layers, 4 query heads on 2 KV heads; weights so large that logits spread over units."""
    config = CONFIGS[name](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def alone(
    model: PreTrainedModel, documents: Sequence[Tensor], starts: Sequence[int]
) -> list[Tensor]:
    """fp64 logits of each document, run alone from its position on."""
    logits = []
    for ids, start in zip(documents, starts, strict=True):
        positions = torch.arange(start, start + len(ids), device=ids.device)[None]
        with torch.no_grad():
            out = model(input_ids=ids[None], position_ids=positions, use_cache=False)
        logits.append(out.logits[0].double())
    return logits


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest absolute difference over all documents; NaN if there is one."""
    return max(
        ((a - b).abs().max() for a, b in zip(found, expected, strict=True)),
        key=lambda x: float("inf") if torch.isnan(x) else float(x),
    ).item()


class Column:
    """One implementation, on one model: a way to make the model, or the reason there is none."""

    def __init__(self, name: str, base: PreTrainedModel, dtype: torch.dtype) -> None:
        self.name = name
        self.model: PreTrainedModel | None = None
        self.reason: str | None = None
        model = copy.deepcopy(base)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        kind, _, rest = name.partition(":")
        try:
            if kind == "transformers":
                model.set_attn_implementation(rest)
            else:
                fv.patch_model(model, rest)
        except (ImportError, ValueError, NotImplementedError) as error:
            self.reason = f"not run here. {one_line(error)}"
        else:
            self.model = model


def run_form(model: PreTrainedModel, form: Form, ids: Tensor) -> list[Tensor]:
    """The packed logits, document by document, in fp64."""
    batch = form.batch(ids)
    model.train(form.train)
    with torch.no_grad():
        logits = model(**batch.inputs).logits
    model.eval()
    return [logits[row, tokens].double() for row, tokens in batch.places]


def measure(
    model_name: str, columns: Sequence[str], dtype: torch.dtype, device: torch.device
) -> list[Row]:
    """Every form on every implementation of one model."""
    base = tiny_model(model_name).to(device)
    oracle, peer = copy.deepcopy(base).double(), copy.deepcopy(base)
    for parameter in peer.parameters():
        parameter.data = parameter.data.to(dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=generator).to(device)
    documents = documents_of(ids)
    where = environment(device)
    made = [Column(name, base, dtype) for name in columns]
    rows = []
    for form in FORMS:
        expected = alone(oracle, documents, form.starts)
        scale = max(logits.abs().max().item() for logits in expected)
        peer_error = largest_error(alone(peer, documents, form.starts), expected)
        limit = FACTOR * (peer_error + torch.finfo(dtype).eps * scale)
        for column in made:
            case = {
                "form": form.name,
                "implementation": column.name,
                "model": model_name,
                "dtype": str(dtype).removeprefix("torch."),
            }
            make_row = _row_maker(case, where)
            if column.model is None:
                rows.append(make_row("unsupported", column.reason, {}))
                continue
            try:
                found = run_form(column.model, form, ids)
            except (ValueError, NotImplementedError) as error:  # a refusal, in a sentence
                rows.append(make_row("unsupported", f"refused. {one_line(error)}", {}))
                continue
            except torch.OutOfMemoryError as error:
                rows.append(make_row("oom", one_line(error), {}))
                continue
            except (RuntimeError, TypeError, IndexError, AttributeError) as error:
                rows.append(make_row("failed", one_line(error), {}))
                continue
            worst = largest_error(found, expected)
            measures = {"max_error": worst, "limit": limit, "largest_logit": scale}
            right = worst <= limit
            why = None if right else f"largest error {worst:.2g}, at most {limit:.2g} is right"
            rows.append(make_row("ok" if right else "wrong", why, measures))
    return rows


def _row_maker(case: dict[str, str], where: dict[str, object]) -> Callable[..., Row]:
    def make(status: str, reason: str | None, measures: dict[str, float]) -> Row:
        return Row(SUITE, case, status, reason, measures, where)  # type: ignore[arg-type]

    return make


def default_backends(device: torch.device) -> list[str]:
    """The backends without `--backend`: per-document SDPA on the CPU, all kernels on CUDA."""
    return ["sdpa"] if device.type == "cpu" else ["sdpa", "flex", "varlen", "fa2"]


def main(argv: list[str] | None = None) -> list[Row]:
    """Run every form and print the table; rows go to `--out`, if given."""
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.contract.leaks",
        description=(__doc__ or "").partition("\n")[0],
    )
    add = parser.add_argument
    add("--out", type=Path, help="JSON lines to append to")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32; on CUDA bfloat16")
    add("--backend", nargs="+", choices=fv.BACKENDS, help="default: all that can run")
    add("--models", nargs="+", choices=sorted(CONFIGS), default=sorted(CONFIGS))
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    columns = [f"transformers:{name}" for name in ("eager", "sdpa", "flash_attention_2")]
    columns += [f"flexvarlen:{name}" for name in args.backend or default_backends(device)]
    rows = [row for name in args.models for row in measure(name, columns, dtype, device)]
    if args.out is not None:
        for row in rows:
            append_row(args.out, row)
    sys.stdout.write(leaks_section(rows) + "\n")
    return rows


if __name__ == "__main__":
    main()
