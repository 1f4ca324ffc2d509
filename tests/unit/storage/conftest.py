"""A real S3 server over TLS, signed by a CA of its own, that can be told to misbehave."""

import datetime
import ipaddress
import socket
import struct
import threading

import pytest


def certificate(directory):
    """Write a self-signed certificate for 127.0.0.1 and its key; return both paths."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a store of the tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(x509.KeyUsage(True, False, False, False, False, True, False, False, False), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    pem, private = directory / "ca.pem", directory / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pem, private


class FaultyS3:
    """moto behind TLS; `fault` is asked about every request and may answer it, spoil it or let it pass (None)."""

    def __init__(self, directory):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            # Only with HTTP/1.1 does moto say 100-continue and keep connections, as stores do.
            protocol_version = "HTTP/1.1"

            def log(self, *_):
                return None

        self.ca, key = certificate(directory)
        self.fault, self.requests = None, []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self, threaded=True, request_handler=Quiet, ssl_context=(str(self.ca), str(key))
        )
        self._server.handle_error = lambda *_: None
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, environ, start_response):
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if self.fault is not None and (answer := self.fault(request, environ)) is not None:
            return answer(environ, start_response)
        return self._app(environ, start_response)

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # ------------------------------------------------------------------------------------------- ways to misbehave
    def once(self, part, answer, times=1):
        """Answer so the next `times` requests that contain `part`."""
        left = [times]

        def fault(request, _environ):
            if part not in request or not left[0]:
                return None
            left[0] -= 1
            return answer

        self.fault = fault
        return left

    def busy(self, environ, start_response):
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def reset(self, environ, start_response):
        """Close the connection hard, before any answer."""
        connection = environ["werkzeug.socket"]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    def spoiled(self, change):
        """Pass the request on and send what `change` makes of the body, under the headers of the true one."""

        def answer(environ, start_response):
            body = b"".join(self._app(environ, start_response))
            return change(body)

        return answer

    def spoil_upload(self, environ, start_response):
        """Store other bytes than were sent."""
        import io

        body = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        body[len(body) // 2] ^= 1
        return self._app({**environ, "wsgi.input": io.BytesIO(bytes(body))}, start_response)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = FaultyS3(tmp_path_factory.mktemp("tls"))
    yield running
    running.close()


@pytest.fixture
def s3(server, monkeypatch, tmp_path):
    from eagle3_core.storage.s3 import s3_client

    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("EAGLE3_S3_CACHE", str(tmp_path / "cache"))
    server.fault = None
    client = s3_client()
    client.create_bucket(Bucket="bucket")
    yield client
    server.fault = None
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket="bucket"):
        for item in page.get("Uploads", []):
            client.abort_multipart_upload(Bucket="bucket", Key=item["Key"], UploadId=item["UploadId"])
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        for item in page.get("Contents", []):
            client.delete_object(Bucket="bucket", Key=item["Key"])
    client.delete_bucket(Bucket="bucket")


@pytest.fixture
def store(s3):
    from eagle3_core.storage import open_store

    return open_store("s3://bucket/some/prefix")


@pytest.fixture
def no_waits(monkeypatch):
    """Let botocore repeat requests at once; how often is its own affair."""
    import time
    from types import SimpleNamespace

    quick = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr("botocore.endpoint.time", quick)


@pytest.fixture
def committed(store, tmp_path):
    from eagle3_core.artifacts import Kind
    from eagle3_core.storage import commit

    staged = tmp_path / "staged"
    (staged / "deep").mkdir(parents=True)
    (staged / "one.bin").write_bytes(b"a" * 1000)
    (staged / "deep" / "two.bin").write_bytes(b"b" * 500)
    return commit(store, "seal/abc", staged, Kind.FEATURE_SET, ref_facts={"samples": 3})


@pytest.fixture
def object_of(s3):
    """Return a function that finds the object of a file by its artifact's key and its name."""

    def find(key, name):
        listed = s3.list_objects_v2(Bucket="bucket", Prefix=f"{key}/")["Contents"]
        [found] = [item["Key"] for item in listed if item["Key"].endswith(f"/{name}")]
        return found

    return find
