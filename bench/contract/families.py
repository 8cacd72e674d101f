"""`flexvarlen.bench.contract.families`: every family, on every backend, in every form of a batch.

Tiny models with random weights that have all that is special to their family. A cell's errors are
those of the packed logits, and of the gradients of all parameters, against each document alone in
fp64; it is right if they are at most twice (gradients: three times) those of each document alone in
the run's dtype, and a rounding. Its leaks are logits that change, in any bit, as another document's
tokens change.

A mixture of experts runs on `batched_mm`, whose rounding does not depend on the rest of the batch;
in half precision each token goes to every expert, as rounding alone may choose another one.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.contract.batch_forms import FORMS, LENGTHS, RESTART, Batch, Form, documents_of
from flexvarlen.bench.contract.families_tables import families_section
from flexvarlen.bench.contract.tiny_configs import tiny_config
from flexvarlen.equivalence.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR
from flexvarlen.equivalence.isolation_tokens import halves
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.rows import Row, one_line

SUITE = "families"
SAMPLE = (
    "position_ids, use_cache=False",
    "position_ids and an attention_mask of ones",
    "2D mask of document ids",
    "two packed rows",
    "left padding",
)
"""Forms of `--sample`, by name."""

FIRST_POSITION = {"roberta": 2}
"""Of families that do not count from 0. Rows given from 0 on are shifted there, others are not."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.contract.families", description=summary
    )
    add = parser.add_argument
    add("--families", nargs="+", default=list(BY_TYPE), choices=list(BY_TYPE), metavar="TYPE")
    add("--backends", nargs="+", choices=fv.BACKENDS, help="default: all that this machine has")
    add("--sample", action="store_true", help="a few forms, not all")
    add("--head-dim", type=int, help="default: 16; on CUDA 64")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32; on CUDA bfloat16")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    args = parser.parse_args(argv)
    on_cuda = torch.device(args.device).type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_cuda else "float32")
    args.head_dim = args.head_dim or (64 if on_cuda else 16)
    args.backends = args.backends or (
        ["sdpa", "flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "nested"]
        if on_cuda
        else ["sdpa", "reference"]
    )
    return args


def new_model(
    model_type: str, head_dim: int, experts: str, *, every_expert: bool
) -> PreTrainedModel:
    """A family's tiny model, always with the same weights, in fp32 and eval mode."""
    config = tiny_config(model_type, head_dim=head_dim, every_expert=every_expert)
    config._experts_implementation = experts
    maker = getattr(transformers, f"AutoModelFor{BY_TYPE[model_type].task}")
    torch.manual_seed(0)
    model: PreTrainedModel = maker.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # they start at 0, or as they come
                parameter.normal_(std=0.2)
            parameter.copy_(parameter.to(torch.bfloat16))  # the very same values in every dtype
    return model.eval()


@dataclass(frozen=True)
class Answer:
    """Logits of each document, and the gradients of all parameters by a fixed cotangent."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def answer(
    model: nn.Module, batches: Sequence[Batch], cotangents: Sequence[Tensor], *, gradients: bool
) -> Answer:
    """Of the documents of all batches, one after another."""
    model.zero_grad()
    found: list[Tensor] = []
    left = list(cotangents)
    with torch.set_grad_enabled(gradients):
        for batch in batches:
            logits = model(**batch.inputs).logits
            parts = [logits[row, tokens] for row, tokens in batch.places]
            if gradients:
                ours, left = left[: len(parts)], left[len(parts) :]
                total = sum((a.double() * b).sum() for a, b in zip(parts, ours, strict=True))
                total.backward()  # type: ignore[union-attr]
            found += [part.detach().double() for part in parts]
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return Answer(found, grads)


def alone(ids: Tensor, starts: Sequence[int]) -> list[Batch]:
    """Each document in a forward of its own, from its position on."""
    batches = []
    for document, start in zip(documents_of(ids), starts, strict=True):
        positions = torch.arange(start, start + len(document), device=ids.device)[None]
        inputs = {"input_ids": document[None], "position_ids": positions}
        batches.append(Batch(inputs, [(0, slice(0, len(document)))]))
    return batches


def errors(found: Answer, exact: Answer) -> tuple[float, float]:
    """The largest error of a logit, and of a gradient relative to the largest of its parameter."""
    logits = max(
        (a - b).abs().max().item() for a, b in zip(found.logits, exact.logits, strict=True)
    )
    largest = max((g.abs().max().item() for g in exact.gradients.values()), default=1.0)
    if not found.gradients:
        return logits, 0.0
    gradients = [
        (found.gradients[name] - g).abs().max().item() / (g.abs().max().item() + 1e-3 * largest)
        for name, g in exact.gradients.items()  # a lost one is a KeyError
    ]
    return logits, max(gradients)


class Run(BenchRun):
    """The tokens that all cells share."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.rows: list[Row] = []
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 97, (sum(LENGTHS),), generator=generator).to(self.device)
        self.forms = [form for form in FORMS if not args.sample or form.name in SAMPLE]

    def run(self) -> list[Row]:
        for model_type in self.args.families:
            self.family(model_type)
        return self.rows

    def family(self, model_type: str) -> None:
        low = {"every_expert": self.dtype != torch.float32}
        base = new_model(model_type, self.args.head_dim, "eager", **low).to(self.device)
        packed = new_model(model_type, self.args.head_dim, "batched_mm", **low)
        packed = packed.to(self.device, self.dtype)
        exact, peer = copy.deepcopy(base).double(), base.to(self.dtype)
        vocabulary = packed.config.get_text_config().vocab_size
        shape = (sum(LENGTHS), vocabulary)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(self.device)
        cotangents = [x.double() for x in noise.split(list(LENGTHS))]
        oracles: dict[tuple[int, ...], tuple[Answer, Answer]] = {}
        for form in self.forms:
            # Where no positions are given, each document's begin at 0.
            given = "position_ids" in form.batch(self.ids).inputs
            starts = tuple(form.starts if given else RESTART)
            if starts not in oracles:
                first = FIRST_POSITION.get(model_type, 0) if starts[0] == 0 else 0
                batches = alone(self.ids, [start + first for start in starts])
                both = [answer(m, batches, cotangents, gradients=True) for m in (exact, peer)]
                oracles[starts] = (both[0], both[1])
            for backend in self.args.backends:
                self.cell(model_type, backend, form, packed, cotangents, *oracles[starts])
        self.say(f"{model_type}: {len(self.forms)} forms")

    def cell(
        self,
        model_type: str,
        backend: str,
        form: Form,
        model: PreTrainedModel,
        cotangents: Sequence[Tensor],
        exact: Answer,
        peer: Answer,
    ) -> None:
        """One row."""
        case = {
            "family": model_type,
            "backend": backend,
            "form": form.name,
            "dtype": self.args.dtype,
        }
        case["head_dim"] = self.args.head_dim
        model.train(form.train)
        try:
            with fv.patched(model, backend):
                trains = backend != "flex" or self.device.type == "cuda"
                found = answer(model, [form.batch(self.ids)], cotangents, gradients=trains)
                leaks = self.leaks(model, form)
        except (NotImplementedError, ImportError) as error:  # a refusal, in a sentence
            self.write(case, "unsupported", one_line(error), {})
            return
        except torch.OutOfMemoryError as error:
            self.write(case, "oom", one_line(error), {})
            return
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            self.write(case, "failed", one_line(error), {})
            return
        finally:
            model.eval()
        logit_error, grad_error = errors(found, exact)
        peer_error, peer_grad_error = errors(peer, exact)
        measures = {
            "error": logit_error,
            "peer_error": peer_error,
            "grad_error": grad_error if trains else None,
            "peer_grad_error": peer_grad_error,
            "leaks": leaks,
        }
        eps = torch.finfo(self.dtype).eps
        scale = max(x.abs().max().item() for x in exact.logits)
        wrong = []
        if not logit_error <= OUTPUT_FACTOR * (peer_error + eps * scale):
            wrong.append(f"error {logit_error:.2g}")
        if trains and not grad_error <= GRADIENT_FACTOR * (peer_grad_error + eps):
            wrong.append(f"gradient error {grad_error:.2g}")
        if leaks:
            wrong.append(f"{leaks} logits leak")
        self.write(case, "wrong" if wrong else "ok", ", ".join(wrong) or None, measures)

    def leaks(self, model: PreTrainedModel, form: Form) -> int:
        """Logits of documents that changed, in any bit, as others' tokens changed."""

        def logits(ids: Tensor) -> list[Tensor]:
            batch = form.batch(ids)
            with torch.no_grad():
                found = model(**batch.inputs).logits
            return [found[row, tokens] for row, tokens in batch.places]

        before, count = logits(self.ids), 0
        for replaced, watched in halves(len(LENGTHS)):
            documents = documents_of(self.ids)
            other = [3 + (x - 3 + 1) % 94 if i in replaced else x for i, x in enumerate(documents)]
            after = logits(torch.cat(other))
            count += sum(int((before[i] != after[i]).sum()) for i in watched)
        return count

    def write(self, case: dict[str, Any], status: Any, reason: str | None, measures: Any) -> None:
        self.rows.append(Row(SUITE, case, status, reason, measures, self.environment))
        self.append(case, status, reason, measures)
        if status not in ("ok", "unsupported"):
            self.say(f"{case['family']}, {case['backend']}, {case['form']}: {status}, {reason}")


def main(argv: list[str] | None = None) -> list[Row]:
    """Run the cells and print the table; rows go to `--out`, if given."""
    rows = Run(parse(argv)).run()
    sys.stdout.write(families_section(rows) + "\n")
    return rows


if __name__ == "__main__":
    main()
