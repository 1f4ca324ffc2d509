"""Every exception the core raises, and what helps against it.

Eagle3Error
|-- InputError               fix     something the user gave is wrong
|   |-- ConfigError                  a recipe or parameter
|   |-- TargetError                  the target's directory, config, tokenizer or chat template
|   `-- PreflightError               several findings of the preflight, one line each
|-- ArtifactError
|   |-- NotCommittedError    fix     an upstream artifact is not there: run that stage first
|   |-- CorruptArtifactError retry   content differs from its manifest: it is quarantined, a retry makes it again
|   `-- UnknownSchemaError   fix     written by a newer version
|-- StorageFullError         resume  free space, then resume
|-- StoreUnreachableError    retry   the store does not answer; says nothing about any artifact
|-- EngineError              retry   SGLang failed in a way a new start may cure
|   |-- EngineDiedError              the server process died
|   |-- EngineStartError             it never became ready
|   |   `-- EngineMemoryError fix    for want of memory: the same arguments would fail again
|   |-- GpuBusyError                 somebody else holds the GPUs
|   |-- EngineUnreachableError       the server lives but does not answer
|   |-- CaptureMismatchError         hidden states do not belong to the request
|   |-- EngineArgsError      fix     flags the installed SGLang would refuse or rewrite
|   |-- EngineVersionError   fix     SGLang or the capture plugin is not a known-good combination
|   `-- NotSpeculatingError  fix     the server counted no verify pass: the drafter is not in use
|-- TrainingError            fix
|   |-- WorkerDiedError      resume  a rank died; the last checkpoint is intact
|   `-- NonFiniteError       fix     too many NaN or infinite gradients
|-- ExportError              fix     key sets or config would not load as written
|-- ParityError              fix     the export does not behave like the trained drafter
|-- DefectError              fix     a defect of this program or its installation; again would end the same way
`-- JobError
    |-- JobLostError         retry   the process vanished without leaving a result
    `-- JobFencedError       fix     another attempt owns the job now
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Remedy(StrEnum):
    """What helps: nothing but a human (fix), running again (retry), or running again to continue (resume)."""

    FIX = "fix"
    RETRY = "retry"
    RESUME = "resume"


EXIT_CODES = {Remedy.FIX: 65, Remedy.RETRY: 75, Remedy.RESUME: 76}
"""Process exit code of a stage for each remedy (65 and 75 as EX_DATAERR and EX_TEMPFAIL of sysexits.h)."""


class Eagle3Error(Exception):
    """Base of all errors raised on purpose; the message is one line: expected, found, where, what to do."""

    remedy: ClassVar[Remedy] = Remedy.FIX


def told(name: str, message: str) -> Eagle3Error | None:
    """Return the error that another process of this program wrote down by its type's name; None: no such type here."""
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, Eagle3Error) else None


class InputError(Eagle3Error):
    """Something the user gave is wrong."""


class ConfigError(InputError):
    """A recipe key or parameter is unknown, out of bounds or contradicts another."""


class TargetError(InputError):
    """The target's directory, config, tokenizer or chat template cannot be used."""


class PreflightError(InputError):
    """The preflight found one or more problems; the message lists them."""


class ArtifactError(Eagle3Error):
    """An artifact cannot be used."""


class NotCommittedError(ArtifactError):
    """No committed manifest at the expected place."""


class CorruptArtifactError(ArtifactError):
    """Content differs from the manifest."""

    remedy = Remedy.RETRY


class UnknownSchemaError(ArtifactError):
    """The schema version is not one this version reads."""


class StorageFullError(Eagle3Error):
    """The root has less free space than the next write needs."""

    remedy = Remedy.RESUME


class StoreUnreachableError(Eagle3Error):
    """The store does not answer, or answers with a fault of its own; no statement about what is in it."""

    remedy = Remedy.RETRY


class EngineError(Eagle3Error):
    """SGLang failed in a way a new start may cure."""

    remedy = Remedy.RETRY


class EngineDiedError(EngineError):
    """The server process died."""


class EngineStartError(EngineError):
    """The server did not become ready."""


class EngineMemoryError(EngineStartError):
    """The server did not become ready for want of memory; the same arguments would fail again."""

    remedy = Remedy.FIX


class GpuBusyError(EngineError):
    """Processes that are not ours hold the GPUs; they may end, and nobody here ends them."""


class EngineUnreachableError(EngineError):
    """The server lives but does not answer."""


class CaptureMismatchError(EngineError):
    """Hidden states that came back do not belong to the request that asked."""


class EngineArgsError(EngineError):
    """Launch arguments the installed SGLang would refuse or silently rewrite."""

    remedy = Remedy.FIX


class EngineVersionError(EngineError):
    """The installed SGLang and the capture plugin are not a known-good combination."""

    remedy = Remedy.FIX


class NotSpeculatingError(EngineError):
    """The server counted no verify pass, so no acceptance length exists."""

    remedy = Remedy.FIX


class TrainingError(Eagle3Error):
    """Training cannot go on."""


class WorkerDiedError(TrainingError):
    """A rank died; training resumes from the last committed checkpoint."""

    remedy = Remedy.RESUME


class NonFiniteError(TrainingError):
    """More NaN or infinite gradients than the configured bound."""


class ExportError(Eagle3Error):
    """The exported directory would not load as written."""


class ParityError(Eagle3Error):
    """The exported drafter does not behave like the trained one, or the gate has no power."""


class DefectError(Eagle3Error):
    """A defect of this program or of its installation, such as an import that fails."""


class JobError(Eagle3Error):
    """A supervised job could not be started, joined or ended."""


class JobLostError(JobError):
    """The job's process vanished without leaving a result (kill -9, reboot)."""

    remedy = Remedy.RETRY


class JobFencedError(JobError):
    """Another attempt has taken the job over."""
