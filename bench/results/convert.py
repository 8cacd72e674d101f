"""Convert the records of older suites to the fields that today's suites read; run once, in place.

python bench/results/convert.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fields = dict[str, Any]


def renamed(fields: Fields, names: dict[str, str]) -> Fields:
    return {names.get(name, name): value for name, value in fields.items()}


def leaks(record: Fields) -> Fields:
    case = renamed(record["case"], {"implementation": "variant", "form": "pass"})
    return record | {"case": case, "measures": renamed(record["measures"], {"max_error": "error"})}


def families(record: Fields) -> Fields:
    names = {"peer_error": "baseline_error", "peer_grad_error": "baseline_grad_error"}
    case = renamed(record["case"], {"family": "model", "backend": "variant", "form": "pass"})
    return record | {"case": case, "measures": renamed(record["measures"], names)}


def capabilities(record: Fields) -> Fields:
    return record | {"case": renamed(record["case"], {"backend": "variant"})}


BUSY_MS = 2.2
"""How long the device was kept busy before a timed call: a host that takes longer leaves gaps."""


def attention(record: Fields) -> Fields:
    measures = {
        name.replace("peer_error", "baseline_error"): value
        for name, value in record["measures"].items()
    }
    if measures.get("host_ms_p50", 0.0) >= BUSY_MS:
        measures["host_bound"] = True
    return record | {"measures": measures}


def compare(record: Fields) -> Fields:
    names = ("model", "dtype", "passes", "compiled", "tokens", "documents", "longest_document")
    case = {name: record.pop(name) for name in (*names, "seed", "source")}
    case |= {"reference": record.pop("oracle"), "variant": record.pop("backend")}
    environment, status = record.pop("environment"), record.pop("status")
    reason = record.pop("reason")
    for name in ("role", "device", "gradients"):
        record.pop(name)
    if (worst := record.pop("worst_gradient_share")) is not None:
        record["worst_gradient_ratio"] = worst
    measures = {name: value for name, value in record.items() if value is not None}
    if "verdict" in measures:
        measures["passes"] = "forward" if status == "forward only" else case["passes"]
    status = "ok" if status == "forward only" else status
    return {
        "suite": "compare",
        "case": case,
        "status": status,
        "reason": reason,
        "measures": measures,
        "environment": environment,
    }


def host_time(record: Fields) -> Fields:
    return record | {"case": renamed(record["case"], {"kernel": "variant", "passes": "pass"})}


def drift_operators(record: Fields) -> Fields:
    return record | {"case": renamed(record["case"], {"backend": "variant"})}


def drift_models(records: list[Fields]) -> list[Fields]:
    """Records of one layer or document become lists in the record of the batch."""
    if not any("scope" in record["case"] for record in records):
        return records
    lists = {"layer": "layers_relative", "document": "documents_relative"}
    measured = {"layer": "hidden_relative", "document": "logits_relative"}
    batches: dict[str, Fields] = {}
    for record in records:
        if record["suite"] != "drift-model":  # attribution: a study that is no more
            continue
        case = renamed(record["case"], {"backend": "variant"})
        scope, measures = case.pop("scope"), record["measures"]
        del case["index"]
        about = {name: case.pop(name) for name in ("documents", "other_dtype")}
        if scope == "batch":
            made = record | {"case": case, "measures": about | measures}
            batches[json.dumps(case, sort_keys=True)] = made
        else:
            whole = batches[json.dumps(case, sort_keys=True)]["measures"]
            whole.setdefault(lists[scope], []).append(measures[measured[scope]])
    return list(batches.values())


BASELINE = {
    f"peer_{name}": f"baseline_{name}" for name in ("error", "error_worst_document", "grad_error")
}


def model(record: Fields) -> Fields:
    """A training step has no fields of generation."""
    case = record["case"]
    if case.get("task") == "train":
        fields = ("task", "prompts", "new_tokens")
        case = {name: value for name, value in case.items() if name not in fields}
    return record | {"case": case, "measures": renamed(record["measures"], BASELINE)}


def compile_time(record: Fields) -> Fields:
    names = {"backend": "variant", "part": "pass"}
    return model(record | {"case": renamed(record["case"], names)})


def training(record: Fields) -> Fields:
    """Trainings: the checksum of the texts is measured, not chosen."""
    names = {
        "peer_loss_error": "baseline_loss_error",
        "peer_gradient_error": "baseline_gradient_error",
        "true_loss": "reference_loss",
    }
    case, measures = dict(record["case"]), renamed(record["measures"], names)
    if "texts_crc32" in case:
        measures["texts_crc32"] = case.pop("texts_crc32")
    if record["suite"] == "convergence":
        case.pop("mode", None)  # all are eager
    return record | {"case": case, "measures": measures}


CONVERT: dict[str, Callable[[Fields], Fields]] = {
    "leaks": leaks,
    "families": families,
    "capabilities": capabilities,
    "kernels": attention,
    "scaling": attention,
    "padding": attention,
    "sdpa-backends": attention,
    "varlen-study": attention,
    "host-time": host_time,
    "drift-op": drift_operators,
    "model": model,
    "packings": model,
    "small-inference": model,
    "compile": compile_time,
    "convergence": training,
    "end-to-end": training,
    "scaling-ranks": training,
}
"""By suite; records of the others are as they were measured."""


def main() -> None:
    for path in Path(__file__).parent.glob("**/*.jsonl"):
        before = path.read_text(encoding="utf-8").splitlines()
        after = []
        for line in before:
            record = json.loads(line)
            convert = CONVERT.get(record["suite"]) if "suite" in record else compare
            after.append(json.dumps(convert(record), ensure_ascii=False) if convert else line)
        if path.stem == "drift-model-h200":
            records = drift_models([json.loads(line) for line in after])
            after = [json.dumps(record, ensure_ascii=False) for record in records]
        if after != before:
            path.write_text("\n".join(after) + "\n", encoding="utf-8")
            print(f"converted {path.name}")


if __name__ == "__main__":
    main()
