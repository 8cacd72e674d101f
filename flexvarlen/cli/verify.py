"""The command `flexvarlen verify`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flexvarlen.cli.console import (
    CPU_MODELS,
    FINDING,
    Device,
    Dtype,
    Seed,
    console,
    device_of,
    dtype_of,
    one_line_errors,
    quiet_transformers,
)


def verify(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="As in compare: llama, qwen3:1.7b@14, a folder, a hub name. Repeatable. "
            "[default: llama, qwen3 and qwen3_5_text]",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="Backend to patch the model with; transformers:NAME leaves the model unpatched, "
            "with that attention of transformers.",
        ),
    ] = "auto",
    unpatched: Annotated[
        bool,
        typer.Option(
            "--unpatched",
            help="As --backend transformers:sdpa: plain transformers, which by default is right "
            "in dense models; see --form.",
        ),
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            help="How the batch marks document boundaries, without a cache: position_ids, "
            "packed_layout, document_ids (a 2D attention_mask that numbers them), cu_seq_lens "
            "(with position_ids), both (and seq_idx), cu_seq_lens_alone, mask_of_ones (with "
            "position_ids); or default_cache (position_ids, and the cache that transformers "
            "makes by default).",
        ),
    ] = "position_ids",
    lengths: Annotated[
        str, typer.Option("--lengths", help="Tokens of each document, comma-separated.")
    ] = "5,70,98,1,30,52",
    train: Annotated[bool, typer.Option("--train/--eval", help="Mode of the model.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check that no bit of a document reaches another: outputs of every layer, logits, gradients.

    Ends with exit code 1 on a leak, and names the documents, the layer and the module.
    """
    with one_line_errors(verify):
        from flexvarlen.attention.backends.registry import get_backend, our_name
        from flexvarlen.verify.experiment.inputs import THEIRS
        from flexvarlen.verify.isolation.command import (
            Answer,
            ask,
            parse_lengths,
            require_form,
            table_of,
        )
        from flexvarlen.verify.models import checked_model

        quiet_transformers()
        where = device_of(device)
        what = dtype_of(dtype, where)
        attention = f"{THEIRS}sdpa" if unpatched else our_name(backend)
        if attention != "auto" and not attention.startswith(THEIRS):
            get_backend(attention)
        require_form(form, attention)
        documents = parse_lengths(lengths)
        names = model or list(CPU_MODELS)
        for name in names:  # reports mistakes before any work
            checked_model(name, patched=not attention.startswith(THEIRS))
        answers: list[Answer] = []
        try:
            for name in names:
                answer = ask(
                    name,
                    attention,
                    form,
                    documents,
                    train=train,
                    seed=seed,
                    device=where,
                    dtype=what,
                )
                answers.append(answer)
        finally:  # show leaks that were found even if a later model fails
            if as_json:
                typer.echo(json.dumps([answer.as_dict() for answer in answers], indent=2))
            elif answers:
                console.print(table_of(answers, console.width))
                for answer in answers:
                    said = answer.leak or (answer.report and answer.report.sentence())
                    console.print(f"\n{answer.model}: {said}", markup=False, highlight=False)
    if any(answer.leak is not None for answer in answers):
        raise typer.Exit(FINDING)
