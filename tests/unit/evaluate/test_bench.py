"""`eagle3 bench` against a small server that misbehaves on demand; a real SGLang is measured in tests/integration."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from eagle3_core.artifacts import Kind
from eagle3_core.cli.main import app
from eagle3_core.config import RunConfig
from eagle3_core.config.sweep import BenchPlan
from eagle3_core.errors import EngineError, InputError, NotSpeculatingError, UnknownSchemaError
from eagle3_core.evaluate.bench import stream
from eagle3_core.evaluate.bench.drive import Hooks, bench
from eagle3_core.evaluate.bench.output import read_bench
from eagle3_core.evaluate.bench.plan import BenchPrompt, load_prompts
from eagle3_core.pipeline import shape_names
from eagle3_core.stages import evaluate
from eagle3_core.storage import load

TOKENS = 30
INFO = {"version": "0.0", "model_path": "somewhere", "dtype": "float32", "speculative_algorithm": None}
SPECULATING = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
               "speculative_num_draft_tokens": 4}  # fmt: skip


class Fake:
    """What the server shall do; an answer has 30 tokens, in chunks of `per_chunk`, one a pass."""

    def __init__(self, speculating=True, per_chunk=3, **changes):
        self.info = {**INFO, **(SPECULATING if speculating else {})}
        self.speculating, self.per_chunk = speculating, per_chunk
        self.counters, self.histogram, self.metrics, self.cumulative = speculating, True, False, True
        self.text, self.ids, self.fault, self.pass_s = "word", list(range(TOKENS)), "", 0.0
        self.faulty = lambda prompt: True
        self.verified = self.flushed = 0
        self.asked = []
        self.template = True
        self.__dict__.update(changes)

    def events(self, prompt):
        """Yield the events of one answer; None breaks the connection off."""
        passes = -(-(len(self.ids) - 1) // self.per_chunk)
        self.verified += passes
        fault = self.fault if self.faulty(prompt) else ""
        ends = [1, *range(1 + self.per_chunk, len(self.ids), self.per_chunk), len(self.ids)]
        for at, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            time.sleep(self.pass_s if at else 0)
            if at == 2 and fault == "disconnect":
                yield None
            meta = {"prompt_tokens": len(prompt), "completion_tokens": end, "finish_reason": None, "cached_tokens": 0}
            if end == len(self.ids):
                meta["finish_reason"] = {"type": "abort" if fault == "abort" else "length"}
                if self.counters and passes:
                    meta |= {"spec_verify_ct": passes}
                    if self.histogram:
                        meta["spec_correct_drafts_histogram"] = [*[0] * (self.per_chunk - 1), passes]
            ids = self.ids[:end] if self.cumulative else self.ids[start:end]
            yield {"text": self.text, "output_ids": ids, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        fake = self.server.fake
        if self.path == "/metrics" and fake.metrics:
            labels = '{model_name="x"}'
            self.reply(200, f"sglang:spec_verify_calls_total{labels} {float(fake.verified)}\n")
        elif self.path == "/server_info":
            self.reply(200, json.dumps(fake.info))
        else:
            self.reply(404, "{}")

    def do_POST(self):
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        if self.path == "/tokenize" and fake.template:
            text = body["messages"][-1]["content"]
            self.reply(200, json.dumps({"tokens": [ord(letter) for letter in text]}))
        elif self.path == "/flush_cache":
            fake.flushed += 1
            self.reply(200, "")
        elif self.path == "/generate" and fake.asked.append(body["sampling_params"]["temperature"]):
            pass
        elif self.path == "/generate" and not (fake.fault == "503" and fake.faulty(body["input_ids"])):
            self.stream(fake.events(body["input_ids"]))
        else:
            self.reply(503 if self.path == "/generate" else 404, "overloaded")

    def reply(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, events):
        self.send_response(200)
        self.end_headers()
        for event in events:
            if event is None:
                return
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


@pytest.fixture
def serve():
    running = []

    def start(fake):
        server = Server(("127.0.0.1", 0), Handler)
        server.fake = fake
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


PROMPTS = [BenchPrompt(f"p{at}", "math" if at % 2 else "code", ({"role": "user", "content": f"say {at}"},))
           for at in range(12)]  # fmt: skip
PLAN = BenchPlan(concurrency=(2,), max_new_tokens=(TOKENS,))


def measure(*urls, **changes):
    return bench(urls, PROMPTS, PLAN.model_copy(update=changes), Hooks())


def cell(serve, fake):
    return measure(serve(fake))[0].cells[0]


@pytest.mark.parametrize("cumulative", [True, False])
def test_tokens_are_the_servers_count_not_chunks_and_acceptance_holds_the_bonus_token(serve, cumulative):
    """30 tokens in 11 chunks, 10 passes: 3.0 tokens a pass, the prefill's among them as SGLang counts."""
    fake = Fake(cumulative=cumulative, pass_s=0.002)
    run = measure(serve(fake), repeats=2)[0]
    found = run.cells[0]
    assert found.overall.completion_tokens == 2 * 12 * TOKENS
    assert found.acceptance_length == 3.0
    assert found.acceptance_source == "requests"
    assert found.acceptance_at == (1.0, 1.0)
    assert set(found.domains) == {"math", "code"}
    assert {answer.output_ids for answer in run.answers} == {tuple(range(TOKENS))}
    assert fake.flushed == 2
    for answer in run.answers:
        # Chunks read together are one; the prefill's token is in none.
        assert 0 <= sum(tokens for _, tokens in answer.gaps) <= TOKENS - 1
    # Each chunk's wait is shared by its tokens.
    assert found.itl_p99_s < found.gap_p99_s
    assert 0.5 < found.mean_in_flight <= 2.0


def test_no_counters_while_the_server_says_it_speculates_is_an_error_within_the_warm_up(serve):
    fake = Fake(counters=False)
    with pytest.raises(NotSpeculatingError, match="counts no verify passes"):
        measure(serve(fake))
    assert fake.flushed == 0


def test_the_servers_metrics_stand_in_for_counters_of_requests(serve):
    found = cell(serve, Fake(counters=False, metrics=True))
    assert (found.acceptance_length, found.acceptance_source) == (3.0, "server")
    assert found.acceptance_at == ()
    assert found.domains["math"].acceptance_length is None


def test_acceptance_without_positions_is_acceptance_all_the_same(serve):
    found = cell(serve, Fake(histogram=False))
    assert (found.acceptance_length, found.acceptance_at) == (3.0, ())


def test_answers_of_one_token_leave_the_acceptance_unknown_never_one(serve):
    with pytest.raises(NotSpeculatingError, match="no verify pass counted"):
        measure(serve(Fake(ids=[7])))


def test_a_server_without_speculation_is_a_baseline(serve, tmp_path):
    result, shown = invoke(tmp_path, serve(Fake(speculating=False, per_chunk=1)))
    assert result.exit_code == 0
    assert shown["verdict"]["summary"] == "Baseline: this server does not speculate."
    assert {row["acceptance_length"] for row in shown["rows"]} == {None}


def test_empty_answers_and_loops_are_flagged(serve, tmp_path):
    _, shown = invoke(tmp_path, serve(Fake(text=" \n", ids=[5, 6] * 30)))
    assert "at 2: 36 of 36 answers are empty" in shown["verdict"]["notes"]
    assert any("36 of 36 answers end in a loop" in note for note in shown["verdict"]["notes"])


@pytest.mark.parametrize(
    ("fault", "reason"), [("disconnect", "tokens"), ("503", "found 503: overloaded"), ("abort", "abort")]
)
def test_lost_requests_are_counted_and_named_and_too_many_are_an_error(serve, fault, reason):
    first = [ord(letter) for letter in "say 5"]
    found = cell(serve, Fake(fault=fault, faulty=lambda prompt: prompt == first))
    assert (found.requests, found.failed, found.overall.answers) == (12, 1, 11)
    assert reason in found.failures[0]
    with pytest.raises(EngineError, match=rf"2 of 2 requests failed, the first: prompt p\d: .*{reason}"):
        measure(serve(Fake(fault=fault)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:30000", "http://not-a-host.invalid"])
def test_a_wrong_address_is_one_line(tmp_path, url):
    result = CliRunner().invoke(app, ["bench", url, "-p", str(prompt_file(tmp_path)), "--out", str(tmp_path / "out")])
    assert result.exit_code == 65
    assert "[InputError]" in result.output
    assert url in result.output
    assert not (tmp_path / "out").exists()


def test_chunks_that_were_sent_together_share_the_wait_before_them(monkeypatch):
    """Or the time per token of a server that sends in bursts would be that of reading a buffer."""
    clock = iter([0.0, 0.5, 0.9, 0.90001, 0.90002, 1.3])
    monkeypatch.setattr(stream.time, "perf_counter", lambda: next(clock))
    reader = stream._Reader()
    for tokens in (1, 2, 4, 5, 8):
        reader.take({"meta_info": {"completion_tokens": tokens}, "output_ids": [1] * tokens})
    assert reader.ttft_s == 0.5
    assert [(round(seconds, 3), tokens) for seconds, tokens in reader.gaps] == [(0.4, 4), (0.4, 3)]


def test_prompts_that_are_not_there_are_told_by_their_flag(tmp_path):
    result = CliRunner().invoke(
        app, ["bench", "http://127.0.0.1:9", "-p", "none.jsonl", "--out", str(tmp_path / "out")]
    )
    assert "expected a JSONL file, found none; set --prompts" in result.output


def test_something_else_than_sglang_is_told_so(serve):
    with pytest.raises(InputError, match="expected a running SGLang server, found status 404"):
        measure(serve(Fake(info={"hello": "world"})))


def test_a_server_that_cannot_apply_its_template_asks_for_a_tokenizer(serve):
    with pytest.raises(InputError, match=r"status 404 of /tokenize.*--tokenizer"):
        measure(serve(Fake(template=False)))


def test_a_concurrency_that_the_prompts_cannot_fill_is_refused():
    with pytest.raises(InputError, match="concurrency 64: expected at least as many prompts, found 12"):
        measure("http://127.0.0.1:9", concurrency=(1, 64))


def test_every_temperature_is_asked_for_at_every_point_and_stands_apart(serve, tmp_path):
    fake = Fake()
    result, shown = invoke(tmp_path, serve(fake), "--temperature", "1,0", "--max-new-tokens", "30,60")
    assert result.exit_code == 0
    rows = [(row["max_new_tokens"], row["temperature"]) for row in shown["rows"] if row["domain"] == "all"]
    assert rows == [(30, 0.0), (30, 1.0), (60, 0.0), (60, 1.0)]
    assert [fake.asked.count(temperature) for temperature in (0, 1)] == [2 + 3 * 2 * 12, 3 * 2 * 12]
    page = (tmp_path / "out" / "bench.html").read_text()
    assert "2 in flight (60 tokens, temperature 1)" in page
    refused, _ = invoke(tmp_path, "http://127.0.0.1:9", "--temperature", "-1", name="other")
    assert "--temperature: expected numbers from 0 like 0,0.7,1, found -1" in refused.output


def test_each_repeat_visits_all_points_and_starts_elsewhere():
    plan = BenchPlan(concurrency=(1, 2, 4, 8), max_new_tokens=(16,), repeats=2)
    orders = [[found.concurrency for found in plan.order(repeat)] for repeat in range(2)]
    assert orders == [[1, 2, 4, 8], [4, 8, 1, 2]]


def test_two_servers_take_turns_in_being_first(serve):
    told = []
    urls = [serve(Fake()), serve(Fake(speculating=False, per_chunk=1))]
    plan = PLAN.model_copy(update={"concurrency": (1, 2), "repeats": 2})
    bench(urls, PROMPTS[:2], plan, Hooks(phase=told.append))
    passes = [text for text in told if ", pass " in text]
    assert ["EAGLE3" in text for text in passes] == [True, False, False, True, False, True, True, False]
    assert [text.partition(", ")[2] for text in passes[::2]] == [
        "1 in flight, pass 1", "2 in flight, pass 1", "2 in flight, pass 2", "1 in flight, pass 2",
    ]  # fmt: skip


def test_a_run_asks_what_its_configuration_counts(serve, flow, put_in, monkeypatch):
    """The stage `evaluate` over HTTP: no speculation, one shape and one pretended length, each at its own points."""
    grid = {"shapes": ["3/1/4"], "primary": "3/1/4", "concurrency": [2, 1], "max_new_tokens": [64, 32], "repeats": 2,
            "simulated_lengths": [2.9], "max_prompts": 3}  # fmt: skip
    flow.config = RunConfig.parse({**flow.config.model_dump(mode="json"), "evaluation": grid}, "test")
    prompts = min(3, flow.run("prepare").facts["held_out"])
    put = put_in(flow.store)
    flow.refs |= {kind: put(f"x/{kind}", kind, {"file": ""}) for kind in (Kind.DRAFTER, Kind.PARITY)}

    @contextlib.contextmanager
    def started(plan, _context):
        counters = SimpleNamespace(avg_spec_accept_length=None)
        client = contextlib.nullcontext(SimpleNamespace(counters=lambda: counters))
        url = serve(Fake(speculating=plan.shape != "baseline"))
        yield SimpleNamespace(url=url, client=lambda: client, ready_s=0.0, effective={})

    monkeypatch.setattr("eagle3_core.engine.server.SglangServer.of_stage", started)
    monkeypatch.setattr(evaluate, "require_known_good", lambda: "test")
    monkeypatch.setattr(evaluate, "_plan", lambda _context, shape, _length: SimpleNamespace(device="cpu", shape=shape))
    names = shape_names(flow.config)
    swept = [load(flow.store, flow.run("evaluate", at)).json("sweep.json") for at in range(len(names))]
    passes = [len(one["answers"]) / prompts for one in swept]
    assert passes == [plan.passes for plan in flow.config.evaluation.plans] == [8, 8, 4]
    assert [one["plan"]["ignore_eos"] for one in swept] == [False, False, True]
    assert flow.config.evaluation.told.startswith(f"{sum(passes):.0f} passes over 3 prompts or fewer, by 3 servers")


def test_prompts_are_taken_evenly_over_domains_once_each(tmp_path):
    lines = [{"prompt": f"add {at}", "domain": "math"} for at in range(20)]
    lines += [{"turns": ["write", "again"], "category": "code"}, {"prompt": "add 3", "domain": "math"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = load_prompts([tmp_path], 4)
    assert sorted(prompt.domain for prompt in found) == ["code", "math", "math", "math"]
    assert len(load_prompts([tmp_path], 99)) == 21
    with pytest.raises(InputError, match="expected JSON lines, found none"):
        load_prompts([tmp_path / "empty"] if (tmp_path / "empty").mkdir() is None else [], 4)


# ------------------------------------------------------------------------------------------------------- the command
def prompt_file(directory: Path) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {at}", "domain": "math"}) + "\n" for at in range(12)))
    return path


def invoke(directory: Path, url: str, *options: str, name: str = "out"):
    argv = ["bench", url, "-p", str(prompt_file(directory)), "--concurrency", "2", "--max-new-tokens", "60",
            "--out", str(directory / name), "--json", *options]  # fmt: skip
    result = CliRunner().invoke(app, argv)
    text = result.stdout[result.stdout.index('{"files"') :] if '{"files"' in result.stdout else ""
    return result, json.loads(text) if text else None


def test_a_drafter_against_a_baseline_measured_in_turn(serve, tmp_path):
    fast = serve(Fake(pass_s=0.012))
    result, shown = invoke(tmp_path, fast, "--baseline", serve(Fake(speculating=False, per_chunk=1, pass_s=0.010)))
    assert result.exit_code == 0, result.output
    row = shown["rows"][0]
    assert 0 < row["low"] <= row["speedup"] <= row["high"]
    assert row["break_even"] > 0
    assert row["equal"] == 12
    assert [Path(path).name for path in shown["files"]] == ["bench.json", "bench.csv", "bench.html"]
    page = Path(shown["files"][2]).read_text()
    assert "<script" not in page
    assert "<link" not in page
    assert page.count("<svg") == 4
    again, _ = invoke(tmp_path, fast)
    assert again.exit_code == 65
    assert "give another --out" in again.output


def test_a_drafter_against_a_former_file_with_what_was_not_alike(serve, tmp_path):
    _, former = invoke(tmp_path, serve(Fake(speculating=False, per_chunk=1, pass_s=0.002)), name="former")
    slow = serve(Fake(pass_s=0.02, info={**INFO, **SPECULATING, "dtype": "bfloat16"}))
    result, shown = invoke(tmp_path, slow, "--against", former["files"][0], "--expect", "3.9")
    assert result.exit_code == 0
    assert shown["rows"][0]["low"] <= shown["rows"][0]["high"]
    assert "not the same dtype: bfloat16, the other server float32" in shown["verdict"]["notes"]
    assert shown["verdict"]["notes"][0].startswith("train/serve mismatch: 3.90 was expected, 3.00 is served")


def test_a_dead_drafter_fails_the_command_and_the_files_are_there(serve, tmp_path):
    result, shown = invoke(tmp_path, serve(Fake(per_chunk=1)))
    assert result.exit_code == 65
    assert shown["verdict"]["dead"]
    assert "contributes nothing" in shown["verdict"]["summary"]
    assert read_bench(tmp_path / "out" / "bench.json").cells[0].acceptance_length == pytest.approx(30 / 29)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UnknownSchemaError, match="eagle3/bench/2"):
        read_bench(tmp_path / "x.json")
    with pytest.raises(InputError, match=r"expected the bench\.json"):
        read_bench(tmp_path / "none.json")
