"""The stand-in kernels against the plainest statement of what they compute: one query, one head, one sum at a time."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from eagle3_core.engine.launch import CPU_SITE

POOL, SLOTS, HEADS, KV_HEADS, WIDTH = 6, 200, 4, 2, 8
SCALE = WIDTH**-0.5


def load(name: str) -> ModuleType:
    """The file alone: importing the package would register it with torch for the rest of the session."""
    found = importlib.util.spec_from_file_location(f"stand_in_{name}", CPU_SITE / "sgl_kernel" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


attention, tree, cache = load("attention"), load("tree"), load("cache")


class Cache:
    """A paged cache with random contents and a table that scatters every request over it."""

    def __init__(self, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.k = torch.randn(SLOTS, KV_HEADS, WIDTH, generator=generator).to(dtype)
        self.v = torch.randn(SLOTS, KV_HEADS, WIDTH, generator=generator).to(dtype)
        self.table = torch.stack([torch.randperm(SLOTS, generator=generator) for _ in range(POOL)]).to(torch.int32)
        self.generator = generator

    def queries(self, rows, dtype=torch.float32):
        return torch.randn(rows, HEADS, WIDTH, generator=self.generator).to(dtype)


def one(query, keys, values, visible, cap=0.0):
    """One query row [H, D] over keys [L, K, D], in float64."""
    out = torch.zeros(HEADS, WIDTH, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = (keys[:, group].double() @ query[head].double()) * SCALE
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=0)
        out[head] = weights @ values[:, group].double()
    return out


def expected_extend(store, q, pool, lengths, extends, window=0, cap=0.0, trees=None):
    rows, start = [], 0
    for index, (length, extend) in enumerate(zip(lengths, extends, strict=True)):
        slots = store.table[pool[index], :length].long()
        prefix = length - extend
        for at in range(extend):
            visible = torch.arange(length) <= prefix + at
            if trees is not None:
                visible = torch.cat([torch.ones(prefix, dtype=torch.bool), trees[index][at]])
            if window:
                visible = visible & (torch.arange(length) > prefix + at - window)
            rows.append(one(q[start + at], store.k[slots], store.v[slots], visible, cap))
        start += extend
    return torch.stack(rows)


def run_extend(store, q, pool, lengths, extends, window=0, cap=0.0, tree_mask=None):
    out = torch.empty_like(q)
    starts = torch.tensor([sum(extends[:index]) for index in range(len(extends))])
    attention.extend_attention_cpu(
        q, None, None, out, store.k, store.v, 1.0, 1.0, store.table, torch.tensor(pool), torch.tensor(lengths),
        torch.tensor(extends), starts, max(extends), SCALE, cap, False, window, None, None, tree_mask, True,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize(
    ("lengths", "extends"),
    [
        ([7], [7]),
        ([9], [4]),
        ([5, 5, 5], [5, 5, 5]),
        ([4, 9, 30], [4, 4, 4]),
        ([40, 3, 11], [40, 3, 2]),
        ([50, 60], [40, 40]),
        ([6, 9], [0, 9]),
    ],
)
def test_new_tokens_see_their_prefix_and_each_other_causally(lengths, extends, cap, window):
    store, pool = Cache(), [4, 1, 3][: len(lengths)]
    q = store.queries(sum(extends))
    found = run_extend(store, q, pool, lengths, extends, window, cap)
    wanted = expected_extend(store, q, pool, lengths, extends, window, cap)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("lengths", [[9], [9, 14], [9, 9]])
def test_draft_tokens_see_their_ancestors_alone_in_both_mask_layouts(lengths, full):
    store, pool, count = Cache(), [2, 5], 4
    trees = [torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool(),
             torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()]  # fmt: skip
    trees, extends = trees[: len(lengths)], [count] * len(lengths)
    blocks = [
        torch.cat([torch.ones(count, length - count).bool(), block], dim=1) if full else block
        for block, length in zip(trees, lengths, strict=True)
    ]
    q = store.queries(count * len(lengths))
    mask = torch.cat([block.reshape(-1) for block in blocks])
    found = run_extend(store, q, pool[: len(lengths)], lengths, extends, tree_mask=mask)
    wanted = expected_extend(store, q, pool, lengths, extends, trees=trees)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("lengths", [[1], [9], [6, 6, 6], [3, 17, 8]])
def test_a_decoding_step_stores_its_key_and_sees_all_of_its_request(lengths, window, dtype):
    store, pool = Cache(dtype), torch.tensor([4, 1, 3][: len(lengths)])
    q, out = store.queries(len(lengths), dtype), torch.empty(len(lengths), HEADS, WIDTH, dtype=dtype)
    new_k = torch.randn(len(lengths), KV_HEADS * WIDTH, generator=store.generator).to(dtype)
    new_v = torch.randn(len(lengths), KV_HEADS * WIDTH, generator=store.generator).to(dtype)
    last = torch.tensor(lengths) - 1
    where = store.table[pool, last].long()
    attention.decode_attention_cpu(
        q, store.k, store.v, 1.0, 1.0, out, new_k, new_v, where, torch.zeros(1), store.table, pool,
        torch.tensor(lengths), SCALE, 0.0, False, window, None, None,
    )  # fmt: skip
    assert torch.equal(store.k[where].reshape(len(lengths), -1), new_k)
    wanted = expected_extend(store, q, pool.tolist(), lengths, [1] * len(lengths), window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


def test_work_shared_by_the_layers_of_a_pass_is_redone_for_the_next_pass():
    store, pool, logits = Cache(), torch.tensor([0, 1]), torch.zeros(1)
    for lengths in ([3, 5], [4, 6]):
        q, out = store.queries(2), torch.empty(2, HEADS, WIDTH)
        attention.decode_attention_cpu(
            q, store.k, store.v, 1.0, 1.0, out, None, None, None, logits, store.table, pool, torch.tensor(lengths),
            SCALE, 0.0,
        )  # fmt: skip
        wanted = expected_extend(store, q, [0, 1], lengths, [1, 1])
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_what_is_not_covered_says_so():
    with pytest.raises(NotImplementedError, match="cross attention"):
        attention._refuse(True, 1.0, 1.0)
    with pytest.raises(NotImplementedError, match="scaled KV"):
        attention._refuse(False, 0.5, 1.0)


@pytest.mark.parametrize("extend", [1, 5, 40])
def test_a_sink_is_a_score_of_each_head_that_has_no_value(extend):
    store, sinks, length = Cache(), torch.tensor([0.5, -1.0, 2.0, 0.0]), 44
    q, out = store.queries(extend), torch.empty(extend, HEADS, WIDTH)
    pool, lengths = torch.tensor([3]), torch.tensor([length])
    if extend == 1:
        attention.decode_attention_cpu(
            q, store.k, store.v, 1.0, 1.0, out, None, None, None, torch.zeros(1), store.table, pool, lengths, SCALE,
            0.0, sinks=sinks,
        )  # fmt: skip
    else:
        attention.extend_attention_cpu(
            q, None, None, out, store.k, store.v, 1.0, 1.0, store.table, pool, lengths, torch.tensor([extend]),
            torch.tensor([0]), extend, SCALE, 0.0, False, 0, None, sinks, None, True,
        )  # fmt: skip
    slots = store.table[3, :length].long()
    for at in range(extend):
        seen = slots[: length - extend + at + 1]
        for head in range(HEADS):
            keys, values = (part[seen, head // (HEADS // KV_HEADS)].double() for part in (store.k, store.v))
            scores = torch.cat((keys @ q[at, head].double() * SCALE, sinks[head : head + 1].double()))
            expected = scores.softmax(0)[:-1] @ values
            torch.testing.assert_close(out[at, head].double(), expected, atol=1e-5, rtol=1e-5)


# Two requests, two branches a step. Slots 0, 1 hang on the root, 2, 3 on slot 0, 4, 5 on slot 1; parent_list[b] is the
# slot whose children are numbered from b * topk.
PARENT_SLOTS = [[-1, 0, 1, 2, 5]] * 2
SELECTED = [[0, 1, 2, 5, 6], [0, 1, 2, 3, 4]]
PARENT_NODES = [[-1, 0, 0, 1, 2, 3], [-1, 0, 0, 1, 1, 2]]
DEPTHS = [[0, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 2]]
LENGTHS = [10, 3]


@pytest.mark.parametrize("mode", [0, 1])
def test_a_tree_links_its_nodes_and_knows_ancestors_and_positions(mode):
    batch, count = 2, 6
    sizes = [count * (length + count) if mode == 0 else count * count for length in LENGTHS]
    mask = torch.ones(sum(sizes), dtype=torch.bool)
    positions = torch.zeros(batch * count, dtype=torch.long)
    index, child, sibling = (torch.full((batch, count), -1) for _ in range(3))
    tree.build_tree_kernel_efficient_cpu(
        torch.tensor(PARENT_SLOTS), torch.tensor(SELECTED), torch.tensor(LENGTHS), mask, positions, index, child,
        sibling, 2, 3, count, mode,
    )  # fmt: skip
    assert index.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert child.tolist() == [[1, 3, 4, 5, -1, -1], [1, 3, 5, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1, -1, -1], [-1, 2, -1, 4, -1, -1]]
    wanted = [length + depth for length, depths in zip(LENGTHS, DEPTHS, strict=True) for depth in depths]
    assert positions.tolist() == wanted
    for parents, length, block in zip(PARENT_NODES, LENGTHS, mask.split(sizes), strict=True):
        rows = block.view(count, -1)
        for node in range(count):
            path, at = set(), node
            while at != -1:
                path.add(at)
                at = parents[at]
            prefix = list(range(length)) if mode == 0 else []
            seen = [*prefix, *(len(prefix) + ancestor for ancestor in sorted(path))]
            assert rows[node].nonzero().flatten().tolist() == seen


@pytest.mark.parametrize(
    ("choices", "accepted", "tokens"),
    [
        ([20, 0, 40, 0, 99, 0], [0, 2, 4], {0: 20, 2: 40, 4: 99}),
        ([10, 30, 0, 50, 0, 98], [0, 1, 3, 5], {0: 10, 1: 30, 3: 50, 5: 98}),
        ([77, 1, 2, 3, 4, 5], [0], {0: 77}),
        ([20, 0, 41, 0, 99, 0], [0, 2], {0: 20, 2: 41}),
    ],
)
def test_verification_follows_the_targets_own_choices_and_adds_its_next_token(choices, accepted, tokens):
    """The first tree above, with token 10 * node at every node; the second request repeats it, six places on."""
    candidates = torch.tensor([[0, 10, 20, 30, 40, 50]] * 2)
    index = torch.arange(12).view(2, 6)
    child = torch.tensor([[1, 3, 4, 5, -1, -1]] * 2)
    sibling = torch.tensor([[-1, 2, -1, -1, -1, -1]] * 2)
    predicts = torch.zeros(12, dtype=torch.int32)
    accept_index, accepted_drafts = torch.full((2, 4), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    tree.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted_drafts, candidates=candidates,
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
        target_predict=torch.tensor([choices] * 2),
    )  # fmt: skip
    padding = [-1] * (4 - len(accepted))
    assert accept_index.tolist() == [[*accepted, *padding], [*(at + 6 for at in accepted), *padding]]
    assert accepted_drafts.tolist() == [len(accepted) - 1] * 2
    wanted = {**tokens, **{at + 6: token for at, token in tokens.items()}}
    assert {at: int(predicts[at]) for at in wanted} == wanted


def test_each_branch_of_a_draft_reads_the_prefix_and_its_own_slots():
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    rows = cache.build_draft_decode_metadata_cpu(table, torch.tensor([1, 0]), torch.tensor([4, 7]), 2, 3, 20)
    prefix_one, prefix_two = list(range(20, 24)), list(range(7))
    assert rows[0, :7].tolist() == [*prefix_one, 24, 25, 26]
    assert rows[1, :7].tolist() == [*prefix_one, 27, 28, 29]
    assert rows[2, :10].tolist() == [*prefix_two, 7, 8, 9]
    assert rows[3, :10].tolist() == [*prefix_two, 10, 11, 12]
    slots = torch.zeros(12, dtype=torch.int64)
    cache.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1, 0]), table, torch.tensor([4, 7]), slots, 20, 2, 3)
    assert slots.tolist() == [*range(24, 30), *range(7, 13)]


def test_cache_rows_move_as_if_read_before_written():
    buffer = torch.arange(12, dtype=torch.float32).view(6, 2)
    pointers, widths = torch.tensor([buffer.data_ptr()], dtype=torch.uint64), torch.tensor([8])
    cache.copy_all_layer_kv_cache_cpu(pointers, widths, torch.tensor([1, 2]), torch.tensor([2, 4]))
    assert buffer[:, 0].tolist() == [0, 4, 8, 6, 8, 10]


def test_slots_are_entered_and_read_back_per_request():
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 3])
    cache.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([11, 12, 13, 14, 15]), 8)
    assert table[2].tolist()[:4] == [0, 11, 12, 0]
    assert table[0].tolist()[:4] == [13, 14, 15, 0]
    slots = torch.zeros(5, dtype=torch.int64)
    cache.assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, 8)
    assert slots.tolist() == [11, 12, 13, 14, 15]


def test_ids_are_shifted_per_request_and_end_with_the_next_token():
    ids = torch.tensor([1, 2, 3, 7, 8, 9])
    cache.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 3]), torch.tensor([4, 10]))
    assert ids.tolist() == [2, 3, 4, 8, 9, 10]
    cache.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 3]), torch.tensor([50, 60]), torch.tensor([1, 5])
    )
    assert ids.tolist() == [3, 50, 4, 9, 10, 60]


def latents(lengths, extends, generator):
    """Return queries, written-out keys and values of so many new tokens, and a cache that holds something else."""
    rows = sum(extends)
    q, k, v = (torch.randn(rows, HEADS, wide, generator=generator) for wide in (WIDTH, WIDTH, 5))
    pool = torch.randn(SLOTS, 1, WIDTH, generator=generator)
    out, starts = torch.empty(rows, HEADS, 5), torch.tensor([0, *extends]).cumsum(0)[:-1]
    table = torch.arange(POOL * SLOTS).view(POOL, SLOTS).to(torch.int32) % SLOTS
    attention.extend_attention_cpu(
        q, k, v, out, pool, pool[..., :6], 1.0, 1.0, table, torch.arange(len(extends)), torch.tensor(lengths),
        torch.tensor(extends), starts, max(extends), SCALE, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    return q, k, v, out


@pytest.mark.parametrize("extends", [(7,), (5, 5, 5), (40, 40), (3, 9, 1)])
def test_written_out_keys_of_mla_are_read_instead_of_the_cached_latents(extends):
    q, k, v, out = latents(extends, extends, torch.Generator().manual_seed(4))
    start = 0
    for extend in extends:
        for at in range(extend):
            for head in range(HEADS):
                keys, values = (part[start : start + at + 1, head].double() for part in (k, v))
                expected = (keys @ q[start + at, head].double() * SCALE).softmax(0) @ values
                torch.testing.assert_close(out[start + at, head].double(), expected, atol=1e-5, rtol=1e-5)
        start += extend


def test_written_out_keys_behind_cached_ones_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="written-out keys behind cached latents"):
        latents((9,), (7,), torch.Generator().manual_seed(4))
