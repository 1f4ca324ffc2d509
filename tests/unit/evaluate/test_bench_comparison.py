"""The arithmetic of two benchmarks side by side, on answers made up here."""

import dataclasses
import itertools

import numpy as np
import pytest

from eagle3_core.config.sweep import BenchPlan, Cell
from eagle3_core.errors import EngineError, InputError
from eagle3_core.evaluate.bench.endpoint import facts_of
from eagle3_core.evaluate.bench.results import BenchRun, Passes, summarise_cell
from eagle3_core.evaluate.bench.stream import StreamedAnswer, looping
from eagle3_core.evaluate.bench.verdict import verdict
from eagle3_core.evaluate.bench.versus import break_even, compare

TOKENS, TTFT = 61, 0.1
INFO = {"version": "1", "dtype": "float32"}
SPECULATING = {**INFO, "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
               "speculative_num_draft_tokens": 4}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds of a step at each concurrency, and tokens of a pass (0: no speculation)."""

    step_s: dict
    per_pass: int = 0
    jitter: float = 0.0
    drift: tuple = (1.0, 1.0, 1.0)
    ids: dict = dataclasses.field(default_factory=dict)


def run(pace: Pace, prompts: int = 20, temperature: float = 0.0, **info) -> BenchRun:
    draw = np.random.default_rng(3)
    cells, answers = [], []
    for concurrency, step_s in pace.step_s.items():
        passes = Passes(wall_s=[10.0] * len(pace.drift), client_busy=[0.1])
        for at, (repeat, drift) in itertools.product(range(prompts), enumerate(pace.drift)):
            steps = (TOKENS - 1) // (pace.per_pass or 1)
            seconds = drift * (TTFT + steps * step_s * (1 + pace.jitter * draw.normal()))
            passes.answers.append(
                StreamedAnswer(
                    id=f"p{at}", domain="math" if at % 2 else "code", repeat=repeat, prompt_tokens=4,
                    output_ids=pace.ids.get(at, tuple(range(TOKENS))), completion_tokens=TOKENS,
                    finish_reason="length", verify_passes=steps if pace.per_pass else None,
                    accept_histogram=(*[0] * (pace.per_pass - 1), steps) if pace.per_pass else None,
                    latency_s=seconds, concurrency=concurrency, max_new_tokens=TOKENS, temperature=temperature,
                    ttft_s=TTFT,
                    gaps=((step_s, pace.per_pass or 1),) * steps, empty=False, loop=False,
                )
            )  # fmt: skip
        cells.append(summarise_cell(Cell(concurrency, TOKENS, temperature), passes, bool(pace.per_pass)))
        answers += passes.answers
    info = {**(SPECULATING if pace.per_pass else INFO), **info}
    return BenchRun(
        server=facts_of("http://here", info), prompts={}, started_at="now",
        plan=BenchPlan(concurrency=tuple(pace.step_s), max_new_tokens=(TOKENS,), temperatures=(temperature,),
                       repeats=len(pace.drift)),
        seconds=1.0, cells=tuple(cells), answers=tuple(answers),
    )  # fmt: skip


PLAIN = Pace({1: 0.010, 64: 0.015}, jitter=0.05)


@pytest.mark.parametrize(("repeats", "concurrency"), [(1, 64), (2, 1), (3, 64)])
def test_a_servers_own_average_is_of_the_pass_that_was_measured_last(repeats, concurrency):
    last = run(Pace({1: 0.010, 64: 0.015}, per_pass=3, drift=(1.0,) * repeats), prompts=5).last_pass
    assert [(answer.id, answer.concurrency, answer.repeat) for answer in last] == [
        (f"p{at}", concurrency, repeats - 1) for at in range(5)
    ]


def test_faster_at_one_and_slower_at_64_is_said_of_each():
    mine, plain = run(Pace({1: 0.012, 64: 0.06}, per_pass=3, jitter=0.05)), run(PLAIN)
    comparison = compare(mine, plain)
    assert [row.word for row in comparison.cells] == ["faster", "slower"]
    for row in comparison.cells:
        assert row.speedup.low < row.speedup.ratio < row.speedup.high
        # Faster exactly where the acceptance length is above break-even.
        assert (row.acceptance_length > row.break_even) == (row.word == "faster")
    summary = verdict(mine, comparison, plain, None).summary
    assert "at 1 faster, " in summary
    assert "at 64 slower, " in summary
    assert "break-even at acceptance length 4." in summary


def test_at_break_even_the_speeds_are_equal():
    """With 61 tokens in 20 passes of cost c against 60 steps of 10 ms: equal where c is 30 ms."""
    row = compare(run(Pace({1: 0.030}, per_pass=3)), run(Pace({1: 0.010}))).cells[0]
    assert row.speedup.ratio == pytest.approx(1.0)
    assert row.break_even == pytest.approx(row.acceptance_length) == pytest.approx(61 / 20)
    assert row.cost_ratio == pytest.approx(3.0)
    assert row.word == "no difference shown"


def test_where_the_first_token_comes_too_late_no_acceptance_length_breaks_even():
    late = run(Pace({1: 0.001}, per_pass=3)).cells[0].model_copy(update={"ttft_mean_s": 0.71})
    theirs = run(Pace({1: 0.010})).cells[0]
    assert theirs.ttft_mean_s + (TOKENS - 1) * theirs.step_s == pytest.approx(0.7)
    assert break_even(late, theirs) is None


def test_of_the_load_generators_passes_the_busiest_is_told():
    cell = Cell(1, TOKENS)
    passes = Passes(answers=run(PLAIN).answers_at(cell), wall_s=[10.0] * 3, client_busy=[0.2, 0.9, 0.4])
    assert summarise_cell(cell, passes, speculating=False).client_busy == 0.9


def test_noise_gives_a_wide_interval_and_no_verdict():
    row = compare(run(Pace({1: 0.029}, per_pass=3, jitter=0.3), 8), run(Pace({1: 0.010}), 8)).cells[0]
    assert row.speedup.high - row.speedup.low > 0.15
    assert row.word == "no difference shown"


def test_pairs_are_resampled_together():
    """Prompts that differ tenfold in length on both servers leave the ratio certain."""
    mine, plain = run(Pace({1: 0.012}, per_pass=3)), run(Pace({1: 0.010}))

    def stretched(found: BenchRun) -> BenchRun:
        answers = [
            answer.model_copy(update={"latency_s": answer.latency_s * (1 + int(answer.id[1:]))})
            for answer in found.answers
        ]
        return found.model_copy(update={"answers": tuple(answers)})

    speed = compare(stretched(mine), stretched(plain)).cells[0].speedup
    assert speed.high - speed.low < 1e-9


def test_a_server_is_not_faster_than_itself_however_many_prompts_say_so():
    """Each pass meets another load: every prompt of it is slower by a tenth."""
    slow, fast = run(Pace({1: 0.010}, drift=(1.1, 1.1, 1.0))), run(Pace({1: 0.010}, drift=(1.0, 1.0, 1.0)))
    assert compare(slow, fast).cells[0].word == "no difference shown"
    once = compare(run(Pace({1: 0.010}, drift=(1.1,))), run(Pace({1: 0.010}, drift=(1.0,)))).cells[0]
    assert once.word == "no difference shown"


def test_a_single_pass_says_that_drift_is_assumed():
    mine, plain = run(Pace({1: 0.012}, per_pass=3, drift=(1.0,))), run(Pace({1: 0.010}))
    comparison = compare(mine, plain)
    assert comparison.cells[0].word == "faster"
    assert verdict(mine, comparison, plain, None).notes[0].startswith("a single pass: ")


def test_greedy_answers_that_differ_are_counted_and_early_ones_flagged():
    changed = {at: (*range(40), 999, *range(41, TOKENS)) for at in (1, 2, 3)} | {4: (999, *range(1, TOKENS))}
    mine, plain = run(Pace({1: 0.012}, per_pass=3, ids=changed)), run(Pace({1: 0.010}))
    comparison = compare(mine, plain)
    row = comparison.cells[0]
    assert (row.equal, row.compared, row.parted_early) == (16, 20, 1)
    assert (
        "at 1: 4 of 20 greedy answers differ, 1 of them within 4 tokens" in verdict(mine, comparison, plain, None).notes
    )


def test_sampled_answers_are_compared_in_speed_alone_and_with_sampled_ones():
    mine, plain = run(Pace({1: 0.012}, per_pass=3), temperature=0.8), run(Pace({1: 0.010}), temperature=0.8)
    row = compare(mine, plain).cells[0]
    assert (row.equal, row.parted_early, row.word) == (None, None, "faster")
    with pytest.raises(InputError, match="and --temperature as"):
        compare(mine, run(Pace({1: 0.010})))


def joined(*runs: BenchRun) -> BenchRun:
    """Return runs at several temperatures as one."""
    plan = runs[0].plan.model_copy(update={"temperatures": tuple(one.plan.temperatures[0] for one in runs)})
    return runs[0].model_copy(
        update={"plan": plan, "cells": tuple(cell for one in runs for cell in one.cells),
                "answers": tuple(answer for one in runs for answer in one.answers)}
    )  # fmt: skip


def test_a_drafter_is_judged_by_its_greedy_points_and_each_point_is_named_by_what_differs():
    mine = joined(run(Pace({1: 0.012}, per_pass=3)), run(Pace({1: 0.012}, per_pass=1), temperature=2.0))
    plain = run(Pace({1: 0.010}))
    comparison = compare(mine, plain)
    found = verdict(mine, comparison, plain, 3.05)
    assert not found.dead
    assert found.summary.startswith("Acceptance length 3.05 at temperature 0, 1.02 at temperature 2 tokens per verify")
    assert "1 of 2 points have no counterpart in the other benchmark" in found.notes
    assert not [note for note in found.notes if "mismatch" in note]
    both = joined(plain, run(Pace({1: 0.010}), temperature=2.0))
    summary = verdict(mine, compare(mine, both), both, None).summary
    assert "at 1 (temperature 0) faster" in summary
    assert "at 1 (temperature 2) drafter dead" in summary


@pytest.mark.parametrize(("device", "told"), [("cpu", 1), ("xpu", 1), ("cuda", 0)])
def test_sampling_that_was_none_is_told(device, told):
    sampled = run(Pace({1: 0.012}, per_pass=3), temperature=0.7, device=device)
    notes = [
        note for note in verdict(sampled, None, None, None).notes if note.startswith("not sampled: temperature 0.7")
    ]
    assert len(notes) == told
    for silent in (
        run(Pace({1: 0.012}, per_pass=3), device=device),
        run(Pace({1: 0.01}), temperature=0.7, device=device),
    ):
        assert not [note for note in verdict(silent, None, None, None).notes if "not sampled" in note]


def test_two_drafters_are_compared_without_a_break_even():
    mine, other = run(Pace({1: 0.012}, per_pass=3)), run(Pace({1: 0.012}, per_pass=2))
    comparison = compare(mine, other)
    assert not comparison.baseline
    assert comparison.cells[0].break_even is None
    assert comparison.cells[0].word == "faster"
    assert "against EAGLE3 3/1/4 at http://here" in verdict(mine, comparison, other, None).summary.lower().replace(
        "eagle3", "EAGLE3"
    )


def test_nothing_in_common_is_an_error():
    with pytest.raises(InputError, match="found none"):
        compare(run(Pace({1: 0.012}, per_pass=3)), run(Pace({2: 0.010})))


def test_few_prompts_are_said_to_be_few():
    mine, plain = run(Pace({1: 0.012}, per_pass=3), 3), run(Pace({1: 0.010}), 3)
    notes = verdict(mine, compare(mine, plain), plain, None).notes
    assert "at 1: only 3 prompts, the interval is a guess" in notes


def test_no_answer_at_all_is_an_error():
    with pytest.raises(EngineError, match="0 of 0 requests failed"):
        summarise_cell(Cell(1, 8), Passes(wall_s=[1.0], client_busy=[0.0]), speculating=False)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([*range(50), *[7] * 32], True),
        ([*range(50), *[7] * 31], False),
        ([1, 2, 3] * 11, True),
        ([*range(40)] * 4, True),
        ([*range(40)] * 3, False),
        ([], False),
    ],
)
def test_a_loop_is_a_piece_four_times_over_and_32_tokens(ids, expected):
    assert looping(ids) is expected
