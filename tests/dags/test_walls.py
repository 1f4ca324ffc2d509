"""The import contracts bite: each is seen to break when somebody breaks it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {
    "operators/lazy.py": "def execute():\n    import torch\n    return torch\n",
    "dags/heavy.py": "from eagle3_core.stages import train\n",
    "operators/wiring.py": "import dags.train_drafter\n",
    "eagle3_core/identity.py": "import airflow\n",
    "eagle3_core/utils/__init__.py": "",
    "eagle3_core/config/base.py": "import eagle3_core.storage\n",
    "eagle3_core/stages/prepare.py": "import eagle3_core.stages.seal\n",
}


def lint(tree: Path) -> str:
    """Return what lint-imports says of a tree."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stdout


def test_every_contract_is_broken_by_a_planted_import(tmp_path):
    for folder in ("eagle3_core", "operators", "dags"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "target"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, line in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(f"{text}\n{line}", encoding="utf-8")
    said = " ".join(lint(tmp_path).split())
    assert "0 kept, 5 broken" in said, said
    for expected in (
        "operators.lazy -> torch",
        "dags.heavy -> eagle3_core.stages",
        "operators.wiring -> dags.train_drafter",
        "eagle3_core.identity -> airflow",
        "eagle3_core.utils",
        "eagle3_core.config.base -> eagle3_core.storage",
        "eagle3_core.stages.prepare -> eagle3_core.stages.seal",
    ):
        assert expected in said, expected
