"""Builds the output of make.py for CPUs in the way of the hub's builder, but without Nix, so that
`kernels` can load it.

    build_locally.py MADE OUTPUT ID...

OUTPUT/ID becomes a repository in the hub's format with one build of that identifier. This shows
that the parts fit together; published builds come from the builder, whose toolchain is older.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import tomllib
from torch.utils import cpp_extension

REGISTRATION = """#pragma once
#include <Python.h>
#define NAMED(name) PyInit_##name
#define AS_TEXT(name) #name
#define REGISTER_EXTENSION(name)                                                      \\
  PyMODINIT_FUNC NAMED(name)() {                                                      \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, AS_TEXT(name), nullptr, 0, nullptr}; \\
    return PyModule_Create(&module);                                                  \\
  }
"""
# The _ops.py that the builder writes.
OPS = '''import torch
from . import {name}
ops = torch.ops.{name}

def add_op_namespace_prefix(op_name: str):
    """
    Prefix op by namespace.
    """
    return f"{name}::{{op_name}}"
'''
# Older versions of `kernels` look for a folder with the kernel's name.
COMPATIBLE = """import sys
from pathlib import Path
import importlib.util

path = Path(__file__).parent.parent / "__init__.py"
spec = importlib.util.spec_from_file_location("{name}", path)
module = importlib.util.module_from_spec(spec)
sys.modules["{name}"] = module
spec.loader.exec_module(module)
globals().update(vars(module))
"""


def compile_library(made: Path, config: dict, objects: Path, name: str, library: Path) -> None:
    torch, cpu = config["torch"], config["kernel"]["cpu"]
    version = config["torch"]["stable-abi"]["cpu"].split(".")
    includes = [made / "csrc", objects, sysconfig.get_path("include")]
    flags = [
        *("-O3", "-DNDEBUG", "-fPIC", "-fno-gnu-unique", "-DCPU_KERNEL"),
        f"-DTORCH_TARGET_VERSION=0x{int(version[0]):02x}{int(version[1]):02x}000000000000",
        *shlex.split(os.environ.get("CXXFLAGS", "")),
        *(f"-I{path}" for path in includes),
        *(part for path in cpp_extension.include_paths() for part in ("-isystem", path)),
    ]
    (objects / "registration.h").write_text(REGISTRATION)
    rules = [f"builddir = {objects}"]  # for ninja's log, otherwise written to the current folder
    rules += ["rule compile", "  command = c++ $flags -MMD -MF $out.d -c $in -o $out"]
    rules += ["  depfile = $out.d", "rule link", "  command = c++ -shared $in -o $out $flags"]
    compiled = []
    for part, of_build in ((torch, name), (cpu, name), (cpu, "")):
        for source in part["src"]:
            # The kernels do not depend on the ops' namespace, so all builds share their objects.
            if not source.endswith(".cpp") or ("csrc/cpu/" in source) != (not of_build):
                continue
            target = objects / of_build / f"{source}.o"
            named = [f"-DTORCH_EXTENSION_NAME={of_build}"] if of_build else []
            text = shlex.join([*flags, *part["cxx-flags"], *named])
            rules += [f"build {target}: compile {made / source}", f"  flags = {text}"]
            compiled.append(str(target))
    folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    link = shlex.join([*folders, "-Wl,--no-as-needed", "-ltorch", "-Wl,--strip-all"])
    rules += [f"build {library}: link {' '.join(compiled)}", f"  flags = {link}", ""]
    ninja = objects / f"{name}.ninja"
    ninja.write_text("\n".join(rules))
    subprocess.run(["ninja", "-f", str(ninja)], check=True)


def build(made: Path, output: Path, identifier: str) -> None:
    config = tomllib.loads((made / "build.toml").read_text())
    general = config["general"]
    package = general["name"].replace("-", "_")
    name = f"_{package}_cpu_{identifier}"
    abi = config["torch"]["stable-abi"]["cpu"].replace(".", "")
    variant = f"torch-stable-abi{abi}-cpu-{platform.machine()}-linux"
    folder = output / identifier / "build" / variant
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made / "torch-ext" / package, folder)
    objects = output / "objects"
    objects.mkdir(exist_ok=True)
    compile_library(made, config, objects, name, folder / f"{name}.abi3.so")
    (folder / "_ops.py").write_text(OPS.format(name=name))
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(COMPATIBLE.format(name=f"{name}_package"))
    metadata = {
        "name": general["name"],
        "id": name,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    made, output = (Path(argument).absolute() for argument in sys.argv[1:3])
    for identifier in sys.argv[3:]:
        build(made, output, identifier)
