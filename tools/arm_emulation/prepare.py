"""Set up aarch64 Python 3.11 and torch, emulated, on an x86-64 Debian 12 machine.

Usage::

    python tools/arm_emulation/prepare.py DIR -c tools/constraints/torch-2.10.txt
    DIR/armrun -m pytest ...

A second call reuses what is there. A part of DIR (the Debian files, the packages of
PyPI, our own wheels) is made in a folder beside it and then renamed, so that one that
was interrupted is never taken for a whole one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
CODENAME = "bookworm"
PYTHON = "3.11"
# Programs that run natively, and the Debian packages that bring them.
PROGRAMS = {
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
}
# Emulated: the interpreter, its headers for what Inductor compiles, and what torch links with.
ARM_PACKAGES = ["python3.11", "libpython3.11-dev", "libgomp1", "libstdc++6"]
# glibc is 2.36 in Debian 12, and pip takes only the platforms that it is told.
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37))]
# Installed without dependencies: requirements.txt says why.
TORCH = ["torch", "torchao"]
# What Linux would say in /proc/cpuinfo of the processor that armrun asks qemu for. Without it,
# the emulated programs read of the x86 processor of this machine.
CPUINFO = """\
processor\t: {number}
BogoMIPS\t: 100.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc \
dcpop sha3 sm3 sm4 asimddp sha512 asimdfhm ilrcpc flagm sb paca pacg dcpodp flagm2 frint i8mm bf16 \
rng bti mte
CPU implementer\t: 0x00
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0x051
CPU revision\t: 0

"""
MIDR = "0x00000000000f0510\n"
# In each part: what it was made from.
STAMP = ".made-from"
# Lines of a failed program's output that are worth reading.
TAIL = 15
MAX_COMMAND = 120


class PrepareError(Exception):
    """The emulation can't be set up; the message says what to do."""


def main() -> int:
    """Parse the command line and do what it says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help="wheels of ours to install")
    parser.add_argument("-c", "--constraint", type=Path, required=True, help="pins torch, torchao")
    parser.add_argument("-r", "--requirement", type=Path, action="append", default=[])
    parser.add_argument("--wheelhouse", type=Path, help="folder where tools/wheels.py puts them")
    options = parser.parse_intermixed_args()
    if bool(options.names) != bool(options.wheelhouse):
        parser.error("--wheelhouse and the names of wheels go together")
    requirements = [HERE / "requirements.txt", *options.requirement]
    try:
        prepare(
            options.folder.resolve(),
            requirements,
            options.constraint,
            [find_wheel(options.wheelhouse, name) for name in options.names],
        )
    except (PrepareError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(folder: Path, requirements: list[Path], constraint: Path, ours: list[Path]) -> None:
    """Make the parts of an emulation that are missing or out of date.

    Args:
        folder: Where the emulation lives.
        requirements: Files that say what to install from PyPI besides torch.
        constraint: File with the versions of torch and torchao.
        ours: Wheels of this repository; they replace all that were there.
    """
    check_machine()
    install_programs()
    (folder / "binfmt").mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_parts(folder, requirements, constraint, ours)


def make_parts(folder: Path, requirements: list[Path], constraint: Path, ours: list[Path]) -> None:
    """Do what `prepare` says, while no other process does."""
    (folder / "bin").mkdir(exist_ok=True)
    shutil.copy2(HERE / "armrun", folder / "armrun")
    shutil.copy2(HERE / "cross-g++", folder / "bin" / "cross-g++")

    make_part(folder / "prefix", " ".join([*ARM_PACKAGES, CPUINFO, MIDR]), make_prefix)
    pins = "\n".join(read(path) for path in (*requirements, constraint))
    make_part(folder / "site", pins, partial(make_site, requirements, constraint))
    if ours:
        digests = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in ours]
        make_part(folder / "ours", "\n".join(digests), partial(make_ours, ours))
    check_emulation(folder)


def make_part(folder: Path, made_from: str, make: Callable[[Path], None]) -> None:
    """Make one part, unless it has been made from the same things.

    Args:
        folder: The part.
        made_from: Text that changes when the part has to be made anew.
        make: Fills the empty folder that it is given.
    """
    if (folder / STAMP).is_file() and read(folder / STAMP) == made_from:
        say(f"{folder.name}: there already")
        return
    start = time.monotonic()
    # First, so that a folder that is only half deleted isn't believed either.
    (folder / STAMP).unlink(missing_ok=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for path in (unfinished, folder):
        if path.exists():
            shutil.rmtree(path)
    unfinished.mkdir()
    make(unfinished)
    (unfinished / STAMP).write_text(made_from, encoding="utf-8")
    unfinished.rename(folder)
    say(f"{folder.name}: made in {time.monotonic() - start:.0f} s")


def check_machine() -> None:
    """Refuse a machine on which the rest can't work."""
    machine, python = platform.machine(), ".".join(platform.python_version_tuple()[:2])
    if machine == "aarch64":
        raise PrepareError("this machine is aarch64: run the tests on it, without emulation")
    release = Path("/etc/os-release")
    named = read(release) if release.is_file() else ""
    if machine != "x86_64" or f"VERSION_CODENAME={CODENAME}" not in named.splitlines():
        raise PrepareError("needs an x86-64 machine with Debian 12: use its container image")
    if python != PYTHON:
        raise PrepareError(
            f"this is Python {python}: start it with {PYTHON}, whose bytecode the emulated one reads"
        )


def install_programs() -> None:
    """Install the Debian packages of the programs that are missing."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not missing:
        return
    if os.geteuid():
        raise PrepareError(f"only root may do this: apt-get install {' '.join(missing)}")
    say(f"Debian packages: {' '.join(missing)}")
    apt_get("update")
    apt_get("install", "--yes", "--no-install-recommends", *missing)


def make_prefix(unfinished: Path) -> None:
    """Unpack what the emulated Python needs of Debian.

    Nothing is installed, so neither an emulated dpkg nor root is needed. Only libraries,
    headers and the interpreter are kept: any other path would hide the machine's own.
    """
    say(f"Debian files for arm64: {' '.join(ARM_PACKAGES)}")
    unpacked = unfinished / "unpacked"
    for package in download_debian(unfinished / "apt"):
        run("dpkg-deb", "--extract", package, unpacked)
    # Packages of Debian 12 still have both /lib and /usr/lib; one is a link to the other.
    shutil.copytree(unpacked / "lib", unpacked / "usr/lib", symlinks=True, dirs_exist_ok=True)
    for name in ("lib", "include"):
        shutil.copytree(unpacked / "usr" / name, unfinished / "usr" / name, symlinks=True)
    (unfinished / "lib").symlink_to("usr/lib")
    (unfinished / "usr/bin").mkdir()
    shutil.copy2(unpacked / "usr/bin/python3.11", unfinished / "usr/bin")
    # Unlike PYTHONPATH, this also holds for `python -I`. The later line comes later on sys.path.
    packages = unfinished / "usr/lib/python3/dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    up = "/".join([".."] * 5)
    (packages / "emulation.pth").write_text(f"{up}/ours\n{up}/site\n", encoding="utf-8")
    describe_processor(unfinished)
    for left in ("apt", "unpacked"):
        shutil.rmtree(unfinished / left)
    compile_bytecode(unfinished / "usr/lib/python3.11")


def describe_processor(prefix: Path) -> None:
    """Write what the emulated programs read about their processor."""
    (prefix / "proc").mkdir()
    known = "".join(CPUINFO.format(number=number) for number in range(os.cpu_count() or 1))
    (prefix / "proc/cpuinfo").write_text(known, encoding="ascii")
    for number in range(os.cpu_count() or 1):
        registers = prefix / f"sys/devices/system/cpu/cpu{number}/regs/identification"
        registers.mkdir(parents=True)
        (registers / "midr_el1").write_text(MIDR, encoding="ascii")


def download_debian(private: Path) -> list[Path]:
    """Download Debian packages for arm64 and what they depend on.

    apt works with a state and a list of sources of its own, since a second
    architecture would change the machine for good.

    Returns:
        The downloaded packages.
    """
    for name in ("state/lists/partial", "cache/archives/partial"):
        (private / name).mkdir(parents=True)
    (private / "status").touch()
    sources = private / "sources.list"
    sources.write_text(f"deb {debian_mirror()} {CODENAME} main\n", encoding="utf-8")
    settings = {
        "Dir::State": private / "state",
        "Dir::State::status": private / "status",
        "Dir::Cache": private / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        # apt's own user may not write here.
        "APT::Sandbox::User": "root",
    }
    options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
    apt_get(*options, "update")
    apt_get(
        *options, "install", "--download-only", "--yes", "--no-install-recommends", *ARM_PACKAGES
    )
    return sorted((private / "cache/archives").glob("*.deb"))


def debian_mirror() -> str:
    """Return the address that this machine's apt has for Debian 12."""
    wanted = ("Created-By: Packages", "Origin: Debian", "Label: Debian", f"Codename: {CODENAME}")
    ask = partial(apt_get, "indextargets", "--format", "$(REPO_URI)", *wanted)
    found = ask().split()
    if not found and not os.geteuid():
        apt_get("update")
        found = ask().split()
    if not found:
        raise PrepareError(f"apt knows no mirror of {CODENAME}: as root, run apt-get update")
    return found[0]


def make_site(requirements: list[Path], constraint: Path, unfinished: Path) -> None:
    """Install aarch64 wheels from PyPI, or from where pip is configured to look."""
    say(f"aarch64 wheels: {', '.join(path.name for path in requirements)}, {constraint.name}")
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:"]
    target += [part for name in PLATFORMS for part in ("--platform", name)]
    files = [part for path in requirements for part in ("--requirement", str(path))]
    pip_install(unfinished, *target, "--no-deps", "--constraint", str(constraint), *TORCH)
    pip_install(unfinished, *target, *files)
    compile_bytecode(unfinished)


def make_ours(wheels: list[Path], unfinished: Path) -> None:
    """Install our own wheels, which are pure Python."""
    say(f"our wheels: {', '.join(path.name for path in wheels)}")
    pip_install(unfinished, "--no-index", "--no-deps", *map(str, wheels))
    compile_bytecode(unfinished)


def find_wheel(wheelhouse: Path, name: str) -> Path:
    """Return the one wheel of that name somewhere below a folder."""
    found = sorted(wheelhouse.rglob(f"{name.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        build = f"python tools/wheels.py build --wheelhouse {wheelhouse}"
        sys.exit(f"error: {name}: expected one wheel, found {len(found)}: run {build}")
    return found[0]


def check_emulation(folder: Path) -> None:
    """Prove that programs run emulated, children too, and that no package is missing."""
    child = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    asked = "import platform; print(platform.machine(), platform.python_version())"
    answer = run(folder / "armrun", "-c", child, "-I", "-c", asked).strip()
    if not answer.startswith("aarch64"):
        raise PrepareError(f"expected an aarch64 Python, got {answer}: delete {folder}, try again")
    checked = folder / "checked"
    stamps = "\n".join(read(path) for path in sorted(folder.glob(f"*/{STAMP}")))
    if not checked.is_file() or read(checked) != stamps:
        advice = "add it to tools/arm_emulation/requirements.txt, or name one more of our wheels"
        run(folder / "armrun", "-m", "pip", "check", advice=advice)
        checked.write_text(stamps, encoding="utf-8")
    say(f"ready: {folder / 'armrun'} runs {answer}")


def compile_bytecode(folder: Path) -> None:
    """Compile modules natively: an emulated interpreter takes minutes for torch's."""
    # A few files are no valid Python, on purpose; the exit code says no more than that.
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(folder)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pip_install(target: Path, *arguments: str) -> None:
    """Install into a folder with this interpreter's pip and its configuration."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    advice = "check pip's index (pip config list) and the versions, then try again"
    run(*command, "--no-compile", "--target", target, *arguments, advice=advice)


def apt_get(*arguments: str) -> str:
    """Run apt-get without questions; return its output."""
    advice = "check apt's sources (apt-get update) and the network, then try again"
    return run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", *arguments, advice=advice)


def run(*command: str | Path, advice: str = "") -> str:
    """Run a program and return what it printed.

    Raises:
        PrepareError: It failed; the message has its last lines and the advice.
    """
    words: Sequence[str] = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        tail = (done.stdout + done.stderr).strip().splitlines()[-TAIL:]
        what = f"{' '.join(words)[:MAX_COMMAND]} failed ({done.returncode})"
        told = "\n  ".join([what, *tail, advice])
        raise PrepareError(told.rstrip())
    return done.stdout


def read(path: Path) -> str:
    """Return the text of a file."""
    if not path.is_file():
        raise PrepareError(f"no such file: {path}")
    return path.read_text(encoding="utf-8")


def say(what: str) -> None:
    """Print a step as it happens."""
    print(f"arm_emulation: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
