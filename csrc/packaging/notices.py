#!/usr/bin/env python3
"""Prints the notices of the packages that libxserv contains: names, versions and the texts of their licences.

    python3 csrc/packaging/notices.py > THIRD-PARTY-NOTICES.txt
    python3 csrc/packaging/notices.py --check

Whoever passes the library on passes these on too. The list is Cargo's for the platform of this machine, as Cargo.lock has
it; macros, build scripts and what only tests use are not in the library. Where a package can be had under one of several
licences, MIT is taken. Fails, and names the package, if the text of a licence is not in its source; with --check it does
no more than that.
"""
import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BEGINNINGS = ("licence", "license", "copying", "unlicense")


def cargo(*arguments):
    command = ["cargo", *arguments, "--locked"]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def packages():
    """Name, version, licence and folder of every package that is linked, in order of their names."""
    described = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    by_name = {(package["name"], package["version"]): package for package in described}
    tree = cargo("tree", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}")
    # Cargo marks what it has shown before, after the version.
    for name, version in sorted({tuple(line.split()[:2]) for line in tree.splitlines()}):
        package = by_name[name, version.removeprefix("v")]
        if package["source"] is not None:  # the library itself has none
            yield name, package["version"], package["license"], Path(package["manifest_path"]).parent


def texts(folder):
    """The notices and the texts of the licence of a package."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    licences = [path for path in files if path.name.lower().startswith(BEGINNINGS)]
    chosen = [path for path in licences if "mit" in path.name.lower()] or licences
    notices = [path for path in files if path.name.lower().startswith("notice")]
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in chosen + notices]


def main():
    found, missing = {}, []
    for name, version, licence, folder in packages():
        of_package = texts(folder)
        if not of_package:
            missing.append(f"{name} {version} ({licence})")
        for text in of_package:
            # Copies that differ in line breaks alone are one text.
            found.setdefault(" ".join(text.split()), (text, []))[1].append(f"{name} {version} ({licence})")
    if missing:
        sys.exit("no text of the licence in: " + ", ".join(missing))
    if "--check" in sys.argv[1:]:
        print(f"{len(found)} texts of licences, for all packages")
        return
    print("libxserv contains these packages. Their licences ask that the following texts go with it.")
    for text, users in sorted(found.values(), key=lambda entry: entry[1]):
        print("\n" + "=" * 100 + "\n" + ", ".join(users) + "\n" + "-" * 100 + "\n\n" + text)


if __name__ == "__main__":
    main()
