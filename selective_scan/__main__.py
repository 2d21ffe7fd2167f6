"""``python -m selective_scan``: prints what is installed and checks it against the reference."""

from __future__ import annotations

import sys

import torch

from . import __version__, backends, selective_scan_fn, selective_scan_ref

_TOLERANCE = 1e-5


def _problem(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    batch, dim, dstate, seqlen = 2, 32, 16, 200
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=random, dtype=torch.float64)
        return values.to(torch.float32).to(device, dtype).requires_grad_()

    tensors = {name: normal(batch, dim, seqlen) for name in ("u", "delta", "z")}
    tensors |= {name: normal(batch, dstate, seqlen) for name in ("B", "C")}
    tensors["A"] = -normal(dim, dstate).detach().abs().requires_grad_()
    tensors["D"] = normal(dim)
    return tensors


def _solve(scan, device: str, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    """Returns the output and all gradients, converted to float64 on the CPU."""
    tensors = _problem(device, dtype)
    out = scan(**tensors, delta_softplus=True, **options)
    gradients = torch.autograd.grad(out.square().sum(), list(tensors.values()))
    return [tensor.detach().to("cpu", torch.float64) for tensor in (out, *gradients)]


def _self_check(backend: str) -> tuple[bool, str]:
    device = "cuda" if backend == "cuda" else "cpu"
    exact = _solve(selective_scan_ref, "cpu", torch.float64)
    try:
        actual = _solve(selective_scan_fn, device, torch.float32, backend=backend)
    except RuntimeError as error:  # for example, a GPU that the library was not built for
        return False, f"FAILED: {error}"
    errors = [((a - e).norm() / e.norm()).item() for a, e in zip(actual, exact, strict=True)]
    passed = all(error < _TOLERANCE for error in errors)  # False for NaN as well
    return passed, (
        f"{'ok' if passed else 'WRONG'}, relative error against float64: output {errors[0]:.1e}, "
        f"gradients up to {max(errors[1:]):.1e}"
    )


def main() -> int:
    print(f"selective_scan {__version__}, torch {torch.__version__}")
    status = backends()
    print(status)
    has_kernels = any(status[name].available for name in ("cpu", "cuda"))
    if not has_kernels:
        print("self-check: FAILED, no kernels are installed")
    all_passed = has_kernels
    for name, backend in status.items():
        if backend.available:
            passed, text = _self_check(name)
            all_passed = all_passed and passed
            print(f"self-check of {name}: {text}")
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
