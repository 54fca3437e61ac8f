"""Four steps of meshgpt-pytorch's autoencoder trainer, with its EMA and schedule."""

import torch
from accelerate.utils import set_seed
from meshgpt_pytorch import MeshAutoencoder, MeshAutoencoderTrainer
from torch.utils.data import Dataset


class Meshes(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(12, 3, generator=drawn), torch.randint(0, 12, (8, 3), generator=drawn)


set_seed(0)
autoencoder = MeshAutoencoder(
    num_discrete_coors=16,
    encoder_dims_through_depth=(16, 16),
    decoder_dims_through_depth=(16, 16),
    dim_codebook=16,
    codebook_size=32,
)
trainer = MeshAutoencoderTrainer(
    model=autoencoder,
    dataset=Meshes(),
    num_train_steps=4,
    batch_size=2,
    grad_accum_every=2,
    checkpoint_every=100,
    warmup_steps=2,
    accelerator_kwargs={"cpu": True},
)
trainer()
