"""Lets the linker of a new system link for an older glibc.

    older_glibc.py FOLDER RELEASE      writes FOLDER for a RELEASE such as 2.28 and the compiler CXX

A linker binds each of glibc's functions to its newest version, such as `dlsym` of 2.34. An older
system refuses to load that, although it has the function under an older version. With
LDFLAGS=-LFOLDER the linker finds libraries without code before glibc's own, which export those
functions under the version of RELEASE.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# The libraries that had these functions before glibc 2.34 moved them into libc.so.6.
FORMER_LIBRARIES = {
    r"dl\w+": "libdl.so.2",
    r"_*(pthread|sem)_\w+": "libpthread.so.0",
    r"(shm|timer|mq|aio|lio)_\w+": "librt.so.1",
}


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def find_file(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return str(Path(found).resolve()) if os.path.isabs(found) else ""


def older_functions(library: str, release: tuple[int, ...], renewed: bool) -> dict[str, str]:
    """Returns a library's functions, each with the newest version that `release` has; with
    `renewed` only the functions that also have a newer version."""
    command = ["readelf", "--dyn-syms", "--wide", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = defaultdict(list)
    for name, version in re.findall(r"FUNC .* (\w+)@@?GLIBC_(\d[\d.]*)$", text, re.MULTILINE):
        versions[name].append(as_numbers(version))
    result = {}
    for name, known in versions.items():
        older = [version for version in known if version <= release]
        if older and not (renewed and max(known) <= release):
            result[name] = ".".join(map(str, max(older)))
    return result


def write_stand_in(compiler: str, folder: Path, soname: str, functions: dict[str, str]) -> Path:
    by_version = defaultdict(list)
    for name, version in functions.items():
        by_version[version].append(name)
    script = [
        f"GLIBC_{version} {{ {'; '.join(names)}; }};" for version, names in by_version.items()
    ]
    source, versions, library = (folder / f"{soname}{suffix}" for suffix in (".s", ".map", ""))
    source.write_text("".join(f".globl {it}\n.type {it}, %function\n{it}:\n" for it in functions))
    versions.write_text("\n".join(script) + "\n")
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{soname},--version-script={versions}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return library


def main() -> None:
    folder, release = Path(sys.argv[1]).absolute(), as_numbers(sys.argv[2])
    compiler = os.environ.get("CXX") or "c++"
    folder.mkdir(parents=True, exist_ok=True)
    # A linker uses only one library of a name, so the stand-in for libm.so.6 must be complete.
    math = older_functions(find_file(compiler, "libm.so.6"), release, renewed=False)
    libm = write_stand_in(compiler, folder, "libm.so.6", math)
    (folder / "libm.so").write_text(f"INPUT({libm})\n")

    libc = find_file(compiler, "libc.so.6")
    renewed = older_functions(libc, release, renewed=True)
    stand_ins = [
        write_stand_in(
            compiler,
            folder,
            soname,
            {name: version for name, version in renewed.items() if re.fullmatch(pattern, name)},
        )
        for pattern, soname in FORMER_LIBRARIES.items()
    ]
    others = f"{libc} {find_file(compiler, 'libc_nonshared.a')}"
    text = f"INPUT(AS_NEEDED({' '.join(map(str, stand_ins))}) {others})\n"
    (folder / "libc.so").write_text(text)


if __name__ == "__main__":
    main()
