from __future__ import annotations

import dataclasses
import json

import pytest

from eagle3_core.config.evaluation import DraftShape
from eagle3_core.config.serving import ServingConfig
from eagle3_core.engine import plugin
from eagle3_core.engine.check_args import unknown_flags
from eagle3_core.engine.effective import compare_effective
from eagle3_core.engine.flags import override
from eagle3_core.engine.launch import CPU_SITE, LaunchPlan
from eagle3_core.engine.prefills import most_samples
from eagle3_core.errors import EngineArgsError

CPU = ServingConfig(device="cpu", max_running_requests=8)


@pytest.fixture
def target(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.fixture
def drafter(tmp_path):
    directory = tmp_path / "drafter"
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def value_of(argv, flag):
    return argv[argv.index(flag) + 1]


def on_gpu(plan):
    return dataclasses.replace(plan, device="cuda")


def test_all_three_numbers_of_a_shape_are_always_given(target, drafter):
    shape = DraftShape.from_name("5/4/16")
    argv = LaunchPlan.speculate(target, "float32", CPU, drafter, shape).argv(1234)
    assert value_of(argv, "--speculative-algorithm") == "EAGLE3"
    assert value_of(argv, "--speculative-num-steps") == "5"
    assert value_of(argv, "--speculative-eagle-topk") == "4"
    assert value_of(argv, "--speculative-num-draft-tokens") == "16"
    assert value_of(argv, "--port") == "1234"


def test_a_cpu_and_a_gpu_differ_only_in_the_tables(target):
    plan = LaunchPlan.serve(target, "bfloat16", CPU)
    cpu, gpu = plan.argv(), on_gpu(plan).argv()
    assert value_of(cpu, "--attention-backend") == "intel_amx"
    assert "--attention-backend" not in gpu
    assert "--disable-cuda-graph" not in gpu
    assert value_of(gpu, "--cuda-graph-max-bs-decode") == "8"
    assert "--max-total-tokens" not in gpu
    assert int(value_of(cpu, "--max-total-tokens")) >= 2 * 512


def test_a_capture_server_caches_no_prefix_and_takes_the_longest_sample(target):
    plan = LaunchPlan.capture(target, "float32", CPU, (1, 3, 4), max_sample_tokens=512, prefill_tokens=2048)
    for argv in (plan.argv(), on_gpu(plan).argv()):
        assert "--disable-radix-cache" in argv
        assert int(value_of(argv, "--context-length")) > 512
        # Samples that share a prefill must fit into one, in tokens, requests and cache.
        assert value_of(argv, "--chunked-prefill-size") == value_of(argv, "--max-prefill-tokens") == "2048"
        assert int(value_of(argv, "--max-running-requests")) == most_samples(2048)
    small = CPU.model_copy(update={"max_total_tokens": 4000})
    with pytest.raises(EngineArgsError, match=r"expected at least 4096, .* found 4000; raise it, or lower capture"):
        LaunchPlan.capture(target, "float32", small, (1, 3, 4), max_sample_tokens=512, prefill_tokens=2048)
    assert "--disable-prefill-cuda-graph" in on_gpu(plan).argv()
    assert "--cuda-graph-max-bs-decode" not in on_gpu(plan).argv()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_argument_is_a_flag_or_the_one_value_of_a_flag(target, drafter, device):
    shape = DraftShape.from_name("3/1/4")
    for plan in (
        LaunchPlan.serve(target, "float32", CPU),
        LaunchPlan.speculate(target, "float32", CPU, drafter, shape),
        LaunchPlan.capture(target, "float32", CPU, (1, 3, 4), max_sample_tokens=512, prefill_tokens=2048),
    ):
        argv = dataclasses.replace(plan, device=device).argv()
        pairs = zip(("--", *argv), argv, strict=False)
        assert [part for before, part in pairs if not before.startswith("--") and not part.startswith("--")] == []
        flags = [part for part in argv if part.startswith("--")]
        assert len(flags) == len(set(flags))


def test_float32_on_a_gpu_is_refused_before_any_start(target, drafter, monkeypatch):
    monkeypatch.setattr("eagle3_core.engine.launch.resolve_device", lambda _wanted: "cuda")
    with pytest.raises(EngineArgsError, match=r"set target\.dtype to bfloat16"):
        LaunchPlan.serve(target, "float32", CPU)
    with pytest.raises(EngineArgsError, match="bfloat16 and float16 alone"):
        LaunchPlan.capture(target, "float32", CPU, (1, 3, 4), max_sample_tokens=512, prefill_tokens=2048)
    with pytest.raises(EngineArgsError, match="bfloat16 and float16 alone"):
        LaunchPlan.speculate(target, "float32", CPU, drafter, DraftShape.from_name("3/1/4"))
    assert LaunchPlan.serve(target, "bfloat16", CPU).device == "cuda"


def test_capture_layers_reach_the_plugin_as_outputs_of(target, tmp_path):
    plan = LaunchPlan.capture(target, "float32", CPU, (1, 3, 4), max_sample_tokens=512, prefill_tokens=2048)
    environment = plan.environment(2, spool=tmp_path)
    assert environment[plugin.CAPTURE_LAYERS] == "1,3,4"
    assert environment[plugin.CAPTURE_DIR] == str(tmp_path)
    assert environment["PYTHONPATH"].split(":")[0] == str(CPU_SITE)
    assert "PYTHONPATH" not in on_gpu(plan).environment(2)


def test_only_a_plan_that_pretends_a_length_sets_sglangs_switch(target, drafter):
    plan = LaunchPlan.speculate(target, "float32", CPU, drafter, DraftShape.from_name("3/1/4"))
    assert "SGLANG_SIMULATE_ACC_LEN" not in plan.environment(1)
    pretending = dataclasses.replace(plan, pretended_length=2.5)
    assert pretending.environment(1)["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert pretending.argv() == plan.argv()


@pytest.mark.parametrize(("width", "threads"), [(192, "1"), (576, "2")])
def test_a_small_target_is_not_shared_among_threads(target, width, threads):
    config = json.loads((target / "config.json").read_text(encoding="utf-8")) | {"hidden_size": width}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert LaunchPlan.serve(target, "float32", CPU).environment(2)["OMP_NUM_THREADS"] == threads


def test_engine_args_replace_ours_and_false_removes_a_flag(target):
    serving = CPU.model_copy(update={"engine_args": {"sampling_backend": "flashinfer", "sleep-on-idle": False, "x": 3}})
    argv = LaunchPlan.serve(target, "float32", serving).argv()
    assert argv.count("--sampling-backend") == 1
    assert value_of(argv, "--sampling-backend") == "flashinfer"
    assert "--sleep-on-idle" not in argv
    assert value_of(argv, "--x") == "3"


def test_a_bare_flag_is_true():
    assert override(["--a", "1"], {"enable_metrics": True}) == ["--a", "1", "--enable-metrics"]


def test_flags_that_have_a_place_of_their_own_are_refused_in_engine_args():
    with pytest.raises(EngineArgsError, match=r"set by evaluation\.shapes"):
        override([], {"speculative-num-steps": 3})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num-speculative-tokens", r"--speculative-num-draft-tokens, which is set by evaluation\.shapes"),
        ("--num_speculative_tokens", r"--speculative-num-draft-tokens, which is set by evaluation\.shapes"),
        ("speculative-model", "--speculative-draft-model-path, which is set by the evaluated shape"),
        ("max-num-seqs", r"--max-running-requests, which is set by serving\.max_running_requests"),
        ("gpu-memory-utilization", "its name for it is --mem-fraction-static; say that"),
        ("max-model-len", "its name for it is --context-length; say that"),
        ("tensor-parallel-size", r"this flag is set by serving\.tensor_parallel"),
        ("model", r"this flag is set by target\.model"),
    ],
)
def test_a_flag_of_vllm_or_of_an_older_sglang_names_the_right_one_and_its_place(name, advice):
    with pytest.raises(EngineArgsError, match=advice):
        override([], {name: 3})


def test_a_drafter_without_weights_is_refused_before_any_start(target, drafter):
    (drafter / "model.safetensors").unlink()
    with pytest.raises(EngineArgsError, match="run export first"):
        LaunchPlan.speculate(target, "float32", CPU, drafter, DraftShape.from_name("3/1/4"))


@pytest.mark.parametrize(
    "architectures", [["LlamaForCausalLM"], ["Eagle3LlamaForCausalLM"], ["LlamaForCausalLMEagle"], []]
)
def test_a_drafter_of_a_class_that_eagle3_does_not_serve_is_refused(architectures, target, drafter):
    (drafter / "config.json").write_text(json.dumps({"architectures": architectures}), encoding="utf-8")
    with pytest.raises(EngineArgsError, match=r"for the algorithm EAGLE3, found .*remap --to sglang"):
        LaunchPlan.speculate(target, "float32", CPU, drafter, DraftShape.from_name("3/1/4"))


def test_a_drafter_that_ends_before_the_context_is_refused_or_the_context_capped(target, drafter):
    shape = DraftShape.from_name("3/1/4")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 128}
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(EngineArgsError, match=r"expected the 512 positions .* found 128.*set context-length to 128"):
        LaunchPlan.speculate(target, "float32", CPU, drafter, shape)
    capped = CPU.model_copy(update={"engine_args": {"context_length": 128}})
    argv = LaunchPlan.speculate(target, "float32", capped, drafter, shape).argv()
    assert value_of(argv, "--context-length") == "128"


def test_a_target_without_config_is_one_clear_line(tmp_path):
    with pytest.raises(EngineArgsError, match=r"config\.json.*check target\.model"):
        LaunchPlan.serve(tmp_path, "float32", CPU)


def test_a_rewritten_number_is_an_error(target, drafter):
    plan = LaunchPlan.speculate(target, "float32", CPU, drafter, DraftShape.from_name("3/1/4"))
    effective = {
        "dtype": "float32", "device": "cpu", "attention_backend": "intel_amx", "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    }  # fmt: skip
    compare_effective(plan, effective)
    with pytest.raises(EngineArgsError, match="speculative_num_draft_tokens: asked 4, got 16"):
        compare_effective(plan, effective | {"speculative_num_draft_tokens": 16})


def test_what_the_user_asked_for_is_compared_too(target):
    serving = CPU.model_copy(update={"engine_args": {"mem-fraction-static": 0.8, "page_size": 4, "no-such-field": 1,
                                                     "sleep-on-idle": False}})  # fmt: skip
    plan = LaunchPlan.serve(target, "float32", serving)
    effective = {"dtype": "float32", "device": "cpu", "attention_backend": "intel_amx", "mem_fraction_static": 0.8,
                 "page_size": 4, "sleep_on_idle": True}  # fmt: skip
    compare_effective(plan, effective)
    with pytest.raises(EngineArgsError, match="page_size: asked 4, got 64"):
        compare_effective(plan, effective | {"page_size": 64})


def test_a_wrong_flag_names_the_one_that_was_meant():
    known = ["--mem-fraction-static", "--port", "--speculative-eagle-topk"]
    assert unknown_flags(["--port", "1"], known) is None
    assert "did you mean --mem-fraction-static?" in str(unknown_flags(["--mem-fraction", "1"], known))
    assert "did you mean --speculative-eagle-topk?" in str(unknown_flags(["--speculative-topk=4"], known))
