"""Bookkeeping of KV cache slots around drafting and verifying. All functions write in place, as the kernels do."""

import ctypes

import numpy as np
import torch


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Enter new cache slots into the table of each request, at positions [start, end)."""
    done = 0
    slots = out_cache_loc.to(req_to_token.dtype)
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = slots[done : done + end - start]
        done += end - start


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Read the cache slots of each request's positions [start, end), one request after the other."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[done : done + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Read the topk * num_steps slots that follow each request's sequence."""
    width = topk * num_steps
    columns = seq_lens.long().unsqueeze(1) + torch.arange(width)
    rows = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc[: rows.numel()] = rows.reshape(-1).to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Return one table row per branch: the request's prefix, then the num_steps slots of that branch."""
    lengths = seq_lens.long()
    longest = min(int(lengths.max()) + topk * num_steps, pool_len) if lengths.numel() else 0
    table = req_to_token[req_pool_indices.long(), :longest].repeat_interleave(topk, dim=0)
    if topk > 1 and longest:
        start = lengths.repeat_interleave(topk).unsqueeze(1) + torch.arange(num_steps)
        branch = (torch.arange(table.shape[0]) % topk).unsqueeze(1) * num_steps
        source = table.gather(1, start + branch)
        table.scatter_(1, start, source)
    return table


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Copy each request's last accepted token, the target's own."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc, size=None):
    """Gather the cache slots of accepted tokens; -1 marks unused places."""
    index = accept_index.view(-1).long()
    index = index[index >= 0]
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index]


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    """Shift every request's ids one to the left and put its next token at the end, or where `select_index` says."""
    starts, extends = extend_start_loc.tolist(), extend_seq_lens.tolist()
    tokens = topk_index.view(-1).to(input_ids.dtype)
    places = select_index.tolist() if select_index is not None else None
    for row, (start, extend) in enumerate(zip(starts, extends, strict=True)):
        if extend == 0:
            continue
        input_ids[start : start + extend - 1] = input_ids[start + 1 : start + extend].clone()
        input_ids[places[row] if places is not None else start + extend - 1] = tokens[row]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache rows in every buffer given by address and row width in bytes; sources are read before any write."""
    target, source = np.asarray(tgt_loc.tolist(), dtype=np.int64), np.asarray(src_loc.tolist(), dtype=np.int64)
    if not target.size:
        return
    rows = int(max(target.max(), source.max())) + 1
    for address, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        buffer = (ctypes.c_uint8 * (rows * width)).from_address(address & (2**64 - 1))
        view = np.ctypeslib.as_array(buffer).reshape(rows, width)
        view[target] = view[source]
