"""The README's configuration reference is the models' own, and its sample recipe is a recipe."""

import re
from pathlib import Path

from eagle3_core.cli.reference import markdown
from eagle3_core.config.recipes import load_recipe

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_configuration_reference_equals_the_models():
    text = README.read_text(encoding="utf-8")
    shown = text.split("<!-- reference -->\n")[1].split("\n<!-- /reference -->")[0]
    assert shown == markdown(), "paste the output of `eagle3 reference` between the markers"


def test_no_placeholder_is_left():
    assert "@@" not in README.read_text(encoding="utf-8")


def test_the_sample_recipe_can_be_read(tmp_path):
    (sample,) = re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my.yaml").write_text(sample, encoding="utf-8")
    run = load_recipe(str(tmp_path / "my.yaml"))
    assert run.evaluation.primary_shape.num_draft_tokens == 8
