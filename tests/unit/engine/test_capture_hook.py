"""The split of a prefill batch, with the objects SGLang hands over replaced by plain ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eagle3_core.engine import capture_hook, spool
from eagle3_core.engine.plugin import CAPTURE_DIR, CAPTURE_LAYERS
from eagle3_core.errors import CaptureMismatchError

MODE = SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: False)


def states(ids):
    """States that say which token they belong to."""
    token = torch.tensor(ids, dtype=torch.float32).unsqueeze(1)
    return [token + 0.1, token + 0.2], token.repeat(1, 2)


@pytest.fixture(autouse=True)
def in_spool(tmp_path, monkeypatch):
    monkeypatch.setenv(CAPTURE_DIR, str(tmp_path))
    monkeypatch.setattr(capture_hook, "_partials", {})
    return tmp_path


def forward(ids, rids, extends, prefixes, aux=None):
    batch = SimpleNamespace(forward_mode=MODE, rids=rids, extend_seq_lens_cpu=extends, extend_prefix_lens_cpu=prefixes)
    given_aux, last = states(ids)
    return capture_hook.around_logits(
        lambda *_args, **_kwargs: "logits",
        None,
        torch.tensor(ids),
        last,
        None,
        batch,
        given_aux if aux is None else aux,
    )


def test_a_batch_is_split_by_its_lengths_and_other_requests_are_left_alone(in_spool):
    first, second = spool.new_rid(2), spool.new_rid(3)
    assert forward([1, 2, 9, 3, 4, 5], [first, "warmup", second], [2, 1, 3], [0, 0, 0]) == "logits"
    assert sorted(path.name for path in in_spool.iterdir()) == sorted([first, second])
    sample = spool.take(in_spool, second, 0, [3, 4, 5], width=2)
    torch.testing.assert_close(sample.aux_hidden_states[:, 1], torch.tensor([3.2, 4.2, 5.2]))
    torch.testing.assert_close(sample.last_hidden_state[:, 0], torch.tensor([3.0, 4.0, 5.0]))


def test_chunks_are_put_together_in_order_even_when_their_buffer_is_reused(in_spool):
    rid = spool.new_rid(5)
    buffer = torch.tensor([1, 2, 3])
    aux, last = states([1, 2, 3])
    batch = SimpleNamespace(forward_mode=MODE, rids=[rid], extend_seq_lens_cpu=[3], extend_prefix_lens_cpu=[0])
    capture_hook.around_logits(lambda *_a, **_k: None, None, buffer, last, None, batch, torch.cat(aux, dim=-1))
    buffer.zero_()
    last.zero_()
    assert list(in_spool.iterdir()) == []
    forward([4, 5], [rid], [2], [3])
    sample = spool.take(in_spool, rid, 0, [1, 2, 3, 4, 5], width=2)
    assert sample.last_hidden_state[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_request_that_starts_over_forgets_its_first_rows(in_spool):
    rid = spool.new_rid(3)
    forward([1, 2], [rid], [2], [0])
    forward([1, 2, 3], [rid], [3], [0])
    assert spool.take(in_spool, rid, 0, [1, 2, 3], width=2).input_ids.tolist() == [1, 2, 3]


def test_rows_served_from_a_cache_leave_no_file(in_spool):
    forward([3], [spool.new_rid(3)], [1], [2])
    assert list(in_spool.iterdir()) == []


def test_rows_that_do_not_add_up_stop_the_engine():
    with pytest.raises(CaptureMismatchError, match="expected 4 rows"):
        forward([1, 2, 3], [spool.new_rid(4)], [4], [0])


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
