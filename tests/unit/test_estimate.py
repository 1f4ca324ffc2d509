"""The arithmetic of `eagle3 plan`."""

from eagle3_core.cli.common import human_bytes
from eagle3_core.estimate import Workload, drafter_parameters, estimate


def test_the_articles_corpus_takes_five_terabytes():
    work = Workload(samples=37312, tokens=37312 * 2353, hidden_size=7168)
    result = estimate(work, shard_tokens=65536, max_tasks=1024)
    assert human_bytes(result.feature_bytes) == "5.0 TB"
    assert result.capture_tasks == 1024
    assert result.shards == 1340


def test_a_small_corpus_has_a_task_a_shard():
    work = Workload(samples=10, tokens=1000, hidden_size=64, dtype="float32")
    result = estimate(work, shard_tokens=300, max_tasks=1024)
    assert result.shards == result.capture_tasks == 4
    assert result.bytes_per_token == 4 * 64 * 4 + 5


def test_capture_time_follows_the_targets_parameters():
    work = Workload(samples=1, tokens=10**6, hidden_size=4096, target_parameters=8e9)
    double = Workload(samples=1, tokens=2 * 10**6, hidden_size=4096, target_parameters=8e9)
    one, two = (estimate(w, shard_tokens=65536, max_tasks=1024) for w in (work, double))
    assert two.capture_gpu_hours == 2 * one.capture_gpu_hours > 0


def test_the_drafters_size_counts_every_matrix():
    work = Workload(samples=1, tokens=1, hidden_size=8, intermediate_size=16, draft_vocab_size=10)
    fc, qkv, out, mlp, head = 3 * 8 * 8, 2 * 8 * 24, 8 * 8, 3 * 8 * 16, 10 * 8
    assert drafter_parameters(work) == fc + qkv + out + mlp + head
