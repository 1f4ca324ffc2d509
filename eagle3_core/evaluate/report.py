"""The report as data: what report.json says and the page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.evaluation import EvaluationConfig, GateConfig
from eagle3_core.errors import ArtifactError, ConfigError
from eagle3_core.evaluate.against import Challenge
from eagle3_core.evaluate.comparison import Difference, Served, ShapeRow, compare_shape, differences
from eagle3_core.evaluate.gate import Figures, Verdict, judge
from eagle3_core.evaluate.measurement import Measurement
from eagle3_core.evaluate.sweep import Pretended, SweepPoint, crossings, paces, sweep_points
from eagle3_core.evaluate.trainer import TrainerFigures


class LineageRow(Section):
    """An artifact the report rests on."""

    artifact: str
    key: str
    manifest_sha256: str
    inputs: dict[str, str] = Field(description="Input name to manifest sha256.")


class Report(Section):
    """Everything on one drafter."""

    name: str
    verdict: Verdict
    challenge: Challenge
    primary: ShapeRow
    rows: tuple[ShapeRow, ...]
    baseline: Measurement
    baseline_sweep: tuple[SweepPoint, ...]
    pretended: tuple[Pretended, ...] = Field(description="Speeds at acceptance lengths that the server pretended.")
    pretended_break_even: dict[int, float | None] = Field(description="By requests in flight, from those.")
    paces: str = Field(description="Speed of the primary shape at each concurrency, where it decides, in words.")
    differences: tuple[Difference, ...]
    parity: dict[str, Any]
    validation: dict[str, Any] = Field(description="The trainer's figures by depth.")
    drafter: dict[str, Any]
    lineage: tuple[LineageRow, ...]


def all_differences(baseline: Served, served: Sequence[Served]) -> list[Difference]:
    """Return the answers of every shape that differ from those without speculation."""
    return [difference for one in served for difference in differences(baseline, one)]


def near_ties(found: Sequence[Difference], shape: str, gap: float) -> int:
    """Return how many answers of `shape` part at a near-tie; an unknown gap is none."""
    return sum(one.shape == shape and one.logit_gap is not None and one.logit_gap <= gap for one in found)


def build(
    name: str,
    evaluation: EvaluationConfig,
    gate: GateConfig,
    baseline: Served,
    served: Sequence[Served],
    validation: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Report:
    """Compare, judge and put together; `about` holds the fields of `Report` that are passed on as they are.

    Raises:
        ConfigError: the shape that decides is a tree.
        NotSpeculatingError: a figure the gate needs is unknown.
        ArtifactError: measurements do not belong together.
    """
    if evaluation.primary_shape.topk > 1:
        raise ConfigError(
            f"evaluation.primary: expected a chain (topk 1), the only shape the trainer's tau is about, found "
            f"{evaluation.primary}; choose a chain"
        )
    served, simulated = served[: len(evaluation.shapes)], served[len(evaluation.shapes) :]
    found = [one.measurement.shape for one in served]
    wanted = [shape.name for shape in evaluation.shapes]
    if found != wanted:
        raise ArtifactError(f"report: expected measurements of {wanted}, found {found}; evaluate again")
    trainer = TrainerFigures(validation)
    rows = tuple(compare_shape(baseline, one, trainer) for one in served)
    primary = next(row for row in rows if row.shape == evaluation.primary)
    pretended = tuple(
        Pretended(length=length, points=sweep_points(one.sweep, baseline.sweep))
        for length, one in zip(evaluation.simulated_lengths, simulated, strict=True)
    )
    return Report(
        name=name,
        verdict=judge(_figures(primary, gate, about["differences"]), gate, about["challenge"].against),
        primary=primary,
        rows=rows,
        baseline=baseline.measurement,
        baseline_sweep=sweep_points(baseline.sweep),
        pretended=pretended,
        pretended_break_even=crossings(pretended),
        paces=paces(primary.sweep),
        validation={key: validation[key] for key in ("depth", "trainer_tau", "by_depth")},
        **about,
    )


def _figures(primary: ShapeRow, gate: GateConfig, parted: Sequence[Difference]) -> Figures:
    return Figures(
        shape=primary.shape,
        acceptance_length=primary.acceptance_length,
        trainer_tau=primary.trainer_tau,
        speedup=primary.speedup,
        word=primary.sweep[0].word,
        equal_answers=primary.equal_answers,
        near_ties=near_ties(parted, primary.shape, gate.near_tie_gap),
        unknown_gaps=sum(one.shape == primary.shape and one.logit_gap is None for one in parted),
        compared_answers=primary.compared_answers,
    )
