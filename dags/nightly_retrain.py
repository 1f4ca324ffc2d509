"""Train a challenger every night at 02:00 UTC, by `train_drafter`. Wiring only."""

from __future__ import annotations

from airflow.sdk import CronTriggerTimetable, dag

from operators import settings, stages
from operators.form import run_params
from operators.triggered import TriggerOnceOperator

FORM = run_params(**{"recipe": settings.nightly_recipe(), "training.start_from": "champion"})
YESTERDAY = "macros.ds_add((dag_run.logical_date or dag_run.run_after).strftime('%Y-%m-%d'), -1)"


@dag(
    dag_display_name="Retrain nightly",
    schedule=CronTriggerTimetable("0 2 * * *", timezone="UTC"),
    catchup=False,
    max_active_runs=1,
    default_args=settings.retries(),
    params=FORM,
    render_template_as_native_obj=True,
    tags=["eagle3"],
)
def nightly_retrain() -> None:
    """Every night a challenger, trained on from the champion; promotion, or a clear no.

    Triggers `train_drafter` with the parameters below; their defaults are what the schedule uses.

    * With `data.window_days` the prompts are those of the days that end with the night's yesterday.
    * **verdict** is green if there is a new champion, skipped if the old one stays; log, XCom and **Report** say why.
    * The run it triggers is called `nightly__` and this run's name: a retry finds it, and clears it if it has failed.
    * Unchanged prompts and target cost nothing: every stage finds its output committed, and the verdict says so.
    """
    until = f"{{{{ params['data.until'] or ({YESTERDAY} if params['data.window_days'] else none) }}}}"
    run_id = "nightly__{{ run_id }}"
    trained = TriggerOnceOperator(
        task_id="train_drafter",
        trigger_dag_id="train_drafter",
        trigger_run_id=run_id,
        conf={name: f"{{{{ params['{name}'] }}}}" for name in FORM} | {"data.until": until},
        poke_interval=60,
    )
    trained >> stages.VerdictOperator(task_id="verdict", dag_id="train_drafter", run_id=run_id)


nightly_retrain()
