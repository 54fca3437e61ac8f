"""Tiny random models, tokenizers and data, in folders that are named as on the hub.

`python assets.py FOLDER` writes them. A program that runs in a folder with links to them finds a model where
it would name one of a hub.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision_operators
import transformers as tf
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [
    "a",
    "the",
    "one",
    "two",
    "red",
    "blue",
    "big",
    "small",
    "cat",
    "dog",
    "bird",
    "fox",
    "sees",
    "hears",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<|endoftext|>", "<|startoftext|>"]
PUNCTUATION = [*".,:;!?", *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = {word: n for n, word in enumerate(dict.fromkeys([*SPECIAL, *WORDS, *PUNCTUATION]))}
CHAT = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' + eos_token }}{% endfor %}"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def main(folder: Path) -> None:
    torchvision_operators.declare()
    folder.mkdir(parents=True, exist_ok=True)
    for make in (text_models, image_models, diffusion_models, text_data, image_data):
        torch.manual_seed(0)
        random.seed(0)
        make(folder)


def tokenizer(*, bert: bool = False, length: int = 64) -> Any:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if bert else {"bos_token": "<s>", "eos_token": "</s>"}
    if bert:
        around = [("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
        )
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=length,
        model_input_names=["input_ids", *(["token_type_ids"] if bert else []), "attention_mask"],
        **ends,
    )
    made.chat_template = None if bert else CHAT
    return made


def text_models(folder: Path) -> None:
    size = len(VOCABULARY)
    bert = tf.BertConfig(vocab_size=size, max_position_embeddings=128, **SMALL)
    llama = tf.LlamaConfig(vocab_size=size, max_position_embeddings=256, **SMALL)
    llama.pad_token_id, llama.bos_token_id, llama.eos_token_id = 0, VOCABULARY["<s>"], VOCABULARY["</s>"]
    t5 = tf.T5Config(vocab_size=size, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    t5.decoder_start_token_id = 0
    save(folder / "bert-base-cased", tf.BertForMaskedLM(bert), tokenizer(bert=True))
    save(folder / "tiny-llama", tf.LlamaForCausalLM(llama), tokenizer(length=256))
    save(folder / "HuggingFaceTB/SmolLM-360M", tf.LlamaForCausalLM(llama), tokenizer(length=256))
    save(folder / "tiny-t5", tf.T5ForConditionalGeneration(t5), tokenizer())
    tf.T5Config(d_model=16).save_pretrained(folder / "google/t5-v1_1-base")
    llama.num_labels = 1
    save(folder / "tiny-reward", tf.LlamaForSequenceClassification(llama), tokenizer(length=256))


def image_models(folder: Path) -> None:
    vit = tf.ViTConfig(image_size=32, patch_size=8, **SMALL)
    processor = tf.ViTImageProcessor(size={"height": 32, "width": 32})
    save(folder / "tiny-vit", tf.ViTForImageClassification(vit), processor)


def diffusion_models(folder: Path) -> None:
    import diffusers as df

    words = [f"{word}</w>" for word in (*WORDS, *PUNCTUATION)]
    pieces = {piece: n for n, piece in enumerate(dict.fromkeys([*words, *PUNCTUATION, *SPECIAL]))}
    parts = folder / "tiny-sd-tokenizer"
    parts.mkdir(exist_ok=True)
    parts.joinpath("vocab.json").write_text(json.dumps(pieces))
    parts.joinpath("merges.txt").write_text("#version: 0.2\n")
    names = {"unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    clip = tf.CLIPTokenizer(
        str(parts / "vocab.json"), str(parts / "merges.txt"), model_max_length=16, **names
    )
    begin, end = pieces["<|startoftext|>"], pieces["<|endoftext|>"]
    ends = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    text = tf.CLIPTextConfig(
        vocab_size=len(pieces), max_position_embeddings=16, **SMALL, **ends, projection_dim=16
    )
    blocks = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    unet = df.UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        **blocks,
    )
    plain = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    df.UNet2DModel(sample_size=16, **plain, **blocks).save_config(folder / "tiny-unet")
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = df.AutoencoderKL(latent_channels=4, sample_size=16, **kinds, **blocks)
    diffusion_pipeline(unet, vae, text, clip).save_pretrained(folder / "tiny-sd")
    # kohya's trainers have a network of their own: four blocks of two layers, and groups of 32 channels.
    wide = {"block_out_channels": (32,) * 4, "norm_num_groups": 32}
    unet = df.UNet2DConditionModel(sample_size=8, cross_attention_dim=16, attention_head_dim=2, **wide)
    vae = df.AutoencoderKL(
        latent_channels=4,
        sample_size=64,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    diffusion_pipeline(unet, vae, text, clip).save_pretrained(folder / "kohya-sd")
    clip.save_pretrained(folder / "openai/clip-vit-large-patch14")


def diffusion_pipeline(unet: Any, vae: Any, text: Any, clip: Any) -> Any:
    import diffusers as df

    beta = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    return df.StableDiffusionPipeline(
        vae=vae,
        text_encoder=tf.CLIPTextModel(text),
        tokenizer=clip,
        unet=unet,
        scheduler=df.DDPMScheduler(**beta),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def text_data(folder: Path) -> None:
    pair = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            "label": ClassLabel(names=["not_equivalent", "equivalent"]),
            "idx": Value("int32"),
        }
    )
    glue = {"train": 92, "validation": 37, "test": 10}
    parquet(folder / "nyu-mll/glue", "mrpc", glue, row_of_pair, pair)
    lines = {"train": 64, "validation": 24, "test": 10}
    parquet(folder / "Salesforce/wikitext", "wikitext-2-v1", lines, lambda n: {"text": sentence(12)})
    kinds = ["O", "B-X", "I-X"]
    tagged = Features(
        {
            "tokens": Sequence(Value("string")),
            "ner_tags": Sequence(ClassLabel(names=kinds)),
            "id": Value("string"),
        }
    )
    parquet(folder / "tiny-ner", "default", {"train": 44, "validation": 19}, row_of_tags, tagged)
    data = folder / "data"
    data.mkdir(exist_ok=True)
    jsonl(data / "text.json", 90, lambda n: {"text": sentence(40)})
    data.joinpath("text.txt").write_text("\n".join(sentence(30) for _ in range(120)))
    jsonl(
        data / "glue.json", 60, lambda n: {"sentence1": sentence(6), "sentence2": sentence(6), "label": n % 2}
    )
    jsonl(data / "translation.json", 30, lambda n: {"translation": {"en": sentence(5), "ro": sentence(5)}})
    jsonl(data / "summary.json", 30, lambda n: {"text": sentence(20), "summary": sentence(4)})
    jsonl(data / "swag.json", 40, row_of_choices)
    data.joinpath("qa.json").write_text(json.dumps({"data": [row_of_question(n) for n in range(40)]}))
    for name, row in {"sft": {"text": 20}, "prompts": {"prompt": 5}}.items():
        for split in ("train", "test"):
            path = data / name / f"{split}.jsonl"
            jsonl(path, 48, lambda n, row=row: {k: sentence(v) for k, v in row.items()})
    preference = {"prompt": 5, "chosen": 9, "rejected": 7}
    jsonl(data / "preference/train.jsonl", 48, lambda n: {k: sentence(v) for k, v in preference.items()})
    kto = {"prompt": 5, "completion": 9}
    jsonl(
        data / "unpaired/train.jsonl",
        48,
        lambda n: {k: sentence(v) for k, v in kto.items()} | {"label": n % 2 == 0},
    )


def row_of_pair(n: int) -> dict[str, Any]:
    return {"sentence1": sentence(6), "sentence2": sentence(7), "label": n % 2, "idx": n}


def row_of_tags(n: int) -> dict[str, Any]:
    return {"tokens": sentence(7).split(), "ner_tags": [random.randrange(3) for _ in range(7)], "id": str(n)}


def row_of_choices(n: int) -> dict[str, Any]:
    endings = {f"ending{number}": sentence(4) for number in range(4)}
    return {"sent1": sentence(5), "sent2": sentence(2), "label": n % 4, **endings}


def row_of_question(n: int) -> dict[str, Any]:
    context = sentence(20)
    answer = context.split()[n % 20]
    answers = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"id": str(n), "context": context, "question": sentence(5), "answers": answers}


def image_data(folder: Path) -> None:
    pixels = np.random.default_rng(0)

    def picture(path: Path, size: int = 32) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(path)

    for n in range(46):
        picture(folder / "images" / f"{('cat', 'dog')[n % 2]}_{n}.jpg")
    for n in range(28):
        picture(folder / "classes/train" / ("cat", "dog")[n % 2] / f"{n}.png")
    for n in range(11):
        picture(folder / "classes/validation" / ("cat", "dog")[n % 2] / f"{n}.png")
    for n in range(100):
        picture(folder / "instance" / f"{n}.png", size=16)
    for n in range(8):
        picture(folder / "subjects/2_cat" / f"{n}.png", size=64)
    captions = []
    for n in range(12):
        picture(folder / "captions/train" / f"{n}.png")
        captions.append({"file_name": f"{n}.png", "text": sentence(5)})
    rows = "\n".join(json.dumps(row) for row in captions)
    folder.joinpath("captions/train/metadata.jsonl").write_text(rows)


def sentence(length: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(length))


def jsonl(path: Path, count: int, row: Callable[[int], dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row(n)) for n in range(count)))


def parquet(
    folder: Path,
    config: str,
    splits: dict[str, int],
    row: Callable[[int], dict[str, Any]],
    features: Features | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    listed = ""
    for split, count in splits.items():
        Dataset.from_list([row(n) for n in range(count)], features=features).to_parquet(
            folder / f"{split}.parquet"
        )
        listed += f"\n  - split: {split}\n    path: {split}.parquet"
    folder.joinpath("README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:{listed}\n---\n"
    )


def save(folder: Path, *parts: Any) -> None:
    for part in parts:
        part.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
