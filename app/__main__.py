"""`python -m app`."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the packages are imported: no traceback

from app.cli import main

if __name__ == "__main__":  # worker processes that are spawned import this module again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
