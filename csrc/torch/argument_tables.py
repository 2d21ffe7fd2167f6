"""Writes the argument tables of selective_scan/'s operators as a C++ header: structs of the
arguments, the tables for the C++ checks, and the schemas of the operators' ops.

Usage: argument_tables.py PACKAGE HEADER. PACKAGE is a copy of selective_scan/ without its
libraries, because libraries from an earlier build may lack current operators.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The C++ constants of the tables, with the module of each operator and its name there.
TABLES = {
    "kSelectiveScan": ("_selective_scan", "SELECTIVE_SCAN"),
    "kMatrixScan": ("_matrix_scan", "MATRIX_SCAN"),
    "kSelectiveScanPrefill": ("selective_scan_prefill", "_PREFILL"),
    "kDiagonalScan": ("diagonal_scan", "DIAGONAL_SCAN"),
    "kSelectiveStateUpdate": ("selective_state_update", "_STATE_UPDATE"),
    "kAdaptiveUnitaryScan": ("adaptive_unitary", "_ADAPTIVE_UNITARY_SCAN"),
    "kMambaInner": ("_mamba_operators", "MAMBA_INNER"),
    "kCausalConv1d": ("causal_conv1d", "CAUSAL_CONV1D"),
    "kCausalConv1dPrefill": ("causal_conv1d", "_PREFILL"),
    "kCausalConv1dUpdate": ("causal_conv1d_update", "_CAUSAL_CONV1D_UPDATE"),
    "kS6Step": ("_s6_step", "S6_STEP"),
}
# The same for the backward ops whose tables C++ needs.
BACKWARD_TABLES = {"kDiagonalScanBackward": ("diagonal_scan", "DIAGONAL_SCAN")}
_SCALAR_TYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "uint8": "Byte",
}
_OPTION_TYPES = {
    "bool": "bool",
    "int": "int64_t",
    "float": "double",
    "str": "Text",
    "dtype": "ScalarType",
}
_PASSED_BY_VALUE = ("bool", "int64_t", "double")
_MOST_SIZES = 24  # CheckedCall::kMost


def write(folder: Path) -> Path:
    """Writes the header if its text has changed, and returns its path."""
    package = folder / "package" / "selective_scan"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "selective_scan", package, ignore=_ignore_all_but_sources)
    header = folder / "argument_tables.h"
    command = [sys.executable, __file__, str(package.parent), str(header)]
    subprocess.run(command, check=True)
    return header


def _ignore_all_but_sources(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name).is_dir())]


class _Header:
    """The header under construction: collects sizes, dimensions, tables and schemas."""

    def __init__(self, checks, table) -> None:
        self._checks, self._table = checks, table
        self.sizes: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        self._dim_rows: list[str] = []
        self.tables: list[str] = []
        self.schemas: list[str] = []
        self.dim("batch")
        self.dim("dstate")
        self.dim("groups")

    def size(self, name: str) -> int:
        return self.sizes.setdefault(name, len(self.sizes))

    def dim(self, text: str | None) -> int:
        if text is None:
            return -1
        if text not in self.dims:
            name = text.rstrip("?")
            terms, constant = self._checks.Expression.of(name)
            pairs = [f"{{{self.size(size)}, {factor}}}" for size, factor in terms.items()]
            pairs += ["{0, 0}"] * (2 - len(pairs))
            least, most = (
                -1 if it is None else it for it in self._checks.LIMITS.get(name, (-1, -1))
            )
            self.dims[text] = len(self.dims)
            self._dim_rows.append(
                f'{{"{name}", {{{{{", ".join(pairs)}}}}}, {constant}, {least}, {most}, '
                f"{_flag(text != name)}}}"
            )
        return self.dims[text]

    def add(self, constant: str, table) -> None:
        places = {argument.name: place for place, argument in enumerate(table.tensors)}
        rows = [self._argument(argument, places) for argument in table.tensors]
        order = [places[argument.name] for argument in table.by_shape]
        used = {dim for argument in table.tensors for dim in argument.dim_names}
        equal = [
            f"{{{places.get(without, -1)}, {self.size(size)}, {self.size(other)}}}"
            for without, (size, other) in table.equal_sizes.items()
            if size in used
        ]
        complex_by = sum(1 << places[name] for name in table.complex_by)
        own = f"{constant}Rows", f"{constant}Order", f"{constant}Equal"
        self.tables.append(
            f"inline constexpr Argument {own[0]}[] = {{\n    {f',{chr(10)}    '.join(rows)}}};\n"
            f"inline constexpr Index {own[1]}[] = {{{', '.join(map(str, order))}}};\n"
            f"inline constexpr std::array<EqualSizes, {len(equal)}> {own[2]} = "
            f"{{{'{' if equal else ''}{', '.join(equal)}{'}' if equal else ''}}};\n"
            f"inline constexpr TableOf<{len(rows)}> {constant} = "
            f"{{{{{', '.join(own)}, {places[table.anchor]}, {places.get(table.counted_by, -1)}, "
            f"{complex_by}u}}}};\n"
        )
        self.tables.append(self._struct(f"{constant.removeprefix('k')}Arguments", table))

    def _struct(self, name: str, table) -> str:
        """Returns the struct of the arguments, which argument_table.h describes."""
        members = [f"{self._type(argument)} {argument.name}" for argument in table.arguments]
        places = ", ".join(_constant(argument.name) for argument in table.tensors)
        entries = [f"entries_of({argument.name})" for argument in table.tensors]
        return (
            f"struct {name} {{\n  enum : Index {{{places}}};\n"
            f"  {f';{chr(10)}  '.join(members)};\n\n"
            f"  std::array<Entries, {len(entries)}> tensors() const {{\n"
            f"    return {{{', '.join(entries)}}};\n  }}\n"
            f"  template <auto kOp, class... Others>\n"
            f"  static auto one_by_one({', '.join(members)}, Others... others) {{\n"
            f"    return kOp({{{', '.join(table.names)}}}, others...);\n  }}\n}};\n"
        )

    def _type(self, argument) -> str:
        if isinstance(argument, self._table.TensorList):
            type = "TensorList"
        elif isinstance(argument, self._table.TensorArgument):
            type = "Tensor"
        else:
            type = _OPTION_TYPES[argument.type.__name__]
        if argument.optional:
            return f"const std::optional<{type}>&"
        return type if type in _PASSED_BY_VALUE else f"const {type}&"

    def _argument(self, argument, places: dict[str, int]) -> str:
        dtypes, dtype_of, remark, cases = argument.dtypes, -1, "", ()
        is_list = isinstance(argument, self._table.TensorList)
        if is_list:
            first = argument.same_dtype or argument.name
            dtype_of, remark = places[first], f" (as {first}[0])"
        if isinstance(dtypes, self._table.DtypeOf):
            dtype_of, remark = places[dtypes.other.removesuffix("[0]")], dtypes.remark
        elif isinstance(dtypes, self._table.Cases):
            cases = dtypes.cases
        elif isinstance(dtypes, tuple):
            cases = (self._table.Case(dtypes),)
        text = ", ".join(map(self._case, cases)) or '{{{}}, -1, -1, -1, false, false, ""}'
        return (
            f'{{"{argument.name}", {{{{{text}}}}}, {dtype_of}, "{remark}", '
            f"{self._shape(argument.shape, places)}, {_flag(argument.is_changed)}, "
            f"{_flag(is_list)}, {_flag(argument.optional)}}}"
        )

    def _case(self, case) -> str:
        names = [_SCALAR_TYPES[str(dtype).removeprefix("torch.")] for dtype in case.dtypes]
        types = ", ".join(f"ScalarType::{name}" for name in names)
        is_complex = -1 if case.is_complex is None else int(case.is_complex)
        rank = -1 if case.rank is None else case.rank
        return (
            f"{{{{{{{types}}}}}, {len(names)}, {is_complex}, {rank}, "
            f'{_flag(case.given is not None)}, {_flag(case.is_half)}, "{case.remark}"}}'
        )

    def _shape(self, shape, places: dict[str, int]) -> str:
        if not isinstance(shape, self._table.Shape):
            return "{}"
        where = -1 if shape.where is None else places[shape.where]
        one = -1 if shape.one is None else self.size(shape.one)
        doubled = None if shape.two_of is None else f"2*{shape.two_of}"
        divided = [self.size(size) for size in shape.divided] + [-1, -1]
        parts = [
            f"{{{{{', '.join(map(self._alternative, shape.alternatives))}}}}}",
            f"{{{{{', '.join(map(self._alternative, shape.otherwise))}}}}}",
            *map(str, (len(shape.alternatives), where)),
            *map(str, (self.dim(shape.two_of), self.dim(doubled))),
            f"{{{{{divided[0]}, {divided[1]}}}}}",
            _flag(shape.is_packed),
            str(one),
            str(-1 if shape.most is None else shape.most),
        ]
        return f"{{{', '.join(parts)}}}"

    def _alternative(self, dims: tuple[str, ...]) -> str:
        return f"{{{{{{{', '.join(str(self.dim(dim)) for dim in dims)}}}}}, {len(dims)}}}"

    def text(self) -> str:
        assert len(self.sizes) <= _MOST_SIZES
        constants = [
            f"inline constexpr Index {_constant(name)} = {i};" for name, i in self.sizes.items()
        ]
        names = ", ".join(f'"{name}"' for name in self.sizes)
        return "\n".join(
            [
                "// Written by csrc/torch/argument_tables.py.",
                "#pragma once",
                '#include "torch/argument_table.h"',
                "namespace selective_scan::op {",
                "namespace tables {",
                *constants,
                f"inline constexpr const char* kSizeNames[] = {{{names}}};",
                f"inline constexpr Index kDimensionBatch = {self.dims['batch']};",
                f"inline constexpr Index kDimensionGroups = {self.dims['groups']};",
                "inline constexpr Dimension kDimensions[] = {\n    "
                + ",\n    ".join(self._dim_rows)
                + "};",
                *self.tables,
                "inline constexpr const char* kSchemas[] = {\n    "
                + ",\n    ".join(map(json.dumps, self.schemas))
                + "};",
                "}  // namespace tables",
                "}  // namespace selective_scan::op\n",
            ]
        )


def _constant(size: str) -> str:
    return "k" + "".join(word.capitalize() for word in size.split("_"))


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _operator(module: str, name: str):
    return getattr(importlib.import_module(f"selective_scan.{module}"), name)


def _layer_of_ranks():
    """Returns the operator of selective_scan/distributed as far as its schemas need it: a PyTorch
    without torch.distributed cannot import that package."""
    from selective_scan._mamba_operators import make_layer_operator
    from selective_scan._result import Kept
    from selective_scan._table import Option

    kept = "before counts entering factors second_entering second_factors"
    group = Option("group", ("",))
    return make_layer_operator("mamba_inner_of_ranks", group, kept=[*map(Kept, kept.split())])


def main(package: str, header: str) -> None:
    sys.path.insert(0, package)
    modules = (importlib.import_module(f"selective_scan.{name}") for name in ("_checks", "_table"))
    made = _Header(*modules)
    operators = {place: _operator(*place) for place in TABLES.values()}
    for constant, place in TABLES.items():
        made.add(constant, operators[place].arguments)
    for constant, place in BACKWARD_TABLES.items():
        made.add(constant, operators[place].backward_arguments)
    for operator in (*operators.values(), _layer_of_ranks()):
        made.schemas += [f"{name}{schema}" for name, schema in operator.schemas().items()]
    target = Path(header)
    if not target.exists() or target.read_text() != made.text():
        target.write_text(made.text())


if __name__ == "__main__":
    main(*sys.argv[1:])
