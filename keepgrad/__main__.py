"""`python -m keepgrad` is the command line."""

from keepgrad.cli import entry

if __name__ == "__main__":
    entry()
