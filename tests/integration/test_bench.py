"""A benchmark of a real SGLang that speculates says what its own counters say, request by request."""

import json

import pytest

from eagle3_core.config import DraftShape, EvaluationConfig, ServingConfig
from eagle3_core.config.sweep import BenchPlan
from eagle3_core.data.corpus import AskedPrompt
from eagle3_core.engine.client import Sampling
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.server import SglangServer
from eagle3_core.errors import NotSpeculatingError
from eagle3_core.evaluate.bench.drive import Hooks, bench
from eagle3_core.evaluate.bench.plan import load_prompts
from eagle3_core.evaluate.bench.verdict import verdict
from eagle3_core.evaluate.gate import DEAD_BELOW
from eagle3_core.evaluate.serve import first_point, served
from eagle3_core.evaluate.sweep import sweep_points
from eagle3_core.progress import Progress
from tests.integration.test_engine import VOCAB, make_drafter, make_target

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TOKENS, SHORT = 24, 8


def told_ids(run, longest, temperature=0.0):
    return [answer for answer in run.answers if answer.cell[1:] == (longest, temperature)]


def sampled_on_a_cpu(plain, ignored, greedy, greedily):
    """Without speculation a CPU samples; with it, it verifies greedily whatever was asked, and that is told."""
    baseline = {answer.output_ids for answer in told_ids(plain, TOKENS)}
    assert baseline == set(greedy)
    assert not baseline & {answer.output_ids for answer in told_ids(plain, TOKENS, 1.0)}
    assert [cell.temperature for cell in plain.cells] == [0, 1] * 4
    assert {answer.output_ids[0] for answer in ignored.answers} != {ids[0] for ids in greedy}
    assert [answer.output_ids[1:] for answer in ignored.answers] == [tuple(one.output_ids) for one in greedily]
    notes = verdict(ignored, None, None, None).notes
    assert [note for note in notes if note.startswith("not sampled: temperature 1 was asked for, but on cpu")]


def test_a_real_server_is_measured_as_it_counts(tmp_path):
    target = make_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    drafter = make_drafter(tmp_path / "drafter", list(range(VOCAB)))
    # The tokenizer finds its special tokens w0, w1 and w2 in longer words too.
    ids = [[30 + (11 * at + 7 * word) % 70 for word in range(4 + at)] for at in range(12)]
    lines = [json.dumps({"prompt": " ".join(f"w{token}" for token in one), "domain": f"d{at % 2}"})
             for at, one in enumerate(ids)]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    prompts = load_prompts([tmp_path / "prompts.jsonl"], 99)
    plan = BenchPlan(concurrency=(1, 4), max_new_tokens=(TOKENS,), repeats=2, ignore_eos=True)
    asked = [AskedPrompt(f"p{at}", [], [], "d", True, one) for at, one in enumerate(ids)]
    evaluation = EvaluationConfig(
        concurrency=(2, 1), max_new_tokens=(TOKENS, SHORT), max_prompts=12, temperatures=(0, 1)
    )
    sampled = evaluation.plan.model_copy(update={"ignore_eos": True})
    quiet = Progress("bench", None)
    greedy = sampled.model_copy(update={"temperatures": (0.0,), "repeats": 2})
    serving = ServingConfig(device="cpu", threads=1, max_running_requests=8)
    launch = LaunchPlan.speculate(target, "float32", serving, drafter, DraftShape.from_name("3/1/4"))
    with SglangServer(launch, log=tmp_path / "log", threads=1) as server, server.client() as client:
        (run,) = bench([server.url], prompts, plan, Hooks())
        told = client.generate_all(ids, Sampling(TOKENS, ignore_eos=True), concurrency=4)
        swept = served(server, asked, greedy, quiet, "3/1/4")
        ignored = served(server, asked, sampled.first.model_copy(update={"temperatures": (1.0,)}), quiet, "3/1/4")
        begun = [[*ids[int(answer.id[1:])], answer.output_ids[0]] for answer in ignored.answers]
        greedily = client.generate_all(begun, Sampling(TOKENS - 1, ignore_eos=True), concurrency=4)
        with pytest.raises(NotSpeculatingError, match=r"5/1/6: expected a server of this shape, found EAGLE3 3/1/4"):
            served(server, asked, greedy.first, quiet, "5/1/6")
    with SglangServer(LaunchPlan.serve(target, "float32", serving), log=tmp_path / "log", threads=1) as server:
        plain = served(server, asked, sampled, quiet, "baseline")
    assert run.server.title == "EAGLE3 3/1/4"
    by_ids = {tuple(answer.output_ids): answer for answer in told}
    assert len(run.answers) == 2 * 2 * len(prompts)
    for answer in run.answers:
        counted = by_ids[answer.output_ids]
        assert answer.verify_passes == counted.spec_verify_ct
        assert answer.accept_histogram == counted.spec_accept_histogram
        assert answer.prompt_tokens == counted.prompt_tokens
        assert 0 < answer.ttft_s < answer.latency_s
    passes = sum(answer.spec_verify_ct or 0 for answer in told)
    for cell in run.cells:
        assert cell.acceptance_length == pytest.approx(TOKENS * len(ids) / passes, rel=1e-12)
        assert cell.overall.completion_tokens == 2 * TOKENS * len(ids)
        assert cell.failed == cell.empty == 0
        assert len(cell.acceptance_at) >= 1
        assert set(cell.domains) == {"d0", "d1"}
    assert run.cells[1].mean_in_flight > 2 * run.cells[0].mean_in_flight
    # The pipeline asks the same server with its own token ids, and its measurement is the first point of the grid.
    about = {"device": "cpu", "startup_s": 1.0, "engine": {}, "server_acceptance_length": None}
    measurement = first_point(swept, about)
    assert (measurement.shape, measurement.concurrency, measurement.max_new_tokens) == ("3/1/4", 2, TOKENS)
    assert (measurement.temperature, measurement.prompts, measurement.repeats) == (0, 12, 2)
    assert measurement.overall.acceptance_length == pytest.approx(TOKENS * len(ids) / passes, rel=1e-12)
    points = sweep_points(swept, plain)
    assert [point.cell for point in points] == greedy.cells == [(2, 24, 0), (2, 8, 0), (1, 24, 0), (1, 8, 0)]
    assert all(point.answers == 24 and point.speedup is not None for point in points)
    whole = {answer.output_ids for answer in told_ids(swept, TOKENS)}
    assert whole == set(by_ids)
    assert {answer.output_ids for answer in told_ids(swept, SHORT)} == {one[:SHORT] for one in whole}
    sampled_on_a_cpu(plain, ignored, by_ids, greedily)
    assert verdict(run, None, None, None).dead == (min(cell.acceptance_length for cell in run.cells) < DEAD_BELOW)
