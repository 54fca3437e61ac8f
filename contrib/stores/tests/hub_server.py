"""A stand-in of the Hugging Face Hub: one repository, whose branch is a list of commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from attrs import define, field

REPOSITORY = "owner/repository"
TOKEN = "hf_a-secret-nobody-may-store"


@define(eq=False)
class Commit:
    """What a client asks to commit. answered: the status."""

    parent: str | None
    written: Mapping[str, bytes]
    removed: list[str]
    answered: int = 0

    @property
    def names(self) -> list[str]:
        return [path.rpartition("/")[2] for path in [*self.written, *self.removed]]


@define(eq=False, slots=False)
class HubServer:
    """Files of the newest commit: `files`.

    judges: it looks at `parentCommit`. refuses: method, path -> status of the answer, or None. before: is
    called before each commit that is asked for; True: it is done, and the answer is a 500. ignored: what
    .gitignore names.
    """

    heads: list[tuple[str, dict[str, bytes]]] = field(factory=list)
    seen: list[Commit] = field(factory=list)
    judges: bool = True
    ignored: str = ""
    refuses: Callable[[str, str], int | None] = lambda method, path: None
    before: Callable[[Commit], bool | None] = lambda commit: None
    lock: Any = field(factory=threading.RLock)

    def __attrs_post_init__(self) -> None:
        self.put({"README.md": b"a repository"})
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def files(self) -> dict[str, bytes]:
        return self.heads[-1][1]

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self.files if name != "README.md")

    def put(self, files: Mapping[str, bytes]) -> None:
        """Commit, as another client does."""
        self._advance(files, [])

    def remove(self, names: list[str]) -> None:
        """Commit that these are gone, as another client does."""
        self._advance({}, names)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, asked: Commit) -> int:
        lost = self.before(asked)
        with self.lock:
            if self.judges and asked.parent not in (None, self.heads[-1][0]):
                return 412
            if not all(path in self.files for path in asked.removed):
                return 404
            self._advance(asked.written, asked.removed)
        return 500 if lost else 200

    def _advance(self, written: Mapping[str, bytes], removed: list[str]) -> None:
        with self.lock:
            files = {**(self.heads[-1][1] if self.heads else {}), **written}
            kept = {path: content for path, content in files.items() if path not in removed}
            self.heads.append((hashlib.sha1(str(len(self.heads)).encode()).hexdigest(), kept))


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if (status := self.hub.refuses(method, path)) is not None:
            self._send(status, b"", "RepoNotFound" if status in (401, 404) else "")
        elif path.startswith(f"/{REPOSITORY}/resolve/"):
            self._resolve(*path.removeprefix(f"/{REPOSITORY}/resolve/").split("/", 1))
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            what, _, rest = path.removeprefix(f"/api/models/{REPOSITORY}").strip("/").partition("/")
            revision, _, inner = rest.partition("/")
            if (files := self._files(revision or "main")) is None:
                self._send(404, b"", "RevisionNotFound")
            else:
                getattr(self, f"_{(what or 'revision').replace('-', '_')}")(files, inner, body)
        else:
            self._send(404, b"", "RepoNotFound")

    def _files(self, revision: str) -> dict[str, bytes] | None:
        return self.hub.files if revision == "main" else dict(self.hub.heads).get(revision)

    def _revision(self, files: dict[str, bytes], inner: str, body: bytes) -> None:
        self._json({"id": REPOSITORY, "sha": self.hub.heads[-1][0]})

    def _tree(self, files: dict[str, bytes], inner: str, body: bytes) -> None:
        start = f"{inner}/" if inner else ""
        below = {path.removeprefix(start) for path in files if path.startswith(start)}
        paths = {start + path.partition("/")[0] for path in below}
        self._json([_entry(files, path) for path in sorted(paths)]) if paths else self._send(
            404, b"", "EntryNotFound"
        )

    def _paths_info(self, files: dict[str, bytes], inner: str, body: bytes) -> None:
        paths = parse_qs(body.decode())["paths"]
        self._json([_entry(files, path) for path in paths if path in files])

    def _preupload(self, files: dict[str, bytes], inner: str, body: bytes) -> None:
        self._json(
            {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": "regular",
                        "shouldIgnore": bool(self.hub.ignored) and each["path"].endswith(self.hub.ignored),
                        "oid": _oid(files[each["path"]]) if each["path"] in files else None,
                    }
                    for each in json.loads(body)["files"]
                ]
            }
        )

    def _commit(self, files: dict[str, bytes], inner: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        header, *operations = ((line["key"], line["value"]) for line in lines)
        asked = Commit(
            header[1].get("parentCommit"),
            {value["path"]: base64.b64decode(value["content"]) for key, value in operations if key == "file"},
            [value["path"] for key, value in operations if key == "deletedFile"],
        )
        self.hub.seen.append(asked)
        asked.answered = self.hub.commit(asked)
        if asked.answered == 200:
            self._json(
                {"commitUrl": f"{self.hub.url}/{REPOSITORY}/commit/1", "commitOid": self.hub.heads[-1][0]}
            )
        else:
            self._send(asked.answered, b"", "EntryNotFound" if asked.answered == 404 else "")

    def _resolve(self, revision: str, path: str) -> None:
        files = self._files(revision) or {}
        if path not in files:
            return self._send(404, b"", "EntryNotFound")
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        return self._send(206, files[path][int(first) : int(last) + 1])

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode())

    def _send(self, status: int, content: bytes, error: str = "") -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _entry(files: Mapping[str, bytes], path: str) -> dict[str, Any]:
    if path in files:
        return {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}
    return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
