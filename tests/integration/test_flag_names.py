"""The flags this program knows by name are the installed SGLang's own."""

import json
import os
import subprocess
import sys

from eagle3_core.engine.flags import ELSEWHERE, OWNED
from eagle3_core.engine.launch import CPU_SITE

LIST = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("\\n" + json.dumps([action.option_strings for action in parser._actions]))
"""


def test_every_alias_of_an_owned_flag_is_owned_and_every_suggestion_is_a_flag():
    environment = os.environ | {"PYTHONPATH": str(CPU_SITE), "CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", LIST], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    aliases = [set(names) for names in json.loads(done.stdout.splitlines()[-1])]
    known = set().union(*aliases)
    assert set(OWNED) <= known
    for names in aliases:
        assert names & set(OWNED) in (set(), names)
    assert set(ELSEWHERE.values()) <= known
    assert not set(ELSEWHERE) & known, "SGLang has these flags now; take them out"
