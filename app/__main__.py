"""`python -m app`."""

from app.cli import main

if __name__ == "__main__":  # worker processes that are spawned import this module again
    main()
