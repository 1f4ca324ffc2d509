"""A tiny target on disk, an engine that is pure arithmetic, and a run that goes through the real stages with both."""

import contextlib
import importlib
import json
import resource
import shutil
from types import SimpleNamespace

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.storage import commit, open_store

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 260,
    "max_position_embeddings": 512, "eos_token_id": 256,
}  # fmt: skip
END = 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def put_in(tmp_path):
    """Return what gives the function that commits files, given as text, into a store."""

    def into(store):
        def put(key, kind, files, **facts):
            staged = tmp_path / "staged"
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            for name, text in files.items():
                (staged / name).write_text(text)
            return commit(store, key, staged, kind, facts=facts)

        return put

    return into


@contextlib.contextmanager
def no_room():
    """Let files be made, and no byte be written to them, as on a full disk; pytest's own log is one of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def tiny_target(tmp_path):
    """Return a directory with everything of a target but sense: byte tokens, one weight."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory = tmp_path / "target"
    directory.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    save_file({"embed": np.ones((260, 8), dtype=np.float32)}, directory / "model.safetensors")
    return directory


class ArithmeticEngine:
    """Stands where SglangServer stands: answers and hidden states are functions of the token ids alone."""

    def __init__(self):
        self.starts, self.answered, self.captured = 0, [], []
        self.fail_after = None
        self.says_nothing = lambda index: False
        self.states = states
        self.disturb = lambda number, aux, last: (aux, last)

    def of_stage(self, plan, _context):
        self.plan = plan
        return self

    def __enter__(self):
        self.starts += 1
        return self

    def __exit__(self, *_):
        return None

    def client(self):
        return Client(self)


class Client:
    def __init__(self, engine):
        self.engine = engine

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def _count(self):
        from eagle3_core.errors import EngineDiedError

        if self.engine.fail_after is not None:
            self.engine.fail_after -= 1
            if self.engine.fail_after < 0:
                raise EngineDiedError("the SGLang server died")

    def generate(self, prompts, sampling, *, concurrency):
        for index in reversed(range(len(prompts))):
            self._count()
            self.engine.answered.append(tuple(prompts[index]))
            length = 0 if self.engine.says_nothing(index) else 3 + sum(prompts[index]) % 5
            # Ids below 94 are printable characters.
            output_ids = [sum(prompts[index]) * (at + 1) % 94 for at in range(length)] + [END]
            assert len(output_ids) <= sampling.max_new_tokens
            yield SimpleNamespace(index=index, output_ids=output_ids, finish_reason="stop")

    def capture(self, samples):
        import torch

        layers = len(self.engine.plan.aux_layers)
        for index, ids in enumerate(samples):
            self._count()
            tokens = torch.tensor(ids)
            aux, last = states(tokens, layers * 8), states(tokens + 7, 8)
            aux, last = self.engine.disturb(index, aux, last)
            self.engine.captured.append(tuple(ids))
            yield SimpleNamespace(index=index, input_ids=tokens, aux_hidden_states=aux, last_hidden_state=last)


def states(tokens, width):
    """Return [T, width]: another token or another place gives other numbers."""
    import torch

    place = torch.arange(len(tokens)).double()[:, None]
    return torch.sin((tokens.double()[:, None] + 1) * (torch.arange(width) + 1) + place).float()


class Flow:
    """Runs real stages in order in one root and remembers their outputs."""

    def __init__(self, root, tmp_path, config):
        self.store, self.tmp_path, self.config, self.refs = open_store(root), tmp_path, config, {}

    def context(self, name, index=None):
        stage = STAGES[name]
        work = self.tmp_path / "jobs" / f"{name}-{index}" / "work"
        work.mkdir(parents=True, exist_ok=True)
        inputs = {key: self.refs[kind] for key, kind in stage.inputs}
        return StageContext(stage, self.config, self.store, inputs, index, work, Progress(name, None))

    def run(self, name, index=None):
        module = importlib.import_module(f"eagle3_core.stages.{name}")
        self.refs[STAGES[name].produces] = ref = module.run(self.context(name, index))
        return ref

    def shard_key(self, index):
        from eagle3_core.artifacts import Kind
        from eagle3_core.data.plan import read_plan
        from eagle3_core.storage import load

        return read_plan(load(self.store, self.refs[Kind.SHARD_PLAN])).shards[index].key

    def capture_all(self):
        from eagle3_core.artifacts import Kind

        return [self.run("capture", index) for index in range(self.refs[Kind.SHARD_PLAN].facts["num_shards"])]


@pytest.fixture
def engine(monkeypatch):
    found = ArithmeticEngine()
    monkeypatch.setattr("eagle3_core.engine.server.SglangServer", found)
    monkeypatch.setattr("eagle3_core.engine.fingerprint.require_known_good", lambda _device: {"sglang": "test"})
    return found


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Question number {number}?", "domain": ("a", "b")[number % 2]} for number in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def config(tiny_target, prompts_file):
    return RunConfig.parse(
        {
            "target": {"model": str(tiny_target), "dtype": "float32"},
            "data": {"prompts": str(prompts_file), "held_out_fraction": 0.25, "max_new_tokens": 16,
                     "max_sample_tokens": 128, "chunk_prompts": 8},
            "capture": {"shard_tokens": 256, "dtype": "float32", "reserve_bytes": 0},
            "drafter": {"draft_vocab_size": 200, "min_coverage": 0.5},
            "serving": {"device": "cpu"},
        },
        "test",
    )  # fmt: skip


@pytest.fixture
def flow_on(tmp_path, config, engine):
    return lambda root: Flow(root, tmp_path, config)


@pytest.fixture
def flow(tmp_path, flow_on):
    return flow_on(str(tmp_path / "root"))


@pytest.fixture
def planned(flow):
    """Return a flow that has a shard plan."""
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    return flow


@pytest.fixture
def sealed(planned):
    """Return a flow that has a feature set."""
    planned.capture_all()
    planned.run("seal")
    return planned
