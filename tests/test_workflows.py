"""The GitHub workflows are what tools/workflows.py writes, and are valid, pinned and least privileged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from workflows import WORKFLOWS, differing, environments, matrix, workflow, workflows

ROOT = Path(__file__).resolve().parent.parent
BASH = shutil.which("bash") or "bash"
FILES = sorted((ROOT / WORKFLOWS).glob("*.yml"))
TOX_INI = """
[tox]
labels =
    # A comment.
    ci = lint, py311-{core,x86}-torch213, arm-emulated
    nightly = \\
        py3{11,12}-x86-latest, \\
        arm-emulated
"""
# In tox the linters are there, or it is a failure.
needs_linters = pytest.mark.skipif(
    find_spec("check_jsonschema") is None and "TOX_ENV_NAME" not in os.environ,
    reason="check-jsonschema and zizmor are not installed: `tox run -e integration` has them",
)


def schema_check(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def security_check(*files: Path) -> subprocess.CompletedProcess[str]:
    zizmor = str(Path(sysconfig.get_path("scripts")) / "zizmor")
    command = [zizmor, "--offline", "--no-config", "--no-progress", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_they_are_up_to_date() -> None:
    tool = ROOT / "tools" / "workflows.py"

    result = subprocess.run(
        [sys.executable, tool, "--check"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout
    assert [path.name for path in FILES] == ["docs.yml", "release.yml", "test.yml"]


def test_what_is_not_up_to_date_is_named(tmp_path: Path) -> None:
    wanted = workflows(TOX_INI)
    for path, text in wanted.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    assert differing(wanted, tmp_path) == []

    (tmp_path / WORKFLOWS / "docs.yml").write_text("by hand", encoding="utf-8")
    (tmp_path / WORKFLOWS / "release.yml").unlink()
    (tmp_path / WORKFLOWS / "other.yml").touch()

    names = [path.name for path in differing(wanted, tmp_path)]
    assert names == ["docs.yml", "other.yml", "release.yml"]


def test_labels_are_read_as_tox_reads_them() -> None:
    core, x86 = "py311-core-torch213", "py311-x86-torch213"

    assert environments(TOX_INI, "ci") == ["lint", core, x86, "arm-emulated"]
    assert environments(TOX_INI, "nightly") == [
        *("py311-x86-latest", "py312-x86-latest", "arm-emulated")
    ]
    with pytest.raises(KeyError, match="weekly"):
        environments(TOX_INI, "weekly")


def test_an_environment_gets_its_python_and_machine() -> None:
    names = ["lint", "py312-x86-torch215", "arm-emulated-torch210"]

    assert matrix(names) == (
        '- { env: lint, python: "3.11" }\n- { env: py312-x86-torch215, python: "3.12" }\n'
    )
    assert matrix(names, is_emulated=True) == ('- { env: arm-emulated-torch210, python: "3.11" }\n')


@pytest.mark.parametrize("label", ["ci", "nightly"])
def test_each_environment_of_a_label_has_a_job(label: str) -> None:
    text = (ROOT / WORKFLOWS / "test.yml").read_text(encoding="utf-8")
    jobs = dict(re.findall(r"^    ([\w-]+):\n((?: {8}.*\n)+)", text, re.MULTILINE))

    names = environments((ROOT / "tox.ini").read_text(encoding="utf-8"), label)
    assert names
    for name in names:
        assert f"env: {name}," in jobs[label] + jobs[f"{label}-emulated"], name


def test_a_placeholder_without_a_value_is_noticed() -> None:
    with pytest.raises(KeyError, match="chekout"):
        workflow("- uses: %{chekout}\n", TOX_INI)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_and_jobs_have_limits(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    pinned = r"[\w-]+(/[\w-]+)+@[0-9a-f]{40} # v[0-9.]+"

    for used in re.findall(r"uses: (.+)", text):
        assert re.fullmatch(rf"{pinned}|\./\.github/workflows/test\.yml # .*", used), used
    jobs = text.count("runs-on:")
    assert text.count("timeout-minutes:") == jobs > 0
    assert "\npermissions: {}\n" in text
    assert "\nconcurrency:\n" in text


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    text = (ROOT / WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    before, publish = text.split("    publish:\n")

    assert "id-token" not in before
    assert "environment: pypi" in publish
    assert "needs: [test, build]" in publish
    assert "checkout" not in publish, "what has the token runs nothing of the repository"


def test_a_tag_names_the_package_and_the_files(tmp_path: Path) -> None:
    text = (ROOT / WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    [script] = re.findall(r"- run: \|\n((?: {18}.*\n)+)", text)
    built = tmp_path / "wheelhouse" / "0123"
    built.mkdir(parents=True)
    for name in ("versatil_x86-0.2.0-py3-none-any.whl", "versatil_x86-0.2.0.tar.gz",
                 "versatil_arm-0.2.0-py3-none-any.whl", "versatil_x86-0.1.0.tar.gz"):  # fmt: skip
        (built / name).touch()
    values = {"GITHUB_REF_NAME": "versatil-x86-v0.2.0", "RUNNER_TEMP": str(tmp_path)}
    # The build is another test's; here it has happened.
    script = re.sub(r"python tools/wheels.py build.*", ":", textwrap.dedent(script))

    subprocess.run([BASH, "-ec", script], cwd=tmp_path, env=os.environ | values, check=True)

    copied = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert copied == ["versatil_x86-0.2.0-py3-none-any.whl", "versatil_x86-0.2.0.tar.gz"]
    assert 'tools/release.py --check "${GITHUB_REF_NAME%-v*}"' in text


@needs_linters
def test_they_fit_the_schema() -> None:
    result = schema_check(*FILES)

    assert result.returncode == 0, result.stdout


@needs_linters
def test_nothing_of_them_can_be_abused() -> None:
    result = security_check(*FILES)

    assert result.returncode == 0, result.stdout


@needs_linters
def test_the_linters_notice_a_fault(tmp_path: Path) -> None:
    good = (ROOT / WORKFLOWS / "docs.yml").read_text(encoding="utf-8")
    misspelt, injected = tmp_path / "misspelt.yml", tmp_path / "injected.yml"
    misspelt.write_text(good.replace("runs-on:", "run-on:"), encoding="utf-8")
    title = "echo ${{ github.event.pull_request.title }}"
    injected.write_text(good.replace("python -m tox run -e docs", title), encoding="utf-8")

    assert schema_check(misspelt).returncode == 1
    assert "template-injection" in security_check(injected).stdout
