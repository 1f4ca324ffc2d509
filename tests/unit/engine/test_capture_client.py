"""The client of a capture server that falls silent: healthy, but it never answers."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle3_core.engine.client import CaptureSettings, EngineClient
from eagle3_core.errors import EngineUnreachableError


@pytest.fixture
def silent():
    posts, over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            posts.append(self.path)
            over.wait(30)

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
