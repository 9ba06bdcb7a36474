"""Check every tracked text file for what linters don't look at.

Reported, one line each, with exit code 1:

* absolute paths of somebody's machine, which work nowhere else;
* Python modules over 400 lines, which hold two ideas.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
# The folders of a home or a build machine. Folders that every Linux has (such
# as /proc/cpuinfo or /usr/bin/env) are fine.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:root|home|work|opt|srv|mnt|Users|tmp|scratch)/[\w.-]+")


def problems(name: str, text: str) -> list[str]:
    """Return what is wrong with one file, as ``file:line: message``."""
    found = [
        f"{name}:{number}: machine path {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in MACHINE_PATH.finditer(line)
    ]
    lines = text.count("\n")
    if name.endswith(".py") and lines > MAX_LINES:
        found.append(f"{name}:1: {lines} lines, at most {MAX_LINES}: split it")
    return found


def tracked_files() -> list[str]:
    """Return the names of all files that git tracks."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in listing.stdout.split("\0") if name]


def main() -> int:
    """Check all tracked files; return the exit code."""
    found: list[str] = []
    for name in tracked_files():
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            found += problems(name, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # not text
    print("\n".join(found) or "tracked text: fine")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
