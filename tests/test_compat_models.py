"""mamba_ssm's language model by its import paths: weights, checkpoints, training, refusals."""

import copy
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from changed_parts import Wrapper
from language_models import (
    DIM,
    LAYERS,
    VOCAB,
    make_model,
    published_config,
    published_weights,
    reference_logits,
)
from layers import by_steps, error
from opchecks import Ops

pytestmark = pytest.mark.usefixtures("compat_modules")


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_published_weights_load_strictly(device, dtype):
    weights, tokens = published_weights(), torch.randint(VOCAB, (2, 19))
    model = make_model(device, dtype, weights)
    assert model.state_dict().keys() == weights.keys()
    logits = model(tokens.to(device)).logits
    assert logits.dtype == dtype
    rounding = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 1e-12}[dtype]
    assert error(logits.cpu(), reference_logits(weights, tokens)) < rounding
    for name in ("A_log", "D"):
        parameter = getattr(model.backbone.layers[1].mixer, name)
        assert torch.equal(parameter.cpu().float(), weights[f"backbone.layers.1.mixer.{name}"])
        assert parameter._no_weight_decay


@pytest.mark.parametrize("change", ["missing", "left over", "of another shape"])
def test_other_weights_do_not_load(change):
    weights, name = published_weights(), "backbone.layers.1.mixer.conv1d.bias"
    weight = weights.pop(name)
    if change != "missing":
        weights |= (
            {name: weight[1:]} if change == "of another shape" else {name: weight, "x": weight}
        )
    with pytest.raises(RuntimeError, match="x" if change == "left over" else name):
        make_model(weights=weights)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("d_intermediate", [0, 40])
def test_kinds_of_blocks(rms_norm, fused, d_intermediate, device):
    options = {"rms_norm": rms_norm, "fused_add_norm": fused}
    model = make_model(device, torch.float64, d_intermediate=d_intermediate, **options)
    names = {name.removeprefix("backbone.layers.0.") for name in model.state_dict()}
    mlp = {"norm2.weight", "mlp.fc1.weight", "mlp.fc2.weight"}
    assert (mlp <= names) == (d_intermediate > 0)
    assert ("norm.bias" in names) is not rms_norm
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(VOCAB, (2, 9))
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    expected = reference_logits(weights, tokens)
    assert error(model(tokens.to(device)).logits.cpu(), expected) < 1e-12
    every = model(tokens.to(device), num_last_tokens=-1).logits  # as upstream defines it
    assert error(every.cpu(), expected) < 1e-12
    last = model(tokens.to(device), num_last_tokens=2).logits
    assert error(last.cpu(), expected[:, -2:]) < 1e-12


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_padded_and_tied(is_tied):
    model = make_model(tie_embeddings=is_tied, vocab_size=33, pad_vocab_size_multiple=16)
    embedding = model.backbone.embedding.weight
    assert embedding.shape == model.lm_head.weight.shape == (48, DIM)
    assert (embedding is model.lm_head.weight) == is_tied
    assert model.config.vocab_size == 33
    assert make_model(pad_vocab_size_multiple=1).lm_head.weight.shape == (VOCAB, DIM)


@pytest.mark.parametrize("d_intermediate", [0, 64])
def test_initial_weights(d_intermediate):
    """Initial weights are scaled as upstream's: with MLPs, its model without a head counts two
    residual additions per block, and the model with a head only one."""
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel, MixerModel

    options = published_config() | {"d_intermediate": d_intermediate, "ssm_cfg": {"bias": True}}
    make = partial(MambaLMHeadModel, make_model(**options).config)
    model, larger, plain = (
        make(cfg) for cfg in (None, {"initializer_range": 2.0}, {"rescale_prenorm_residual": False})
    )
    assert model.backbone.embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert larger.backbone.embedding.weight.std().item() == pytest.approx(2, rel=0.2)
    headless = MixerModel(DIM, LAYERS, d_intermediate, VOCAB)
    additions = LAYERS * (2 if d_intermediate else 1)
    stacks = (model.backbone.layers, headless.layers, plain.backbone.layers)
    for block, *others in zip(*stacks, strict=True):
        for name in ("mixer.out_proj", "mlp.fc2") if d_intermediate else ("mixer.out_proj",):
            parts = [it.get_submodule(name) for it in (block, *others)]
            for part, number in zip(parts, (LAYERS, additions, 1), strict=True):
                bound = (part.in_features * number) ** -0.5
                assert part.weight.abs().max().item() == pytest.approx(bound, rel=0.1)
        assert not block.mixer.in_proj.bias.any()
        assert (F.softplus(block.mixer.dt_proj.bias) >= 1e-4).all()
        assert block.mixer.dt_proj.bias.any()


def test_gated_mlp(device):
    from mamba_ssm.modules.mlp import GatedMLP

    mlp = GatedMLP(6, 10, 5, activation=torch.tanh, bias=True, multiple_of=4, device=device)
    assert (mlp.fc1.weight.shape, mlp.fc2.weight.shape) == ((24, 6), (5, 12))
    x = torch.randn(3, 6, device=device)
    values, gate = mlp.fc1(x)[:, :12], mlp.fc1(x)[:, 12:]
    torch.testing.assert_close(mlp(x), mlp.fc2(values * gate.tanh()))
    assert GatedMLP(48, dtype=torch.bfloat16).fc2.weight.shape == (48, 128)


def test_calls_of_version_1():
    """Calls of version 1, which had no d_intermediate, run if they name their arguments. What they
    leave out is as upstream."""
    from mamba_ssm.models.mixer_seq_simple import MixerModel, _init_weights, create_block

    block = create_block(DIM, ssm_cfg={"d_state": 4}, rms_norm=True, layer_idx=2)
    assert (block.layer_idx, block.mixer.layer_idx, block.mixer.d_state) == (2, 2, 4)
    block.apply(partial(_init_weights, n_layer=4, initializer_range=0.1))
    plain = create_block(DIM)
    assert type(plain.norm) is nn.LayerNorm
    assert plain.norm.eps == 1e-5
    assert not plain.fused_add_norm
    assert not plain.residual_in_fp32
    for is_rms in (False, True):
        sizes = {"d_model": DIM, "n_layer": 1, "vocab_size": VOCAB}
        model = MixerModel(**sizes, norm_epsilon=0.1, rms_norm=is_rms)
        assert model.norm_f.eps == model.layers[0].norm.eps == 0.1
    model = MixerModel(d_model=DIM, n_layer=2, vocab_size=VOCAB, rms_norm=True)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, DIM)
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1, got None"):
        MixerModel(DIM, 2)
    with pytest.raises(ValueError, match="d_intermediate must be an integer"):
        create_block(DIM, {"d_state": 4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_layer_idx": [1]}, "attention is not part of this package"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "Mamba-2 is not part of this package"),
        ({"ssm_cfg": {"layer": "S5"}}, r"ssm_cfg\['layer'\] must be one of Mamba1, got 'S5'"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"n_layer": 0}, "n_layer must be"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple must be"),
    ],
)
def test_what_is_not_covered_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^selective_scan: .*{message}"):
        make_model(**options)
    assert (
        make_model(ssm_cfg={"layer": "Mamba1", "d_state": 8}).backbone.layers[0].mixer.d_state == 8
    )


# --- training -------------------------------------------------------------------------------------


def test_packed_sequences_train_as_each_alone(device):
    weights, lengths = published_weights(), (5, 1, 11)
    model = make_model(device, torch.float64, weights)
    texts = [torch.randint(VOCAB, (1, length), device=device) for length in lengths]
    boundaries = torch.tensor([0, 5, 6, 17], dtype=torch.int32, device=device)
    alone = torch.cat([model(text).logits for text in texts], 1)
    targets = torch.randn_like(alone)
    expected = torch.autograd.grad((alone * targets).sum(), model.parameters())
    packed = model(torch.cat(texts, 1), cu_seqlens=boundaries).logits
    gradients = torch.autograd.grad((packed * targets).sum(), model.parameters())
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    for gradient, other in zip(gradients, expected, strict=True):
        assert error(gradient, other) < 1e-9
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    with pytest.raises(ValueError, match="cu_seqlens must be None where inference_params is given"):
        model(texts[0], inference_params=params, cu_seqlens=boundaries)


def test_a_model_learns(device):
    model, tokens = make_model(device), torch.randint(VOCAB, (4, 17), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.lm_head.weight is model.backbone.embedding.weight


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_save_and_load(tmp_path, device, dtype):
    model = make_model(device, weights=published_weights(), d_intermediate=0)
    folder = tmp_path / "new" / "checkpoint"
    model.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    again = type(model).from_pretrained(str(folder), device=device, dtype=dtype)
    assert again.config == model.config
    assert again.lm_head.weight is again.backbone.embedding.weight
    assert again.lm_head.weight.dtype == (dtype or torch.float32)
    assert again.lm_head.weight.device.type == device
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].to(weight.dtype)), name
    assert again.backbone.layers[0].mixer.A_log.dtype == torch.float32


def write_published(folder):
    (folder / "config.json").write_text(json.dumps(published_config()))
    torch.save(weights := published_weights(), folder / "pytorch_model.bin")
    return weights


def test_a_checkpoint_in_a_folder_needs_no_other_package(tmp_path, monkeypatch, device):
    from mamba_ssm import MambaLMHeadModel
    from mamba_ssm.utils.hf import load_config_hf, load_state_dict_hf

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    weights = write_published(tmp_path)
    model = MambaLMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())
    assert model.config.tie_embeddings
    assert load_config_hf(tmp_path) == published_config()
    loaded = load_state_dict_hf(tmp_path, device=device, dtype=torch.float64)
    for name, weight in weights.items():
        assert torch.equal(loaded[name].cpu(), weight.double())
        assert loaded[name].device.type == device

    with pytest.raises(ImportError, match="huggingface_hub is not installed, got 'some/model'"):
        load_config_hf("some/model")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_config_hf(tmp_path)


def test_a_checkpoint_of_the_hub(tmp_path, monkeypatch):
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    asked = []

    def hf_hub_download(repo_id, filename):
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    weights = write_published(tmp_path)
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download)
    )
    model = MambaLMHeadModel.from_pretrained("some/model", dtype=torch.float64)
    assert asked == [("some/model", "config.json"), ("some/model", "pytorch_model.bin")]
    name = "backbone.layers.0.mixer.in_proj.weight"
    assert torch.equal(model.state_dict()[name], weights[name].double())


def test_fields_of_the_configuration():
    """The fields, their order and their defaults are those of mamba_ssm, whose callers may leave
    them out or give them by position."""
    from mamba_ssm.models.config_mamba import MambaConfig

    assert repr(MambaConfig()) == (
        "MambaConfig(d_model=2560, d_intermediate=0, n_layer=64, vocab_size=50277, ssm_cfg={}, "
        "attn_layer_idx=[], attn_cfg={}, rms_norm=True, residual_in_fp32=True, "
        "fused_add_norm=True, pad_vocab_size_multiple=8, tie_embeddings=True)"
    )


# --- changed models -------------------------------------------------------------------------------


def give_norms_a_bias(model: nn.Module) -> None:
    for norm in (model.backbone.norm_f, model.backbone.layers[1].norm):
        norm.bias = nn.Parameter(torch.randn(DIM))


def wrap_backbone(model: nn.Module) -> None:
    model.backbone = Wrapper(model.backbone, factor=2)


def derive_backbone(model: nn.Module) -> None:
    kind = type(model.backbone)

    class Derived(kind):
        def forward(self, *inputs: object) -> torch.Tensor:
            return 2 * super().forward(*inputs)

    model.backbone.__class__ = Derived


def narrow_a_mixer(model: nn.Module) -> None:
    """Replaces a mixer by a narrower one, as structured pruning does."""
    block = model.backbone.layers[1]
    block.mixer = type(block.mixer)(DIM, d_state=2, expand=1, layer_idx=1)


CHANGES = [give_norms_a_bias, wrap_backbone, derive_backbone, narrow_a_mixer]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_single_tokens_see_what_was_changed(change, fused):
    model, tokens = make_model(fused_add_norm=fused), torch.randint(VOCAB, (2, 7))
    plain = model(tokens).logits
    change(model)
    logits = model(tokens).logits
    assert error(logits, plain) > 0.1
    assert error(by_steps(model, tokens, 4)[0], logits) < 1e-5


def test_views_of_states_are_kept_while_these_are_the_same():
    """States may be replaced between tokens, and come in and out of inference mode."""
    model, tokens = make_model().requires_grad_(False), torch.randint(VOCAB, (2, 9))
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    logits = [model(tokens[:, :4], inference_params=params).logits]
    views = []
    for params.seqlen_offset in range(4, 9):
        if params.seqlen_offset == 7:
            old = params.key_value_memory_dict
            params.key_value_memory_dict = copy.deepcopy(old)
            for states in old.values():
                for state in states:
                    state.fill_(torch.nan)
        token = tokens[:, params.seqlen_offset : params.seqlen_offset + 1]
        with torch.inference_mode(params.seqlen_offset == 4):
            logits.append(model(token, inference_params=params).logits)
        views.append(params._selective_scan_states)
    assert error(torch.cat(logits, 1), model(tokens).logits) < 1e-5
    assert views == [views[0]] * 3 + [views[3]] * 2
    assert views[0] is not views[3]


def test_a_head_learns_from_single_tokens():
    """The trainable head of a frozen model gets the same gradient from single tokens."""
    model, tokens = make_model(tie_embeddings=False), torch.randint(VOCAB, (2, 7))
    model.backbone.requires_grad_(False)
    gradients = [
        torch.autograd.grad(logits.square().mean(), model.lm_head.weight)[0]
        for logits in (by_steps(model, tokens, 4)[0], model(tokens).logits)
    ]
    assert error(*gradients) < 1e-5
    with torch.no_grad(), Ops() as ops:
        by_steps(model, tokens, 4)
    assert ops.names[-1] == "s6_step"


@torch.no_grad()
def test_hooks_for_all_modules_see_an_embedding_once():
    model, seen = make_model(), []
    with nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part)):
        by_steps(model, torch.randint(VOCAB, (2, 7)), 4)
    assert seen.count(model.backbone.embedding) == 4  # a prompt and three tokens
