from __future__ import annotations

import pytest
import torch

from eagle3_core.engine import spool
from eagle3_core.engine.spool import Member
from eagle3_core.errors import CaptureMismatchError, EngineDiedError

SAMPLES = [[5, 6, 7], [8, 9]]


def spooled(directory, ids=(5, 6, 7, 8, 9), rows=5):
    group = spool.new_group([3, 2])[0].group
    spool.admit(directory, group)
    spool.write(
        directory,
        group,
        [
            {
                "input_ids": torch.tensor(ids, dtype=torch.int32)[part],
                "aux_hidden_states": torch.arange(rows).float()[part, None].repeat(1, 6),
                "last_hidden_state": torch.ones(rows, 2)[part],
            }
            for part in (slice(0, 2), slice(2, None))
        ],
    )
    return group


def test_a_group_comes_back_once_sample_by_sample_and_leaves_nothing(tmp_path):
    one, other = spool.take(tmp_path, spooled(tmp_path), SAMPLES, first=9)
    assert (one.index, other.index) == (9, 10)
    assert one.input_ids.dtype == torch.int64
    assert other.input_ids.tolist() == [8, 9]
    assert other.aux_hidden_states[:, 5].tolist() == [3, 4]
    assert other.last_hidden_state.shape == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_request_id_says_its_group_and_place_and_only_ours_do():
    members = spool.new_group([12, 34])
    assert [Member.parse(member.rid) for member in members] == members
    assert [(member.position, member.count, member.tokens) for member in members] == [(0, 2, 12), (1, 2, 34)]
    assert members[0].group == members[1].group != spool.new_group([12])[0].group
    assert Member.parse("b4f1c2") is None
    assert Member.parse("HEALTH_CHECK_1.5") is None


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ((5, 6, 7, 8, 1), 5, "sample 1: the captured token ids differ"),
        ((8, 9, 5, 6, 7), 5, "sample 0: the captured token ids differ"),
        ((5, 6, 7, 8), 4, "expected 5 rows, found 4 ids"),
        ((5, 6, 7, 8, 9), 4, r"aux \(4, 6\)"),
    ],
)
def test_states_of_other_tokens_are_refused(tmp_path, ids, rows, message):
    with pytest.raises(CaptureMismatchError, match=message):
        list(spool.take(tmp_path, spooled(tmp_path, ids, rows), SAMPLES, 0))


def test_a_server_without_the_plugin_is_noticed(tmp_path):
    with pytest.raises(CaptureMismatchError, match="without the capture plugin"):
        list(spool.take(tmp_path, "none", SAMPLES, 0))


def test_states_that_could_not_be_written_or_never_will_be_end_the_wait_with_the_reason(tmp_path):
    spool.admit(tmp_path, "full")
    spool.fail(tmp_path, "full", "OSError: No space left on device")
    with pytest.raises(CaptureMismatchError, match="No space left on device"):
        list(spool.take(tmp_path, "full", SAMPLES, 0))

    def died():
        raise EngineDiedError("the SGLang server died")

    spool.admit(tmp_path, "dead")
    with pytest.raises(EngineDiedError):
        list(spool.take(tmp_path, "dead", SAMPLES, 0, died))
