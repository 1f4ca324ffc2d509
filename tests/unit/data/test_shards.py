"""A shard has the rows that were planned: not one more, not one less."""

import threading

import pytest
import torch

from eagle3_core.data.encoding import Encoding
from eagle3_core.data.shards import ShardWriter
from eagle3_core.errors import CaptureMismatchError

ENCODING = Encoding(dtype="float32", fp8="none", last_rows="all", num_aux=3, hidden_size=4)


def write(path, planned, *lengths):
    with ShardWriter(path, ENCODING, planned, planned) as writer:
        for length in lengths:
            writer.append([1] * length, 1, torch.zeros(length, 12), torch.zeros(length, 4))


@pytest.mark.parametrize(
    ("planned", "said"),
    [(9, "expected 9 rows of aux_hidden_states, found more"), (11, "expected 11 rows of aux_hidden_states, found 10")],
)
def test_other_rows_than_planned_are_refused(tmp_path, planned, said):
    write(tmp_path / "whole", 10, 4, 6)
    with pytest.raises(CaptureMismatchError, match=f"{said}; recapture"):
        write(tmp_path / "other", planned, 4, 6)


def test_what_waits_for_its_turn_is_not_on_the_disk(tmp_path, monkeypatch):
    go_on, real = threading.Event(), ShardWriter._store
    monkeypatch.setattr(ShardWriter, "_store", lambda *sample: go_on.wait(60) and real(*sample))
    with ShardWriter(tmp_path / "shard", ENCODING, 10, 10) as writer:
        for length in (4, 6):
            writer.append([1] * length, 1, torch.zeros(length, 12), torch.zeros(length, 4))
        assert writer.on_disk == 0
        go_on.set()
        writer.checksums()
        assert writer.on_disk == 10
