"""From a real training to a gated export: the train, export and parity stages on the same artifacts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.errors import ParityError
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.stages import export, parity
from eagle3_core.storage import commit, load, open_store
from tests.integration import training_inputs
from tests.integration.test_train import finish
from tests.integration.training_inputs import D, make_inputs

_plain_samples = training_inputs._samples


def told_by_the_highest_layer(head):
    """Return samples whose two lower aux layers are loud noise, so that their order matters."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for ids, aux, last in _plain_samples(head):
        noise = 4 * torch.randn(len(ids), 2 * D, generator=generator)
        samples.append((ids, torch.cat([noise, aux[:, 2 * D :]], dim=1), last))
    return samples


class Root:
    """The artifacts of one training, and a way to run later stages on them."""

    def __init__(self, base):
        self.base, inputs = base, make_inputs(base, epochs=30, checkpoint_every_s=600)
        self.store = open_store(str(inputs.root))
        self.run = RunConfig.parse(json.loads(self.store.read_bytes(inputs.run_key)), "run")
        self.refs: dict[str, Ref] = {**inputs.inputs, "checkpoint": finish(inputs, base / "job")}

    def stage(self, module, name, **refs):
        work = self.base / "work" / name
        work.mkdir(parents=True, exist_ok=True)
        stage = STAGES[name]
        inputs = {wanted: {**self.refs, **refs}[wanted] for wanted, _ in stage.inputs}
        return module.run(StageContext(stage, self.run, self.store, inputs, None, work, Progress(name, None)))

    def altered(self, change):
        """Return a drafter whose tensors and config went through `change`, committed as if it had been exported."""
        artifact = load(self.store, self.refs["drafter"])
        tensors = load_file(artifact.path("model.safetensors"))
        config = artifact.json("config.json")
        change(tensors, config)
        staged = self.base / "altered"
        staged.mkdir(exist_ok=True)
        save_file(tensors, staged / "model.safetensors")
        (staged / "config.json").write_text(json.dumps(config))
        key = f"export/{len(self.store.list_keys('export'))}"
        return commit(self.store, key, staged, Kind.DRAFTER, facts={"dtype": "float32"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_inputs, "_samples", told_by_the_highest_layer)
        root = Root(tmp_path_factory.mktemp("trained"))
    root.refs["drafter"] = root.stage(export, "export")
    return root


def test_a_trained_drafter_survives_its_export_and_the_gate_has_power(root):
    ref = root.stage(parity, "parity")
    values = load(root.store, ref).json("parity.json")
    trained = load(root.store, root.refs["checkpoint"]).json("validation.json")
    assert values["tau_export"] == pytest.approx(trained["trainer_tau"], rel=0.01)
    assert values["max_logit_difference"] < 1e-3
    assert min(values["losses"].values()) > 0.1
    assert root.stage(parity, "parity") == ref


def swap_norms(tensors, _config):
    names = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[names[0]], tensors[names[1]] = tensors[names[1]].clone(), tensors[names[0]].clone()


def other_rope(_tensors, config):
    config["rope_parameters"]["rope_theta"] = 500.0


def one_layer_deeper(_tensors, config):
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in ids]


def vllm_names(tensors, _config):
    for name in list(tensors):
        if name.startswith("midlayer."):
            tensors[name.replace("midlayer.", "layer.")] = tensors.pop(name)


def absolute_ids(tensors, _config):
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_norms, "differ by up to"),
        (other_rope, "differ by up to"),
        (one_layer_deeper, r"expected \[1, 3, 4\], by which SGLang means the captured outputs"),
        (vllm_names, "would drop"),
        (absolute_ids, "tau at depth"),
    ],
)
def test_an_export_with_a_mistake_is_refused_before_anything_is_launched(root, change, message):
    drafter = root.altered(change)
    with pytest.raises(ParityError, match=message):
        root.stage(parity, "parity", drafter=drafter)
