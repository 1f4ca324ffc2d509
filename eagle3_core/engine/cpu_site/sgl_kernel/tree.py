"""Draft trees: their links, masks and positions, and the greedy walk that verifies them. Plain integers, no tensors."""

import torch

_FULL_MASK, _QLEN_ONLY = 0, 1


def _parents(selected, parent_list, topk):
    """Return the parent node of every node but the root; None where the parent was not selected."""
    node_of = {}
    for index, slot in enumerate(selected):
        node_of.setdefault(slot, index + 1)
    parents = [-1]
    for slot in selected:
        branch = slot // topk
        parents.append(0 if branch == 0 else node_of.get(parent_list[branch]))
    return parents


def _ancestors(node, parents):
    path = []
    while node:
        path.append(node)
        node = parents[node]
    return path


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Fill links, mask and positions in place; node 0 is the verified token, siblings ascend by node number."""
    mode = int(tree_mask_mode)
    if mode not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} has no plain PyTorch version in eagle3_core")
    count = draft_token_num
    lengths = verified_seq_len.tolist()
    batch = len(lengths)
    selected, listed = selected_index.tolist(), parent_list.tolist()
    next_token = [[-1] * count for _ in range(batch)]
    next_sibling = [[-1] * count for _ in range(batch)]
    depths, masks = [], []
    for index in range(batch):
        parents = _parents(selected[index], listed[index], topk)
        for node in range(count - 1, 0, -1):
            parent = parents[node]
            if parent is not None:
                next_sibling[index][node] = next_token[index][parent]
                next_token[index][parent] = node
        rows = []
        for node in range(count):
            path = _ancestors(node, parents)
            row = [True] + [False] * (count - 1)
            for ancestor in path:
                row[ancestor] = True
            rows.append(row)
            depths.append(lengths[index] + len(path))
        masks.append(rows)
    retrive_index.copy_(torch.arange(batch * count).view(batch, count))
    retrive_next_token.copy_(torch.tensor(next_token))
    retrive_next_sibling.copy_(torch.tensor(next_sibling))
    positions.view(-1)[: batch * count].copy_(torch.tensor(depths))
    _write_masks(tree_mask.view(-1), masks, lengths, count, mode)


def _write_masks(flat, masks, lengths, count, mode):
    blocks = torch.tensor(masks, dtype=torch.bool)
    if mode == _QLEN_ONLY:
        flat[: blocks.numel()].copy_(blocks.view(-1))
        return
    start = 0
    for block, length in zip(blocks, lengths, strict=True):
        width = length + count
        flat[start : start + count * width].view(count, width)[:, length:].copy_(block)
        start += count * width


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Walk from the root along the children that equal the target's own choice; in place, per request."""
    tokens, indices = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    chosen = target_predict.reshape(-1).tolist()
    steps = accept_index.shape[1]
    written, accepted_rows, counts = {}, accept_index.tolist(), []
    for row, (token, index, child, sibling) in enumerate(zip(tokens, indices, children, siblings, strict=True)):
        last, node = index[0], 0
        accepted_rows[row][0] = last
        accepted = 0
        for _ in range(1, steps):
            node = child[node]
            while node != -1 and token[node] != chosen[last]:
                node = sibling[node]
            if node == -1:
                break
            written[last] = chosen[last]
            last = index[node]
            accepted += 1
            accepted_rows[row][accepted] = last
        written[last] = chosen[last]
        counts.append(accepted)
    predicts[torch.tensor(list(written))] = torch.tensor(list(written.values()), dtype=predicts.dtype)
    accept_index.copy_(torch.tensor(accepted_rows))
    accept_token_num.copy_(torch.tensor(counts))
