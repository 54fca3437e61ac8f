"""The schemes of URLs that are served, and those that take checkpoints."""

from __future__ import annotations

from typing import Final

__all__ = ["BUCKETS", "CREATES_ONCE", "READ"]

BUCKETS: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Schemes of object stores, with buckets.

Folders need not be made there.
"""

CREATES_ONCE: Final = (*BUCKETS, "memory")
"""Schemes whose library creates a file only once.

It does so by one request that fails if the file is there.

s3fs: If-None-Match. gcsfs: ifGenerationMatch=0. adlfs: `overwrite=False`, which is If-None-Match too. The
memory of this process: one step of one thread. fsspec's own fallback looks first and writes then, which is
two steps.
"""

READ: Final = ("hf", "http", "https", "ftp", "sftp", "ssh", "hdfs", "webhdfs", "smb", "oss", "oci", "dropbox")
"""Schemes of other file systems of fsspec.

They are read, and those that can be written take weights. Repositories (hf) take checkpoints: `hub.py`.
"""
