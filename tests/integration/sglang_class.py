"""Load a drafter with the installed SGLang's own class and tell what it asked for, took and left; run as a script.

Every parameter is NaN before loading, so what the loader leaves uninitialised stays NaN.
"""

import json
import sys
import tempfile
from pathlib import Path


def single_process():
    """Make the groups that SGLang's layers want even for one process, without a port."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{tempfile.mkdtemp()}/meet"
    )
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")


def together(tensors):
    """Yield the tensors one by one, but the two that the class with MLA makes one parameter of as one."""
    first = {key: tensor for key, tensor in tensors.items() if "q_a_proj" in key or "kv_a_proj_with_mqa" in key}
    return [*([first] if first else []), *({key: tensors[key]} for key in tensors if key not in first)]


def probe(directory: Path) -> dict:
    import torch
    from safetensors.torch import load_file
    from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import AutoConfig

    torch.set_default_dtype(torch.float32)
    config = AutoConfig.from_pretrained(directory)
    classes = {kind.__name__: kind for kind in (LlamaForCausalLMEagle3, Eagle3DeepseekV2ForCausalLM)}
    model = classes[config.architectures[0]](config)
    parameters = dict(model.named_parameters())
    touched = {}
    for parameter in parameters.values():
        parameter.data.fill_(float("nan"))
    for group in together(load_file(directory / "model.safetensors")):
        before = {name: parameter.isnan().sum().item() for name, parameter in parameters.items()}
        had_map = model.hot_token_id is not None
        model.load_weights(group.items())
        now = [name for name, parameter in parameters.items() if parameter.isnan().sum().item() != before[name]]
        touched |= dict.fromkeys(group, now + ([] if had_map or model.hot_token_id is None else ["hot_token_id"]))
    return {
        "required": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "touched": touched,
        "uninitialised": [name for name, parameter in parameters.items() if parameter.isnan().any()],
        "target_ids": model.hot_token_id.tolist() if model.hot_token_id is not None else None,
    }


if __name__ == "__main__":
    single_process()
    print("\n" + json.dumps([probe(Path(name)) for name in sys.argv[1:]]))
