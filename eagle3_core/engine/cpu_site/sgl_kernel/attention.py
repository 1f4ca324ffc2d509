"""Attention over SGLang's paged KV cache: one batched SDPA per call wherever the shapes allow it.

Letters: B requests, Q query rows of a request, L keys, H query heads, K key/value heads, G = H / K, D head width.
Heads that share a key head become query rows of that head ([B, K, G * Q, D]), so no key is ever copied G times.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

# The layers of one forward pass share their metadata objects; the work that depends on them alone is done once a pass.
# Holding the objects themselves (not their ids) makes identity a safe key.
_memo = {}


def _once_per_pass(kind, keys, build):
    held = _memo.get(kind)
    if held is not None and len(held[0]) == len(keys) and all(a is b for a, b in zip(held[0], keys, strict=True)):
        return held[1]
    value = build()
    _memo[kind] = (keys, value)
    return value


def _attend(q, k, v, mask, scale, cap, causal=False, sinks=None):
    """Attend; `sinks` [1, K or H, rows, 1] is a further score of each row, whose value is nothing."""
    if (not cap or cap <= 0) and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if cap and cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
        return torch.matmul(torch.softmax(scores, dim=-1)[..., :-1], v.float()).to(q.dtype)
    return torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(q.dtype)


def _refuse(is_cross, k_scale, v_scale):
    if is_cross:
        raise NotImplementedError("cross attention has no plain PyTorch version in eagle3_core")
    if k_scale not in (None, 1.0) or v_scale not in (None, 1.0):
        raise NotImplementedError("scaled KV caches have no plain PyTorch version in eagle3_core")


def _gather(buffer, rows):
    """Return `buffer` [N, K, D] at cache rows [B, L] as [B, K, L, D]."""
    # Four times as fast as indexing.
    picked = buffer.view(buffer.shape[0], -1).index_select(0, rows.reshape(-1))
    return picked.view(*rows.shape, *buffer.shape[1:]).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------- decoding
def _decode_plan(req_to_token, req_pool_indices, seq_lens, window):
    """Return cache rows [B, L] of every key and their mask [B, 1, 1, L], None where all lengths are equal."""
    lengths = seq_lens.tolist()
    longest = max(lengths)
    rows = req_to_token[req_pool_indices.long(), :longest].long()
    if min(lengths) == longest and (window <= 0 or window >= longest):
        return rows, None
    position = torch.arange(longest).unsqueeze(0)
    last = seq_lens.unsqueeze(1)
    visible = position < last
    if window > 0:
        visible &= position >= last - window
    return rows, visible[:, None, None, :]


def decode_attention_cpu(
    q, k_buf, v_buf, k_scale, v_scale, o, key, value, loc, attn_logits, req_to_token, req_pool_indices, seq_lens,
    sm_scale, logit_cap, is_cross=False, sliding_window=0, encoder_lens=None, sinks=None,
):  # fmt: skip
    """Write one new key and value per request, then let its one query attend to all of the request's keys."""
    _refuse(is_cross, k_scale, v_scale)
    heads = k_buf.shape[1]
    if key is not None:
        k_buf[loc] = key.view(-1, heads, k_buf.shape[2]).to(k_buf.dtype)
        v_buf[loc] = value.view(-1, heads, v_buf.shape[2]).to(v_buf.dtype)
    rows, mask = _once_per_pass(
        ("decode", sliding_window),
        (attn_logits, req_to_token, req_pool_indices, seq_lens),
        lambda: _decode_plan(req_to_token, req_pool_indices, seq_lens, sliding_window),
    )
    batch = q.shape[0]
    grouped = q.view(batch, heads, -1, q.shape[-1])
    sunk = None if sinks is None else sinks.view(1, heads, -1, 1)
    out = _attend(grouped, _gather(k_buf, rows), _gather(v_buf, rows), mask, sm_scale, logit_cap, sinks=sunk)
    o.copy_(out.reshape(o.shape))


# ---------------------------------------------------------------------------------------------------------- extending
def _visible(prefix, extend, window, is_causal):
    """Return the mask [Q, L] of one request's new tokens over all of its keys."""
    length = prefix + extend
    key_at = torch.arange(length).unsqueeze(0)
    query_at = torch.arange(prefix, length).unsqueeze(1)
    visible = key_at <= query_at if is_causal else torch.ones(extend, length, dtype=torch.bool)
    if window > 0:
        visible = visible & (key_at > query_at - window)
    return visible


def _tree_blocks(tree_mask, prefixes, extends):
    """Yield each request's [Q, Q] ancestor mask, from either of SGLang's two layouts."""
    flat = tree_mask.view(-1)
    full = flat.numel() != sum(extend * extend for extend in extends)
    start = 0
    for prefix, extend in zip(prefixes, extends, strict=True):
        width = prefix + extend if full else extend
        yield flat[start : start + extend * width].view(extend, width)[:, width - extend :].bool()
        start += extend * width


def _extend_plan(req_to_token, req_pool_indices, seq_lens, extend_seq_lens, tree_mask, window, is_causal):
    """Return one entry per group of requests: (first query row, B, Q, cache rows [B, L], mask or None, causal)."""
    lengths, extends = seq_lens.tolist(), extend_seq_lens.tolist()
    prefixes = [length - extend for length, extend in zip(lengths, extends, strict=True)]
    trees = list(_tree_blocks(tree_mask, prefixes, extends)) if tree_mask is not None else None
    pool = req_pool_indices.long()
    uniform = len(extends) > 1 and min(extends) == max(extends) and (min(extends) <= 32 or min(lengths) == max(lengths))
    if uniform:
        longest, extend = max(lengths), extends[0]
        if prefixes == [0] * len(prefixes) and trees is None and window <= 0:
            mask = None
        else:
            mask = torch.zeros(len(extends), 1, extend, longest, dtype=torch.bool)
            for index, prefix in enumerate(prefixes):
                mask[index, 0, :, : lengths[index]] = _visible(prefix, extend, window, is_causal)
                if trees is not None:
                    mask[index, 0, :, prefix : lengths[index]] = trees[index]
        return [(0, len(extends), extend, req_to_token[pool, :longest].long(), mask, mask is None and is_causal)]
    plan, start = [], 0
    for index, (prefix, extend) in enumerate(zip(prefixes, extends, strict=True)):
        if extend:
            mask = (
                None if prefix == 0 and trees is None and window <= 0 else _visible(prefix, extend, window, is_causal)
            )
            if trees is not None:
                mask[:, prefix:] = trees[index]
            cache_rows = req_to_token[pool[index], : lengths[index]].long().unsqueeze(0)
            plan.append((start, 1, extend, cache_rows, mask, mask is None and is_causal))
        start += extend
    return plan


def extend_attention_cpu(
    q, k, v, o, k_buf, v_buf, k_scale, v_scale, req_to_token, req_pool_indices, seq_lens, extend_seq_lens,
    extend_start_loc, max_len_extend, sm_scale, logit_cap, is_cross=False, sliding_window=0, encoder_lens=None,
    sinks=None, tree_mask=None, is_causal=True,
):  # fmt: skip
    """Let the new tokens of every request attend to its cached tokens and, causally or along a tree, to each other.

    Where the cache holds MLA's latents and the keys come written out, nothing but the new tokens may be there.
    """
    _refuse(is_cross, k_scale, v_scale)
    width = q.shape[-1]
    written_out = k is not None and (k.shape[1:], v.shape[1:]) != (k_buf.shape[1:], v_buf.shape[1:])
    heads = k.shape[1] if written_out else k_buf.shape[1]
    group = q.shape[1] // heads
    plan = _once_per_pass(
        ("extend", sliding_window, is_causal),
        (req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, tree_mask),
        lambda: _extend_plan(
            req_to_token, req_pool_indices, seq_lens, extend_seq_lens, tree_mask, sliding_window, is_causal
        ),
    )
    for start, batch, extend, cache_rows, mask, causal in plan:
        stop = start + batch * extend
        if written_out:
            if cache_rows.shape[1] != extend:
                raise NotImplementedError("written-out keys behind cached latents have no plain PyTorch version here")
            keys, values = (new[start:stop].view(batch, extend, heads, -1).transpose(1, 2) for new in (k, v))
        else:
            keys, values = _gather(k_buf, cache_rows), _gather(v_buf, cache_rows)
        if extend <= 32 and not causal:
            # [B, Q, K, G, D] -> [B, K, Q * G, D]: a small block, cheaper than repeating keys for every query head.
            rows = q[start:stop].view(batch, extend, heads, group, width).transpose(1, 2)
            wide = mask if mask is None or group == 1 else mask.repeat_interleave(group, dim=-2)
            sunk = None if sinks is None else sinks.view(1, heads, group, 1).repeat(1, 1, extend, 1)
            rows = rows.reshape(batch, heads, extend * group, width)
            out = _attend(rows, keys, values, wide, sm_scale, logit_cap, sinks=sunk)
            out = out.view(batch, heads, extend, group, -1).transpose(1, 2)
        else:
            rows = q[start:stop].view(batch, extend, -1, width).transpose(1, 2)
            if group > 1:
                keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
            sunk = None if sinks is None else sinks.view(1, -1, 1, 1)
            out = _attend(rows, keys, values, mask, sm_scale, logit_cap, causal, sunk).transpose(1, 2)
        o[start:stop].copy_(out.reshape(o[start:stop].shape))
