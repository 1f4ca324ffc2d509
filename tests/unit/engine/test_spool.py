from __future__ import annotations

import pytest
import torch

from eagle3_core.engine import spool
from eagle3_core.errors import CaptureMismatchError

IDS = [5, 6, 7]


def spooled(directory, rid, ids=IDS, rows=3):
    spool.write(
        directory,
        rid,
        {
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "aux_hidden_states": torch.ones(rows, 6),
            "last_hidden_state": torch.ones(rows, 2),
        },
    )


def test_what_was_written_comes_back_once_and_leaves_nothing(tmp_path):
    rid = spool.new_rid(3)
    spooled(tmp_path, rid)
    sample = spool.take(tmp_path, rid, 9, IDS, width=6)
    assert sample.index == 9
    assert sample.input_ids.dtype == torch.int64
    assert sample.aux_hidden_states.shape == (3, 6)
    assert list(tmp_path.iterdir()) == []


def test_a_request_id_carries_its_number_of_tokens_and_only_ours_do():
    assert spool.expected_tokens(spool.new_rid(1234)) == 1234
    assert spool.expected_tokens("b4f1c2") is None
    assert spool.expected_tokens("HEALTH_CHECK_1.5") is None


@pytest.mark.parametrize(
    ("ids", "rows", "width", "message"),
    [
        ([5, 6, 8], 3, 6, "token ids"),
        ([5, 6], 2, 6, "token ids"),
        (IDS, 2, 6, "expected 3 rows"),
        (IDS, 3, 9, "aux 9 wide"),
    ],
)
def test_states_of_other_tokens_are_refused(tmp_path, ids, rows, width, message):
    rid = spool.new_rid(3)
    spooled(tmp_path, rid, ids, rows)
    with pytest.raises(CaptureMismatchError, match=message):
        spool.take(tmp_path, rid, 0, IDS, width)


def test_a_server_without_the_plugin_is_noticed(tmp_path):
    with pytest.raises(CaptureMismatchError, match="without the capture plugin"):
        spool.take(tmp_path, spool.new_rid(3), 0, IDS, None)
