"""Drafters that decode one token at a time with a cache, as servers do: a second reading of the unroll."""

import math

import torch


def rms(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x, position, theta=10000.0):
    """Rotate one head vector, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


class CachedDecoder:
    """One token at a time; the cache is a list of (key heads, value heads)."""

    def __init__(self, drafter):
        self.p = {name: value.detach() for name, value in drafter.named_parameters()}
        self.embedding, self.sizes = drafter.embed_tokens, drafter.sizes

    def step(self, token, carried, position, cache):
        p = self.p
        state = torch.cat((
            rms(self.embedding[token], p["layer.input_layernorm.weight"]), rms(carried, p["layer.hidden_norm.weight"]),
        ))  # fmt: skip
        heads = self.attend(state, position, cache)
        residual = carried + p["layer.self_attn.o_proj.weight"] @ torch.cat(heads)
        inner = rms(residual, p["layer.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(p["layer.mlp.gate_proj.weight"] @ inner)
        out = residual + p["layer.mlp.down_proj.weight"] @ (gate * (p["layer.mlp.up_proj.weight"] @ inner))
        return out, p["lm_head.weight"] @ rms(out, p["norm.weight"])

    def attend(self, state, position, cache):
        d = self.sizes.head_dim
        q, k, v = ((self.p[f"layer.self_attn.{n}_proj.weight"] @ state).view(-1, d) for n in "qkv")
        cache.append((torch.stack([turn(head, position) for head in k]), v))
        heads = []
        for h in range(self.sizes.num_heads):
            g = h // (self.sizes.num_heads // self.sizes.num_kv_heads)
            query = turn(q[h], position)
            scores = torch.stack([query @ keys[g] / math.sqrt(d) for keys, _ in cache])
            heads.append(sum(w * values[g] for w, (_, values) in zip(scores.softmax(0), cache, strict=True)))
        return heads

    def chain(self, ids, aux, slot, steps):
        """Prefill slots 0..slot from true hidden states, then go on with the own output as carried state."""
        cache, logits = [], []
        for t in range(slot + 1):
            carried, z = self.step(ids[t + 1], self.p["fc.weight"] @ aux[t], t, cache)
        logits.append(z)
        for k in range(1, steps):
            carried, z = self.step(ids[slot + 1 + k], carried, slot + k, cache)
            logits.append(z)
        return logits


class LatentDecoder(CachedDecoder):
    """MLA as engines run it: the cache is (latent, rotated part of the key), and kv_b is never multiplied with it."""

    def attend(self, state, position, cache):
        sizes, H = self.sizes.mla, self.sizes.num_heads
        a = {name.split(".")[2]: value for name, value in self.p.items() if ".self_attn." in name}
        latent, shared = (a["kv_a_proj_with_mqa"] @ state).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim])
        cache.append((rms(latent, a["kv_a_layernorm"]), turn_pairs(shared, position)))
        queries = (a["q_b_proj"] @ rms(a["q_a_proj"] @ state, a["q_a_layernorm"])).view(H, -1)
        made = a["kv_b_proj"].view(H, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank)
        to_keys, to_values = made.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1)
        heads = []
        for h in range(H):
            plain, tail = queries[h].split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim])
            query, tail = to_keys[h].T @ plain, turn_pairs(tail, position)
            scores = torch.stack([query @ c + tail @ k for c, k in cache]) / math.sqrt(len(plain) + len(tail))
            heads.append(to_values[h] @ sum(w * c for w, (c, _) in zip(scores.softmax(0), cache, strict=True)))
        return heads


def turn_pairs(x, position, theta=10000.0):
    """Rotate neighbours."""
    out = x.clone()
    for i in range(0, len(x), 2):
        angle = position * theta ** (-i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
        out[i + 1] = x[i + 1] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def decoder_of(drafter):
    return CachedDecoder(drafter) if drafter.sizes.mla is None else LatentDecoder(drafter)
