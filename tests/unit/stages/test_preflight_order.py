"""What can be known in a second is told before anything slow begins, and all of it together."""

import shutil
from collections import namedtuple

import pytest

from eagle3_core.errors import PreflightError
from eagle3_core.stages import preflight

Usage = namedtuple("Usage", "total used free")


def never(*_):
    raise AssertionError("a slow check began")


def test_what_a_quick_check_finds_is_told_before_a_slow_one_begins(flow, monkeypatch):
    for slow in ("_template", "try_training", "_flags"):
        monkeypatch.setattr(preflight, slow, never)
    monkeypatch.setattr(preflight, "require_known_good", dict)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1, 1, 0))
    training = flow.config.training.model_copy(update={"trackers": ("mlflow",)})
    flow.config = flow.config.model_copy(update={"training": training})
    with pytest.raises(PreflightError, match=r"mlflow.*; /dev/shm: expected 64 MiB free"):
        flow.run("preflight")


def test_sampled_points_are_refused_where_sglang_would_verify_greedily(flow, monkeypatch):
    for slow in ("_template", "try_training", "_flags"):
        monkeypatch.setattr(preflight, slow, never)
    monkeypatch.setattr(preflight, "require_known_good", dict)
    evaluation = flow.config.evaluation.model_copy(update={"temperatures": (0.0, 1.0)})
    flow.config = flow.config.model_copy(update={"evaluation": evaluation})
    monkeypatch.setattr(preflight, "resolve_device", lambda _wanted: "cpu")
    with pytest.raises(PreflightError, match=r"^evaluation\.temperatures: expected 0 alone on cpu.*found 1; leave"):
        flow.run("preflight")
    for name in ("_gpus", "_template", "try_training"):
        monkeypatch.setattr(preflight, name, lambda *_: {})
    monkeypatch.setattr(preflight, "_flags", lambda _context: {"attention": "as asked"})
    monkeypatch.setattr(preflight, "resolve_device", lambda _wanted: "cuda")
    assert " passes over 80 prompts" in flow.run("preflight").facts["evaluation"]


def test_what_several_checks_meet_is_told_once(flow, monkeypatch):
    monkeypatch.setattr(preflight, "require_known_good", dict)
    flow.config = flow.config.model_copy(
        update={"drafter": flow.config.drafter.model_copy(update={"attention": "mla"})}
    )
    with pytest.raises(PreflightError) as caught:
        flow.run("preflight")
    assert str(caught.value).count("set them under drafter") == 1


def test_the_preflight_makes_every_check(flow, monkeypatch):
    for slow in ("_template", "try_training"):
        monkeypatch.setattr(preflight, slow, lambda *_: {})
    monkeypatch.setattr(preflight, "require_known_good", dict)
    monkeypatch.setattr(preflight, "_flags", lambda _context: {"attention": "as asked"})
    assert flow.run("preflight").facts["checks"] == (
        "trackers, shared memory, sampling, host, drafter, warm start, engine, gpus, held-out split, space, "
        "template, training step, flags"
    )
