"""Owned processes: start or re-join a supervised job, follow it, end it, leave nothing behind.

A job is a directory:

    command.json     what runs, which attempt, where its log starts
    supervisor.json  pid, start time and boot id of the process that watches over it
    owner, lease     who may kill it; renewed by whoever follows it
    log              output of all attempts
    progress.json    what the stage last reported        (written by the stage)
    result.json      reference of the committed output   (written by the stage)
    error.json       type, remedy, message               (written by the stage)
    exit.json        exit code, written when every process of the job is gone
    work/            partial work; survives attempts
"""

from eagle3_core.jobs.job import (
    Job,
    JobState,
    committed_result,
    directory_state,
    end_processes,
    kill,
    log_tail,
    outcome,
    raise_failure,
    start_or_join,
    wait,
)
from eagle3_core.jobs.processes import sweep
from eagle3_core.jobs.spec import JobSpec, engine_python, jobs_directory, repair_job, stage_job

__all__ = [
    "Job",
    "JobSpec",
    "JobState",
    "committed_result",
    "directory_state",
    "end_processes",
    "engine_python",
    "jobs_directory",
    "kill",
    "log_tail",
    "outcome",
    "raise_failure",
    "repair_job",
    "stage_job",
    "start_or_join",
    "sweep",
    "wait",
]
