"""The REST endpoint: start `ragcache serve`, ask once for JSON and once for a stream.

python examples/batch_index.py --store /tmp/harbour
python examples/rest_query.py --store /tmp/harbour "How much is a berth for a long boat?"
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any


@contextmanager
def server(store: Path, port: int) -> Iterator[None]:
    """Run `ragcache serve` until the block ends."""
    command = [str(Path(sys.executable).with_name("ragcache")), "serve", "--store", str(store), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not healthy(port):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with code {process.returncode}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def healthy(port: int) -> bool:
    """Whether the server answers yet."""
    try:
        return request(port, "GET", "/health").status == 200
    except ConnectionError:
        return False


def request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
    """One HTTP request to the local server."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    return connection.getresponse()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    """Ask the same question both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="folder of the state store")
    parser.add_argument("question", nargs="?", default="How tall is the lighthouse?")
    arguments = parser.parse_args()
    query = {"question": arguments.question, "top_k": 3, "max_tokens": 64}

    port = free_port()
    with server(arguments.store, port):
        answer = json.load(request(port, "POST", "/v1/query", query))
        print(answer["answer"])
        print(f"  {answer['tokens']['restored']} tokens restored, TTFT {answer['timings_ms']['ttft']:.0f} ms")

        print("once more, streamed:")
        for line in request(port, "POST", "/v1/query", {**query, "stream": True}):
            content = line.decode().removeprefix("data: ").strip()
            if content and content != "[DONE]" and (event := json.loads(content))["type"] == "text":
                print(event["text"], end="", flush=True)
        print()


if __name__ == "__main__":
    main()
