"""A reader of checkpoints, written from docs/checkpoint-format.md alone: nothing of accel_core is used."""

from __future__ import annotations

import base64
import json
import math
import struct

import numpy as np
import xxhash

BLOCK = 4_194_304
DTYPES = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "int32": "<i4", "uint8": "<u1", "bool": "?"}


def digest(content):
    blocks = [xxhash.xxh3_64_intdigest(content[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
    return [f"{block:016x}" for block in blocks], xxhash.xxh3_64_hexdigest(
        b"".join(struct.pack(">Q", b) for b in blocks)
    )


def manifest_of(folder):
    """The whole manifest of the highest number."""
    for path in sorted(folder.glob("manifest-????????.json"), reverse=True):
        content = path.read_bytes()
        body, _, tail = content.rpartition(b",")
        checksum = xxhash.xxh3_64_hexdigest(body)
        if tail == b'\n  "checksum": "%s"\n}\n' % checksum.encode():
            return json.loads(content)
    raise AssertionError("no checkpoint")


class Reader:
    def __init__(self, folder):
        self.manifest = manifest_of(folder)
        assert (self.manifest["format"], self.manifest["version"]) == ("accel-checkpoint", 1)
        home = folder / self.manifest["save_id"]
        self.files = {name: (home / name).read_bytes() for name in self.manifest["files"]}
        for name, file in self.manifest["files"].items():
            assert len(self.files[name]) == file["size"], name
            assert digest(self.files[name])[1] == file["digest"], name
        self.state = json.loads(self.files["state.json"])
        self.ranks = [
            json.loads(self.files[f"rank-{rank:05}.json"]) for rank in range(self.manifest["world"]["size"])
        ]
        for rank in self.ranks:
            assert digest(self.files[f"rank-{rank['rank']:05}.safetensors"])[0] == rank["blocks"]

    def keys(self):
        return {(unit, key) for rank in self.ranks for unit, keys in rank["tensors"].items() for key in keys}

    def tensor(self, unit, key):
        whole, filled = None, 0
        for rank in self.ranks:
            if key not in rank["tensors"].get(unit, {}):
                continue
            number, place = rank["tensors"][unit][key]
            outline = rank["outlines"][number]
            dtype = np.dtype(DTYPES[outline["dtype"]])
            whole = np.empty(outline["shape"], dtype) if whole is None else whole
            is_whole = isinstance(place, int)
            for offset, shape, start in [[[0] * whole.ndim, whole.shape, place]] if is_whole else place:
                count = math.prod(shape)
                file = self.files[f"rank-{rank['rank']:05}.safetensors"]
                part = np.frombuffer(file, dtype, count, start).reshape(shape)
                whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))] = part
                filled += count
        assert filled == whole.size, "a gap"
        return whole

    def value(self, encoded):
        if isinstance(encoded, list):
            return [self.value(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tag, body = next(iter(encoded.items()), ("", None))
        if len(encoded) != 1 or not tag.startswith("$"):
            return {key: self.value(item) for key, item in encoded.items()}
        if tag in ("$tuple", "$size"):
            return tuple(self.value(body))
        if tag in ("$dict", "$ordered", "$counter"):
            return {self.value(key): self.value(item) for key, item in body}
        if tag == "$float":
            return float(body)
        if tag == "$tensor":
            return np.frombuffer(base64.b64decode(body[2]), DTYPES[body[0]]).reshape(body[1])
        return self.tensor("", body) if tag == "$stored" else (tag, body)
