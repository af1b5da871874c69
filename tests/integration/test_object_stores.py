"""Checkpoints on a real S3 server on this machine (moto), and on an HTTP server that serves ranges."""

from __future__ import annotations

import http.server
import os
import re
import threading
from functools import partial

import pytest
import torch

import statetree as st
from statetree import Checkpointer
from statetree.files import formats
from tests.cli.states import bits
from tests.judge import assert_trees_equal

pytest.importorskip("s3fs", reason="needs s3fs")
pytest.importorskip("aiohttp", reason="needs aiohttp")
moto = pytest.importorskip("moto.server", reason="needs moto[server]")

STATE = {"model": {"w": bits(2000, 300), "b": bits(3)}}
NAMES = ["a.safetensors", "a.pt", "directory"]


@pytest.fixture(scope="module")
def bucket():
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_there_and_comes_back(name, bucket):
    st.save(STATE, f"{bucket}/{name}")
    like = st.map_leaves(torch.zeros_like, STATE)
    assert_trees_equal(st.load(f"{bucket}/{name}", like), STATE)
    checkpoint = formats.opened(f"{bucket}/{name}")
    before = checkpoint.files.nbytes_read
    part = st.load(f"{bucket}/{name}", like, where="**.b")
    assert torch.equal(part["model"]["b"], STATE["model"]["b"])
    assert before < 30_000


def test_a_run_is_mirrored_and_resumed_from_there(bucket, tmp_path):
    with Checkpointer(tmp_path / "near", mirror=f"{bucket}/run", keep=2) as saved:
        for step in range(4):
            saved.async_save(step, {"w": bits(1000, start=step)})
    with Checkpointer(tmp_path / "elsewhere", mirror=f"{bucket}/run") as other:
        assert other.steps() == [2, 3]
        assert_trees_equal(other.restore(), {"w": bits(1000, start=3)})


def test_what_is_not_there_is_named(bucket):
    with pytest.raises(st.CheckpointError, match="no such"):
        st.load(f"{bucket}/nothing.pt")
    with pytest.raises(st.CheckpointError, match=r"cannot be (read|reached)|no such"):
        st.load("s3://another/nothing.pt")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and ranges of them."""

    def log_message(self, *_args):
        """Say nothing."""

    def do_GET(self):
        path = self.translate_path(self.path)
        if not os.path.isfile(path):
            super().do_GET()
            return
        with open(path, "rb") as file:
            data = file.read()
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        part = data[int(found[1]) : int(found[2]) + 1 if found[2] else len(data)] if found else data
        self.send_response(206 if found else 200)
        if found:
            first = int(found[1])
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(part)


@pytest.mark.parametrize("name", NAMES)
def test_a_web_server_does_as_well(name, tmp_path):
    st.save(STATE, tmp_path / name)
    handler = partial(Ranges, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        like = st.map_leaves(torch.zeros_like, STATE)
        assert_trees_equal(st.load(f"http://127.0.0.1:{server.server_port}/{name}", like), STATE)
    finally:
        server.shutdown()
        server.server_close()
