"""Flower's SuperLink in a process that ends with the one that started it.

The starter keeps this process's standard input open. It first writes the secret with which it will claim its task;
when the pipe closes the starter has ended, even by SIGKILL, and so does this.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path


def main() -> None:
    secret = sys.stdin.buffer.read(32)

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    # No word to anybody about who runs what, and no look for newer versions.
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    from flwr.superlink.cli import flower_superlink

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        path.touch(0o600)
        path.write_bytes(secret)
        sys.argv = ["flower-superlink", *sys.argv[1:], "--superexec-auth-secret-file", str(path)]
        flower_superlink()


if __name__ == "__main__":
    main()
