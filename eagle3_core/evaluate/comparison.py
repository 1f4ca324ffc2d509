"""Put measurements side by side: speed, acceptance against the trainer's estimate, equality of answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.evaluation import DraftShape
from eagle3_core.errors import ArtifactError
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.measurement import Measurement, Pool, ServedAnswer, first_difference
from eagle3_core.evaluate.sweep import Estimate, SweepPoint, sweep_points
from eagle3_core.evaluate.trainer import TrainerFigures


@dataclass(frozen=True)
class Served:
    """One draft shape, or none: the whole sweep, and the measurement at its first point, which decides."""

    measurement: Measurement
    sweep: BenchRun

    @property
    def answers(self) -> Sequence[ServedAnswer]:
        """Return the answers at the first point."""
        return self.sweep.answers_at(self.sweep.cells[0].cell)

    def first_pass(self) -> dict[str, ServedAnswer]:
        """Return the answers of the first pass by prompt."""
        return {answer.id: answer for answer in self.answers if answer.repeat == 0}


class Difference(Section):
    """An answer that is not, token by token, the one without speculation."""

    id: str
    shape: str
    position: int = Field(ge=0, description="First answer token that differs, from 0.")
    baseline_token: int | None = Field(description="None: the answer without speculation had ended.")
    token: int | None
    tokens: int = Field(description="Length of the answer without speculation.")
    logit_gap: float | None = Field(
        None, description="From the target's best to the worse of the two tokens, in float32."
    )


class DomainRow(Section):
    """One domain of prompts with one draft shape."""

    domain: str
    answers: int
    acceptance_length: float | None
    speedup: float = Field(description="Tokens per second of single answers, against no speculation.")


class ShapeRow(Section):
    """One draft shape."""

    shape: str
    acceptance_length: float | None
    verify_passes: int | None
    acceptance_at: tuple[float | None, ...]
    server_acceptance_length: float | None
    trainer_tau: float | None = Field(description="The trainer's replay on the same prompts; None for trees.")
    trainer_tau_all: float | None = Field(description="The same over all held-out samples.")
    tau_difference: float | None = Field(description="(served - trainer's) / trainer's.")
    tokens_per_s: float
    speedup: float
    latency_p50_s: float
    latency_p99_s: float
    equal_answers: int
    compared_answers: int
    domains: tuple[DomainRow, ...]
    sweep: tuple[SweepPoint, ...] = Field(
        description="By requests in flight, length and temperature; the first point is that of the other fields."
    )


def compare_shape(baseline: Served, served: Served, trainer: TrainerFigures) -> ShapeRow:
    """Compare one draft shape with no speculation and with the trainer's estimate.

    Raises:
        ArtifactError: the two served other prompts, or the trainer knows none of them.
    """
    measurement, without = served.measurement, baseline.measurement
    shape = DraftShape.from_name(measurement.shape)
    acceptance = measurement.overall.acceptance_length
    estimate = every = None
    if shape.topk == 1:
        estimate = trainer.tau_chain(shape.num_steps, sorted(served.first_pass()))
        every = trainer.tau_chain(shape.num_steps)
    known = acceptance is not None and estimate is not None
    return ShapeRow(
        shape=measurement.shape,
        acceptance_length=acceptance,
        verify_passes=measurement.overall.verify_passes,
        acceptance_at=tuple(measurement.acceptance_at),
        server_acceptance_length=measurement.server_acceptance_length,
        trainer_tau=estimate,
        trainer_tau_all=every,
        tau_difference=(acceptance - estimate) / estimate if known else None,  # type: ignore[operator]
        tokens_per_s=measurement.tokens_per_s,
        speedup=measurement.tokens_per_s / without.tokens_per_s,
        latency_p50_s=measurement.latency_p50_s,
        latency_p99_s=measurement.latency_p99_s,
        equal_answers=len(served.first_pass()) - len(differences(baseline, served)),
        compared_answers=len(served.first_pass()),
        domains=_domains(without.domains, measurement.domains),
        sweep=sweep_points(served.sweep, baseline.sweep, _estimate(trainer, shape, sorted(served.first_pass()))),
    )


def _estimate(trainer: TrainerFigures, shape: DraftShape, ids: Sequence[str]) -> Estimate:
    """Return what the trainer expects at a point: of chains, at the length it replays, greedy or at temperature 1."""
    known = (
        {temperature: trainer.tau_chain(shape.num_steps, ids, sampling=temperature > 0) for temperature in (0.0, 1.0)}
        if shape.topk == 1
        else {}
    )
    return lambda cell: known.get(cell.temperature) if cell.max_new_tokens == trainer.values["max_tokens"] else None


def differences(baseline: Served, served: Served) -> list[Difference]:
    """Return the answers that differ, with the first token that does.

    Raises:
        ArtifactError: not the same prompts were served.
    """
    ours, theirs = served.first_pass(), baseline.first_pass()
    if set(ours) != set(theirs):
        raise ArtifactError(
            f"{served.measurement.shape}: expected the {len(theirs)} prompts of the baseline, found {len(ours)}, "
            f"{len(set(ours) & set(theirs))} of them the same; evaluate again"
        )
    found = []
    for name in sorted(ours):
        mine, other = ours[name].output_ids, theirs[name].output_ids
        if mine == other:
            continue
        at = first_difference(mine, other)
        found.append(
            Difference(
                id=name,
                shape=served.measurement.shape,
                position=at,
                token=_at(mine, at),
                baseline_token=_at(other, at),
                tokens=len(other),
            )
        )
    return found


def csv_rows(baseline: Served, rows: Sequence[ShapeRow]) -> list[dict[str, Any]]:
    """Return one flat row per shape and point, `all` being every prompt, the baseline first, then the domains."""
    flat = [_csv_point(baseline.measurement.shape, point) for point in sweep_points(baseline.sweep)]
    for row in rows:
        first, *others = (_csv_point(row.shape, point) for point in row.sweep)
        flat += [first | {"equal_answers": row.equal_answers}, *others]
        flat += [
            {"shape": row.shape, "domain": domain.domain, **row.sweep[0].cell._asdict(),
             "answers": domain.answers, "acceptance_length": domain.acceptance_length, "speedup": domain.speedup}
            for domain in row.domains
        ]  # fmt: skip
    return flat


def _csv_point(shape: str, point: SweepPoint) -> dict[str, Any]:
    speed = point.speedup
    ends = {} if speed is None else {"speedup": speed.ratio, "speedup_low": speed.low, "speedup_high": speed.high}
    plain = point.model_dump(exclude={"speedup", "word"})
    return {"shape": shape, "domain": "all", **plain, **ends}


def _domains(without: Mapping[str, Pool], measured: Mapping[str, Pool]) -> tuple[DomainRow, ...]:
    return tuple(
        DomainRow(
            domain=name,
            answers=pool.answers,
            acceptance_length=pool.acceptance_length,
            speedup=pool.stream_tokens_per_s / without[name].stream_tokens_per_s,
        )
        for name, pool in measured.items()
    )


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
