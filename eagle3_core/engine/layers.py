"""Which number SGLang wants for "the output of decoder layer i". The one place that knows.

SGLang records a hidden state when it ENTERS a layer ("boundary"), so the output of layer i is boundary i + 1. The ids
it is given, by flag, by call or in a drafter's `eagle_config`, are turned into boundaries by a rule of the model class.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3_core.errors import EngineArgsError

# Rules read in SGLang 0.5.23, models/*.py, set_eagle3_layers_to_capture.
_ADDS_ONE = frozenset(
    {
        "ApertusForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "ExaoneMoEForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "Glm4MoeForCausalLM",
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "LongcatFlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
_ADDS_ONE_WHEN_FIRST_IS_ONE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
    }
)
_KEEPS_ITS_EMBEDDING = frozenset({"Qwen2MoeForCausalLM"})
"""Classes that record hidden states and have no `get_embed_and_head` (0.5.17, 0.5.23): no drafter starts with them."""
_ADDS_ONE_UNLESS_LAST_BOUNDARY = frozenset({"GptOssForCausalLM"})

PART_OF_THE_OUTPUT = frozenset({"Gemma3ForCausalLM"})
"""Classes of which SGLang (0.5.17 and 0.5.23) records what a layer's MLP adds, without the stream it is added to.

A drafter that learns from what SGLang captures is served the same; states of another engine are others.
"""


def boundaries(outputs_of: Sequence[int]) -> tuple[int, ...]:
    """Return the boundaries SGLang must end up capturing for these layers' outputs."""
    return tuple(layer + 1 for layer in outputs_of)


def default_outputs_of(num_layers: int) -> tuple[int, int, int]:
    """Return the EAGLE-3 default, (1, n/2 - 1, n - 4).

    Raises:
        EngineArgsError: the target has fewer than 7 layers, where the defaults collide.
    """
    if num_layers < 7:
        raise EngineArgsError(
            f"the default aux layers [1, n/2-1, n-4] need 7 decoder layers or more, the target has {num_layers}; "
            "set target.aux_layers, for example [0, 1, 2]"
        )
    return 1, num_layers // 2 - 1, num_layers - 4


def check_outputs_of(outputs_of: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers as a tuple after checking that they ascend and exist.

    Raises:
        EngineArgsError: names the offending ids and the range.
    """
    layers = tuple(outputs_of)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise EngineArgsError(
            f"aux layers must be ascending, distinct and within 0..{num_layers - 1} (layers counted from 0), "
            f"found {list(layers)}; correct target.aux_layers"
        )
    return layers


def captured_outputs_of(ids: Sequence[int], model_class: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs SGLang captures when it is given these ids; `engine_layer_ids` backwards.

    Raises:
        EngineArgsError: they name a layer that is not there or cannot be captured, or the class is not known here.
    """
    if model_class in _ADDS_ONE_UNLESS_LAST_BOUNDARY:
        are_boundaries = ids[-1] == num_layers
    else:
        are_boundaries = model_class in _ADDS_ONE_WHEN_FIRST_IS_ONE and ids[0] != 1
    outputs_of = tuple(layer - are_boundaries for layer in ids)
    engine_layer_ids(outputs_of, model_class, num_layers)  # refuses what cannot be captured
    return outputs_of


def engine_layer_ids(outputs_of: Sequence[int], model_class: str, num_layers: int) -> tuple[int, ...]:
    """Return the ids to give SGLang, by call or in `eagle_config`, so that it captures these layers' outputs.

    Raises:
        EngineArgsError: SGLang cannot express the layers for this class, or the class is not known here.
    """
    layers = check_outputs_of(outputs_of, num_layers)
    if model_class in _KEEPS_ITS_EMBEDDING:
        raise EngineArgsError(
            f"target class: expected one that lends a drafter its embedding, found {model_class}, with which SGLang "
            "ends at its start (no get_embed_and_head); choose another target, or once SGLang has it, remove the class "
            "from eagle3_core/engine/layers.py"
        )
    if model_class in _ADDS_ONE_UNLESS_LAST_BOUNDARY:
        return boundaries(layers) if layers[-1] == num_layers - 1 else layers
    if layers[-1] == num_layers - 1:
        raise EngineArgsError(
            f"SGLang cannot capture the output of the last layer ({layers[-1]}) of {model_class}: it records states on "
            f"entering the next one; choose aux layers within 0..{num_layers - 2}"
        )
    if model_class in _ADDS_ONE:
        return layers
    if model_class in _ADDS_ONE_WHEN_FIRST_IS_ONE:
        if layers[0] == 0:
            raise EngineArgsError(
                f"SGLang cannot capture the output of layer 0 of {model_class}: a first id of 1 is read as layer 1; "
                "choose aux layers from 1 on"
            )
        return layers if layers[0] == 1 else boundaries(layers)
    raise EngineArgsError(
        f"no layer-id rule is known for {model_class}; check set_eagle3_layers_to_capture in SGLang's model file and "
        "add the class to eagle3_core/engine/layers.py, or capture through transformers"
    )
