"""Models in ONNX: what onnxruntime computes, against PyTorch, for any batch and length."""

import pytest
import torch
from torch import nn

import published_calls
from exported import Program, assert_close
from problem import METHODS
from selective_scan import S6, MambaMixer, MixerCache, S6Cache, mamba_inner_fn, selective_scan_fn
from selective_scan.compat.mamba_simple import Mamba
from selective_scan.onnx import export

D_MODEL = 16
LENGTH, BATCH = torch.export.Dim("length"), torch.export.Dim("batch")
OF_ROWS, OF_STATES = {0: BATCH, 1: LENGTH}, {0: BATCH}
BOUND = 1e-4


def check(model, examples, path, opset=27, dynamic=(OF_ROWS,)):
    """The first example is exported; all are computed."""
    program = Program(model.eval(), examples[0], path, opset=opset, dynamic=dynamic)
    with torch.no_grad():
        for example in examples:
            assert_close(program(*example), model(*example), BOUND)
    return program


def rows(*sizes):
    return [(torch.randn(*size, D_MODEL),) for size in sizes]


ROWS = ((2, 9), (3, 1), (1, 40))


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, {"dt_min": 0.2, "dt_max": 1.0, "rotary": True}], ids=str)
def test_s6(options, tmp_path):
    model = S6(D_MODEL, d_state=4, depth=1, **options)
    check(model, rows(*ROWS), tmp_path / "model.onnx")


def test_methods(tmp_path):
    """Of one size, which takes less time."""
    layers = (S6(D_MODEL, d_state=4, depth=1, discretization_method=it) for it in METHODS[1:])
    check(nn.Sequential(*layers), rows(ROWS[0]), tmp_path / "model.onnx", dynamic=None)


def test_the_trapezoid_is_refused():
    model = MambaMixer(D_MODEL, discretization_method="trapezoid")
    with pytest.raises(RuntimeError, match="input_delta must be None for ONNX"):
        export(model, *rows((2, 9)))


@pytest.mark.parametrize(("bidirectional", "opset"), [(False, 27), (True, 27), _slow(True, 18)])
def test_mixer(bidirectional, opset, tmp_path):
    model = MambaMixer(D_MODEL, d_state=4, bidirectional=bidirectional)
    check(model, rows(*ROWS), tmp_path / "model.onnx", opset)


@pytest.mark.parametrize("bimamba_type", ["none", "v2"])
def test_mamba_of_compat(bimamba_type, tmp_path):
    model = Mamba(D_MODEL, d_state=4, bimamba_type=bimamba_type)
    check(model, rows(*ROWS), tmp_path / "model.onnx")


@pytest.mark.parametrize("name", [_slow("Vim"), "MambaVision", "VMamba"])
def test_vision(name, tmp_path):
    """A block as published; images of any number and height."""
    function = mamba_inner_fn if name == "Vim" else selective_scan_fn
    model = getattr(published_calls, name)(function)
    images = [(torch.randn(n, published_calls.DIM, height, 3),) for n, height in ((2, 4), (3, 5))]
    dynamic = ({0: BATCH, 2: torch.export.Dim("height")},)
    check(model, images, tmp_path / "model.onnx", dynamic=dynamic)


def test_transformers_model_by_our_kernels(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from selective_scan.integrations.transformers import enable

    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens, use_cache=False).logits

    sizes = {"hidden_size": D_MODEL, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 30}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    tokens = [(torch.randint(30, size),) for size in ROWS]
    with enable():
        program = check(Logits(model), tokens, tmp_path / "model.onnx")
    assert program.operators["LinearAttention"] == 2


# --- with states ----------------------------------------------------------------------------------


class Continued(nn.Module):
    """S6 that goes on from states, which are inputs and outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, *states):
        states = [state.clone() for state in states]
        layers = zip(*[iter(states)] * 2, strict=True)
        out = self.model(x, cache=S6Cache(tuple(MixerCache(*layer) for layer in layers)))
        return out, *states


@pytest.mark.parametrize(("steps", "opset"), [(None, 27), _slow(None, 18), (1, 27)])
def test_s6_goes_on_from_its_cache(steps, opset, tmp_path):
    """With any number of steps, or with one, which is an operator of its own in PyTorch."""
    model = Continued(S6(D_MODEL, d_state=4, depth=2))

    def example(batch, seqlen):
        cache = model.model.allocate_cache(batch)
        states = [state.normal_() for layer in cache.layers for state in layer._tensors()]
        return (torch.randn(batch, seqlen, D_MODEL), *states)

    of_rows = OF_ROWS if steps is None else OF_STATES
    dynamic = (of_rows, (OF_STATES,) * 4)
    sizes = ROWS if steps is None else [(2, 1), (3, 1), (1, 1)]
    examples = [example(*size) for size in sizes]
    check(model, examples, tmp_path / "model.onnx", opset, dynamic)
    if opset == 27:  # and sizes that are known
        check(model, [example(2, steps or 9)], tmp_path / "fixed.onnx", opset, None)
