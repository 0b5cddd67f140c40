"""Stands in for `python -m disagg`: a router that only tells its state, workers that only say hello to it.

Behaviour is set by FAKE_DISAGG: "" works; "worker-bad" exits 2 with a plain line; "worker-crash" raises;
"router-bad"; "never-ready"; "deaf" ignores SIGTERM.
"""

import http.server
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request

from disagg.channel.lifeline import watch_parent

MODE = os.environ.get("FAKE_DISAGG", "")


def flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class State(http.server.BaseHTTPRequestHandler):
    workers: list[dict[str, object]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path.startswith("/hello/"):
            worker_id = self.path.rpartition("/")[2]
            known = [worker for worker in self.workers if worker["worker_id"] != worker_id]
            self.workers[:] = [*known, {"worker_id": worker_id, "role": "mixed", "model": "m", "connected": True}]
        is_ready = bool(self.workers) and MODE != "never-ready"
        missing = "" if is_ready else "no worker can answer"
        models = [{"model": "m", "is_ready": is_ready, "missing": missing}]
        body = json.dumps({"router": {"incarnation": 1}, "models": models, "workers": self.workers}).encode()
        self.send_response(503 if self.path == "/ready" and not is_ready else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


def run_router() -> None:
    if MODE == "router-bad":
        print("disagg: port 8000 is already in use", file=sys.stderr)
        raise SystemExit(2)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--port", "8000"))), State)
    server.daemon_threads = True
    control = http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--control-port", "8001"))), State)
    control.daemon_threads = True
    threading.Thread(target=control.serve_forever, daemon=True).start()
    addresses = [f"127.0.0.1:{each.server_address[1]}" for each in (server, control)]
    print(json.dumps({"http": addresses[0], "control": addresses[1]}), flush=True)
    server.serve_forever()


def say_hello(url: str) -> None:
    """Workers are started together with their router, and try until it listens."""
    opener, deadline_s = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + 60.0
    while True:
        try:
            opener.open(url, timeout=10.0).read()
            return
        except urllib.error.URLError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def run_worker() -> None:
    if MODE == "worker-bad":
        print("disagg: '/m' is not a model", file=sys.stderr)
        raise SystemExit(2)
    if MODE == "worker-crash":
        raise RuntimeError("out of luck")
    worker_id = flag("--worker-id", "")
    url = f"http://{flag('--router-address', '')}/hello/{worker_id}"
    say_hello(url)
    print(f"{worker_id} says hello", file=sys.stderr, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    watch_parent(grace_s=0.2)
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    run_router() if sys.argv[1] == "router" else run_worker()
