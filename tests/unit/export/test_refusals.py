"""What is refused, by name and in one line, and that nothing is left behind."""

import json
import shutil

import pytest
import torch

from eagle3_core.errors import ExportError, StorageFullError
from eagle3_core.export.plan import TargetFacts
from eagle3_core.export.remap import remap
from tests.unit.export import tiny

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def refused(tmp_path):
    """Return a function that remaps a directory and returns the one line of its refusal."""

    def refuse(source, to="sglang", **more):
        more = {"target": tiny.target(), **more}
        with pytest.raises(ExportError) as caught:
            remap(source, tmp_path / "out", to, **more)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))
        line = str(caught.value)
        assert "\n" not in line
        assert "expected" in line
        assert "found" in line
        return line

    return refuse


def drafter(tmp_path, name="sglang", config=None, **changes):
    """Return a drafter some tensors of which are replaced, added or (None) taken away; `__` stands for a dot."""
    values = {**tiny.tensors(name), **{key.replace("__", "."): value for key, value in changes.items()}}
    values = {key: value for key, value in values.items() if value is not None}
    return tiny.write(tmp_path / "in", name, values, **(config or {}))


def used(*ids):
    flags = torch.zeros(tiny.V, dtype=torch.bool)
    flags[list(ids)] = True
    return flags


@pytest.mark.parametrize("name", sorted(tiny.PREFIXES))
def test_a_missing_parameter_is_named_as_that_dialect_calls_it(name, tmp_path, refused):
    layer, _ = tiny.PREFIXES[name]
    key = f"{layer}self_attn.o_proj.weight"
    line = refused(drafter(tmp_path, name, **{key: None}), "own" if name == "sglang" else "sglang")
    assert f"missing {key}" in line


@pytest.mark.parametrize("key", ["surprise.weight", "layers.1.mlp.up_proj.weight", "midlayer.self_attn.q_proj.bias",
                                 "midlayer.self_attn.q_norm.weight", "mask_hidden"])  # fmt: skip
def test_an_unknown_key_is_named_because_sglang_would_drop_it(key, tmp_path, refused):
    line = refused(drafter(tmp_path, **{key: torch.zeros(1)}))
    assert key in line


def test_norms_of_queries_and_keys_are_said_to_be_vllms_alone(tmp_path, refused):
    """What speculators 0.9.0 writes by its default, a layer as Qwen3's."""
    norms = {f"layers.0.self_attn.{name}.weight": torch.ones(tiny.WIDTH) for name in ("q_norm", "k_norm")}
    assert "attends as Qwen3" in refused(drafter(tmp_path, "speculators", **norms))


def test_layers_under_a_prefix_nobody_has(tmp_path, refused):
    values = {key.replace("midlayer.", "blocks.0."): value for key, value in tiny.tensors("sglang").items()}
    assert "blocks.0." in refused(tiny.write(tmp_path / "in", "sglang", values))


def test_two_spellings_of_the_layer_in_one_file(tmp_path, refused):
    both = {**tiny.tensors("sglang"), **tiny.tensors("vllm")}
    assert "layers.0.* and midlayer.*" in refused(tiny.write(tmp_path / "in", "sglang", both))


@pytest.mark.parametrize(
    ("other", "config"),
    [("_orig_mod.fc.weight", {}), ("aux_norm_low.weight", {"fc_norm": True})],
)
def test_one_parameter_under_two_names(other, config, tmp_path, refused):
    norms = {f"fc_norm.{place}.weight": torch.ones(tiny.D).bfloat16() for place in range(3)} if config else {}
    source = drafter(tmp_path, config=config, **norms, **{other: torch.zeros(tiny.D, 3 * tiny.D)})
    assert other in refused(source)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("fc.weight", torch.zeros(tiny.D, 2 * tiny.D), "(16, 48) from the config, found (16, 32)"),
        ("lm_head.weight", torch.zeros(tiny.V, tiny.D), "(4, 16) from the config, found (40, 16)"),
        ("embed_tokens.weight", torch.zeros(tiny.V + 24, tiny.D), "(40, 16) from the config, found (64, 16)"),
        ("t2d", used(3, 4, 9, 20)[:30].clone(), "(40,) from the config, found (30,)"),
    ],
)
def test_a_shape_that_is_not_the_configs(key, value, shown, tmp_path, refused):
    line = refused(drafter(tmp_path, **{key: value}))
    assert key in line
    assert shown in line


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_that_are_none(bad, dtype, tmp_path, refused):
    values = tiny.tensors("sglang", dtype=dtype)
    values["midlayer.mlp.down_proj.weight"][-1, -1] = bad
    line = refused(tiny.write(tmp_path / "in", "sglang", values))
    assert "midlayer.mlp.down_proj.weight" in line
    assert "NaN or infinite" in line


OFFSETS = [3, 3, 7, 17]


@pytest.mark.parametrize(
    ("d2t", "hint"),
    [(tiny.USED, "look like absolute ids"), ([0, 1, 2, 3], "disagree"), ([0, 0, 0, 0], "disagree"),
     ([3, 3, 7, 16], "disagree"), ([3, 3, 7, 99], "disagree")],
)  # fmt: skip
def test_d2t_that_is_no_offsets_to_t2d(d2t, hint, tmp_path, refused):
    assert hint in refused(drafter(tmp_path, d2t=torch.tensor(d2t)))


@pytest.mark.parametrize(
    ("d2t", "hint"),
    [(tiny.USED, "could be absolute ids too"), ([30, 31, 37, 38], "look like absolute ids"),
     ([3, 3, 7, 99], "below 40"), ([3, 3, 7, 37], "below 40"), ([3, 1, 7, 17], "rising"), ([-1, 3, 7, 17], "rising")],
)  # fmt: skip
def test_d2t_alone_that_is_no_offsets(d2t, hint, tmp_path, refused):
    assert hint in refused(drafter(tmp_path, "modelopt", d2t=torch.tensor(d2t)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("d2t", torch.tensor(OFFSETS, dtype=torch.int32)), ("t2d", used(*tiny.USED).to(torch.uint8)),
     ("fc.weight", torch.zeros(tiny.D, 3 * tiny.D, dtype=torch.int8))],
)  # fmt: skip
def test_a_dtype_that_cannot_be_meant(key, value, tmp_path, refused):
    assert f"{key}: expected" in refused(drafter(tmp_path, **{key: value}))


@pytest.mark.parametrize("gone", [("d2t", "t2d"), ("d2t",), ("t2d",)])
def test_a_reduced_vocabulary_without_its_maps(gone, tmp_path, refused):
    line = refused(drafter(tmp_path, **dict.fromkeys(gone)))
    assert any(name in line for name in gone)


def test_a_missing_head_that_is_tied_to_nothing(tmp_path, refused):
    assert "lm_head.weight" in refused(drafter(tmp_path, lm_head__weight=None))


def test_a_reduced_head_cannot_be_tied(tmp_path, refused):
    source = drafter(tmp_path, config={"tie_word_embeddings": True}, lm_head__weight=None,
                     embed_tokens__weight=torch.zeros(tiny.V, tiny.D).bfloat16())  # fmt: skip
    assert "lm_head.weight" in refused(source)


@pytest.mark.parametrize("to", ["sglang", "sglang-new", "specforge", "eagle", "modelopt", "automodel", "own"])
def test_the_residual_after_the_norm_is_served_by_vllm_alone(to, tmp_path, refused):
    source = drafter(tmp_path, "speculators", {"norm_before_residual": True})
    assert "norm_before_residual" in refused(source, to)
    config = tiny.read_config(remap(source, tmp_path / "vllm", "vllm").out)
    assert config["norm_before_residual"] is True


def test_a_speculators_config_must_say_where_its_norm_is(tmp_path, refused):
    source = drafter(tmp_path, "speculators", {"norm_before_residual": None})
    assert "vLLM then takes true" in refused(source, "vllm")


def test_a_sliding_window_is_ignored_by_sglang_and_so_refused(tmp_path, refused):
    source = drafter(tmp_path, "vllm", {"sliding_window": 64})
    assert "sliding_window" in refused(source)
    assert tiny.read_config(remap(source, tmp_path / "spec", "speculators").out)["transformer_layer_config"][
        "sliding_window"
    ] == 64  # fmt: skip


@pytest.mark.parametrize("off", [{"use_sliding_window": False}, {"layer_types": ["full_attention"]}])
def test_a_sliding_window_that_is_off_is_none(off, tmp_path):
    source = drafter(tmp_path, config={"sliding_window": 4096, **off})
    assert "sliding_window" not in tiny.read_config(remap(source, tmp_path / "out", "sglang").out)


@pytest.mark.parametrize(
    "config",
    [{"num_hidden_layers": 2}, {"attention_bias": True}, {"mlp_bias": True}, {"model_type": "gemma3_text"},
     {"hidden_act": "gelu"}, {"quantization_config": {"bits": 4}}, {"parallel_drafting": True},
     {"eagle_config": {"use_aux_hidden_state": False}}],
)  # fmt: skip
def test_a_config_these_parameters_cannot_serve(config, tmp_path, refused):
    name = next(iter(config))
    assert name in refused(drafter(tmp_path, config=config))


@pytest.mark.parametrize("config", [{"quantization_config": {"bits": 4}}, {"parallel_drafting": True}])
def test_what_a_nested_config_says_at_top_that_these_parameters_cannot_serve(config, tmp_path, refused):
    assert f"{next(iter(config))}: expected" in refused(drafter(tmp_path, "speculators", config))


def test_a_block_of_ours_with_what_this_version_does_not_know(tmp_path, refused):
    block = {"eagle3": {"dialect": "sglang", "rotated": True}}
    assert "eagle3: expected aux_layers, dialect, target_class" in refused(drafter(tmp_path, config=block))


def test_a_size_that_is_not_there(tmp_path, refused):
    assert "'intermediate_size'" in refused(drafter(tmp_path, config={"intermediate_size": None}))


@pytest.mark.parametrize("kind", ["qwen3", "phi3", None])
@pytest.mark.parametrize("gone", ["rms_norm_eps", "rope_theta"])
def test_a_constant_that_is_not_there(gone, kind, tmp_path, refused):
    assert f"'{gone}'" in refused(drafter(tmp_path, config={gone: None, "model_type": kind}))


def test_our_own_config_without_its_rope_theta(tmp_path, refused):
    assert "'rope_theta'" in refused(drafter(tmp_path, "own", {"rope_parameters": {"rope_type": "default"}}))


def test_norms_the_config_does_not_mention(tmp_path, refused):
    source = drafter(tmp_path, input_norm__weight=torch.ones(3 * tiny.D).bfloat16())
    assert "input_norm.weight" in refused(source)


def test_a_norm_that_the_config_mentions_within_or_at_top(tmp_path):
    norm = {"input_norm.weight": torch.ones(3 * tiny.D).bfloat16()}
    said = {"norm_before_fc": True}
    for name, config in (("top", said), ("within", {"eagle_config": said})):
        source = drafter(tmp_path / name, config=config, **norm)
        assert tiny.read_config(remap(source, tmp_path / f"{name}-out", "sglang").out)["norm_before_fc"] is True


def test_fewer_layer_ids_than_aux_states(tmp_path, refused):
    ids = {"num_aux_hidden_states": 3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    assert "expected 3 layer ids (num_aux_hidden_states), found [1, 3]" in refused(drafter(tmp_path, config=ids))


def test_norms_the_config_asks_for(tmp_path, refused):
    assert "fc_norm.0.weight" in refused(drafter(tmp_path, config={"fc_norm": True}))


def test_rope_in_two_spellings_that_differ(tmp_path, refused):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert "rope_theta" in refused(drafter(tmp_path, config=rope))


def test_yarn_is_nothing_eagles_own_code_reads(tmp_path, refused):
    rope = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    assert "RoPE type for eagle" in refused(drafter(tmp_path, config=rope), "eagle")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaled", "said"),
    [({"factor": 2.0}, "RoPE type default: expected rope_theta, found factor"),
     ({"rope_type": "linear"}, "expected the key 'factor', found none"),
     ({"rope_type": "linear", "facter": 2.0}, "expected the key 'factor', found none"),
     ({"rope_type": "yarn", "factor": 4.0}, "expected the key 'original_max_position_embeddings', found none"),
     ({**YARN, "factor": None}, "expected the key 'factor', found none"),
     ({"rope_type": "llama3", "factor": 8.0}, "expected the key 'original_max_position_embeddings', found none"),
     ({**YARN, "beta_fats": 32}, "found beta_fats, which is not read there"),
     ({**YARN, "attn_factor": 2.0}, "found attn_factor, which is not read there"),
     ({**YARN, "type": "linear"}, "expected one type of RoPE, found rope_type yarn and type linear"),
     ({**YARN, "mrope_section": [1, 1]}, "found mrope_section, which is not read there"),
     ({"rope_type": "dynamic", "factor": 2.0}, "found dynamic"),
     ({"rope_type": "longrope", "factor": 2.0}, "found longrope"),
     ({**YARN, "factor": "4"}, "factor of RoPE: expected a number above 0, found '4'"),
     ({**YARN, "factor": 0}, "factor of RoPE: expected a number above 0, found 0"),
     ({**YARN, "attention_factor": "1"}, "attention_factor of RoPE: expected a number above 0, found '1'"),
     ({**YARN, "mscale": -1.0}, "mscale of RoPE: expected a number above 0"),
     ({**YARN, "truncate": 1}, "truncate of RoPE: expected true or false, found 1"),
     ({"sliding_attention": {"rope_theta": 1e4}}, "found sliding_attention, which is not read there")],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_of_which_a_reader_would_guess_or_skip_something(key, scaled, said, tmp_path, refused):
    assert said in refused(drafter(tmp_path, config={key: scaled}))


def test_a_setting_of_rope_that_is_null_or_nothing_is_none(tmp_path):
    rope = {"rope_scaling": {**YARN, "attention_factor": None, "mscale": 0, "mscale_all_dim": 0.0}}
    made = tiny.read_config(remap(drafter(tmp_path, config=rope), tmp_path / "out", "sglang").out)
    assert made["rope_scaling"] == {**YARN, "mscale": 0, "mscale_all_dim": 0.0, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("config", "said"),
    [({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}}, "aux layers for eagle: expected [1, 3, 4]"),
     ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_theta of scaled RoPE for eagle: expected 10000")],
)  # fmt: skip
def test_what_eagles_own_code_takes_for_granted(config, said, tmp_path, refused):
    """It reads no layer ids, and scales RoPE of base 10000 alone (commit cb7e084)."""
    assert said in refused(drafter(tmp_path, config=config), "eagle", target=tiny.target())


def test_heads_wider_than_hidden_by_heads_are_nothing_eagles_own_code_knows(tmp_path, refused):
    values = tiny.tensors("sglang")
    wide = {part: values[f"midlayer.self_attn.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    values |= {f"midlayer.self_attn.{part}.weight": torch.cat([found] * 2, dim=int(part == "o_proj"))
               for part, found in wide.items()}  # fmt: skip
    source = tiny.write(tmp_path / "in", "sglang", values, head_dim=2 * tiny.WIDTH)
    assert "head_dim for eagle: expected 4, found 8" in refused(source, "eagle")
    assert remap(source, tmp_path / "sglang", "sglang").out.exists()


def test_automodels_config_is_the_targets_and_says_nothing_of_the_drafters_layers(tmp_path):
    """NeMo Automodel 0.7.0 adds keys to the target's config; SGLang would make all its layers and leave them empty."""
    config = {
        "architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 32, "sliding_window": 64, "torch_dtype": None,
        "dtype": "float32", "attn_implementation": "eager", "fc_norm": False, "norm_output": False,
        "parallel_drafting": False, "target_hidden_size": tiny.D, "tie_word_embeddings": False,
    }  # fmt: skip
    source = drafter(tmp_path, "automodel", config)
    made = tiny.read_config(remap(source, tmp_path / "out", "sglang", target=tiny.target()).out)
    assert made["num_hidden_layers"] == 1
    assert "sliding_window" not in made
    assert "eagle_aux_hidden_state_layer_ids" not in made["eagle_config"]


@pytest.mark.parametrize(("config", "read"), [({"norm_output": True}, None), ({}, None), ({"norm_output": False}, "")])
def test_specforge_means_another_norm_by_norm_output(config, read, tmp_path, refused):
    """SpecForge 0.2.0: whether the head's input is normed, as it is where the key is missing; never what is carried."""
    source = drafter(tmp_path, "specforge", config)
    if config:
        assert "--from" in refused(source)
    if read is None:
        out = remap(source, tmp_path / "out", "sglang", told="specforge").out
        assert "norm_output" not in tiny.read_config(out)
    else:
        assert "without the norm" in refused(source, told="specforge")


def test_what_carries_normed_states_is_nothing_specforge_trains(tmp_path, refused):
    source = drafter(tmp_path, "vllm", {"norm_output": True})
    assert "norm_output: expected none for specforge" in refused(source, "specforge")
    again = remap(source, tmp_path / "sglang", "sglang", target=tiny.target()).out
    assert tiny.read_config(remap(again, tmp_path / "again", "sglang").out)["norm_output"] is True


def test_a_drafter_narrower_than_the_target_is_refused_with_both_numbers(tmp_path, refused):
    line = refused(drafter(tmp_path), target=tiny.target(hidden_size=128))
    assert "128" in line
    assert "16" in line


@pytest.mark.parametrize(
    ("change", "shown"),
    [({"vocab_size": 64}, "vocabulary"), ({"num_hidden_layers": 9}, "layers"),
     ({"architectures": ["Qwen3ForCausalLM"]}, "model class")],
)  # fmt: skip
def test_a_target_that_is_another(change, shown, tmp_path, refused):
    remap(drafter(tmp_path), tmp_path / "vllm", "vllm", target=tiny.target())
    assert shown in refused(tmp_path / "vllm", target=tiny.target(**change))


def test_a_target_of_another_fingerprint(tmp_path, refused):
    other = TargetFacts(tiny.TARGET, "the target", lambda: "b" * 64)
    assert "for the fingerprint bbb" in refused(drafter(tmp_path, "own"), target=other)


@pytest.mark.parametrize("alone", ["d2t", "t2d"])
def test_one_map_of_a_full_vocabulary_alone(alone, tmp_path, refused):
    values = tiny.tensors("sglang", range(tiny.V))
    del values[{"d2t": "t2d", "t2d": "d2t"}[alone]]
    source = tiny.write(tmp_path / "in", "sglang", values, draft_vocab_size=tiny.V)
    assert f"expected {'t2d' if alone == 'd2t' else 'd2t'}, found none" in refused(source, told="sglang")


def test_another_number_of_aux_states_than_the_config_says(tmp_path, refused):
    config = {"num_aux_hidden_states": 2, "eagle_config": None}
    assert "fc.weight: expected shape (16, 32)" in refused(drafter(tmp_path, config=config))


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    source = drafter(tmp_path)
    total = sum(value.nbytes for value in tiny.tensors("sglang").values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(0, 0, total - 1))
    with pytest.raises(StorageFullError, match=rf"expected {total:,} bytes free, found {total - 1:,}; free space"):
        remap(source, tmp_path / "out", "sglang", target=tiny.target())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_layer_ids_whose_target_is_not_known(tmp_path, refused):
    assert "--target" in refused(drafter(tmp_path), "vllm", target=None)


def test_our_own_format_needs_the_target(tmp_path, refused):
    assert "--target" in refused(drafter(tmp_path), "own", target=None)


@pytest.mark.parametrize("architectures", [None, []])
def test_our_own_format_needs_a_target_that_says_its_class(architectures, tmp_path, refused):
    line = refused(drafter(tmp_path, "vllm"), "own", target=tiny.target(architectures=architectures))
    assert "target_class: expected one, found none" in line
    assert "architectures" in line


def test_what_the_target_leaves_out_stays_as_the_drafter_has_it(tmp_path):
    made = remap(drafter(tmp_path), tmp_path / "made", "vllm", target=tiny.target()).out
    vague = tiny.target(architectures=None, num_hidden_layers=None)
    block = tiny.read_config(remap(made, tmp_path / "again", "speculators", target=vague).out)["eagle3"]
    assert (block["target_class"], block["target_layers"]) == ("LlamaForCausalLM", tiny.LAYERS)


DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}


def test_modelopts_ids_are_not_written_where_sglang_would_read_other_layers(tmp_path, refused):
    source = drafter(tmp_path, "vllm", {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]})
    line = refused(source, "modelopt", target=tiny.target(**DEEPSEEK))
    assert "[2, 3, 5]" in line
    assert "[3, 4, 6]" in line
    assert "--to sglang" in line
    made = remap(source, tmp_path / "sglang", "sglang", target=tiny.target(**DEEPSEEK)).out
    assert tiny.read_config(made)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 4, 6]


def test_modelopts_ids_are_written_where_both_mean_the_same_layers(tmp_path):
    source = drafter(tmp_path, "vllm")
    made = remap(source, tmp_path / "out", "modelopt", target=tiny.target(**DEEPSEEK)).out
    assert tiny.read_config(made)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == tiny.OUTPUTS


def test_layer_ids_sglang_cannot_capture(tmp_path, refused):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, tiny.LAYERS]}
    assert "last layer" in refused(drafter(tmp_path, "vllm", ids))


def test_layer_ids_that_two_dialects_count_differently(tmp_path, refused):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, 6], "architectures": ["LlamaForCausalLM"]}
    line = refused(drafter(tmp_path, "sglang-new", ids))
    assert "sglang-new, vllm" in line
    assert "--from" in line


def test_layer_ids_where_that_dialect_does_not_read_them(tmp_path, refused):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, 6], "eagle_config": None}
    assert "--from" in refused(drafter(tmp_path, "sglang", ids))


def test_a_dialect_the_keys_are_not_of(tmp_path, refused):
    assert "--from is sglang" in refused(drafter(tmp_path, "vllm"), told="sglang")


def test_a_config_of_ours_with_other_weights(tmp_path, refused):
    block = {"eagle3": {"dialect": "sglang"}}
    assert "eagle3.dialect is sglang" in refused(drafter(tmp_path, "vllm", block))


def test_a_config_of_ours_that_is_said_to_be_another_dialects(tmp_path, refused):
    made = remap(drafter(tmp_path, "vllm"), tmp_path / "made", "sglang-new", target=tiny.target()).out
    assert "--from is modelopt: expected sglang-new" in refused(made, told="modelopt")
    assert remap(made, tmp_path / "again", "vllm", told="sglang-new").out.exists()


def test_a_config_of_ours_whose_ids_were_edited(tmp_path, refused):
    made = remap(drafter(tmp_path), tmp_path / "made", "vllm", target=tiny.target()).out
    config = tiny.read_config(made)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 4, 5]
    (made / "config.json").write_text(json.dumps(config))
    assert "was edited" in refused(made)


@pytest.mark.parametrize("option", ["to", "told"])
def test_an_unknown_dialect_is_answered_with_the_known_ones(option, tmp_path):
    arguments = {"to": "sglang", "told": None, option: "eagle9"}
    with pytest.raises(ExportError, match=r"eagle9: expected one of own, sglang, .*automodel"):
        remap(drafter(tmp_path), tmp_path / "out", **arguments)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_never_read_and_the_way_to_convert_it_is_shown(name, tmp_path, refused):
    source = drafter(tmp_path)
    (source / "model.safetensors").unlink()
    torch.save(tiny.tensors("sglang"), source / name)
    for given in (source, source / name):
        line = refused(given)
        assert "pickle" in line
        assert f"torch.load('{name}', weights_only=True)" in line


def test_the_way_shown_converts_it(tmp_path):
    import subprocess
    import sys

    source = drafter(tmp_path)
    (source / "model.safetensors").unlink()
    torch.save(tiny.tensors("sglang"), source / "pytorch_model.bin")
    with pytest.raises(ExportError) as caught:
        remap(source, tmp_path / "out", "sglang")
    code = str(caught.value).split('python -c "')[1].rstrip('"')
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source)
    remap(source, tmp_path / "out", "sglang", target=tiny.target())
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.tensors("sglang"))


@pytest.fixture
def shards(tmp_path):
    return tiny.shard(drafter(tmp_path), 3)


SIZE, FLAG, NAMES = "a whole number from 1 on", "true or false", "a list of names"
OF_ANOTHER_KIND = {
    "hidden_size": ([0, "16", 16.0, True, []], SIZE), "sliding_window": ([-1, "64"], SIZE),
    "num_aux_hidden_states": ([0, []], SIZE), "draft_vocab_size": ([0, False], SIZE),
    "max_position_embeddings": (["512", True], SIZE), "rms_norm_eps": (["1e-5", True, []], "a number"),
    "rope_theta": (["10000", [1e4]], "a number"), "norm_output": (["false", 0, 1], FLAG),
    "fc_norm": (["false"], FLAG), "tie_word_embeddings": (["false", 0], FLAG), "attention_bias": ([0], FLAG),
    "use_sliding_window": (["false"], FLAG), "eagle_config": ([[], "x", 1], "an object"),
    "eagle3": ([[1], "x"], "an object"), "rope_scaling": (["yarn", [1]], "an object"),
    "architectures": (["LlamaForCausalLMEagle3", [None]], NAMES), "layer_types": (["full_attention"], NAMES),
    "model_type": ([["llama"]], "a name"), "bos_token_id": (["1", True, [None]], "a token id or a list of them"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [(key, value, what) for key, (values, what) in OF_ANOTHER_KIND.items() for value in values],
)
def test_a_value_of_another_kind_than_its_key_has(key, value, what, tmp_path, refused):
    """Read by Python's rules, "false" would be true, and 0 or an empty list the default."""
    line = refused(drafter(tmp_path, config={key: value}))
    assert f"config.json: {key}: expected {what}, found {value!r}" in line


@pytest.mark.parametrize(
    ("inner", "what"),
    [({"transformer_layer_config": tiny.llama(num_attention_heads=0)}, f"num_attention_heads: expected {SIZE}"),
     ({"eagle_config": {"norm_before_fc": "no"}}, f"norm_before_fc: expected {FLAG}"),
     ({"eagle_aux_hidden_state_layer_ids": ["2", "4", "5"]}, "layer_ids: expected a list of whole numbers"),
     ({"eagle3": {"target_layers": "8"}}, f"target_layers: expected {SIZE}"),
     ({"speculators_config": {"verifier": "the target"}}, "verifier: expected an object")],
)  # fmt: skip
def test_a_value_of_another_kind_within(inner, what, tmp_path, refused):
    assert what in refused(drafter(tmp_path, "speculators", inner))


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"hidden_size": 8, ', "the key hidden_size twice"), ('{"rope_theta": Infinity, "x": ', "Infinity, which is no"),
     ("[" * 100_000, "found damage")],
)  # fmt: skip
def test_json_that_readers_take_differently(text, said, tmp_path, refused):
    source = drafter(tmp_path)
    path = source / "config.json"
    path.write_text(text + path.read_text().removeprefix("{" if text.startswith('{"hidden') else ""))
    assert said in refused(source)


def test_a_header_nested_without_end(tmp_path, refused):
    source = drafter(tmp_path)
    (source / "model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    assert "expected a safetensors header, found damage" in refused(source)


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"vocab_size": None}, {"architectures": "Llama"}])
def test_a_target_that_does_not_say_what_is_compared(change, tmp_path, refused):
    line = refused(drafter(tmp_path), target=tiny.target(**change))
    assert f"the target: expected {next(iter(change))} in" in line or "architectures: expected a list" in line


def test_an_index_beside_the_one_file_it_is_not_of(tmp_path, refused):
    source = drafter(tmp_path)
    index = {"weight_map": {"fc.weight": "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "the index is not of these files" in refused(source)


def test_a_shard_that_is_not_there(shards, refused):
    (shards / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(shards)


def test_a_stale_file_beside_the_shards(shards, refused):
    (shards / "model.safetensors").write_bytes((shards / "model-00001-of-00003.safetensors").read_bytes())
    assert "model.safetensors, which engines would load too" in refused(shards)


def test_an_index_of_other_shards(shards, refused):
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["fc.weight"] = "model-00003-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert "fc.weight" in refused(shards)


def test_a_key_in_two_shards(shards, refused):
    path = shards / "model-00003-of-00003.safetensors"
    tiny.save_file({**tiny.load_file(path), "d2t": torch.tensor(OFFSETS)}, path)
    assert "expected d2t in one file" in refused(shards)


def test_shards_without_an_index(shards, refused):
    (shards / "model.safetensors.index.json").unlink()
    assert "no index" in refused(shards)


def test_a_file_cut_short(tmp_path, refused):
    source = drafter(tmp_path)
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-1])
    assert "bytes" in refused(source)


def test_half_a_checkpoint_of_ours(tmp_path, refused):
    source = drafter(tmp_path, "own")
    (source / "vocab.safetensors").unlink()
    assert "vocab.safetensors" in refused(source)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_config_that_is_none(text, tmp_path, refused):
    source = drafter(tmp_path)
    (source / "config.json").unlink()
    if text is not None:
        (source / "config.json").write_text(text)
    assert "config.json" in refused(source)


def test_nothing_where_the_drafter_should_be(tmp_path, refused):
    assert "found nothing" in refused(tmp_path / "nowhere")
