"""The README's configuration reference is the models' own."""

from pathlib import Path

from eagle3_core.cli.reference import markdown

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_configuration_reference_equals_the_models():
    text = README.read_text(encoding="utf-8")
    shown = text.split("<!-- reference -->\n")[1].split("\n<!-- /reference -->")[0]
    assert shown == markdown(), "paste the output of `eagle3 reference` between the markers"


def test_no_placeholder_is_left():
    assert "@@" not in README.read_text(encoding="utf-8")
