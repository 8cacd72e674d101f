"""Which backends give a document equal bits in any row of one size, the cost, and GRPO's drift.

Documents of one row in four packings, whose logits, input gradients and parameter gradients are
compared bit by bit; times of forwards on full rows; and log-probabilities of TRL's GRPOTrainer in
micro-batches of 1 to 8, of long and of short samples: unpatched, packed, and packed with
`same_bits`. From the checkout:

    python -m tests.patches.same_bits COMMIT [FILE [PART ...]]

appends to FILE, by default `same_bits.jsonl`, the parts named of "bits", "times" and "grpo", else
all: on a GPU 14 layers of the Qwen3-1.7B geometry in bfloat16 (one H200, about four minutes), on a
CPU a tiny model in float32 and bfloat16.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.measure.machine import environment
from flexvarlen.measure.timing import wall_seconds
from tests.contract_training import settings
from tests.patches.padded_trainers import PLAIN, of_length
from tests.tiny_models import tokenizer

RECORDS = Path(__file__).with_suffix(".jsonl")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

BATCHES = (1, 2, 4, 8)
Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of machine.

    Attributes:
        tokens: of every row of the packings; the longest document has a third at most.
        backends: the last one is the counterexample.
        samples: tokens of the prompt and completion of each of eight samples, at most.
    """

    device: str
    geometry: str
    layers: int
    dtypes: tuple[torch.dtype, ...]
    tokens: int
    backends: tuple[str, ...]
    samples: tuple[tuple[int, int], ...]
    repeats: int


H200 = Setting(
    device="cuda",
    geometry="qwen3-1.7b",
    layers=14,
    dtypes=(torch.bfloat16,),
    tokens=8192,
    backends=("fa3", "fa2", "varlen", "flex"),
    samples=((512, 1024), (48, 64)),
    repeats=10,
)
CPU = Setting(
    device="cpu",
    geometry="qwen3-tiny",
    layers=2,
    dtypes=(torch.float32, torch.bfloat16),
    tokens=512,
    backends=("sdpa", "reference"),
    samples=((24, 32), (6, 8)),
    repeats=2,
)


def new_model(of: Setting, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(of.device):
        return AutoModelForCausalLM.from_config(
            GEOMETRIES[of.geometry](of.layers), dtype=dtype
        ).eval()


# ---- packings ----


def packings(tokens: int) -> tuple[list[int], dict[str, list[int]]]:
    """Lengths of documents, the first ones of which fill a row, and the documents of each row."""
    longest = tokens // 4
    lengths = [longest, longest // 2 + 3, 1, longest - 5, 17, longest // 3]
    lengths.append(tokens - sum(lengths))
    first = list(range(len(lengths)))
    known = [0, 2, 4]  # beside others, which are new
    others = tokens - sum(lengths[i] for i in known)
    sizes = [longest] * (others // longest) + [others % longest]
    new = list(range(len(lengths), len(lengths) + len(sizes)))
    rows = {
        "first": first,
        "in reverse": first[::-1],
        "shuffled": [3, 0, 6, 2, 5, 1, 4],
        "among others": [*new[:1], known[1], *new[1:], known[0], known[2]],
    }
    return lengths + sizes, rows


def rows_of(of: Setting, vocab: int) -> Iterator[tuple[str, list[int], Tensor, fv.PackedLayout]]:
    """Name, documents, ids and layout of each row; all rows and layouts have one size."""
    lengths, rows = packings(of.tokens)
    rng = torch.Generator().manual_seed(1)
    documents = [torch.randint(vocab, (n,), generator=rng) for n in lengths]
    for name, row in rows.items():
        layout = fv.PackedLayout.from_lengths(
            [lengths[i] for i in row],
            total_tokens=of.tokens,
            device=of.device,
            capacity=16,
            max_seqlen_bound=of.tokens // 3,
        )
        ids = torch.cat([documents[i] for i in row])[None].to(of.device)
        yield name, row, ids, layout


def compared(of: Setting, model: Any, call: Any, *, backward: bool) -> Record:
    """How many documents of the other rows have the first row's bits, of how many."""
    vocab = model.config.vocab_size
    before: dict[int, dict[str, Tensor]] = {}
    equal: dict[str, int] = {}
    total, largest, parameters = 0, 0.0, []
    for name, row, ids, layout in rows_of(of, vocab):
        found = {"logits": None, "input gradients": None}
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            found["logits"] = logits = call(inputs_embeds=embedded, packed_layout=layout).logits[0]
        if backward:
            rng = torch.Generator(of.device).manual_seed(2)
            grad = torch.randn(vocab, generator=rng, device=of.device).to(logits)
            logits.backward(grad.expand_as(logits))
            found["input gradients"] = embedded.grad[0]
            parameters.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
            model.zero_grad()
        parts = {what: layout.split(x.detach()) for what, x in found.items() if x is not None}
        for index, document in enumerate(row):
            its = {what: x[index].clone() for what, x in parts.items()}
            if name == "first":
                before[document] = its
            elif document in before:
                total += 1
                for what, x in its.items():
                    old = before[document][what]
                    equal[what] = equal.get(what, 0) + int(torch.equal(old, x))
                    if what == "logits":
                        largest = max(largest, float((old - x).abs().max()))
    of_parameters = [torch.equal(parameters[0], x) for x in parameters[1:3]]  # the same documents
    record: Record = {"documents": total, "equal": equal, "largest_difference_of_logits": largest}
    return record | (
        {"rows_with_equal_parameter_gradients": sum(of_parameters)} if backward else {}
    )


def bits(of: Setting, dtype: torch.dtype) -> Iterator[Record]:
    """Records of each backend, eager with gradients, and compiled."""
    model = new_model(of, dtype)
    for backend in of.backends:
        case = {"what": "bits", "backend": backend, "dtype": str(dtype), "tokens": of.tokens}
        torch.use_deterministic_algorithms(backend == "varlen")
        try:
            same = None if backend == of.backends[-1] else of.tokens
            fv.patch_model(model, backend, same_bits=same, deterministic=True)
            found = compared(of, model, model, backward=True)
            yield {"case": case | {"compiled": False, "deterministic": True}} | found
            fv.patch_model(model, backend, same_bits=same)
            torch._dynamo.reset()
            call = torch.compile(model, fullgraph=True)
            found = compared(of, model, call, backward=False)
            yield {"case": case | {"compiled": True, "deterministic": False}} | found
        except (NotImplementedError, fv.SameBitsError) as reason:
            yield {"case": case, "status": "unsupported", "reason": str(reason)}
        finally:
            torch.use_deterministic_algorithms(False)
            fv.unpatch_model(model)


# ---- time ----


def times(of: Setting, dtype: torch.dtype) -> Iterator[Record]:
    """Milliseconds of a forward on a full row, in turns with `same_bits` and without."""
    models = {name: new_model(of, dtype) for name in ("same_bits", "without")}
    backend, calls = of.backends[0], {}
    _, _, ids, layout = next(rows_of(of, models["without"].config.vocab_size))
    for name, model in models.items():
        fv.patch_model(model, backend, same_bits=of.tokens if name == "same_bits" else None)
        calls[name] = partial(model, input_ids=ids, packed_layout=layout)
    yield {"case": {"what": "time", "backend": backend, "dtype": str(dtype)}} | in_turns(of, calls)


def in_turns(of: Setting, calls: dict[str, Callable[[], object]]) -> Record:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(of.repeats + 1):
            for name, call in calls.items():
                seconds = wall_seconds(call, torch.device(of.device))
                if repeat:
                    samples[name].append(seconds * 1e3)
    return {f"ms_{name}": median(x) for name, x in samples.items()}


# ---- GRPO ----


def trainer_of(model: PreTrainedModel, folder: str, device: str) -> GRPOTrainer:
    arguments = {"num_generations": 2, "use_cpu": device == "cpu", "max_completion_length": 8}
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(**settings(folder, **PLAIN | arguments)),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tokenizer("left"),
        reward_funcs=[of_length],
    )


def samples(vocab: int, prompt: int, completion: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of eight samples: prompts padded on the left, completions on the right."""
    rng = torch.Generator().manual_seed(3)
    shape = (BATCHES[-1], prompt + completion)
    ids, mask = torch.randint(8, vocab, shape, generator=rng), torch.ones(shape, dtype=torch.int64)
    for row in range(BATCHES[-1]):
        mask[row, : row * prompt // 10] = 0
        mask[row, shape[1] - row * completion // 12 :] = 0
    return ids * mask, mask


def grpo(of: Setting, dtype: torch.dtype) -> Iterator[Record]:
    """Records of each micro-batch against micro-batches of 1: tokens that differ, and time."""
    for (prompt, completion), how in product(of.samples, ("unpatched", "packed", "same_bits")):
        same = BATCHES[-1] * (prompt + completion) if how == "same_bits" else None
        case = {
            "what": "GRPO",
            "backend": "transformers:sdpa" if how == "unpatched" else of.backends[0],
            "patched": how != "unpatched",
            "dtype": str(dtype),
            "prompt": prompt,
            "completion": completion,
            "same_bits": same,
        }
        with TemporaryDirectory() as folder:
            model = new_model(of, dtype)
            trainer = trainer_of(model, folder, of.device)
            if case["patched"]:
                fv.patch_trainer(trainer, of.backends[0], same_bits=same)
            batch = samples(model.config.vocab_size, prompt, completion)
            ids, mask = (x.to(of.device) for x in batch)
            score = partial(
                trainer._get_per_token_logps_and_entropies, trainer.model, ids, mask, completion
            )
            calls = {str(size): partial(score, batch_size=size) for size in BATCHES}
            with torch.no_grad():
                counted = mask[:, -completion:].bool()
                found = {size: call()[0][counted].double() for size, call in calls.items()}
            took = in_turns(of, calls)
        for size, logps in found.items():
            difference = logps - found["1"]
            ratio = difference.exp()
            yield {
                "case": case | {"batch": int(size)},
                "tokens": len(logps),
                "tokens_that_differ": int((difference != 0).sum()),
                "tokens_outside_0.9_to_1.1": int(((ratio < 0.9) | (ratio > 1.1)).sum()),
                "largest_difference": float(difference.abs().max()),
                "ms": took[f"ms_{size}"],
            }


def measured(of: Setting, parts: Collection[str]) -> Iterator[Record]:
    for dtype in of.dtypes:
        for part in (bits, times, grpo):
            if not parts or part.__name__ in parts:
                yield from part(of, dtype)


def main(commit: str, out: str | Path = RECORDS, *parts: str) -> None:
    of = H200 if torch.cuda.is_available() else CPU
    about = {
        "geometry": of.geometry,
        "layers": of.layers,
        "environment": environment(torch.device(of.device)) | {"git_commit": commit},
    }
    with Path(out).open("a", encoding="utf-8") as file:
        for record in measured(of, parts):
            line = json.dumps(record | about)
            print(line[:300], flush=True)
            file.write(line + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
