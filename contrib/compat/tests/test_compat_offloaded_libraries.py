"""transformers, peft and diffusers give, with weights offloaded, what they give with resident ones."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.needs("accel-big-models"),
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # of these libraries
]
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "disk",
    "lm_head": "disk",
    "model.rotary_emb": "cpu",
}
MAPS = {"some on disk": ON_DISK, "all on disk": {"": "disk"}, "auto": "auto"}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    """A checkpoint of a tiny model, in several files."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.fixture
def llama(transformers, folder, tmp_path):
    def load(places=None, **kwargs):
        given = {} if places is None else {"device_map": places, "offload_folder": tmp_path / "off"}
        return transformers.LlamaForCausalLM.from_pretrained(folder, **given, **kwargs).eval()

    return load


IDS = torch.arange(5)[None]


@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_generation_and_export_are_the_resident_models(llama, places, dtype, tmp_path):
    resident, offloaded = llama(dtype=dtype), llama(places, dtype=dtype)

    assert torch.equal(offloaded(IDS).logits, resident(IDS).logits)
    asked = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(offloaded.generate(IDS, **asked), resident.generate(IDS, **asked))
    assert list(tmp_path.rglob("off/*.dat")) == []
    offloaded.save_pretrained(tmp_path / "saved")
    again = type(resident).from_pretrained(tmp_path / "saved", dtype=dtype).eval()
    assert torch.equal(again(IDS).logits, resident(IDS).logits)


def test_a_pipeline_runs_an_offloaded_model(llama, transformers):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")

    def said(model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        return pipe("w3 w5 w7", max_new_tokens=4, do_sample=False)[0]["generated_text"]

    offloaded = llama(ON_DISK)
    assert offloaded.hf_device_map == ON_DISK
    assert said(offloaded) == said(llama())


@pytest.mark.parametrize("places", [ON_DISK, {"": "disk"}], ids=["some", "all"])
def test_adapters_train_on_an_offloaded_base(llama, places, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)  # peft writes the names of adapted weights into files below it

    def trained(base):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(base, config).train()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    resident, offloaded = trained(llama()), trained(llama(places))
    assert torch.equal(offloaded(IDS).logits, resident(IDS).logits)
    resident.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        llama(places), tmp_path / "adapter", offload_folder=str(tmp_path / "again")
    ).eval()
    assert torch.equal(loaded(IDS).logits, resident(IDS).logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, resident(IDS).logits)


def pipeline():
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        norm_num_groups=2,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=[4, 8],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=2,
    )
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=30
        )
    )
    made = diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=text,
        tokenizer=None,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


def image(pipe):
    words = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    return pipe(
        prompt_embeds=words,
        negative_prompt_embeds=torch.zeros_like(words),
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(2),
        output_type="np",
        height=16,
        width=16,
    ).images


@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_a_diffusion_pipeline_offloads_its_models(method):
    wanted, pipe = image(pipeline()), pipeline()
    getattr(pipe, method)(device="cpu")

    assert (image(pipe) == wanted).all()
    assert (image(pipe) == wanted).all()
    assert pipe.unet._hf_hook is not None
    pipe.remove_all_hooks()
    assert not hasattr(pipe.unet, "_hf_hook")
    assert (image(pipe) == wanted).all()


def test_a_model_of_diffusers_loads_by_a_device_map(tmp_path):
    unet = pipeline().unet
    unet.save_pretrained(tmp_path)
    resident = type(unet).from_pretrained(tmp_path)
    loaded = type(unet).from_pretrained(tmp_path, device_map="auto")
    given = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 4, 8)

    assert torch.equal(loaded(*given).sample, resident(*given).sample)
