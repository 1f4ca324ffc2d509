"""From trained tensors in memory to the directory SGLang loads."""

import pytest
import torch

from eagle3_core.errors import ExportError
from eagle3_core.export.own import export_drafter
from eagle3_core.export.remap import remap
from eagle3_core.model.architecture import DrafterArchitecture
from tests.unit.export import tiny

SIZES = DrafterArchitecture.parse(tiny.config("own"), "tiny")


def export(out, dtype="float32", maps=None, **changes):
    own = tiny.tensors("own", dtype=torch.float32)
    vocab = {name: own.pop(name) for name in ("d2t", "t2d")} | (maps or {})
    return export_drafter(out, {**own, **changes}, vocab, SIZES, tiny.target(), dtype, "train/a")


def test_the_written_file_remaps_back_to_the_checkpoint_bit_for_bit(tmp_path):
    export(tmp_path / "out")
    remap(tmp_path / "out", tmp_path / "back", "own")
    assert tiny.same(tiny.read(tmp_path / "back"), tiny.tensors("own", dtype=torch.float32))
    assert DrafterArchitecture.parse(tiny.read_config(tmp_path / "back"), "back") == SIZES.model_copy(
        update={"max_position_embeddings": 4096}
    )


def test_casting_touches_weights_but_not_the_vocabulary_maps(tmp_path):
    export(tmp_path / "out", "bfloat16")
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.tensors("sglang"))
    assert tiny.read_config(tmp_path / "out")["torch_dtype"] == "bfloat16"


def test_tensors_that_share_storage_are_written(tmp_path):
    shared = torch.randn(tiny.D)
    export(tmp_path / "out", **{"norm.weight": shared, "layer.hidden_norm.weight": shared})
    made = tiny.read(tmp_path / "out")
    assert torch.equal(made["norm.weight"], made["midlayer.hidden_norm.weight"])


def test_a_weight_that_overflows_where_it_is_served_is_refused(tmp_path):
    with pytest.raises(ExportError, match="NaN or infinite"):
        export(tmp_path / "out", "float16", **{"fc.weight": torch.full((tiny.D, 3 * tiny.D), 1e6)})


def test_an_error_names_the_checkpoint_and_leaves_nothing(tmp_path):
    with pytest.raises(ExportError, match=r"^train/a: d2t and t2d disagree.*absolute"):
        export(tmp_path / "out", maps={"d2t": torch.tensor(tiny.USED)})
    assert list(tmp_path.iterdir()) == []
