"""Popular models, tiny and random: name -> a function that makes one with inputs and labels.

Nothing is downloaded. Parameters are random, the dtype float64, the mode eval; dimensions are as
small as the classes allow. A model's packages are imported in its function alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["DEFAULT", "FAMILIES", "Case"]

N, CLASSES, TOKENS, VOCABULARY, PIXELS = 3, 3, 4, 11, 32


class Case(NamedTuple):
    """A model, and one batch for it."""

    model: nn.Module
    x: Any
    y: Tensor


def _case(model: nn.Module, x: Any, terms: tuple[int, ...] = ()) -> Case:
    """The model in float64, with parameters that no initialisation has put to 0 or 1."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            fan_in = p[0].numel() if p.dim() > 1 else 1
            p.copy_(p / 2 + noise * (0.3 if p.dim() < 2 else 0.7 / fan_in**0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))
            elif name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype))
    y = torch.randint(CLASSES, (N, *terms), generator=generator)
    return Case(model, x, y)


def _noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, *shape, generator=generator, dtype=torch.float64)


def _pixels() -> Tensor:
    return _noise(3, PIXELS, PIXELS)


def _tokens() -> Tensor:
    return torch.randint(2, VOCABULARY, (N, TOKENS), generator=torch.Generator().manual_seed(1))


# --- transformers ---


def _transformers(
    kind: str,
    head: str,
    key: str,
    values: Callable[[], Tensor],
    terms: tuple[int, ...] = (),
    **config: Any,
) -> Callable[[], Case]:
    """A model whose class is called ``kind + head``, and its one input ``key``."""

    def make() -> Case:
        import transformers

        known = getattr(transformers, f"{kind}Config")(**config)
        return _case(getattr(transformers, kind + head)(known), {key: values()}, terms)

    return make


def _text(kind: str, **config: Any) -> Callable[[], Case]:
    """A classifier of texts."""
    return _transformers(kind, "ForSequenceClassification", "input_ids", _tokens, **config)


def _causal(kind: str, head: str = "ForCausalLM", **config: Any) -> Callable[[], Case]:
    """A language model, whose labels are the tokens: one loss term for each."""
    return _transformers(kind, head, "input_ids", _tokens, (TOKENS,), **config)


def _image(kind: str, **config: Any) -> Callable[[], Case]:
    """A classifier of images."""
    return _transformers(kind, "ForImageClassification", "pixel_values", _pixels, **config)


_SMALL = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": CLASSES,
}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
_BERT = _SMALL | _WORDS
_FALCON = _BERT | _ENDS
_LLAMA = _FALCON | {"num_key_value_heads": 1}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
_VIT = _SMALL | {"image_size": PIXELS, "patch_size": 16}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "num_labels": CLASSES,
    "use_cache": False,
    "dropout_rate": 0.0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 1,
    "num_labels": CLASSES,
    "use_cache": False,
}


def _ends(make: Callable[[], Case]) -> Callable[[], Case]:
    """Texts that end with the token that such a model looks for."""

    def ended() -> Case:
        case = make()
        case.x["input_ids"][:, -1] = 1
        return case

    return ended


def _clip() -> Case:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = CLIPVisionConfig(**{k: v for k, v in _VIT.items() if k != "num_labels"})
            self.body, self.head = CLIPVisionModel(config), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).pooler_output)

    return _case(Classifier(), _pixels())


def _sound(kind: str) -> Callable[[], Case]:
    """A classifier of sounds."""
    small = _SMALL | {
        "vocab_size": VOCABULARY,
        "conv_dim": (4, 4),
        "conv_stride": (4, 4),
        "conv_kernel": (5, 5),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 6,
        "mask_time_prob": 0.0,
    }
    head = "ForSequenceClassification"
    return _transformers(kind, head, "input_values", lambda: _noise(100), **small)


# --- timm and torchvision ---


def _timm_class(module: str, kind: str, **more: Any) -> Callable[[], Case]:
    def make() -> Case:
        import importlib

        home = importlib.import_module(f"timm.models.{module}")
        for key in ("block_layer", "norm_layer"):
            if key in more:
                more[key] = getattr(home, more[key], None) or more[key]
        model_type = getattr(home, kind)
        return _case(model_type(num_classes=CLASSES, **more), _pixels())

    return make


_TIMM = {"img_size": PIXELS, "patch_size": 16, "embed_dim": 8}
_TIMM_VIT = _TIMM | {"depth": 2, "num_heads": 2, "mlp_ratio": 1.5}
_TIMM_MIXER = _TIMM | {"num_blocks": 2}
_TIMM_SWIN = _TIMM | {"patch_size": 4, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}


def _timm_resnet(block: str = "BasicBlock", **more: Any) -> Callable[[], Case]:
    def make() -> Case:
        from timm.models import resnet

        model = resnet.ResNet(
            getattr(resnet, block), (1, 1, 1, 1), CLASSES, channels=(8, 8, 8, 12), **more
        )
        return _case(model, _pixels())

    return make


def _timm_efficientnet(name: str) -> Callable[[], Case]:
    def make() -> Case:
        from timm.models._efficientnet_builder import decode_arch_def, round_channels
        from timm.models.efficientnet import EfficientNet

        same = name == "same"
        model = EfficientNet(
            decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k3_s2_e2_c8_se0.25"]]),
            num_classes=CLASSES,
            num_features=12,
            stem_size=8,
            round_chs_fn=lambda c: round_channels(c, 1.0, divisor=4),
            act_layer=nn.SiLU,
            pad_type="same" if same else "",
        )
        return _case(model, _pixels())

    return make


def _timm_regnet() -> Case:
    from timm.models.regnet import RegNet, RegNetCfg

    config = RegNetCfg(depth=8, w0=8, wa=8.0, wm=2.0, group_size=8, se_ratio=0.25, stem_width=8)
    return _case(RegNet(config, num_classes=CLASSES), _pixels())


def _timm_nf() -> Case:
    from timm.models.nfnet import NfCfg, NormFreeNet

    config = NfCfg(depths=(1, 1), channels=(8, 12), stem_type="3x3", stem_chs=8, group_size=4)
    return _case(NormFreeNet(config, num_classes=CLASSES), _pixels())


def _torchvision(name: str) -> Callable[[], Case]:
    return lambda: _case(_torchvision_model(name), _pixels())


def _torchvision_model(name: str) -> nn.Module:
    from functools import partial

    from torchvision.models import (
        convnext,
        densenet,
        efficientnet,
        mobilenetv2,
        regnet,
        resnet,
        swin_transformer,
        vgg,
        vision_transformer,
    )

    if name == "resnet":
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], CLASSES)
    if name == "resnext":
        return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=2, width_per_group=4)
    if name == "vit":
        return vision_transformer.VisionTransformer(PIXELS, 16, 2, 2, 8, 12, num_classes=CLASSES)
    if name in ("swin", "swin_v2"):
        v2 = name == "swin_v2"
        return swin_transformer.SwinTransformer(
            [4, 4],
            8,
            [2, 1],
            [2, 2],
            [4, 4],
            num_classes=CLASSES,
            stochastic_depth_prob=0.0,
            block=swin_transformer.SwinTransformerBlockV2 if v2 else None,
            downsample_layer=getattr(swin_transformer, "PatchMergingV2" if v2 else "PatchMerging"),
        )
    if name == "convnext":
        blocks = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
        return convnext.ConvNeXt(blocks, num_classes=CLASSES)
    if name == "densenet":
        return densenet.DenseNet(4, (2, 2), 8, 2, num_classes=CLASSES)
    if name == "mobilenet":
        return mobilenetv2.MobileNetV2(CLASSES, 0.25, [[1, 8, 1, 1], [2, 8, 1, 2]], round_nearest=4)
    if name == "efficientnet":
        blocks = [
            efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1, 1, 1),
            efficientnet.MBConvConfig(2, 3, 2, 8, 12, 1, 1, 1),
        ]
        return efficientnet.EfficientNet(
            blocks, 0.0, 0.0, CLASSES, partial(nn.BatchNorm2d, eps=1e-3), last_channel=16
        )
    if name == "regnet":
        parameters = regnet.BlockParams([1, 1], [8, 12], [4, 4], [1.0, 1.0], [2, 2], 0.25)
        return regnet.RegNet(parameters, CLASSES, 8)
    assert name == "vgg"
    features = vgg.make_layers([8, "M", 8, "M"], batch_norm=True)
    model = vgg.VGG(features, CLASSES, init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    return model


# --- peft ---


def _peft(kind: str, **more: Any) -> Callable[[], Case]:
    def make() -> Case:
        import peft
        import transformers

        config = transformers.LlamaConfig(**_LLAMA)
        base = transformers.LlamaForSequenceClassification(config)
        known = getattr(peft, kind)(task_type="SEQ_CLS", **more)
        return _case(peft.get_peft_model(base, known), {"input_ids": _tokens()})

    return make


# --- torch-geometric: graphs of three nodes, the batch (N, nodes, features) ---


def _graphs(kind: str, **more: Any) -> Callable[[], Case]:
    def make() -> Case:
        import torch_geometric.nn as gnn

        class Graphs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                if kind == "GINConv":
                    layers = [
                        gnn.GINConv(
                            nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), **more
                        )
                        for _ in range(2)
                    ]
                else:
                    layers = [getattr(gnn, kind)(4, 4, **more) for _ in range(2)]
                self.layers, self.head = nn.ModuleList(layers), nn.Linear(4, CLASSES)

            def forward(self, x: Tensor) -> Tensor:
                M = x.shape[1]
                ends = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
                edges = torch.cat([ends + M * n for n in range(len(x))], 1)
                nodes = x.flatten(0, 1)
                for layer in self.layers:
                    nodes = layer(nodes, edges).tanh()
                return self.head(nodes.unflatten(0, (-1, M)).mean(1))

        return _case(Graphs(), _noise(3, 4))

    return make


def _unet() -> Case:
    class UNet(nn.Module):
        """Ronneberger et al. 2015, two levels; logits for each pixel, channels last."""

        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.middle = nn.Sequential(
                nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU()
            )
            self.up = nn.ConvTranspose2d(6, 4, 2, 2)
            self.last = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.ReLU())
            self.head = nn.Conv2d(4, CLASSES, 1)

        def forward(self, x: Tensor) -> Tensor:
            high = self.down(x)
            low = self.middle(nn.functional.max_pool2d(high, 2))
            return self.head(self.last(torch.cat([high, self.up(low)], 1))).movedim(1, -1)

    return _case(UNet(), _noise(3, 4, 4), (4, 4))


FAMILIES: dict[str, Callable[[], Case]] = {
    "transformers BERT": _text("Bert", **_BERT),
    "transformers RoBERTa": _text("Roberta", **_BERT),
    "transformers DistilBERT": _text(
        "DistilBert", **_WORDS, dim=8, hidden_dim=12, n_layers=2, n_heads=2, num_labels=CLASSES
    ),
    "transformers ALBERT": _text("Albert", **_BERT, embedding_size=6),
    "transformers ELECTRA": _text("Electra", **_BERT, embedding_size=6),
    "transformers DeBERTa-v3": _text(
        "DebertaV2",
        **_BERT,
        relative_attention=True,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
    ),
    "transformers ModernBERT": _text("ModernBert", **_BERT),
    "transformers GPT-2": _text(
        "GPT2", **_GPT2, num_labels=CLASSES, pad_token_id=0, bos_token_id=1, eos_token_id=1
    ),
    "transformers GPT-2 (language model)": _causal("GPT2", "LMHeadModel", **_GPT2, **_ENDS),
    "transformers OPT": _text("OPT", **_FALCON, ffn_dim=12, word_embed_proj_dim=8),
    "transformers GPT-NeoX": _text("GPTNeoX", **_LLAMA),
    "transformers Falcon": _text("Falcon", **_FALCON),
    "transformers BLOOM": _text(
        "Bloom",
        vocab_size=VOCABULARY,
        hidden_size=8,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
        num_labels=CLASSES,
        use_cache=False,
    ),
    "transformers Llama": _text("Llama", **_LLAMA),
    "transformers Llama (language model)": _causal("Llama", **_LLAMA),
    "transformers Mistral": _text("Mistral", **_LLAMA),
    "transformers Mixtral": _text(
        "Mixtral", **_LLAMA, num_local_experts=3, experts_implementation="eager"
    ),
    "transformers Qwen2": _text("Qwen2", **_LLAMA),
    "transformers Qwen3": _text("Qwen3", **_LLAMA, head_dim=4),
    "transformers Gemma": _text("Gemma", **_LLAMA, head_dim=4),
    "transformers Gemma 2": _text("Gemma2", **_LLAMA, head_dim=4),
    "transformers Phi": _text("Phi", **_LLAMA),
    "transformers Phi-3": _text("Phi3", **_LLAMA),
    "transformers OLMo 2": _text("Olmo2", **_LLAMA),
    "transformers T5": _ends(_text("T5", **_T5)),
    "transformers BART": _ends(_text("Bart", **_BART)),
    "transformers ViT": _image("ViT", **_VIT),
    "transformers DeiT": _image("DeiT", **_VIT),
    "transformers BEiT": _image("Beit", **_VIT, use_relative_position_bias=True),
    "transformers DINOv2": _image("Dinov2", **(_VIT | {"mlp_ratio": 2})),
    "transformers Swin": _image(
        "Swin",
        image_size=PIXELS,
        patch_size=4,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=CLASSES,
    ),
    "transformers ConvNeXt": _image(
        "ConvNext", depths=[1, 1], hidden_sizes=[8, 12], num_stages=2, num_labels=CLASSES
    ),
    "transformers ConvNeXt-V2": _image(
        "ConvNextV2", depths=[1, 1], hidden_sizes=[8, 12], num_stages=2, num_labels=CLASSES
    ),
    "transformers SegFormer": _image(
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 12],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=CLASSES,
    ),
    "transformers MobileViT": _image(
        "MobileViT",
        image_size=PIXELS,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 4, 4, 8, 8, 12],
        num_attention_heads=2,
        mlp_ratio=2.0,
        num_labels=CLASSES,
    ),
    "transformers CLIP (vision)": _clip,
    "transformers wav2vec 2.0": _sound("Wav2Vec2"),
    "timm ResNet": _timm_resnet(),
    "timm ResNeXt": _timm_resnet("Bottleneck", cardinality=2, base_width=8),
    "timm EfficientNet": _timm_efficientnet("plain"),
    "timm EfficientNet (TensorFlow's padding)": _timm_efficientnet("same"),
    "timm ConvNeXt": _timm_class("convnext", "ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 8, 8, 12)),
    "timm ViT": _timm_class("vision_transformer", "VisionTransformer", **_TIMM_VIT),
    "timm ViT (layer scale, register tokens)": _timm_class(
        "vision_transformer",
        "VisionTransformer",
        **_TIMM_VIT,
        init_values=0.1,
        reg_tokens=2,
        qk_norm=True,
    ),
    "timm BEiT": _timm_class("beit", "Beit", **_TIMM_VIT, use_rel_pos_bias=True, init_values=0.1),
    "timm EVA": _timm_class("eva", "Eva", **_TIMM_VIT, qkv_fused=True, use_rot_pos_emb=True),
    "timm CaiT": _timm_class("cait", "Cait", **_TIMM_VIT, depth_token_only=1),
    "timm Swin": _timm_class("swin_transformer", "SwinTransformer", **_TIMM_SWIN),
    "timm Swin V2": _timm_class("swin_transformer_v2", "SwinTransformerV2", **_TIMM_SWIN),
    "timm MLP-Mixer": _timm_class("mlp_mixer", "MlpMixer", **_TIMM_MIXER),
    "timm ResMLP": _timm_class(
        "mlp_mixer",
        "MlpMixer",
        **_TIMM_MIXER,
        block_layer="ResBlock",
        norm_layer="Affine",
        mlp_ratio=2.0,
    ),
    "timm RegNet": _timm_regnet,
    "timm NFNet (weight standardisation)": _timm_nf,
    "torchvision ResNet": _torchvision("resnet"),
    "torchvision ResNeXt": _torchvision("resnext"),
    "torchvision VGG": _torchvision("vgg"),
    "torchvision DenseNet": _torchvision("densenet"),
    "torchvision MobileNet": _torchvision("mobilenet"),
    "torchvision EfficientNet": _torchvision("efficientnet"),
    "torchvision RegNet": _torchvision("regnet"),
    "torchvision ConvNeXt": _torchvision("convnext"),
    "torchvision ViT": _torchvision("vit"),
    "torchvision Swin": _torchvision("swin"),
    "torchvision Swin V2": _torchvision("swin_v2"),
    "peft LoRA": _peft("LoraConfig", r=2, target_modules=["q_proj", "v_proj"]),
    "peft DoRA": _peft("LoraConfig", r=2, target_modules=["q_proj", "v_proj"], use_dora=True),
    "peft IA3": _peft(
        "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "torch-geometric GCN": _graphs("GCNConv"),
    "torch-geometric GIN": _graphs("GINConv", train_eps=True),
    "torch-geometric SAGE": _graphs("SAGEConv"),
    "torch-geometric GAT": _graphs("GATConv"),
    "U-Net": _unet,
}

DEFAULT = [
    "transformers BERT",
    "transformers Llama",
    "transformers Mixtral",
    "transformers wav2vec 2.0",
    "transformers Swin",
    "timm ViT",
    "timm BEiT",
    "timm EfficientNet (TensorFlow's padding)",
    "torchvision ConvNeXt",
    "peft LoRA",
]
"""Those of the default suite; the others are marked slow."""
