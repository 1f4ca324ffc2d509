# ruff: noqa: T201, TID253 - a program, and a heavy one
"""How fast rows reach the device, by how states are stored: `python benchmarks/loading.py --device cuda`.

Random states of samples of 2,350 tokens on average lie in memory; the loader packs, sends and turns 8 bits back, and
nothing else happens. `on the CPU` turns them back before they are sent. Every batch must hold what the CPU would have
made of it, to the last bit. Prints one JSON line, tokens a second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eagle3_core.data.encoding import quantise
from eagle3_core.data.features import FeatureSample
from eagle3_core.train.loader import Batch, batches

LAYERS, SAMPLES, ROW = 3, 24, 4
LENGTHS = [1500 + 73 * number for number in range(SAMPLES)]


@dataclass
class Stored:
    """Samples as a feature set hands them out."""

    samples: list[FeatureSample]
    on_cpu: bool = False

    def read(self, index: int) -> FeatureSample:
        """Return one, its states turned back already or not."""
        sample = self.samples[index % SAMPLES]
        return sample.restored() if self.on_cpu else sample


def stored(hidden: int, fp8: str) -> list[FeatureSample]:
    """Draw samples whose states are stored so."""
    generator, found = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        mask = torch.arange(length) >= length // 3
        aux, last = (torch.randn(length, layers * hidden, generator=generator) for layers in (LAYERS, 1))
        states, scales = quantise(aux, LAYERS) if fp8 != "none" else (aux.bfloat16(), None)
        final, factors = quantise(last, 1) if fp8 == "all" else (last.bfloat16(), None)
        found.append(FeatureSample(torch.arange(length), mask, states, final, scales, factors))
    return found


def loaded(samples: Stored, device: torch.device, rows: int) -> Iterator[Batch]:
    """Yield batches of a few samples each."""
    order = [tuple(range(row * ROW, (row + 1) * ROW)) for row in range(rows)]
    return batches(samples, order, device, torch.bfloat16)


def check(samples: list[FeatureSample], device: torch.device) -> None:
    """Demand of every batch what the CPU makes of it.

    Raises:
        SystemExit: it differs.
    """
    for one, other in zip(
        *(loaded(Stored(samples, on_cpu), device, SAMPLES // ROW) for on_cpu in (False, True)), strict=True
    ):
        for name in ("aux_hidden_states", "last_hidden_state"):
            if not torch.equal(getattr(one, name), getattr(other, name)):
                raise SystemExit(f"{name}: the device turns 8 bits back otherwise than the CPU")


def rate(samples: Stored, device: torch.device, rows: int) -> float:
    """Return tokens a second of the second half of some rows."""
    tokens, began = 0, 0.0
    for number, batch in enumerate(loaded(samples, device, rows)):
        if number == rows // 2:
            began, tokens = time.perf_counter(), 0
        tokens += sum(batch.lengths)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    device, found = torch.device(arguments.device), {}
    for fp8 in ("none", "aux", "all"):
        samples = stored(arguments.hidden_size, fp8)
        check(samples, device)
        found[f"fp8 {fp8}"] = round(rate(Stored(samples), device, arguments.rows))
        if fp8 != "none":
            found[f"fp8 {fp8}, on the CPU"] = round(rate(Stored(samples, True), device, arguments.rows))
    print(json.dumps({"threads": torch.get_num_threads(), "tokens_per_s": found}))


if __name__ == "__main__":
    main()
