"""`ragcache evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli.app import (
    Adapter,
    Device,
    Dtype,
    EmbeddingModel,
    Model,
    Store,
    TopK,
    TrustRemoteCode,
    app,
    remark,
    say,
    to_stderr,
)
from ragcache.errors import SettingsError
from ragcache.settings import load_settings
from ragcache.states.store import StateStore, hold_lock

MADE_QUESTIONS = 20
"""Made from the corpus when the user gives neither questions nor a number."""


@app.command()
def evaluate(
    store: Store,
    questions: Annotated[
        Path | None,
        typer.Option(help="JSON or JSONL of {question, answers, documents}; without it they are made from the corpus."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help=f"How many questions; all of a file, {MADE_QUESTIONS} made ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; a run that was stopped goes on there.")] = Path(
        "evaluation"
    ),
    grid: Annotated[
        Path | None, typer.Option(help="JSON list of {encodings, order, repair, repair_ratio or repair_ms}.")
    ] = None,
    full_grid: Annotated[bool, typer.Option("--full-grid", help="Compare many settings instead of a few.")] = False,
    encodings: Annotated[
        str | None, typer.Option(help="Compare these, separated by commas, such as alone,alone+context.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="Compare these orders, separated by commas.")] = None,
    repair: Annotated[str | None, typer.Option(help="Compare these ways of repair, separated by commas.")] = None,
    repair_ratio: Annotated[str | None, typer.Option(help="Compare these ratios, separated by commas.")] = None,
    codec: Annotated[
        str | None, typer.Option(help="Compare these codecs, separated by commas, from a store with --codec raw.")
    ] = None,
    top_k: TopK = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer that are compared.")] = 32,
    target_agreement: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Recommend the fastest setting that agrees so often.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Make the recommended setting the store's default.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of questions, and of the intervals.")] = 0,
    model: Model = None,
    adapter: Adapter = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Compare answers over composed states with a full prefill's, and times to the first token, setting by setting."""
    settings = {
        "model": model,
        "adapter": adapter,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "top_k": top_k,
    }
    # All that can be wrong with arguments shows before models are loaded.
    if apply and target_agreement is None:
        raise SettingsError("--apply needs --target-agreement, which says what to recommend")
    opened = StateStore.open(store)
    loaded = load_settings(store, **settings)
    if apply:
        with hold_lock(store):
            pass

    from ragcache.console import EvaluationProgress, loading

    with loading(to_stderr) as on_stage:
        from ragcache.evaluation.corpus_questions import corpus_questions
        from ragcache.evaluation.grid import chosen_grid, setting_of
        from ragcache.evaluation.job import JOURNAL, REPORT, RESULT, EvaluationOptions
        from ragcache.evaluation.job import evaluate as run_evaluation
        from ragcache.evaluation.questions import read_questions, sampled
        from ragcache.evaluation.recommend import apply as apply_setting
        from ragcache.evaluation.text_table import text_table

        compared = chosen_grid(
            grid,
            full=full_grid,
            current=setting_of(loaded),
            encodings=encodings,
            order=order,
            repair=repair,
            ratio=repair_ratio,
            codec=codec,
        )
        if questions is not None:
            asked = sampled(read_questions(questions), sample, seed)
        else:
            asked = corpus_questions(opened.catalog, sample or MADE_QUESTIONS, seed)

        from ragcache.pipeline import RagCache

        # What a full prefill gives for comparison shall not be remembered and served afterwards.
        cache = RagCache.open(store, on_stage=on_stage, sequence_megabytes=0, canary_rate=0.0, **settings)
    options = EvaluationOptions(max_tokens, cache.settings.top_k, target_agreement, seed)
    try:
        with cache, EvaluationProgress(to_stderr) as progress:
            evaluation = run_evaluation(cache, asked, compared, out, options, progress, remark)
    except KeyboardInterrupt:
        remark(f"interrupted; what was measured is in {out / JOURNAL}, and the same command goes on from there")
        raise typer.Exit(130) from None
    for line in text_table(evaluation):
        say(line)
    say(f"written to {out / REPORT} and {out / RESULT}")
    if evaluation.recommendation is None:
        return
    for line in evaluation.recommendation.lines:
        say(line)
    if not evaluation.recommendation.met:
        raise typer.Exit(1)
    if apply:
        setting = evaluation.recommendation.summary.setting
        apply_setting(opened, setting)
        say(f"now the default of {store}, in its store.toml")
        for name in loaded.encodings:
            if name not in setting.encodings:
                say(f"the next index run takes the encoding {name!r} away; --encodings keeps it")
