"""Tensors on disk and in batches: chat rendering, shards, order, packing."""
