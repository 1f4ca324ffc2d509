"""The client of a capture server that is healthy and does not do what it is asked: no answer, or from a cache."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle3_core.engine.client import CaptureSettings, EngineClient
from eagle3_core.errors import CaptureMismatchError, EngineUnreachableError


@pytest.fixture
def silent(request):
    posts, over, answer = [], threading.Event(), getattr(request, "param", None)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            posts.append(self.path)
            if answer is None:
                over.wait(30)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_arguments):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posts
    over.set()
    server.shutdown()
    server.server_close()


def test_a_silent_server_ends_the_capture_and_no_prefill_is_sent_twice(silent, tmp_path):
    url, posts = silent
    settings = CaptureSettings(tmp_path, prefill_tokens=64, page_size=1)
    with (
        pytest.raises(EngineUnreachableError, match=r"samples 0 to 0 \(60 tokens\): .* 1 attempts failed.*; retry"),
        EngineClient(url, capture=settings, timeout_s=0.3) as client,
    ):
        next(client.capture([[5] * 60] * 5))
    assert posts == ["/generate"]


@pytest.mark.parametrize("silent", [[{"meta_info": {"cached_tokens": 3}}]], indirect=True)
def test_states_that_a_cache_kept_back_are_refused(silent, tmp_path):
    settings = CaptureSettings(tmp_path, prefill_tokens=64, page_size=1)
    with (
        pytest.raises(CaptureMismatchError, match="expected no cached tokens, found 3; is the radix cache on"),
        EngineClient(silent[0], capture=settings) as client,
    ):
        next(client.capture([[5] * 60]))
