"""Write the GitHub workflows: from the templates, and from the labels of tox.ini.

Usage::

    python tools/workflows.py --write    # write .github/workflows/*.yml
    python tools/workflows.py --check    # end with 1 if one of them is not what --write writes

A workflow runs the environments of a label, one job each; the actions that it uses are pinned
here, in one place.
"""

from __future__ import annotations

import argparse
import configparser
import re
import sys
import textwrap
from itertools import product
from pathlib import Path

from whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = Path(__file__).resolve().parent / "workflow_template"
WORKFLOWS = Path(".github") / "workflows"
HEADER = (
    "# Written by `python tools/workflows.py --write` from tools/workflow_template and tox.ini.\n"
)
# A commit can't be moved to other code, as a tag can.
ACTIONS = {
    "checkout": ("actions/checkout", "de0fac2e4500dabe0009e67214ff5f5447ce83dd", "v6.0.2"),
    "setup_python": ("actions/setup-python", "a309ff8b426b58ec0e2a45f0f869d46889d02405", "v6.2.0"),
    "upload_artifact": (
        "actions/upload-artifact",
        "ea165f8d65b6e75b540449e92b4886f43607fa02",
        "v4.6.2",
    ),
    "download_artifact": (
        "actions/download-artifact",
        "d3f86a106a0bac45b974a628896c90dbdf5c8093",
        "v4.3.0",
    ),
    "upload_pages": (
        "actions/upload-pages-artifact",
        "7b1f4a764d45c48632c6b24a0339c27f5614fb0b",
        "v4.0.0",
    ),
    "deploy_pages": ("actions/deploy-pages", "d6db90164ac5ed86f2b6aed7e0febac5b3c0c03e", "v4.0.5"),
    "publish": (
        "pypa/gh-action-pypi-publish",
        "ed0c53931b1dc9bd32cbe73a98c7f6766f8a527e",
        "v1.13.0",
    ),
}
# These need another machine, and have jobs of their own in the template.
EMULATED = "arm-emulated"
PYTHON = "3.11"
TOX_STEPS = """\
- uses: %{checkout}
  with:
      persist-credentials: false
      # Releases are tested against the tags.
      fetch-depth: 0
- uses: %{setup_python}
  with:
      python-version: ${{ matrix.python }}
- run: python -m pip install tox
- run: python -m tox run -e "$ENVIRONMENT"
  env:
      ENVIRONMENT: ${{ matrix.env }}
"""


def environments(tox_ini: str, label: str) -> list[str]:
    """Return the environments of a label.

    Args:
        tox_ini: The text of tox.ini.
        label: A name below ``labels``.

    Raises:
        KeyError: There is no such label.
    """
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(re.sub(r"\\\n\s*", "", tox_ini))
    lines = (line.partition("=") for line in config["tox"]["labels"].splitlines() if "=" in line)
    labels = {name.strip(): value for name, _, value in lines}
    # A comma inside braces separates factors, as in py311-{core,x86}.
    names = re.split(r",\s*(?![^{]*})", labels[label])
    return [name for pattern in names if pattern for name in expanded(pattern.strip())]


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern of tox stands for.

    Example:
        >>> expanded("py311-{core,x86}-torch213")
        ['py311-core-torch213', 'py311-x86-torch213']
    """
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def matrix(names: list[str], *, is_emulated: bool = False) -> str:
    """Return the lines of a matrix: each environment with the Python that it needs.

    Args:
        names: Environments.
        is_emulated: Take those that emulate Arm; else all others.
    """
    lines = []
    for name in names:
        if name.startswith(EMULATED) == is_emulated:
            version = re.match(r"py(\d)(\d+)", name)
            python = ".".join(version.groups()) if version else PYTHON
            lines.append(f'- {{ env: {name}, python: "{python}" }}\n')
    return "".join(lines)


def workflow(template: str, tox_ini: str) -> str:
    """Return a workflow.

    Args:
        template: The text of its template. A placeholder alone on a line stands for several lines.
        tox_ini: The text of tox.ini.

    Raises:
        KeyError: The template has a placeholder for which there is no value, or there is no label.
    """
    values = {name: f"{action}@{sha} # {tag}" for name, (action, sha, tag) in ACTIONS.items()}
    blocks = {"tox_steps": TOX_STEPS}
    for label in ("ci", "nightly"):
        names = environments(tox_ini, label)
        blocks |= {label: matrix(names), f"{label}_emulated": matrix(names, is_emulated=True)}
    text = re.sub(
        r"^( *)%\{(\w+)\}$",
        lambda found: textwrap.indent(blocks[found[2]].rstrip(), found[1]),
        template,
        flags=re.MULTILINE,
    )
    return HEADER + re.sub(r"%\{(\w+)\}", lambda found: values[found[1]], text)


def workflows(tox_ini: str) -> dict[Path, str]:
    """Return the path, from the root of the repository, and the text of each workflow."""
    return {
        WORKFLOWS / template.name.removesuffix(".in"): workflow(
            template.read_text(encoding="utf-8"), tox_ini
        )
        for template in sorted(TEMPLATES.glob("*.in"))
    }


def differing(wanted: dict[Path, str], root: Path) -> list[Path]:
    """Return the workflows that are missing, differ, or come from no template."""
    found = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for path in (root / WORKFLOWS).glob("*")
    }
    return sorted(path for path in {*wanted, *found} if wanted.get(path) != found.get(path))


def main() -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the workflows")
    action.add_argument("--check", action="store_true", help="say which are not up to date")
    options = parser.parse_args()
    wanted = workflows((ROOT / "tox.ini").read_text(encoding="utf-8"))
    if options.write:
        for path, text in wanted.items():
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(ROOT / path, text)
        return 0
    paths = differing(wanted, ROOT)
    for path in paths:
        print(f"{path} is not up to date: run `python tools/workflows.py --write`")
    return int(bool(paths))


if __name__ == "__main__":
    sys.exit(main())
