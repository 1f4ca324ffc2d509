"""Whatever decides what a stage writes is part of the names of its output and of its job."""

import pytest

from eagle3_core import jobs
from eagle3_core.artifacts import Ref
from eagle3_core.config.recipes import load_recipe
from eagle3_core.jobs import spec
from eagle3_core.pipeline import STAGES, output_key
from eagle3_core.runner import freeze
from eagle3_core.storage import open_store


def inputs(stage, other=None):
    """Return references of all inputs; that of `other` is to other content."""
    return {
        name: Ref(kind=kind, key=f"{name}/a", manifest_sha256=("1" if name == other else "0") * 64)
        for name, kind in STAGES[stage].inputs
    }


READING = [(stage.name, name) for stage in STAGES.values() for name, _ in stage.inputs]


@pytest.mark.parametrize(("stage", "name"), READING)
def test_another_input_is_another_output_and_another_job(stage, name, tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "_outside", lambda *_: [])
    run, store = load_recipe("demo"), open_store(str(tmp_path))
    key = freeze(store, run)
    outputs = {output_key(STAGES[stage], run, inputs(stage, other)) for other in (None, name)}
    directories = {jobs.stage_job(store.root, key, stage, inputs(stage, other)).directory for other in (None, name)}
    assert (len(outputs), len(directories)) == (2, 2)


def test_other_settings_that_a_stage_reads_are_another_output_and_another_job_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "_outside", lambda *_: [])
    store, plain = open_store(str(tmp_path)), load_recipe("demo")
    changed = load_recipe("demo", {"training.learning_rate": 1e-5})
    for stage in STAGES.values():
        if stage.name == "preflight":  # which is never reused, and checks all settings
            continue
        reads = "training" in stage.sections
        outputs = {output_key(stage, run, inputs(stage.name)) for run in (plain, changed)}
        directories = {
            jobs.stage_job(store.root, freeze(store, run), stage.name, inputs(stage.name)).directory
            for run in (plain, changed)
        }
        assert (len(outputs) > 1, len(directories) > 1) == (reads, reads), stage.name


def test_what_lies_outside_the_root_and_the_stages_version_are_part_of_the_name():
    stage, run = STAGES["prepare"], load_recipe("demo")
    newer = stage.__class__(**{**{name: getattr(stage, name) for name in stage.__dataclass_fields__}, "version": 99})
    names = [output_key(stage, run, {}), output_key(stage, run, {}, content={"prompts": "a"}),
             output_key(stage, run, {}, content={"prompts": "b"}), output_key(newer, run, {})]  # fmt: skip
    assert len(set(names)) == 4
