"""Weights of mamba_ssm's and transformers' models in S6, and back."""

import copy

import pytest
import torch
from torch import nn

from language_models import parts_of_layers
from layers import by_definition
from selective_scan import S6, MambaMixer

DIM, SEQLEN = 8, 21


def model_elsewhere(depth: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Returns a MixerModel's state dict, as in mamba_ssm: d_inner 12, d_state 5, width 3, dt_rank
    4."""
    parts = parts_of_layers(DIM, 12, 5, 4, width=3)
    shapes = {f"layers.{i}.{name}": shape for i in range(depth) for name, shape in parts.items()}
    shapes |= {"norm_f.weight": (DIM,), "embedding.weight": (50, DIM)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def mixer_elsewhere() -> dict[str, torch.Tensor]:
    prefix = "layers.0.mixer."
    state = model_elsewhere()
    return {n.removeprefix(prefix): w for n, w in state.items() if n.startswith(prefix)}


class Elsewhere(nn.Module):
    """A module whose state dict is the given one."""

    def __init__(self, state: dict[str, torch.Tensor], config: object = None) -> None:
        super().__init__()
        self.state = state
        self.config = config

    def state_dict(self):
        return self.state


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("as_module", [False, True])
def test_model_becomes_s6_and_back(prefix, as_module):
    given = model_elsewhere(depth=11)  # numbers of layers have one digit or two
    state = {prefix + name: weight for name, weight in given.items()}
    if prefix:
        state["lm_head.weight"] = state["backbone.embedding.weight"]
    model = S6.from_mamba(Elsewhere(state) if as_module else state)
    assert (model.depth, model.d_model, model.layers[1].d_inner) == (11, DIM, 12)
    del given["embedding.weight"]
    back = model.to_mamba()
    assert set(back) == set(given)
    assert all(torch.equal(back[name], weight) for name, weight in given.items())
    assert torch.equal(model.layers[1].out_proj.weight, given["layers.1.mixer.out_proj.weight"])
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
    assert all(
        parameter._no_weight_decay for parameter in (model.layers[0].A_log, model.layers[1].D)
    )
    again = S6.from_mamba(back, dtype=torch.float64)
    x = torch.randn(2, SEQLEN, DIM, dtype=torch.float64)
    torch.testing.assert_close(again(x), by_definition(again, x), rtol=1e-9, atol=1e-9)


def test_weights_are_copied():
    state = model_elsewhere()
    kept = copy.deepcopy(state)
    model = S6.from_mamba(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(state[name], weight) for name, weight in kept.items())


def test_dtypes_are_the_weights_unless_told():
    state = model_elsewhere(dtype=torch.float16)
    state["layers.0.mixer.A_log"] = state["layers.0.mixer.A_log"].float()
    model = S6.from_mamba(state)
    assert model.layers[0].A_log.dtype == torch.float32
    assert model.layers[1].A_log.dtype == torch.float16
    model = S6.from_mamba(state, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_mixer_alone():
    state = mixer_elsewhere()
    mixer = MambaMixer.from_mamba(state)
    back = mixer.to_mamba()
    assert set(back) == set(state)
    assert all(torch.equal(back[name], weight) for name, weight in state.items())
    model = S6.from_mamba(Elsewhere(state))
    assert model.depth == 1
    x = torch.randn(2, SEQLEN, DIM)
    normed = model.layers[0].norm(x)
    torch.testing.assert_close(normed, nn.functional.rms_norm(x, (DIM,), eps=1e-5))
    # The layer's norm runs by a separate kernel, and random weights give large numbers.
    expected = x + mixer(normed)
    tolerance = {"rtol": 1e-4, "atol": 1e-6 * expected.abs().max().item()}
    torch.testing.assert_close(model.layers[0](x), expected, **tolerance)


# --- refusals -------------------------------------------------------------------------------------


def without(state: dict, name: str) -> dict:
    return {key: weight for key, weight in state.items() if key != name}


class Config:
    def __init__(self, model_type: str = "mamba", hidden_act: str = "silu") -> None:
        self.model_type = model_type
        self.hidden_act = hidden_act


STATE = model_elsewhere()
IN_PROJ, X_PROJ = "layers.0.mixer.in_proj.weight", "layers.1.mixer.x_proj.weight"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, f"hold {IN_PROJ}, got nothing and so on"),
        ({"a": torch.zeros(1)}, f"hold {IN_PROJ}, got a and so on"),
        (without(STATE, X_PROJ), f"hold {X_PROJ}, got layers.0.mixer.A_log, layers.0.mixer.D, "),
        (STATE | {X_PROJ: torch.zeros(14, 11)}, f"have {X_PROJ} of shape (14, 12), got (14, 11)"),
        (
            STATE | {IN_PROJ: torch.zeros(23, 8)},
            f"have {IN_PROJ} of shape (2·d_inner, d_model), got (23, 8)",
        ),
        (STATE | {IN_PROJ: torch.zeros(24)}, f"have {IN_PROJ} of 2 dimensions, got (24,)"),
        (STATE | {IN_PROJ: None}, f"hold Tensors, got NoneType for {IN_PROJ}"),
        (STATE | {X_PROJ: STATE[X_PROJ].char()}, f"have {X_PROJ} of dtype float32, float16, "),
        ({"in_proj.weight": torch.zeros(0, 8)}, f"have {IN_PROJ} of shape (2·d_inner, d_model), "),
        ({"in_proj.weight": torch.zeros(())}, f"have {IN_PROJ} of 2 dimensions, got ()"),
        (
            STATE | {"layers.0.norm.bias": torch.zeros(8)},
            "hold nothing but Mamba's weights, got layers.0.norm.bias",
        ),
        (
            Elsewhere(STATE, Config(model_type="falcon_mamba")),
            "be a Mamba model, got one of type 'falcon_mamba'",
        ),
        (Elsewhere(STATE, Config(hidden_act="relu")), "have the activation 'silu', got 'relu'"),
        (nn.Sequential(nn.RMSNorm(8, eps=1e-6)), "have norms of eps = 1e-05, got 1e-06 in '0'"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_refused_with_what_is_wrong(source, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared
        S6.from_mamba(source)
    assert str(caught.value).startswith(f"selective_scan: source must {message}")


@pytest.mark.parametrize("dtype", [torch.int8, "float16"])
def test_a_dtype_that_parameters_cannot_have_is_refused(dtype):
    with pytest.raises(ValueError, match=r"^selective_scan: dtype must be float32, float16, "):
        S6.from_mamba(STATE, dtype=dtype)


def test_what_is_no_model_is_refused():
    message = r"^selective_scan: source must be a Module or a state dict, got list$"
    for kind in (S6, MambaMixer):
        with pytest.raises(TypeError, match=message):
            kind.from_mamba([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bidirectional": True}, "bidirectional must be False for Mamba, got True"),
        (
            {"discretization_method": "foh"},
            "discretization_method must be 'zoh' for Mamba, got 'foh'",
        ),
        (
            {"discretization_method": "trapezoid"},
            "discretization_method must be 'zoh' for Mamba, got 'trapezoid'",
        ),
        ({"rotary": True}, "rotary must be False for Mamba, got True"),
        ({"dt_soft_plus": False}, "dt_soft_plus must be True for Mamba, got False"),
        ({"dt_proj_bias": False}, "dt_proj_bias must be True for Mamba, got False"),
    ],
)
@pytest.mark.parametrize("kind", [S6, MambaMixer])
def test_a_model_that_mamba_does_not_compute_has_no_weights_for_it(kind, options, message):
    with pytest.raises(ValueError, match=f"^selective_scan: {message}$"):
        kind(DIM, **options).to_mamba()


def test_a_module_between_layers_that_mamba_does_not_have():
    model = S6(DIM)
    model.layers.append(nn.Tanh())
    with pytest.raises(ValueError, match=r"layers must be Mamba's for Mamba, got 'Tanh'$"):
        model.to_mamba()


@pytest.mark.parametrize("kind", [S6, MambaMixer])
def test_a_convolution_that_mamba_does_not_have(kind):
    model = kind(DIM)
    mixer = model.layers[0] if kind is S6 else model
    mixer.conv1d.dilation = (2,)
    with pytest.raises(ValueError, match=r"conv1d must be as Mamba's for Mamba, got 'Conv1d"):
        model.to_mamba()


@pytest.mark.parametrize(
    ("owner", "option", "value", "message"),
    [
        ("", "bidirectional", True, "bidirectional False, got True in ''"),
        ("", "dt_soft_plus", False, "dt_soft_plus True, got False in ''"),
        ("", "discretization_method", "foh", "discretization_method 'zoh', got 'foh' in ''"),
        ("conv1d", "padding", "same", r"convolutions as Mamba's, got Conv1d\(.*in 'conv1d'"),
    ],
)
def test_what_weights_do_not_tell_is_refused(owner, option, value, message):
    mixer = MambaMixer(DIM)
    setattr(mixer.get_submodule(owner), option, value)
    with pytest.raises(ValueError, match=f"^selective_scan: source must have {message}$"):
        MambaMixer.from_mamba(mixer)


# --- transformers' own ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("options", [{}, {"use_bias": True, "use_conv_bias": False}])
@pytest.mark.parametrize("kind", ["MambaModel", "MambaForCausalLM"])
def test_transformers_model(kind, options, transformers):
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=24, state_size=5, num_hidden_layers=3, conv_kernel=3, **options
    )
    theirs = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # initial biases and skips would hide an omission
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = S6.from_mamba(theirs)
    tokens = torch.randint(50, (2, SEQLEN))
    body = getattr(theirs, "backbone", theirs)
    with torch.no_grad():
        embedded = body.get_input_embeddings()(tokens)
        expected = body(tokens, use_cache=False).last_hidden_state
        torch.testing.assert_close(ours(embedded), expected, rtol=1e-4, atol=1e-4)
        if kind == "MambaForCausalLM":
            logits = theirs(tokens, use_cache=False).logits
            torch.testing.assert_close(theirs.lm_head(ours(embedded)), logits, rtol=1e-4, atol=1e-4)
        other = getattr(transformers, kind)(config).eval()
        other_body = getattr(other, "backbone", other)
        left = other_body.load_state_dict(ours.to_mamba(), strict=False)
        assert left.missing_keys == ["embeddings.weight"]
        assert not left.unexpected_keys
        actual = other_body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        assert torch.equal(actual, expected)
        mixer = MambaMixer.from_mamba(body.layers[1].mixer)
        torch.testing.assert_close(mixer(embedded), body.layers[1].mixer(embedded))


def test_transformers_falcon_mamba_is_refused(transformers):
    config = transformers.FalconMambaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1)
    with pytest.raises(ValueError, match="got one of type 'falcon_mamba'"):
        S6.from_mamba(transformers.FalconMambaModel(config))
