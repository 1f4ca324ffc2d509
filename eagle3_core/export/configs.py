"""Write a drafter's config for one dialect, or say why its reader cannot serve this drafter."""

from __future__ import annotations

from typing import Any

from eagle3_core.engine.layers import PART_OF_THE_OUTPUT, default_outputs_of
from eagle3_core.errors import ConfigError, ExportError
from eagle3_core.export.dialects import BLOCK, IDS, NESTED_CONFIG, Dialect, Numbering
from eagle3_core.export.facts import DrafterFacts
from eagle3_core.export.numbering import translate
from eagle3_core.export.rope import write_rope
from eagle3_core.model.architecture import DrafterArchitecture

WHY_NOT = {
    "norm_before_residual": "{reader} adds the carried state to the residual before its norm",
    "sliding_window": "{reader} lets the drafter attend to everything",
    "norm_output": "{reader} carries the state on before its norm",
    "norm_before_fc": "{reader} feeds fc without a norm",
    "fc_norm": "{reader} feeds fc without norms",
    "target_hidden_size": "{reader} has no drafter narrower or wider than its target",
}
EAGLE_THETA = 10000
"""What EAGLE's own code takes where RoPE is scaled: it drops the config's own."""
VLLM_THETA = 10000
"""What vLLM's MLA drafter takes where RoPE is not scaled: it drops the config's own (models/deepseek_eagle3.py)."""
PROPOSAL = "speculators_config"
DRAFT_TOKENS = 5
"""What a speculators config says vLLM drafts, where the source does not say it."""


def check_served(facts: DrafterFacts, to: Dialect, where: str) -> None:
    """Refuse what the readers of `to` would compute otherwise, or not at all.

    Raises:
        ExportError: names the setting and what they do instead.
    """
    served = to.served(mla=facts.mla is not None, where=where)
    for name in sorted(facts.extras - served.extras):
        found = facts.target_hidden_size if name == "target_hidden_size" else getattr(facts, name)
        raise ExportError(
            f"{where}: {name}: expected none for {to.name}, found {found}; {WHY_NOT[name].format(reader=to.reader)}, "
            "so acceptance would fall without an error; train without it, or serve with an engine that has it"
        )
    kind = facts.rope_parameters["rope_type"]
    if kind not in served.rope_types:
        known = " or ".join(sorted(served.rope_types))
        raise ExportError(
            f"{where}: RoPE type for {to.name}: expected {known}, found {kind}; {to.reader} has no other, "
            "choose another dialect"
        )
    vllm = [numbering is Numbering.ENTRIES for numbering in (facts.numbering, to.numbering)]
    if vllm[0] != vllm[1] and facts.target_class in PART_OF_THE_OUTPUT:
        raise ExportError(
            f"{where}: target: expected one whose states are the same to SGLang and vLLM, found {facts.target_class}: "
            "SGLang hands out what each layer's MLP adds, vLLM the layer's output; train for the engine that serves it"
        )
    if to.name == "eagle":
        _check_eagle(facts, where)
    if facts.mla and to.name == "vllm" and kind == "default" and facts.rope_parameters["rope_theta"] != VLLM_THETA:
        raise ExportError(
            f"{where}: rope_theta for vllm: expected {VLLM_THETA}, found {facts.rope_parameters['rope_theta']}: vLLM's "
            "MLA drafter reads it with YaRN alone; serve with SGLang"
        )


def _check_eagle(facts: DrafterFacts, where: str) -> None:
    """Refuse what EAGLE's own code (model/cnets.py, model/modeling_*_kv.py) takes for granted and reads nowhere."""
    rope, layers = facts.rope_parameters, facts.target_layers
    default: object = "the default layers" if layers is None else list(default_outputs_of(layers))
    ids = facts.layer_ids and list(translate(facts.layer_ids, facts.numbering, Numbering.OUTPUTS, facts.target, where))
    theta = rope["rope_theta"] if rope["rope_type"] != "default" else EAGLE_THETA
    for name, found, wanted in (
        ("head_dim", facts.head_dim, facts.hidden_size // facts.num_heads),
        ("rope_theta of scaled RoPE", theta, EAGLE_THETA),
        ("aux states", facts.num_aux, 3),
        ("aux layers", ids or default, default),
    ):
        if found != wanted:
            raise ExportError(
                f"{where}: {name} for eagle: expected {wanted}, found {found}: EAGLE's own code has no other and would "
                "not say so; serve with another engine"
            )


def write_config(facts: DrafterFacts, to: Dialect, dtype: str, where: str) -> dict[str, Any]:
    """Return the config of a drafter in dialect `to`.

    Raises:
        ExportError: its reader cannot serve the drafter, or what it needs to know of the target is not known.
    """
    check_served(facts, to, where)
    if to.config == "own":
        return _own(facts, where)
    ids = None
    if facts.layer_ids is not None:
        ids = list(translate(facts.layer_ids, facts.numbering, to.numbering, facts.target, where))
        if to.numbering is Numbering.OUTPUTS:
            _check_alike(ids, facts, to, where)
    block = _block(facts, to, where)
    return _nested(facts, to, dtype, ids, block) if to.config == "nested" else _flat(facts, to, dtype, ids, block)


def _check_alike(outputs: list[int], facts: DrafterFacts, to: Dialect, where: str) -> None:
    """Refuse ids that count outputs, as ModelOpt means them, where SGLang reads the file and takes other layers."""
    sglang = list(translate(outputs, Numbering.OUTPUTS, Numbering.SGLANG, facts.target, where))
    if sglang != outputs:
        raise ExportError(
            f"{where}: {IDS}: expected ids that mean the same layers to {to.name} and to SGLang, found the outputs "
            f"{outputs}, which SGLang calls {sglang} for {facts.target_class}; write them with --to sglang"
        )


def _heads(facts: DrafterFacts) -> dict[str, Any]:
    if facts.mla is None:
        return {"model_type": "llama", "head_dim": facts.head_dim, "mlp_bias": False}
    # Pairs of neighbours are rotated, and the one layer has a plain MLP.
    return {"model_type": "deepseek_v3", **facts.mla.model_dump(), "rope_interleave": True, "first_k_dense_replace": 1}


def _model(facts: DrafterFacts, dtype: str) -> dict[str, Any]:
    return {
        **_heads(facts),
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": facts.rms_norm_eps,
        "attention_bias": False,
        "vocab_size": facts.vocab_size,
        # Inherited from a small target, True would make the head the target's embedding, with V rows for U tokens.
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_position_embeddings,
        **write_rope(facts.rope_parameters),
        **({"sliding_window": facts.sliding_window} if facts.sliding_window else {}),
        "torch_dtype": dtype,
    }


def _flags(facts: DrafterFacts) -> dict[str, bool]:
    """Return the deviations that are a flag at top level; what is off is not written."""
    names = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    return {name: True for name in names if getattr(facts, name)}


def _flat(facts: DrafterFacts, to: Dialect, dtype: str, ids: list[int] | None, block: dict[str, Any]) -> dict[str, Any]:
    config = {
        "architectures": [to.served(mla=facts.mla is not None, where=to.name).architecture],
        **_model(facts, dtype),
        "draft_vocab_size": facts.draft_vocab_size,
        "target_hidden_size": facts.target_hidden_size,
        "num_aux_hidden_states": facts.num_aux,
        **_flags(facts),
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": facts.eos_token_id,
    }
    if to.numbering is Numbering.ENTRIES:
        config |= {IDS: ids} if ids else {}
    else:
        config["eagle_config"] = {"use_aux_hidden_state": True, **({IDS: ids} if ids else {})}
    if to.name == "eagle":
        _spell_as_eagle(config, facts)
    return {**config, BLOCK: block}


def _spell_as_eagle(config: dict[str, Any], facts: DrafterFacts) -> None:
    """Leave to EAGLE's own code nothing it stumbles over.

    A target's width that is there keeps it from taking the target's embedding, and scaled RoPE must have two keys.
    """
    if facts.target_hidden_size == facts.hidden_size:
        del config["target_hidden_size"]
    if scaled := config["rope_scaling"]:
        config["rope_scaling"] = {"type": scaled["rope_type"], "factor": scaled["factor"]}


def _nested(
    facts: DrafterFacts, to: Dialect, dtype: str, ids: list[int] | None, block: dict[str, Any]
) -> dict[str, Any]:
    wide = facts.target_hidden_size
    return {
        "architectures": [to.mha.architecture],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": facts.draft_vocab_size,
        # Always written: the library and vLLM disagree on what its absence means.
        "norm_before_residual": facts.norm_before_residual,
        **_flags(facts),
        "target_hidden_size": wide if wide != facts.hidden_size else None,
        "tie_word_embeddings": False,
        **({IDS: ids} if ids else {}),
        PROPOSAL: _proposal(facts),
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": facts.eos_token_id,
        "torch_dtype": dtype,
        # vLLM makes three of them unless it reads it here.
        NESTED_CONFIG: _model(facts, dtype) | ({"num_aux_hidden_states": facts.num_aux} if facts.num_aux != 3 else {}),
        BLOCK: block,
    }


def _proposal(facts: DrafterFacts) -> dict[str, Any]:
    """Return what is drafted for whom; speculators (0.9.0) loads no file that does not name its target."""
    if (kept := facts.speculators_config) is not None:
        verifier = kept.get("verifier") or {}
        if verifier.get("name_or_path") or facts.target_name is None:
            return kept
        return {**kept, "verifier": {**verifier, "name_or_path": facts.target_name}}
    method = {"proposal_type": "greedy", "speculative_tokens": DRAFT_TOKENS, "verifier_accept_k": 1}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{**method, "accept_tolerance": 0.0}],
        "verifier": {
            "name_or_path": facts.target_name,
            "architectures": [facts.target_class] if facts.target_class else [],
        },
    }


def _block(facts: DrafterFacts, to: Dialect, where: str) -> dict[str, Any]:
    """Return our own block: the dialect, and of layers and target what is known without any convention."""
    block: dict[str, Any] = {"dialect": to.name}
    known = facts.numbering is not Numbering.SGLANG or None not in (facts.target_class, facts.target_layers)
    if facts.layer_ids is not None and known:
        outputs = translate(facts.layer_ids, facts.numbering, Numbering.OUTPUTS, facts.target, where)
        block["aux_layers"] = list(outputs)
    for name in ("target_class", "target_layers", "target_sha256"):
        if (value := getattr(facts, name)) is not None:
            block[name] = value
    return block


def _own(facts: DrafterFacts, where: str) -> dict[str, Any]:
    """Return `drafter_config.json`."""
    needed = {"target_class": facts.target_class, "target_sha256": facts.target_sha256}
    for name, value in needed.items():
        if value is None:
            raise ExportError(f"{where}: {name}: expected one, found none: our own format names the target it is for; "
                              "give --target DIRECTORY with architectures in its config.json")  # fmt: skip
    if facts.layer_ids is None:
        if facts.target_layers is None:
            raise ExportError(f"{where}: {IDS}: expected them written out, found none, which means the default layers "
                              "of a target that is not known; give --target DIRECTORY")  # fmt: skip
        layers: tuple[int, ...] = default_outputs_of(facts.target_layers)
    else:
        layers = translate(facts.layer_ids, facts.numbering, Numbering.OUTPUTS, facts.target, where)
    shared = set(DrafterArchitecture.model_fields) & set(DrafterFacts.model_fields)
    values = {**{name: getattr(facts, name) for name in shared}, "aux_layers": layers}
    try:
        return DrafterArchitecture.parse(values, where).model_dump(mode="json")
    except ConfigError as error:
        raise ExportError(f"{error}; our own network cannot hold this drafter") from None
