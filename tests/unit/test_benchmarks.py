"""Benchmarks fit the code, the one that needs no engine runs to its end, and the rule of sampling is SGLang's."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_core.evaluate.acceptance import expected_passes

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_programs_that_capture_can_be_read():
    code = "import capture, kill_capture, store, store_options"
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("temperature", "chances", "passes"),
    [(1.0, [[0.5, 0.3], [0.6, 0], [0, 0]], 1.5), (0.0, [[1, 1], [1, 0], [0, 0]], 1.0),
     (0.5, [[0.25 / 0.38, 0.25 / 0.38 * 0.36 / 0.46], [0.36 / 0.46, 0], [0, 0]], 2 - 0.25 / 0.38)],
)  # fmt: skip
def test_a_draft_token_is_accepted_with_the_targets_probability_of_it(monkeypatch, temperature, chances, passes):
    """An answer of three tokens, two draft tokens a pass: the second is judged after the first, none past the end."""
    monkeypatch.syspath_prepend(str(FOLDER))
    likely = importlib.import_module("sampling").likely
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).log()
    found = likely(logits, torch.tensor([[0, 1], [1, 2]]), temperature)
    assert found == pytest.approx(np.array(chances), rel=1e-6)
    assert expected_passes(found)[-1] == pytest.approx(passes, rel=1e-6)


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
