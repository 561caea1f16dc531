"""A tap on the way from the router to one engine: it passes requests on, shows them, and lets a test
do something between the engine's answer and the router's receipt of it."""

import http.client
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from wire import PATIENCE


@dataclass
class Seen:
    """One leg that came by."""

    path: str
    headers: dict
    body: bytes


class Tap:
    """Listens on a free port of the loopback device for as long as the test runs."""

    def __init__(self, port: int):
        self.port = port
        self.seen: list[Seen] = []
        # Called with a leg before it is passed on.
        self.before = lambda seen: None
        # Called with a leg's answer; what it gives is passed on instead.
        self.after = lambda body: body
        tap = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                tap.pass_on(self, b"")

            def do_POST(self):
                tap.pass_on(self, self.rfile.read(int(self.headers["content-length"])))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.seen.clear()
        self.before = lambda seen: None
        self.after = lambda body: body

    def pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        seen = Seen(handler.path, dict(handler.headers), body)
        # The router also asks an engine that has come up to tokenise something.
        is_leg = handler.path.startswith("/v1/") and handler.command == "POST"
        try:
            if is_leg:
                self.seen.append(seen)
                self.before(seen)
            engine = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            engine.request(handler.command, handler.path, body, seen.headers)
            response = engine.getresponse()
            answer = response.read()
            engine.close()
            if is_leg:
                answer = self.after(answer)
            handler.send_response(response.status)
            handler.send_header("content-type", response.headers["content-type"] or "text/plain")
            handler.send_header("content-length", str(len(answer)))
            handler.end_headers()
            handler.wfile.write(answer)
        except OSError:
            # One of the two is gone: the other one shall see it.
            handler.close_connection = True

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
