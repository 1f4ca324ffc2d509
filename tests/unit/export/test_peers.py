"""Files as the peers' own code was seen to write them: their keys, and all that stands in their configs."""

import pytest
import torch

from eagle3_core.export.remap import remap
from tests.unit.export import tiny

SIZES = {
    "vocab_size": tiny.V, "hidden_size": tiny.D, "intermediate_size": tiny.F, "num_attention_heads": tiny.H,
    "num_key_value_heads": tiny.G, "head_dim": tiny.WIDTH, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "use_cache": True, "pretraining_tp": 1, "attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
FLAT = {**SIZES, "model_type": "llama", "tie_word_embeddings": False, "num_hidden_layers": 1}
USED = {"draft_vocab_size": len(tiny.USED)}
PEERS = {
    # speculators 0.9.0, Eagle3DraftModel.save_pretrained; its own converter writes Eagle3Speculator and no ids.
    "speculators": {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "float32",
        **USED, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": False, "fc_norm": False,
        "norm_before_fc": False, "norm_before_residual": False, "norm_output": False, "target_hidden_size": None,
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3,
                                  "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/models/target"},
        },
        "transformer_layer_config": {**FLAT, **ROPE, "pad_token_id": None},
    },
    # SpecForge 0.2.0, specforge.export to_sglang and to_hf.
    "specforge": {"architectures": ["LlamaForCausalLMEagle3"], **FLAT, **ROPE, **USED, "dtype": "bfloat16",
                  "rope_theta": 5e5},
    # EAGLE at commit cb7e084, traineagle3/config.json with which its cnets.Model is built.
    "eagle": {"architectures": ["LlamaForCausalLM"], **FLAT, **USED, "torch_dtype": "float16", "head_dim": None,
              "transformers_version": "4.28.1"},
    # NVIDIA ModelOpt 0.47.0, export_speculative_decoding; without eagle_export_rope_scaling it writes YaRN of 32 here.
    "modelopt": {
        "architectures": ["LlamaForCausalLMEagle3"], **FLAT, **USED, "torch_dtype": "float32", "rope_theta": 5e5,
        "transformers_version": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "next_layer_regular": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        },
    },
    # NeMo Automodel 0.7.0, its checkpointer's consolidated files.
    "automodel": {"architectures": ["LlamaEagle3DraftModel"], **FLAT, **ROPE, **USED, "num_hidden_layers": tiny.LAYERS,
                  "attn_implementation": "eager", "fc_norm": False, "norm_output": False, "parallel_drafting": False,
                  "target_hidden_size": tiny.D, "dtype": "float32"},
}  # fmt: skip
EMBEDDING = {"speculators": "embed_tokens.weight", "automodel": "model.embed_tokens.weight"}
"""Who saves the target's embedding with the drafter."""


def written(tmp_path, peer):
    values = tiny.tensors(peer, dtype=torch.float32)
    if peer in EMBEDDING:
        values[EMBEDDING[peer]] = torch.ones((tiny.V, tiny.D))
    none = dict.fromkeys(set(tiny.config(peer)) - set(PEERS[peer]))
    directory = tiny.write(tmp_path / "in", peer, values, **none, **PEERS[peer])
    return tiny.shard(directory, 2) if peer == "automodel" else directory


@pytest.mark.parametrize("peer", PEERS)
def test_what_a_peer_wrote_is_served_with_its_very_bytes_and_goes_back_to_it(peer, tmp_path):
    source = written(tmp_path, peer)
    target = tiny.target()
    there = remap(source, tmp_path / "sglang", "sglang", target=target)
    assert peer in there.plan.source.readable_as
    found, own = tiny.read(there.out), tiny.tensors("sglang", dtype=torch.float32)
    assert all(torch.equal(found[key], own[key]) for key in own)
    config = tiny.read_config(there.out)
    assert config["num_hidden_layers"] == 1
    assert config["rope_parameters"]["rope_theta"] == (1e4 if peer == "eagle" else 5e5)
    assert config["eagle_config"].get("eagle_aux_hidden_state_layer_ids", [1, 3, 4]) == [1, 3, 4]
    back = remap(there.out, tmp_path / "back", peer, target=target).out
    assert tiny.same(tiny.read(back), tiny.read(source))


def test_precisions_may_differ_within_a_file(tmp_path):
    """Automodel's consolidation gives a tensor the dtype that the target's file has under the same name."""
    values = tiny.tensors("automodel", dtype=torch.float32)
    mixed = {key: value.bfloat16() if ".layers.0." in key else value for key, value in values.items()}
    none = dict.fromkeys(set(tiny.config("automodel")) - set(PEERS["automodel"]))
    source = tiny.write(tmp_path / "in", "automodel", mixed, **none, **PEERS["automodel"])
    out = remap(source, tmp_path / "out", "sglang", target=tiny.target()).out
    assert tiny.read(out)["midlayer.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert tiny.read_config(out)["torch_dtype"] == "float32"
