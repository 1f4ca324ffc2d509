"""Benchmarks of the capture fit the code, and the one that needs no engine runs to its end."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_programs_that_capture_can_be_read():
    code = "import capture, kill_capture, store, store_options"
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_store_is_compared_with_one_file_a_sample(tmp_path):
    small = ["--samples", "12", "--mean-tokens", "40", "--hidden-size", "16", "--shard-tokens", "256"]
    command = [sys.executable, FOLDER / "store.py", *small, "--index", "300", "--files", "5", "--root", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    store, files = (json.loads(done.stdout)[name] for name in ("store", "one_file_a_sample"))
    # Only the last hidden states that labels need, no header a sample.
    assert 3 * 16 * 2 + 5 < store["bytes_per_token"] < 4 * 16 * 2 + 5 < files["bytes_per_token"]
    assert set(store) == {*files, "verify_gb_per_s"}
    assert set(store["open_s"]) == {"300"}
    assert list(tmp_path.iterdir()) == []
