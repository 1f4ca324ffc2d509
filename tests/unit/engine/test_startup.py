"""Starts that go wrong, or are merely slow: a module called sglang.launch_server stands for the real one."""

import contextlib
import json
import os
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from eagle3_core import demo
from eagle3_core.config.recipes import load_recipe
from eagle3_core.config.serving import ServingConfig
from eagle3_core.context import StageContext
from eagle3_core.engine.client import Sampling
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.log import OpenLog
from eagle3_core.engine.server import SglangServer
from eagle3_core.engine.shipping import ShippedLog
from eagle3_core.engine.startup import StartWatch
from eagle3_core.errors import EXIT_CODES, EngineDiedError, EngineMemoryError, EngineStartError, EngineUnreachableError
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.storage import open_store

DEMO_TARGET = Path(demo.__file__).parent / "target"

SERVER = """
    import http.server, json, sys, time, threading

    PORT = int(sys.argv[sys.argv.index("--port") + 1])

    def serve(first_generation_s=0.0, most=1 << 30):
        began, answered = time.monotonic(), []

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, value):
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.answer({"dtype": "float32", "device": "cpu", "attention_backend": "intel_amx",
                             "speculative_algorithm": None, "speculative_num_steps": None,
                             "speculative_eagle_topk": None, "speculative_num_draft_tokens": None})

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                answered.append(self.path)
                while len(answered) > most:
                    time.sleep(1.0)
                time.sleep(max(0.0, began + first_generation_s - time.monotonic()))
                self.answer({"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"},
                             "completion_tokens": 1, "prompt_tokens": 3}})

            def log_message(self, *_parts):
                pass

        http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()

"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts a server of which `body` is the program."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    def started(body, silence_s=60.0, on_phase=None, shipped=None):
        program = textwrap.dedent(SERVER) + textwrap.dedent(body)
        (package / "launch_server.py").write_text(program)
        plan = LaunchPlan.serve(tmp_path, "float32", ServingConfig(device="cpu"))
        return SglangServer(plan, log=tmp_path / "log", silence_s=silence_s, on_phase=on_phase, shipped=shipped)

    return started


class Bucket:
    """As much of a bucket as a log needs."""

    root, in_place = "s3://bucket", False

    def __init__(self):
        self.objects = {}

    def write_bytes(self, key, data):
        self.objects[key] = data


@pytest.mark.parametrize("body", ["print('loading', flush=True)\nserve()", "raise RuntimeError('no such weights')"])
def test_the_log_of_a_server_is_copied_whether_it_starts_or_not(start, tmp_path, body):
    bucket = Bucket()
    shipped = ShippedLog(tmp_path / "log", bucket, "jobs/x/sglang.log", print)
    with contextlib.suppress(EngineStartError), start(body, shipped=shipped):
        pass
    assert bucket.objects == {"jobs/x/sglang.log": (tmp_path / "log").read_bytes()}
    assert re.search(b"loading|no such weights", bucket.objects["jobs/x/sglang.log"])


def test_a_stage_with_a_bucket_ships_its_servers_log_and_one_with_a_directory_need_not(tmp_path):
    plan = LaunchPlan.serve(DEMO_TARGET, "float32", ServingConfig(device="cpu"))
    for store, expected in ((Bucket(), "jobs/capture-7/sglang.log"), (open_store(str(tmp_path)), None)):
        work = tmp_path / "capture-7" / "work"
        context = StageContext(
            STAGES["capture"], load_recipe("demo", {}), store, {}, 7, work, Progress("capture", work.parent)
        )
        shipped = SglangServer.of_stage(plan, context)._shipped
        assert (shipped and shipped._key) == expected


def test_a_server_is_ready_when_it_has_generated_not_when_its_health_route_answers(start):
    with start("serve(first_generation_s=3.0)") as server:
        assert server.ready_s >= 3.0


def test_a_server_that_answers_its_health_route_and_never_generates_is_given_up(start):
    with pytest.raises(EngineUnreachableError, match="the server lives but"), start("serve(1e6)", silence_s=1.0):
        pass


def test_e12_a_server_that_is_healthy_and_answers_nobody_any_more_is_ended_and_no_answer_is_lost(start):
    answered = []
    with (
        pytest.raises(EngineDiedError, match=r"silent for \d+ s \(serving.silence_s\) with \d requests in hand"),
        start("serve(most=101)", silence_s=2.0) as server,  # one of them proves that it is ready
        server.client() as client,
    ):
        for generation in client.generate([[5]] * 120, Sampling(max_new_tokens=1), concurrency=4):
            answered.append(generation.index)
    assert len(answered) == len(set(answered)) == 100
    assert not server.pids


def test_a_log_that_was_removed_blinds_nobody_and_is_said_once(start, tmp_path):
    body = """
        import subprocess
        rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("RuntimeError: a rank is lost", flush=True)
        serve()
    """
    phases = []
    with (
        pytest.raises(EngineDiedError, match=r"its process \d+ is gone\); .*: a rank is lost \[.*, which was rem"),
        start(body, on_phase=phases.append) as server,
        server.client() as client,
    ):
        (tmp_path / "log").unlink()
        time.sleep(1.0)
        client.generate_all([[5]], Sampling(max_new_tokens=1))
        os.kill(next(pid for pid in server.pids if pid != server.pid), signal.SIGKILL)
        for _ in range(200):
            client.generate_all([[5]], Sampling(max_new_tokens=1))
            time.sleep(0.05)
    assert [phase for phase in phases if "was removed" in phase] == [
        f"engine: {tmp_path}/log was removed; SGLang goes on, what it logs is lost"
    ]


def test_a_log_that_is_removed_during_the_start_ends_no_start(start, tmp_path):
    remove = f"import os\nos.unlink({str(tmp_path / 'log')!r})\nprint('loading', flush=True)\ntime.sleep(1.0)\nserve()"
    with start(remove) as server:
        assert server.ready_s >= 1.0
    fails = remove.replace("serve()", "raise ValueError('port')")
    with pytest.raises(EngineStartError, match=r"ValueError: port \[.*log, which was removed\]"), start(fails):
        pass


def test_a_server_that_owes_nobody_anything_may_be_silent_and_one_that_logs_or_computes_may_be_slow(start):
    with start("serve()", silence_s=1.0) as server, server.client() as client:
        time.sleep(3.0)
        client.generate_all([[5]], Sampling(max_new_tokens=1))
    busy = """
        import itertools
        turn = itertools.count()
        sleep = time.sleep

        def compute(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sum(range(1000))

        # The second request, which is the first after the start.
        time.sleep = lambda s: compute(4.0) if s == 0.0 and next(turn) == 1 else sleep(s)
        serve()
    """
    slow = """
        import itertools
        turn = itertools.count()

        def log():
            while True:
                time.sleep(0.3)
                print("Decode batch", flush=True)

        threading.Thread(target=log, daemon=True).start()
        sleep = time.sleep
        # The second request, which is the first after the start.
        time.sleep = lambda s: sleep(4.0 if s == 0.0 and next(turn) == 1 else s)
        serve()
    """
    for body in (slow, busy):
        with start(body, silence_s=1.5) as server, server.client() as client:
            began = time.monotonic()
            client.generate_all([[5]], Sampling(max_new_tokens=1))
            assert time.monotonic() - began > 3.0


def test_a_slow_start_that_shows_signs_of_life_is_left_alone(start):
    body = """
        for step in range(12):
            print(f"Capturing batches (bs={step})", file=sys.stderr, flush=True)
            time.sleep(0.5)
        serve()
    """
    with start(body, silence_s=5.0) as server:
        assert server.ready_s >= 6.0


def test_silence_with_a_rank_killed_meanwhile_ends_the_start_and_says_so(start):
    body = """
        import os, signal, subprocess
        rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("Load weight begin. avail mem=20.59 GB", flush=True)
        time.sleep(3.0)
        os.kill(rank.pid, signal.SIGKILL)
        time.sleep(600)
    """
    phases = []
    with pytest.raises(EngineStartError) as caught, start(body, silence_s=6.0, on_phase=phases.append):
        pass
    assert "silent for 6 s" in str(caught.value)
    assert "process" in str(caught.value)
    assert "is gone" in str(caught.value)
    assert "Load weight begin" in str(caught.value)
    assert "engine: loading weights" in phases


def test_a_kill_for_want_of_memory_is_told_from_the_control_groups_own_count(tmp_path, monkeypatch):
    from eagle3_core.engine import startup

    counts = iter([3, 4])
    monkeypatch.setattr(startup, "out_of_memory_kills", lambda: next(counts))
    (tmp_path / "log").write_text("Load weight begin.\n")
    with contextlib.closing(OpenLog(tmp_path / "log")) as log:
        watch = StartWatch(log, "nobody", 60.0, lambda _phase: None)
        with pytest.raises(EngineStartError, match=r"signal SIGKILL.*killed a process here for want of memory"):
            watch.look(-9)


@pytest.mark.parametrize(
    ("last", "advice"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "then lower mem-fraction-static"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
         "then raise mem-fraction-static"),
    ],
)  # fmt: skip
def test_want_of_memory_is_not_retried_with_the_same_arguments(start, last, advice):
    with pytest.raises(EngineMemoryError, match=advice) as caught, start(f"sys.exit({last!r})"):
        pass
    assert EXIT_CODES[caught.value.remedy] == 65
    assert "cuda-graph-max-bs-decode or serving.max_running_requests first" in str(caught.value)


def test_an_ordinary_crash_is_retried_and_an_earlier_starts_trouble_is_not_its_own(start, tmp_path):
    (tmp_path / "log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    with pytest.raises(EngineStartError, match="ended with status 1") as caught, start("raise ValueError('port')"):
        pass
    assert type(caught.value) is EngineStartError
    assert EXIT_CODES[caught.value.remedy] == 75
