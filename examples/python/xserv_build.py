"""Builds the wheel of this package (PEP 517 and 660): copies xserv/, xserv_server/ and the libxserv.so that was built.

    pip install examples/python        takes the library along
    pip install -e examples/python     finds it when it is used
    csrc/packaging/wheel               makes a wheel to pass on

It needs nothing but Python, so that pip fetches nothing and no build/ is left behind. The library is the file
that XSERV_LIBRARY names, one that was copied into xserv/, or what `cargo build --release` made. The platform
in the wheel's name is computed from the library: the oldest C library whose functions it needs.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import time
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

PACKAGES = ("xserv", "xserv_server")
SOURCES = ("*.py", "*.html", "py.typed")

#: The libraries that the platform tags of PEP 600 allow, besides the C library's own parts: the unwinder.
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|ld-linux-[a-z0-9-]+)\.so\.\d+$")
MACHINES = {62: "x86_64", 183: "aarch64"}
#: The oldest C library that pip knows tags for on all of these machines.
OLDEST_GLIBC = (2, 17)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    """Makes the wheel with the library inside, and returns the name of its file."""
    return write_wheel(Path(wheel_directory), find_library(), licences())


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    """Makes a wheel that points at this folder, and returns the name of its file."""
    return _write(Path(wheel_directory), "py3-none-any", {"xserv.pth": f"{HERE}\n".encode()}, licences())


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """PEP 517 asks for it."""
    raise SystemExit("There is no source distribution: the library is built from the repository. Make a wheel.")


def write_wheel(folder: Path, library: Path, texts: Dict[str, bytes]) -> str:
    """Makes a wheel of the package and this library, with these licence texts, and returns the name of its file."""
    sources = sorted(source for package in PACKAGES for kind in SOURCES for source in (HERE / package).glob(kind))
    files = {source.relative_to(HERE).as_posix(): source.read_bytes() for source in sources}
    files["xserv/libxserv.so"] = library.read_bytes()
    return _write(folder, f"py3-none-{platform_of(library)}", files, texts)


def find_library() -> Path:
    """Returns the library to take along. Exits with a sentence if there is none."""
    chosen = os.environ.get("XSERV_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise SystemExit(f"There is no file {chosen}, which XSERV_LIBRARY names: set it to a libxserv.so.")
        return Path(chosen)
    target = Path(os.environ.get("CARGO_TARGET_DIR") or "target")
    built = REPOSITORY / target / "release" / "libxserv.so"  # an absolute target stays as it is
    for library in (HERE / "xserv" / "libxserv.so", built):
        if library.is_file():
            return library
    raise SystemExit(
        f"There is no {built}: run `cargo build --release` in the repository, then install again, or set "
        "XSERV_LIBRARY to a libxserv.so."
    )


def licences() -> Dict[str, bytes]:
    """Returns the licence of the repository, if this is a checkout of it."""
    file = REPOSITORY / "LICENSE"
    is_checkout = (REPOSITORY / "include" / "xserv.h").is_file()
    return {"LICENSE": file.read_bytes()} if is_checkout and file.is_file() else {}


def platform_of(library: Path) -> str:
    """Returns the platform tag of a library: manylinux_2_17_x86_64 and its like, or linux_x86_64 if it needs
    more than the C library, so that it runs where it was built but should not be passed on."""
    machine, needed, versions = read_elf(library)
    glibc: Tuple[int, ...] = OLDEST_GLIBC
    for version in versions:
        kind, _, number = version.partition("_")
        if kind == "GLIBC" and re.fullmatch(r"[\d.]+", number):
            glibc = max(glibc, tuple(int(part) for part in number.split("."))[:2])
        elif kind != "GCC":
            return f"linux_{machine}"
    if not all(SYSTEM_LIBRARIES.match(name) for name in needed):
        return f"linux_{machine}"
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def read_elf(library: Path) -> Tuple[str, List[str], List[str]]:
    """Returns the machine of a shared library, the libraries that it needs, and the versions of their symbols."""
    content = library.read_bytes()
    try:
        return _read_elf(content)
    except (ValueError, struct.error, KeyError) as error:
        raise SystemExit(f"{library} is not a shared library of 64-bit Linux: {error}.") from None


def _read_elf(content: bytes) -> Tuple[str, List[str], List[str]]:
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not begin as one does")
    kind, machine = struct.unpack_from("<HH", content, 16)
    if kind != 3 or machine not in MACHINES:
        raise ValueError(f"its type is {kind}, its machine {machine}")
    (program_headers,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    loads, dynamic = [], None
    for at in range(program_headers, program_headers + size * count, size):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", content, at)
        if kind == 1:
            loads.append((address, address + length, offset))
        elif kind == 2:
            dynamic = offset, length
    if dynamic is None:
        raise ValueError("it has no dynamic section")
    entries: Dict[int, List[int]] = {}
    for at in range(dynamic[0], sum(dynamic), 16):
        tag, value = struct.unpack_from("<QQ", content, at)
        if tag == 0:
            break
        entries.setdefault(tag, []).append(value)

    def offset_of(address: int) -> int:
        for begin, end, offset in loads:
            if begin <= address < end:
                return int(offset + address - begin)
        raise ValueError(f"the address {address:#x} is in no segment")

    strings = offset_of(entries[5][0])  # DT_STRTAB

    def string(offset: int) -> str:
        begin = strings + offset
        return content[begin : content.index(b"\0", begin)].decode()

    versions = []
    at = offset_of(entries[0x6FFFFFFE][0]) if 0x6FFFFFFE in entries else 0  # DT_VERNEED
    for _ in range(entries.get(0x6FFFFFFF, [0])[0]):  # DT_VERNEEDNUM
        _, number, _, first, following = struct.unpack_from("<HHIII", content, at)
        version = at + first
        for _ in range(number):
            _, _, _, name, step = struct.unpack_from("<IHHII", content, version)
            versions.append(string(name))
            version += step
        at += following
    needed = [string(offset) for offset in entries.get(1, [])]  # DT_NEEDED
    return MACHINES[machine], needed, versions


def _section(name: str) -> str:
    """Returns a table of pyproject.toml: Python reads TOML from 3.11 on only."""
    text = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    return text.split(f"\n[{name}]\n")[1].split("\n[")[0] + "\n"


def _extras() -> List[str]:
    """Returns the headers that name the optional requirements."""
    headers = []
    for extra, listed in re.findall(r"^([a-z-]+) = \[\n(.*?)^\]$", _section("project.optional-dependencies"), re.M | re.S):
        headers.append(f"Provides-Extra: {extra}")
        for requirement in re.findall(r'^ *"(.*)",$', listed, re.M):
            headers.append(f'Requires-Dist: {requirement}; extra == "{extra}"')
    return headers


def _entry_points() -> bytes:
    scripts = re.findall(r'^([a-z-]+) = "(.*)"$', _section("project.scripts"), re.M)
    return "".join(["[console_scripts]\n", *(f"{name} = {function}\n" for name, function in scripts)]).encode()


def _project() -> Dict[str, str]:
    """Returns the strings of [project] in pyproject.toml, and the package's version."""
    section = _section("project")
    package = (HERE / "xserv" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', package, re.MULTILINE)
    return {**dict(re.findall(r'^([a-z-]+) = "(.*)"$', section, re.MULTILINE)), "version": version}


def _write(folder: Path, tag: str, files: Dict[str, bytes], texts: Dict[str, bytes]) -> str:
    project = _project()
    info = f"{project['name']}-{project['version']}.dist-info"
    headers = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Requires-Python: {project['requires-python']}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {name}" for name in texts),
        *_extras(),
        "Description-Content-Type: text/markdown",
    ]
    readme = (HERE / project["readme"]).read_text(encoding="utf-8")
    is_pure = "true" if tag.endswith("-any") else "false"
    files = {
        **files,
        **{f"{info}/licenses/{name}": text for name, text in texts.items()},
        f"{info}/METADATA": ("\n".join(headers) + "\n\n" + readme).encode(),
        f"{info}/entry_points.txt": _entry_points(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: xserv_build\nRoot-Is-Purelib: {is_pure}\nTag: {tag}\n".encode(),
    }
    files[f"{info}/RECORD"] = _record(files.items(), f"{info}/RECORD")
    name = f"{project['name']}-{project['version']}-{tag}.whl"
    # The same content makes the same file. The format knows no time before 1980.
    seconds = max(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), 315532800)
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, time.gmtime(seconds)[:6])
            entry.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
    return name


def _record(files: Iterable[Tuple[str, bytes]], itself: str) -> bytes:
    lines = []
    for path, content in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{itself},,\n"]).encode()
