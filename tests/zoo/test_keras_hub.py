"""KerasHub: its tasks at a tiny size, with data as its preprocessors make it, the loss and metrics
those that a task compiles itself with.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from zoo import Case, Steps, row
from zoo import _theirs as step_of_keras

import fastaccum as fa

keras_hub = pytest.importorskip("keras_hub")
hub = keras_hub.models

VOCABULARY, LENGTH, ROWS = 23, 6, 7


def _tokens(seed=0):
    """Right-padded token ids and their mask; 7 rows, which two micro-batches do not share
    evenly.
    """
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (ROWS, 1))
    return np.where(mask, rng.integers(1, VOCABULARY, mask.shape), 0), mask.astype("int32")


def _next_token(model, **options):
    """As a CausalLMPreprocessor makes it: the next token for each, weighted by the mask."""
    ids, mask = _tokens()
    y, weight = np.roll(ids, -1, 1), np.roll(mask, -1, 1) * mask
    return Case(
        model,
        {"token_ids": ids, "padding_mask": mask},
        y,
        sample_weight=weight.astype("float32"),
        **options,
    )


def _masked_lm(model, segments=False):
    """As a MaskedLMPreprocessor makes it: positions that are masked, of which some rows have
    fewer.
    """
    ids, mask = _tokens()
    rng = np.random.default_rng(1)
    weight = (np.arange(2) < rng.integers(1, 3, (ROWS, 1))).astype("float32")
    positions = np.array([rng.choice(2, 2, replace=False) for _ in ids]) * (weight > 0)
    y = rng.integers(1, VOCABULARY, positions.shape) * (weight > 0)
    x = {"token_ids": ids, "padding_mask": mask, "mask_positions": positions}
    if segments:
        x["segment_ids"] = np.zeros_like(ids)
    return Case(model, x, y, sample_weight=weight)


def _classified(model, segments=False, **options):
    ids, mask = _tokens()
    x = {"token_ids": ids, "padding_mask": mask}
    if segments:
        x["segment_ids"] = np.zeros_like(ids)
    return Case(model, x, np.arange(ROWS) % 3, **options)


def _without_dropout(model):
    """For layers whose rate is not an argument."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def _images(model, size=32, rows=4, classes=3, **options):
    rng = np.random.default_rng(0)
    return Case(
        model,
        rng.normal(size=(rows, size, size, 3)).astype("float32"),
        np.arange(rows) % classes,
        **options,
    )


# Decoders.

COUPLED = (
    "The balance between experts is that of a micro-batch. Compared with a loop over micro-batches."
)


def _even(case):
    """Micro-batches of as many rows each, for a loop over them."""
    case.x, case.y, case.sample_weight = tf.nest.map_structure(
        lambda a: a[:6], (case.x, case.y, case.sample_weight)
    )
    case.by_micro_batch = True
    return case


DECODER = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
HEADS = {"num_heads": 2, "dropout": 0.0, "max_sequence_length": LENGTH}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}


@row("KerasHub", "GPT-2, causal language model", mixed=True, quick=True, fused=True)
def test_gpt2():
    return _next_token(hub.GPT2CausalLM(hub.GPT2Backbone(**DECODER, **HEADS)))


@row("KerasHub", "GPT-2, AdamW without decay of biases and norms", fused=True)
def test_gpt2_adamw():
    def optimizer():
        made = keras.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-3)
        made.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
        return made

    return _next_token(hub.GPT2CausalLM(hub.GPT2Backbone(**DECODER, **HEADS)), optimizer=optimizer)


@row("KerasHub", "OPT, causal language model", fused=True)
def test_opt():
    return _next_token(hub.OPTCausalLM(hub.OPTBackbone(**DECODER, **HEADS)))


@row("KerasHub", "Bloom, causal language model")
def test_bloom():
    return _next_token(hub.BloomCausalLM(hub.BloomBackbone(**DECODER, num_heads=2)))


@row("KerasHub", "Falcon, causal language model")
def test_falcon():
    return _next_token(hub.FalconCausalLM(hub.FalconBackbone(**DECODER, num_attention_heads=2)))


@row("KerasHub", "GPT-NeoX, causal language model", fused=True)
def test_gpt_neo_x():
    return _next_token(hub.GPTNeoXCausalLM(hub.GPTNeoXBackbone(**DECODER, **HEADS)))


@row("KerasHub", "Llama, causal language model", fused=True)
def test_llama():
    return _next_token(hub.LlamaCausalLM(hub.LlamaBackbone(**DECODER, **GROUPED)))


@row("KerasHub", "Llama 3, causal language model", mixed=True, fused=True)
def test_llama3():
    return _next_token(hub.Llama3CausalLM(hub.Llama3Backbone(**DECODER, **GROUPED)))


@row("KerasHub", "Mistral with a sliding window, causal language model", fused=True)
def test_mistral():
    return _next_token(
        hub.MistralCausalLM(hub.MistralBackbone(**DECODER, **GROUPED, sliding_window=3))
    )


@row("KerasHub", "Qwen 2.5, causal language model", fused=True)
def test_qwen():
    return _next_token(hub.QwenCausalLM(hub.QwenBackbone(**DECODER, **GROUPED)))


@row("KerasHub", "Qwen 3, causal language model", fused=True)
def test_qwen3():
    return _next_token(hub.Qwen3CausalLM(hub.Qwen3Backbone(**DECODER, **GROUPED, head_dim=4)))


@row("KerasHub", "Phi-3, causal language model", fused=True)
def test_phi3():
    return _next_token(hub.Phi3CausalLM(hub.Phi3Backbone(**DECODER, **GROUPED)))


def _gemma():
    backbone = hub.GemmaBackbone(
        **DECODER, **GROUPED, head_dim=4, attention_logit_soft_cap=50, final_logit_soft_cap=30
    )
    return hub.GemmaCausalLM(backbone)


@row("KerasHub", "Gemma 2 with soft caps, causal language model", mixed=True, fused=True)
def test_gemma():
    return _next_token(_gemma())


@row("KerasHub", "Gemma, LoRA fine-tuning", mixed=True, quick=True, fused=True)
def test_gemma_lora():
    model = _gemma()
    model.backbone.enable_lora(rank=2)
    for weight in model.trainable_weights:  # lora_b starts at zero, where lora_a has no gradient
        if "lora_kernel_b" in weight.path or "lora_embeddings_b" in weight.path:
            weight.assign(np.random.default_rng(0).normal(0, 0.1, weight.shape))
    return _next_token(model)


@row(
    "KerasHub", "Mixtral, a mixture of experts with a load-balancing loss", note=COUPLED, fused=True
)
def test_mixtral():
    backbone = hub.MixtralBackbone(**DECODER, **GROUPED, num_experts=3, output_router_logits=True)
    return _even(_next_token(hub.MixtralCausalLM(backbone)))


@row("KerasHub", "Qwen MoE with shared experts, causal language model", note=COUPLED, fused=True)
def test_qwen_moe():
    experts = {
        "moe_intermediate_dim": 8,
        "shared_expert_intermediate_dim": 8,
        "num_experts": 3,
        "top_k": 2,
    }
    backbone = hub.QwenMoeBackbone(**DECODER, **GROUPED, **experts, output_router_logits=True)
    return _even(_next_token(hub.QwenMoeCausalLM(backbone)))


@row("KerasHub", "GPT-OSS with attention sinks, a mixture of experts")
def test_gpt_oss():
    backbone = hub.GptOssBackbone(**DECODER, **GROUPED, num_experts=3, sliding_window=4, head_dim=4)
    return _next_token(hub.GptOssCausalLM(backbone))


# Encoders.

ENCODER = {**DECODER, **HEADS}
LONGER = {"max_sequence_length": 8}
SEGMENTS = (
    "The largest error is in the segment's embedding. The normalization after it removes nearly "
    "all of its gradient, because every token has it. Keras's step differs from float64 by as "
    "much."
)


@row(
    "KerasHub",
    "BERT, text classifier",
    mixed=True,
    quick=True,
    tolerance=5e-5,
    note=SEGMENTS,
    fused=True,
)
def test_bert_classifier():
    return _classified(
        hub.BertTextClassifier(hub.BertBackbone(**ENCODER), 3, dropout=0.0), segments=True
    )


@row("KerasHub", "BERT with a frozen backbone, text classifier", fused=True)
def test_bert_frozen():
    model = hub.BertTextClassifier(hub.BertBackbone(**ENCODER), 3, dropout=0.0)
    model.backbone.trainable = False
    return _classified(model, segments=True)


@row("KerasHub", "BERT, masked language model", fused=True)
def test_bert_masked_lm():
    return _masked_lm(hub.BertMaskedLM(hub.BertBackbone(**ENCODER)), segments=True)


@row("KerasHub", "RoBERTa, text classifier", fused=True)
def test_roberta():
    return _classified(hub.RobertaTextClassifier(hub.RobertaBackbone(**ENCODER), 3, dropout=0.0))


@row("KerasHub", "RoBERTa, masked language model", fused=True)
def test_roberta_masked_lm():
    return _masked_lm(hub.RobertaMaskedLM(hub.RobertaBackbone(**ENCODER)))


@row("KerasHub", "DistilBERT, text classifier", fused=True)
def test_distil_bert():
    return _classified(
        hub.DistilBertTextClassifier(hub.DistilBertBackbone(**ENCODER), 3, dropout=0.0)
    )


@row("KerasHub", "ALBERT with shared layers, text classifier", fused=True)
def test_albert():
    backbone = hub.AlbertBackbone(**ENCODER, embedding_dim=8, num_inner_repetitions=2)
    return _classified(hub.AlbertTextClassifier(backbone, 3, dropout=0.0), segments=True)


@row("KerasHub", "DeBERTaV3, text classifier", mixed=True)
def test_deberta_v3():
    backbone = hub.DebertaV3Backbone(**ENCODER, bucket_size=4)
    return _classified(hub.DebertaV3TextClassifier(backbone, 3, dropout=0.0))


@row("KerasHub", "FNet, text classifier")
def test_f_net():
    backbone = hub.FNetBackbone(**DECODER, dropout=0.0, max_sequence_length=LENGTH)
    case = _classified(hub.FNetTextClassifier(backbone, 3, dropout=0.0), segments=True)
    del case.x["padding_mask"]
    return case


# Text, by the preprocessor of each.

SENTENCES = [
    "the quick brown fox",
    "a fox",
    "the dog jumped",
    "quick",
    "the fox jumped the dog",
    "a dog jumped",
    "fox",
]


def _bert_tokenizer():
    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[PAD]",
        "[MASK]",
        "the",
        "a",
        "quick",
        "brown",
        "fox",
        "dog",
        "jumped",
    ]
    return hub.BertTokenizer(vocabulary=words, lowercase=True)


@row(
    "KerasHub",
    "BERT, text classifier on strings",
    quick=True,
    tolerance=5e-5,
    note=SEGMENTS,
    fused=True,
)
def test_bert_strings():
    preprocessor = hub.BertTextClassifierPreprocessor(_bert_tokenizer(), sequence_length=8)
    model = hub.BertTextClassifier(
        hub.BertBackbone(**{**ENCODER, **LONGER}), 3, preprocessor=preprocessor, dropout=0.0
    )
    return Case(model, np.array(SENTENCES), np.arange(ROWS) % 3)


@row(
    "KerasHub",
    "BERT, text classifier on pairs of strings, weighted",
    tolerance=5e-5,
    note=SEGMENTS,
    fused=True,
)
def test_bert_pairs():
    preprocessor = hub.BertTextClassifierPreprocessor(_bert_tokenizer(), sequence_length=8)
    model = hub.BertTextClassifier(
        hub.BertBackbone(**{**ENCODER, **LONGER}), 3, preprocessor=preprocessor, dropout=0.0
    )
    pairs = np.array(SENTENCES), np.array(SENTENCES[::-1])
    weight = np.linspace(0, 2, ROWS).astype("float32")
    return Case(model, pairs, np.arange(ROWS) % 3, sample_weight=weight)


@row("KerasHub", "GPT-2, causal language model on strings", fused=True)
def test_gpt2_strings():
    vocabulary = {
        word: i
        for i, word in enumerate(
            [
                "<|endoftext|>",
                *"aquickfox",
                "Ġ",
                "ui",
                "ck",
                "uick",
                "Ġq",
                "Ġquick",
                "Ġf",
                "ox",
                "Ġfox",
            ]
        )
    }
    merges = ["Ġ q", "u i", "c k", "ui ck", "Ġq uick", "Ġ f", "o x", "Ġf ox"]
    tokenizer = hub.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    preprocessor = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    model = hub.GPT2CausalLM(hub.GPT2Backbone(**DECODER, **HEADS), preprocessor=preprocessor)
    return Case(
        model,
        np.array(
            ["a quick fox", "a fox", "a", "a fox quick", "a quick", "a fox fox", "a quick quick"]
        ),
    )


# Encoders with decoders.


def _seq2seq(model):
    ids, mask = _tokens(1)
    case = _next_token(model)
    decoder = {f"decoder_{name}": value for name, value in case.x.items()}
    case.x = {"encoder_token_ids": ids, "encoder_padding_mask": mask, **decoder}
    return case


@row("KerasHub", "T5 with tied embeddings, sequence to sequence")
def test_t5():
    backbone = hub.T5Backbone(**DECODER, num_heads=2, dropout=0.0)
    return _seq2seq(hub.T5Seq2SeqLM(backbone))


@row("KerasHub", "BART, sequence to sequence", fused=True)
def test_bart():
    return _seq2seq(hub.BartSeq2SeqLM(hub.BartBackbone(**ENCODER)))


@row("KerasHub", "Whisper's backbone with a head, speech to text", fused=True)
def test_whisper():
    backbone = hub.WhisperBackbone(
        **DECODER,
        num_heads=2,
        num_mels=5,
        max_encoder_sequence_length=8,
        max_decoder_sequence_length=LENGTH,
    )
    hidden = backbone.output["decoder_sequence_output"]
    model = keras.Model(backbone.input, backbone.token_embedding(hidden, reverse=True))
    case = _next_token(model)
    case.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    case.weighted_metrics = ["accuracy"]
    frames = np.random.default_rng(2).normal(size=(ROWS, 8, 5)).astype("float32")
    case.x = {
        "encoder_features": frames,
        "decoder_token_ids": case.x["token_ids"],
        "decoder_padding_mask": case.x["padding_mask"],
    }
    return case


# Images.

NO_GRADIENT = (
    "The largest error is in a bias whose exact gradient is 0: of attention's keys, or before a "
    "normalization. Both steps compute rounding errors there, equally far from float64."
)


def _segmented(model):
    case = _images(model, by_micro_batch=True)
    case.y = np.eye(3, dtype="float32")[np.random.default_rng(1).integers(0, 3, (4, 32, 32))]
    return case


@row("KerasHub", "ViT, image classifier", quick=True, tolerance=5e-5, note=NO_GRADIENT, fused=True)
def test_vit():
    backbone = hub.ViTBackbone(
        (32, 32, 3), patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24
    )
    return _images(hub.ViTImageClassifier(backbone, 3), rows=7)


@row("KerasHub", "ResNet v1, image classifier", mixed=True)
def test_resnet():
    backbone = hub.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[2],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )
    return _images(hub.ResNetImageClassifier(backbone, 3), rows=8, by_micro_batch=True)


@row("KerasHub", "ResNet v2 with a frozen backbone, image classifier")
def test_resnet_frozen():
    backbone = hub.ResNetBackbone(
        [8], [7], [64], [1], [1], "bottleneck_block", True, image_shape=(32, 32, 3)
    )
    backbone.trainable = False
    return _images(hub.ResNetImageClassifier(backbone, 3), rows=7)


@row(
    "KerasHub",
    "DenseNet, image classifier",
    tolerance=1e-4,
    note="The largest error is in the first normalization's bias, whose gradients nearly cancel. Keras's step "
    "differs from float64 by 2e-5 there, ours by 1e-5.",
)
def test_densenet():
    backbone = hub.DenseNetBackbone([2, 2], image_shape=(32, 32, 3), growth_rate=4)
    return _images(hub.DenseNetImageClassifier(backbone, 3), rows=8, by_micro_batch=True)


@row("KerasHub", "VGG, image classifier")
def test_vgg():
    backbone = hub.VGGBackbone([1, 1], [8, 8], image_shape=(32, 32, 3))
    return _images(
        _without_dropout(hub.VGGImageClassifier(backbone, 3, pooling_hidden_dim=16)), rows=7
    )


@row("KerasHub", "Xception, image classifier")
def test_xception():
    backbone = hub.XceptionBackbone([[8, 8], [8, 8]], [True, False], image_shape=(32, 32, 3))
    return _images(hub.XceptionImageClassifier(backbone, 3), rows=8, by_micro_batch=True)


@row("KerasHub", "CSPNet, image classifier")
def test_cspnet():
    backbone = hub.CSPNetBackbone(
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=2,
        stackwise_depth=[1, 1],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="dark",
        image_shape=(32, 32, 3),
    )
    return _images(hub.CSPNetImageClassifier(backbone, 3), rows=8, by_micro_batch=True)


@row("KerasHub", "Swin Transformer with shifted windows, image classifier")
def test_swin():
    backbone = hub.SwinTransformerBackbone(
        (32, 32, 3), embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4, drop_path=0.0
    )
    return _images(hub.SwinTransformerImageClassifier(backbone, 3), rows=7)


def _mit():
    return hub.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=(32, 32, 3),
        hidden_dims=[8, 16],
    )


@row("KerasHub", "MiT, image classifier", tolerance=5e-5, note=NO_GRADIENT)
def test_mit():
    return _images(_without_dropout(hub.MiTImageClassifier(_mit(), 3)), rows=7)


@row("KerasHub", "SegFormer, image segmenter", tolerance=2e-4, note=NO_GRADIENT)
def test_segformer():
    model = hub.SegFormerImageSegmenter(hub.SegFormerBackbone(_mit(), projection_filters=8), 3)
    return _segmented(_without_dropout(model))


@row("KerasHub", "DeepLabV3+, image segmenter", tolerance=1e-4, note=NO_GRADIENT)
def test_deeplab_v3():
    encoder = hub.ResNetBackbone(
        [8], [7], [64, 64], [1, 1], [1, 2], "bottleneck_block", image_shape=(32, 32, 3)
    )
    backbone = hub.DeepLabV3Backbone(
        encoder,
        spatial_pyramid_pooling_key="P3",
        low_level_feature_key="P2",
        upsampling_size=2,
        dilation_rates=[1, 2],
        projection_filters=8,
        image_shape=(32, 32, 3),
    )
    return _segmented(_without_dropout(hub.DeepLabV3ImageSegmenter(backbone, 3)))


# Losses of a model's own.


def _retinanet():
    encoder = hub.ResNetBackbone(
        [64], [7], [64, 64, 64], [1, 1, 1], [1, 2, 2], "basic_block", image_shape=(64, 64, 3)
    )
    backbone = hub.RetinaNetBackbone(
        encoder, min_level=3, max_level=4, use_p5=False, image_shape=(64, 64, 3)
    )
    model = hub.RetinaNetObjectDetector(
        backbone, 3, bounding_box_format="xyxy", pre_logits_num_conv_layers=1
    )
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 30, (4, 2, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(10, 30, (4, 2, 2))], -1).astype("float32")
    case = _images(
        model, size=64, by_micro_batch=True, optimizer=lambda: keras.optimizers.SGD(1e-4)
    )
    case.y = {"boxes": boxes, "labels": rng.integers(0, 3, (4, 2)).astype("float32")}
    return case


@row(
    "KerasHub",
    "RetinaNet, object detector",
    refused="RetinaNetObjectDetector.compute_loss weights its compiled loss",
    why="Its loss divides a sum by the positives of the whole batch, which no micro-batch knows. See the next row.",
)
def test_retinanet():
    return _retinanet()


def _by_hand(case):
    """With TrainStep, over micro-batches of as many rows each."""
    model, rows = case.model, len(tf.nest.flatten(case.x)[0]) / 2.0

    def loss_fn(batch):
        x, y = batch if case.y is not None else (batch, None)
        return model.compute_loss(x, y, model(x, training=True), None) * rows, rows

    def ours():
        step = fa.TrainStep(loss_fn, model.trainable_variables, case.optimizer())
        batch = case.x if case.y is None else (case.x, case.y)
        return {
            "loss": float(
                step(
                    tf.nest.map_structure(lambda a: tf.reshape(a, (2, -1, *a.shape[1:])), batch)
                ).loss
            )
        }

    return Steps(
        model.trainable_variables, ours, lambda: step_of_keras(case), model.non_trainable_variables
    )


@row(
    "KerasHub",
    "RetinaNet, frozen encoder, with TrainStep",
    note="The loss divides by the positives of each micro-batch.",
)
def test_retinanet_by_hand():
    case = _retinanet()
    case.model.backbone.image_encoder.trainable = False
    return _by_hand(case)


def _siglip():
    widths = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 16}
    vision = hub.SigLIPVisionEncoder(patch_size=8, image_shape=(16, 16, 3), **widths)
    text = hub.SigLIPTextEncoder(
        VOCABULARY, 8, max_sequence_length=LENGTH, projection_dim=8, **widths
    )
    model = hub.SigLIPBackbone(vision, text)
    model.compile()
    images = np.random.default_rng(0).normal(size=(6, 16, 16, 3)).astype("float32")
    x = {"images": images, "token_ids": _tokens()[0][:6]}
    return Case(model, x, by_micro_batch=True, optimizer=lambda: keras.optimizers.SGD(0.1))


@row(
    "KerasHub",
    "SigLIP, images against captions",
    refused="There is no y, so compute_loss makes the targets",
    why="It makes the targets of its loss itself. See the next row.",
)
def test_siglip():
    return _siglip()


@row(
    "KerasHub",
    "SigLIP with TrainStep",
    note="The negatives are those of a micro-batch. The largest error is in attention's query, whose gradients"
    " nearly cancel: both steps differ from float64 by 2e-5.",
    tolerance=2e-4,
)
def test_siglip_by_hand():
    return _by_hand(_siglip())
