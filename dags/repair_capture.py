"""Verify a run's hidden-state shards by content, quarantine what is bad, recapture exactly that. Wiring only."""

from __future__ import annotations

from airflow.sdk import Param, XComArg, dag

from operators import repair, settings, stages

PARAMS = {
    "features": Param(
        None,
        type=["null", "string"],
        title="Feature set or shard plan",
        pattern=r"^(seal|plan_capture)/[0-9a-f]+$",
        description="Key below the root, as in the XCom of `seal` or `plan_capture`: seal/3f9c... "
        "Empty: the plan that was made last.",
    ),
    "check_only": Param(False, type="boolean", title="Only check", description="Report; move and capture nothing."),
}


@dag(
    dag_display_name="Repair captured hidden states",
    schedule=None,
    catchup=False,
    default_args=settings.retries(),
    params=PARAMS,
    is_paused_upon_creation=False,  # it has no schedule: who triggers it wants it to run
    tags=["eagle3"],
)
def repair_capture() -> None:
    """Hidden states that can be trusted again.

    Reads every byte of every shard of a plan and compares it with plan and manifest. What is corrupt moves to
    `quarantine/` with the reason, what is missing or moved is captured again, and the feature set is sealed anew.
    Shards that are well are not touched.
    """
    find = repair.FindPlanOperator(task_id="find_plan", key="{{ params.features or '' }}", known=list(PARAMS))
    run = XComArg(find, key="run_key")
    bad = repair.VerifyShardsOperator(task_id="verify", plan=find.output, check_only="{{ params.check_only }}")
    capture = stages.CaptureOperator.partial(
        task_id="capture",
        run_key=run,
        inputs={"shard_plan": find.output},
        pool=settings.ENGINE_POOL,
        map_index_template=settings.MAP_NAME,
    ).expand(index=bad.output)
    # With nothing to capture the mapped task is skipped; sealing then proves that all is well.
    capture >> stages.SealOperator(
        task_id="seal", run_key=run, inputs={"shard_plan": find.output}, trigger_rule="none_failed"
    )


repair_capture()
