"""Train one EAGLE-3 drafter: prompts in, a parity-checked, benchmarked, gated drafter out. Wiring only."""

from __future__ import annotations

from airflow.sdk import dag

from operators import configure, settings, stages
from operators.form import run_params


@dag(
    dag_display_name="Train a drafter",
    schedule=None,
    catchup=False,
    max_active_runs=4,
    default_args=settings.retries(),
    params=run_params(),
    is_paused_upon_creation=False,  # it has no schedule: who triggers it wants it to run
    tags=["eagle3"],
)
def train_drafter() -> None:
    """Prompts in, a served drafter out.

    The target answers your prompts; SGLang gives up its hidden states in shards; the drafter is trained on them,
    exported, compared with what was trained, measured with and without speculation and against the champion, the
    drafter that is released under this name, and published if it is better. If not, **publish** is skipped, and says
    why.

    * **Trigger** opens a form: choose a recipe, override what you like; empty fields keep the recipe's value.
    * Everything is committed by content: a second run with equal inputs returns at once.
    * A task's **Job** link shows progress and log live; the run's **Report** tab shows the result.
    """
    run = configure.ConfigureOperator(task_id="configure").output
    shapes = configure.ListShapesOperator(task_id="list_shapes", run_key=run)
    preflight = stages.PreflightOperator(task_id="preflight", run_key=run, pool=settings.ENGINE_POOL)
    prompt_set = stages.PrepareOperator(task_id="prepare", run_key=run)
    corpus = stages.RegenerateOperator(
        task_id="regenerate", run_key=run, inputs={"prompt_set": prompt_set.output}, pool=settings.ENGINE_POOL
    )
    vocab_map = stages.BuildVocabOperator(task_id="build_vocab", run_key=run, inputs={"corpus": corpus.output})
    shard_plan = stages.PlanCaptureOperator(task_id="plan_capture", run_key=run, inputs={"corpus": corpus.output})
    shards = configure.ListShardsOperator(task_id="list_shards", plan=shard_plan.output)
    capture = stages.CaptureOperator.partial(
        task_id="capture",
        run_key=run,
        inputs={"shard_plan": shard_plan.output},
        pool=settings.ENGINE_POOL,
        map_index_template=settings.MAP_NAME,
    ).expand(index=shards.output)
    feature_set = stages.SealOperator(task_id="seal", run_key=run, inputs={"shard_plan": shard_plan.output})
    checkpoint = stages.TrainOperator(
        task_id="train",
        run_key=run,
        inputs={"feature_set": feature_set.output, "vocab_map": vocab_map.output},
        pool=settings.ENGINE_POOL,
    )
    drafter = stages.ExportOperator(task_id="export", run_key=run, inputs={"checkpoint": checkpoint.output})
    trained = {"drafter": drafter.output, "checkpoint": checkpoint.output}
    parity = stages.ParityOperator(
        task_id="parity",
        run_key=run,
        inputs={**trained, "feature_set": feature_set.output},
        pool=settings.ENGINE_POOL,
    )
    served = {"prompt_set": prompt_set.output, "drafter": drafter.output, "parity": parity.output}
    evaluate = stages.EvaluateOperator.partial(
        task_id="evaluate", run_key=run, inputs=served, pool=settings.ENGINE_POOL, map_index_template=settings.MAP_NAME
    ).expand(index=shapes.output)
    challenge = stages.ChallengeOperator(task_id="challenge", run_key=run, inputs=served, pool=settings.ENGINE_POOL)
    report = stages.ReportOperator(
        task_id="report", run_key=run, inputs={**trained, **served, "challenge": challenge.output}
    )
    publish = stages.PublishOperator(
        task_id="publish", run_key=run, inputs={"drafter": drafter.output, "eval_report": report.output}
    )

    preflight >> prompt_set
    capture >> feature_set
    evaluate >> challenge
    evaluate >> report >> publish


train_drafter()
