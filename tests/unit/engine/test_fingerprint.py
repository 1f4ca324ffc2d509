from __future__ import annotations

import pytest

from eagle3_core.engine import fingerprint as engine
from eagle3_core.errors import EngineVersionError


def package(directory, body="return 1"):
    for file, name in engine._HOOKED:
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        *classes, function = name.split(".")
        text = f"def {function}(self):\n    {body}\n"
        for wanted in classes:
            text = f"class {wanted}:\n" + "".join(f"    {line}\n" for line in text.splitlines())
        path.write_text(text, encoding="utf-8")
    return directory


def test_the_digest_changes_with_a_hooked_function_and_with_nothing_else(tmp_path):
    one = engine.digest_of(package(tmp_path / "one"))
    same = package(tmp_path / "same")
    with (same / engine._HOOKED[0][0]).open("a", encoding="utf-8") as file:
        file.write("\n\ndef another():\n    return 2\n")
    assert engine.digest_of(same) == one
    assert engine.digest_of(package(tmp_path / "other", "return 2")) != one


def test_a_hooked_function_that_is_gone_is_named(tmp_path):
    root = package(tmp_path)
    (root / engine._HOOKED[1][0]).write_text("class LogitsProcessor:\n    pass\n", encoding="utf-8")
    with pytest.raises(EngineVersionError, match=r"LogitsProcessor\.forward"):
        engine.digest_of(root)


def test_the_installed_sglang_is_one_the_plugin_was_proven_with():
    assert engine.require_known_good("cpu") == engine.fingerprint("cpu")
    assert engine.fingerprint("cpu") != engine.fingerprint("cuda")


@pytest.mark.parametrize(("table", "message"), [({}, "proven with"), ({"VERSION": "0" * 64}, "was modified")])
def test_an_unproven_or_modified_sglang_is_refused(monkeypatch, table, message):
    known = {engine.sglang_version() if key == "VERSION" else key: value for key, value in table.items()}
    monkeypatch.setattr(engine, "KNOWN_GOOD", known)
    with pytest.raises(EngineVersionError, match=message):
        engine.require_known_good("cpu")


def test_a_version_proven_on_gpus_alone_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(engine, "_GPU_ONLY", frozenset({engine.sglang_version()}))
    with pytest.raises(EngineVersionError, match="on GPUs alone; install"):
        engine.require_known_good("cpu")
    assert engine.require_known_good("cuda") == engine.fingerprint("cuda")
