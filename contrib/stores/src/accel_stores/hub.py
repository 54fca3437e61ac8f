"""Repositories of the Hugging Face Hub as a store: each write is a commit.

A file is created by a commit that names its parent, which the hub refuses with 412 if the branch has moved.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["Hub", "is_repository"]

WAITS: Final = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0, 30.0)
"""Seconds after a commit that another one overtook, cut at random to half."""
SILENT_SECONDS: Final = 60.0
"""Seconds without an answer after which a request fails; the library repeats those that read five times."""
OVERTAKEN: Final = (409, 412)
"""Answers to a commit that came beside another one."""


def is_repository(url: str) -> bool:
    """Return True for a repository; a bucket of the hub has no commits."""
    return url.startswith("hf://") and not url.startswith("hf://buckets/")


class Hub:
    """See `Objects`.

    created: URL of a file that this process has created -> parent of its commit, hash of its content.
    """

    keeps_history = True

    def __init__(self) -> None:
        self.created: dict[str, tuple[str, int]] = {}

    def entries(self, url: str) -> Mapping[str, int | None]:
        """Return name -> bytes of each entry, None of a folder."""
        from huggingface_hub.errors import EntryNotFoundError

        with _opened(url) as (api, repo, path):
            try:
                tree = [*api.list_repo_tree(path_in_repo=path or None, **repo)]
            except EntryNotFoundError:
                return {}
        return {
            each.path.rpartition("/")[2]: getattr(each, "size", None) for each in tree if each.path != path
        }

    def content(self, url: str, start: int, size: int) -> bytes:
        """Return a range of a file, of the branch's head."""
        from huggingface_hub import hf_hub_url, utils

        library: Any = utils
        if not size:
            return b""
        with _opened(url) as (api, repo, path):
            headers = library.build_hf_headers(token=api.token)
            headers |= {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
            where = hf_hub_url(filename=path, endpoint=api.endpoint, **repo)
            answer = library.http_backoff("GET", where, headers=headers, timeout=SILENT_SECONDS)
            library.hf_raise_for_status(answer)
            content: bytes = answer.content
        return content

    def create(self, url: str, content: bytes) -> None:
        """Create a file by a commit onto a head at which it is not there.

        A second create by this process first names the first one's parent again: the hub itself refuses it.
        """
        from huggingface_hub import CommitOperationAdd

        with _opened(url) as (api, repo, path):
            new = CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
            # Before the look: the library takes a file that lies there with this content for committed.
            api.preupload_lfs_files(additions=[new], **repo)
            head, same = self.created.pop(url, (None, None))
            stale = None if same == hash(content) else head

            def onto(head: str) -> list[Any]:
                if head != stale and api.get_paths_info(paths=[path], **{**repo, "revision": head}):
                    raise FileExistsError(f"{url} exists")
                return [new]

            self.created[url] = _commit(api, repo, path, onto, first=stale), hash(content)

    def send(self, source: Path, url: str) -> None:
        """Write a file by a commit, onto any head."""
        from huggingface_hub import CommitOperationAdd

        with _opened(url) as (api, repo, path):
            new = CommitOperationAdd(path_in_repo=path, path_or_fileobj=source)
            _commit(api, repo, path, lambda head: [new], names_parent=False)

    def remove(self, urls: Sequence[str]) -> None:
        """Remove files by one commit."""
        from huggingface_hub import CommitOperationDelete

        with _opened(urls[0]) as (api, repo, path):
            root = len(urls[0]) - len(path)

            def onto(head: str) -> list[Any]:
                paths = [url[root:] for url in urls]
                there = api.get_paths_info(paths=paths, **{**repo, "revision": head})
                return [CommitOperationDelete(path_in_repo=each.path) for each in there]

            _commit(api, repo, path, onto)
        for url in urls:
            self.created.pop(url, None)

    def pinned(self, url: str) -> str:
        """Return the URL of the branch's head."""
        from huggingface_hub import constants

        with _opened(url) as (api, repo, path):
            kind = constants.REPO_TYPES_URL_PREFIXES.get(repo["repo_type"], "")
            return f"hf://{kind}{repo['repo_id']}@{api.repo_info(**repo).sha}/{path}"


def _commit(
    api: Any,
    repo: Mapping[str, Any],
    path: str,
    onto: Any,
    first: str | None = None,
    names_parent: bool = True,
) -> str:
    """Commit the operations that `onto` gives for the branch's head.

    Again while other commits come between. first: taken for the head at first. Returns the head that it was.

    Raises:
        OSError: others came between each time, or the hub left the file out.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for wait in (0.0, *WAITS):
        time.sleep(wait * random.uniform(0.5, 1))  # noqa: S311 - spreads ranks, keeps no secret
        head: str = first or api.repo_info(**repo).sha
        first = None
        if not (operations := onto(head)):
            return head
        parent = {"parent_commit": head} if names_parent else {}
        message = f"{type(operations[0]).__name__.removeprefix('CommitOperation')} {path}"
        try:
            done = api.create_commit(operations=operations, commit_message=message, **repo, **parent)
        except HfHubHTTPError as error:
            if _status(error) not in OVERTAKEN:
                raise
            continue
        now = {**repo, "revision": done.oid}
        if message.startswith("Add") and not api.get_paths_info(paths=[path], **now):
            raise OSError(f"{path} was left out of the commit, as the repository's .gitignore may say")
        return head
    raise OSError(
        f"{path} is not committed: other commits came between {len(WAITS) + 1} times, or the token may only"
        " open pull requests"
    )


@contextmanager
def _opened(url: str) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Give the API, its arguments for the repository and branch, and the path in it.

    What it raises within becomes PermissionError and FileNotFoundError by the hub's answer.
    """
    from huggingface_hub import HfApi, HfFileSystem, get_session

    fs: Any = HfFileSystem()
    session: Any = get_session()
    if session.timeout.read is None:  # the library's own default; one that the user has set stays
        session.timeout = SILENT_SECONDS
    try:
        try:
            where = fs.resolve_path(url)
        except FileNotFoundError:
            fs.invalidate_cache()  # it may have been made since
            where = fs.resolve_path(url)
        repo = {"repo_id": where.repo_id, "repo_type": where.repo_type, "revision": where.revision}
        yield HfApi(endpoint=fs.endpoint, token=fs.token), repo, where.path_in_repo
    except OSError as error:
        status = _status(error) or _status(error.__cause__)
        if status in (401, 403):
            raise PermissionError(f"the hub answered {status}: {error}") from error
        if status == 404:
            raise FileNotFoundError(str(error)) from error
        raise
    except Exception as error:  # of the library below, which has no answer
        raise OSError(f"{type(error).__name__}: {error}") from error


def _status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
