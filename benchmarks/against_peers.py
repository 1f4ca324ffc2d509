# ruff: noqa: T201 - a program
"""Run the training step beside two other trainers on one GPU and print the ratios.

`python benchmarks/against_peers.py DRIVERS --setting S --ttt-steps 3`: DRIVERS holds `peer_speculators.py` and
`peer_specforge.py`, programs that import speculators 0.9.0 and specforge 0.2.0 and time their own steps on documents of
the same lengths (lognormal, mean 2,350, 35 % without a loss) with `--setting`, `--ttt` and `--out FILE`. One after the
other, in one process tree; every token of a document counts, no padding does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OURS = Path(__file__).with_name("train_step.py")


def ours(arguments: argparse.Namespace, *more: str) -> dict[str, float]:
    """Return the figures of our own step."""
    command = [sys.executable, str(OURS), "--setting", arguments.setting, "--ttt-steps", str(arguments.ttt_steps),
               "--precision", "bfloat16", "--device", "cuda", "--steps", str(arguments.steps), *more]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def peer(arguments: argparse.Namespace, script: str, *more: str) -> dict[str, Any]:
    """Return what a peer's driver wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(arguments.drivers / script), "--setting", arguments.setting, "--ttt",
                   str(arguments.ttt_steps), "--out", str(out), *more]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=arguments.drivers)
        figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if "error" in figures:
        raise SystemExit(f"{script}: {figures['error']}")
    return figures


def main() -> None:
    """Measure in turn, print one JSON line each and then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drivers", type=Path)
    parser.add_argument("--setting", choices=("S", "K"), default="S")
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    trained, frozen = ours(arguments), ours(arguments, "--freeze-head")
    rates = {"trained head": trained["tokens_per_s"], "frozen head": frozen["tokens_per_s"]}
    peaks = {"trained head": trained["peak_gib"], "frozen head": frozen["peak_gib"]}
    first = peer(arguments, "peer_speculators.py", "--window", "0")
    other = peer(arguments, "peer_specforge.py", "--cases", "one8192,mean")
    theirs = {
        "speculators, frozen head": (first["default_trainer"]["useful_tok_per_s"], first["peak_mem_gib"]),
        "speculators, frozen head, batches on the GPU": (first["compute_only"]["useful_tok_per_s"], None),
    }
    for case, figures in other["cases"].items():
        theirs[f"specforge, trained head, {case}"] = (figures["default"]["useful_tok_per_s"], figures["peak_mem_gib"])
        theirs[f"specforge, trained head, {case}, batches on the GPU"] = (
            figures["gpu_resident"]["useful_tok_per_s"],
            None,
        )
    print(json.dumps({"ours": rates, "gib": peaks, "first epoch": trained["first_epoch_tokens_per_s"]}))
    for name, (rate, peak) in theirs.items():
        like = "frozen head" if "frozen" in name else "trained head"
        print(json.dumps({"peer": name, "tokens_per_s": round(rate), "gib": peak and round(peak, 1),
                          "ratio": round(rates[like] / rate, 2)}))  # fmt: skip


if __name__ == "__main__":
    main()
