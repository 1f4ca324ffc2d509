"""The arithmetic of two benchmarks side by side, on answers made up here."""

import dataclasses
import itertools

import numpy as np
import pytest

from eagle3_core.errors import EngineError, InputError
from eagle3_core.evaluate.bench.endpoint import facts_of
from eagle3_core.evaluate.bench.plan import BenchPlan, Cell
from eagle3_core.evaluate.bench.results import BenchRun, Passes, summarise_cell
from eagle3_core.evaluate.bench.stream import StreamedAnswer, looping
from eagle3_core.evaluate.bench.verdict import verdict
from eagle3_core.evaluate.bench.versus import compare

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


def run(pace: Pace, prompts: int = 20, **plan) -> BenchRun:
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
                    latency_s=seconds, concurrency=concurrency, max_new_tokens=TOKENS, ttft_s=TTFT,
                    gaps=((step_s, pace.per_pass or 1),) * steps, empty=False, loop=False,
                )
            )  # fmt: skip
        cells.append(summarise_cell(Cell(concurrency, TOKENS), passes, bool(pace.per_pass)))
        answers += passes.answers
    return BenchRun(
        server=facts_of("http://here", SPECULATING if pace.per_pass else INFO), prompts={}, started_at="now",
        plan=BenchPlan(concurrency=tuple(pace.step_s), max_new_tokens=(TOKENS,), repeats=len(pace.drift), **plan),
        seconds=1.0, cells=tuple(cells), answers=tuple(answers),
    )  # fmt: skip


PLAIN = Pace({1: 0.010, 64: 0.015}, jitter=0.05)


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
    sampled = compare(run(Pace({1: 0.012}, per_pass=3), temperature=0.8), plain).cells[0]
    assert (sampled.equal, sampled.parted_early) == (None, None)


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
