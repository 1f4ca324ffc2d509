"""The GPU's loss kernel, run by Triton's interpreter, against the plain reading and autograd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("interpreted_divergence.py")


def test_loss_gradient_and_greedy_token_are_those_of_the_plain_reading():
    # A process of its own: Triton decides when it is imported whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "compared\n"), done.stderr[-2000:]
