"""A tiny diffusion model by denoising-diffusion-pytorch's Trainer, with its EMA, samples and checkpoint."""

import torch
from accelerate.utils import set_seed
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

set_seed(0)
model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=10, sampling_timesteps=2)
trainer = Trainer(
    diffusion,
    "instance",
    train_batch_size=8,
    train_num_steps=4,
    gradient_accumulate_every=2,
    save_and_sample_every=4,
    num_samples=4,
    calculate_fid=False,
    results_folder="results",
)
trainer.train()
torch.save(diffusion.state_dict(), "final.pt")
