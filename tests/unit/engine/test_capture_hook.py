"""What the hook makes of a prefill, with the objects SGLang hands over replaced by plain ones."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from eagle3_core.engine import capture_hook, spool
from eagle3_core.engine.plugin import CAPTURE_DIR, CAPTURE_LAYERS
from eagle3_core.errors import CaptureMismatchError
from tests.unit.conftest import no_room

MODE = SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: False)


def states(ids):
    """States that say which token they belong to."""
    token = torch.tensor(ids, dtype=torch.float32).unsqueeze(1)
    return [token + 0.1, token + 0.2], token.repeat(1, 2)


@pytest.fixture(autouse=True)
def in_spool(tmp_path, monkeypatch):
    monkeypatch.setenv(CAPTURE_DIR, str(tmp_path))
    capture_hook.spooler.cache_clear()
    return tmp_path


def batch_of(members, extends, prefixes):
    rids = [member if isinstance(member, str) else member.rid for member in members]
    return SimpleNamespace(forward_mode=MODE, rids=rids, extend_seq_lens_cpu=extends, extend_prefix_lens_cpu=prefixes)


def forward(ids, members, extends, prefixes):
    batch, (aux, last) = batch_of(members, extends, prefixes), states(ids)
    capture_hook._before_forward(None, (torch.tensor(ids), None, batch), {})
    return capture_hook.around_logits(
        lambda *_args, **_kwargs: "logits", None, torch.tensor(ids), last, None, batch, aux
    )


def taken(directory, members, samples):
    return list(spool.take(directory, members[0].group, samples, 0))


def test_a_group_is_spooled_whole_and_other_requests_are_left_alone(in_spool):
    members = spool.new_group([2, 3])
    assert forward([7, 8], ["warmup"], [2], [0]) == "logits"
    assert forward([1, 2, 3, 4, 5], members, [2, 3], [0, 0]) == "logits"
    _, second = taken(in_spool, members, [[1, 2], [3, 4, 5]])
    torch.testing.assert_close(second.aux_hidden_states[:, 1], torch.tensor([3.2, 4.2, 5.2]))
    torch.testing.assert_close(second.last_hidden_state[:, 0], torch.tensor([3.0, 4.0, 5.0]))
    assert list(in_spool.iterdir()) == []


def test_chunks_are_put_together_even_when_their_buffer_is_used_again(in_spool):
    members = spool.new_group([5])
    buffer, (aux, last) = torch.tensor([1, 2, 3]), states([1, 2, 3])
    batch = batch_of(members, [3], [0])
    capture_hook.around_logits(lambda *_a, **_k: None, None, buffer, last, None, batch, torch.cat(aux, dim=-1))
    buffer.zero_()
    last.zero_()
    forward([4, 5], members, [2], [3])
    (sample,) = taken(in_spool, members, [[1, 2, 3, 4, 5]])
    assert sample.last_hidden_state[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_process_that_does_not_write_counts_the_rows_of_every_chunk_too(in_spool, monkeypatch):
    monkeypatch.setattr(capture_hook, "_writes", lambda: False)
    members = spool.new_group([5])
    forward([1, 2, 3], members, [3], [0])
    with pytest.raises(CaptureMismatchError, match="from row 3 on"):
        forward([5], members, [1], [4])
    forward([4, 5], members, [2], [3])
    assert list(in_spool.iterdir()) == []


def test_a_group_counts_as_begun_with_its_last_chunk_since_others_could_join_an_earlier_one(in_spool):
    members = spool.new_group([5])
    capture_hook._before_forward(None, (), {"forward_batch": batch_of(members, [3], [0])})
    assert list(in_spool.iterdir()) == []
    capture_hook._before_forward(None, (), {"forward_batch": batch_of(members, [2], [3])})
    assert [path.name for path in in_spool.iterdir()] == [f"{members[0].group}.admitted"]


def test_a_request_that_starts_over_forgets_its_first_rows(in_spool):
    members = spool.new_group([3])
    forward([1, 2], members, [2], [0])
    forward([1, 2, 3], members, [3], [0])
    assert taken(in_spool, members, [[1, 2, 3]])[0].input_ids.tolist() == [1, 2, 3]


ONE, OTHER = spool.new_group([2, 3]), spool.new_group([2])


@pytest.mark.parametrize(
    ("members", "extends", "prefixes", "message"),
    [
        (ONE[:1], [2], [0], "one group of 2 samples, found 1 requests"),
        ([*ONE, *OTHER], [2, 3, 2], [0, 0, 0], "found 3 requests, 3 of them samples"),
        ([*ONE, "warmup"], [2, 3, 1], [0, 0, 0], "found 3 requests, 2 of them samples"),
        (ONE[::-1], [3, 2], [0, 0], "one group of 2 samples"),
        (ONE, [2, 2], [0, 0], r"expected \[2, 3\] rows from row 0 on, found \[2, 2\]"),
        (ONE, [2, 2], [0, 1], r"from \[0, 1\] on; is the radix cache on"),
        (OTHER, [1], [1], r"expected \[2\] rows from row 0 on, found \[1\] from \[1\]"),
    ],
)
def test_a_prefill_that_is_not_one_whole_group_stops_the_engine(members, extends, prefixes, message):
    with pytest.raises(CaptureMismatchError, match=message):
        forward(list(range(sum(extends))), members, extends, prefixes)


def test_rows_that_do_not_add_up_stop_the_engine():
    with pytest.raises(CaptureMismatchError, match="expected 4 rows"):
        forward([1, 2, 3], spool.new_group([4]), [4], [0])


def test_states_that_cannot_be_written_are_told_to_who_waits_for_them(in_spool, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "write", full)
    members = spool.new_group([2])
    forward([1, 2], members, [2], [0])
    with pytest.raises(CaptureMismatchError, match="No space left on device"):
        taken(in_spool, members, [[1, 2]])


def test_whoever_waits_hears_of_a_spool_without_room_for_the_reason(in_spool):
    members = spool.new_group([2])
    deadline = time.monotonic() + 20

    def too_long():
        assert time.monotonic() < deadline

    with no_room():
        forward([1, 2], members, [2], [0])
        while not list(in_spool.glob("*.failed")):
            too_long()
    with pytest.raises(CaptureMismatchError, match=f"no room in {in_spool}"):
        list(spool.take(in_spool, members[0].group, [[1, 2]], 0, too_long))


def fake_runner(recorded_as):
    inner = torch.nn.Module()
    inner.layers_to_capture = []

    class LlamaForCausalLM(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = inner

        def set_eagle3_layers_to_capture(self, ids):
            inner.layers_to_capture = recorded_as(ids)

    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=8))
    return SimpleNamespace(model=LlamaForCausalLM(), model_config=config, is_draft_worker=False)


def test_a_model_that_would_record_other_layers_stops_the_start(monkeypatch):
    monkeypatch.setenv(CAPTURE_LAYERS, "1,3,4")
    capture_hook.after_load_model(None, fake_runner(lambda ids: [value + 1 for value in ids]))
    with pytest.raises(CaptureMismatchError, match=r"\(2, 4, 5\)"):
        capture_hook.after_load_model(None, fake_runner(list))
