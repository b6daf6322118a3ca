"""What a process of a rank begins with: before torch is imported it watches whoever started it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def _end_with_parent() -> None:
    """End when the parent has gone, however: its end of standard input closes."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from simulator.validate.torch import worker

    worker.main(Path(sys.argv[1]))
