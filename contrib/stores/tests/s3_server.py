"""An S3 server of moto on this machine, which counts requests and fails where it is told to."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import boto3
from attrs import field, frozen
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 400: "ExpiredToken"}
SECRET = "a-secret-nobody-may-store"


@frozen
class Request:
    """What a client asked. sent: bytes of its body. answered: bytes of the answer's."""

    method: str
    path: str
    sent: int
    is_conditional: bool
    answered: list[int] = field(factory=list)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class S3Server:
    """Before each request `fault` is asked: None lets it pass, a number is the answer's status.

    "accept": the condition is not looked at. "lose": it is done, and the answer is a 500. "cut": the
    connection ends in the middle of what is sent, or of what is answered.
    """

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self._active: set[int] = set()
        self.fault: Callable[[Request], int | str | None] = lambda request: None
        self._app = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=self.url, **keys)

    @property
    def variables(self) -> dict[str, str]:
        """What a user sets."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def reset(self) -> None:
        """Begin with an empty bucket and no faults."""
        self.fault = lambda request: None
        boto3.client("s3", endpoint_url=self.url, aws_access_key_id="k", aws_secret_access_key="s")
        if BUCKET in [each["Name"] for each in self.client.list_buckets()["Buckets"]]:
            for key in self.names():
                self.client.delete_object(Bucket=BUCKET, Key=key)
        else:
            self.client.create_bucket(Bucket=BUCKET)
        self.seen.clear()

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [each["Key"] for each in found]

    def content(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def close(self) -> None:
        self._server.shutdown()

    def wait_until_idle(self) -> None:
        """Wait for what clients have asked before they died."""
        while self._active:
            time.sleep(0.01)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        self._active.add(threading.get_ident())
        try:
            return self._done(environ, start)
        finally:
            self._active.discard(threading.get_ident())

    def _done(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        request = Request(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"],
            int(environ.get("CONTENT_LENGTH") or 0),
            "HTTP_IF_NONE_MATCH" in environ,
        )
        self.seen.append(request)
        told = self.fault(request)
        if told == "accept":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if told == "cut" and request.sent:
            environ["wsgi.input"].read(request.sent // 2)
            raise cut_off(environ)
        # The body is read here, once: a second read of the connection would wait for bytes that never come.
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(request.sent))
        if told == "lose":
            list(self._app(environ, lambda *_: None))
        if told == "lose" or isinstance(told, int):
            code = CODES[told if isinstance(told, int) else 500]
            body = f"<Error><Code>{code}</Code><Message>told to fail</Message></Error>".encode()
            start(f"{500 if told == 'lose' else told} X", [("Content-Length", str(len(body)))])
            return [body]
        answer = list(self._app(environ, start))
        request.answered.append(sum(map(len, answer)))
        return half_of(b"".join(answer), environ) if told == "cut" else answer


def half_of(answer: bytes, environ: dict[str, Any]) -> Iterator[bytes]:
    """A connection that ends in the middle."""
    yield answer[: len(answer) // 2]
    raise cut_off(environ)


def cut_off(environ: dict[str, Any]) -> ConnectionResetError:
    """End the connection; else the server would take the rest of the body for the next request."""
    with suppress(OSError):  # the client may be gone
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return ConnectionResetError()
