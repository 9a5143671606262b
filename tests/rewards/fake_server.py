"""A server on 127.0.0.1 that speaks the chat-completions protocol as well or as badly as told."""

import contextlib
import http.server
import json
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
  """Does what `server.behave(number of the request, its body)` says.

  That is (status, text): 200 sends the text as a completion; another status, or bytes, are sent as
  they are; `hang` holds the connection, `drip` sends a byte now and then, `drop` closes it.
  """

  def do_POST(self):
    server = self.server
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    with server.lock:
      server.requests.append((self.path, body))
      number = len(server.requests) - 1
    status, content = server.behave(number, body)
    if content == "drop":
      self.close_connection = True
      return
    if content == "hang":
      server.over.wait(30)
      return
    if content == "drip":
      with contextlib.suppress(OSError):
        while not server.over.wait(0.02):
          self.wfile.write(b"H")
      return
    if isinstance(content, str):
      choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
      content = json.dumps({"choices": [choice]}).encode()
    with contextlib.suppress(OSError):  # who asked may be gone
      self.send_response(status)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

  def log_message(self, format, *args):
    pass


@contextlib.contextmanager
def serving(behave, port=0):
  """Runs a server; gives it with `url`, `requests` and `stop`."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
  server.daemon_threads = True
  server.block_on_close = False
  server.behave, server.requests, server.lock = behave, [], threading.Lock()
  server.over = threading.Event()
  server.url = f"http://127.0.0.1:{server.server_port}/v1"
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()

  def stop():
    if not server.over.is_set():
      server.over.set()
      server.shutdown()
      thread.join(5)
      server.server_close()

  server.stop = stop
  try:
    yield server
  finally:
    stop()


def wait_until(condition, deadline_s=5.0):
  """Waits for a condition; fails where it does not come."""
  end_s = time.monotonic() + deadline_s
  while not condition():
    assert time.monotonic() < end_s, "it did not come"
    time.sleep(0.005)
