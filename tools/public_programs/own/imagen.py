"""Three steps of a tiny Imagen by imagen-pytorch's ImagenTrainer."""

import torch
from accelerate.utils import set_seed
from imagen_pytorch import Imagen, ImagenTrainer, Unet

set_seed(0)
unet = Unet(
    dim=8,
    cond_dim=16,
    dim_mults=(1, 2),
    layer_attns=False,
    layer_cross_attns=(False, True),
    num_resnet_blocks=1,
)
imagen = Imagen(unets=(unet,), image_sizes=(16,), timesteps=4, text_embed_dim=12, cond_drop_prob=0.1)
trainer = ImagenTrainer(imagen, fp16=False)
for _ in range(3):
    images, texts = torch.rand(4, 3, 16, 16), torch.randn(4, 5, 12)
    trainer(images, text_embeds=texts, unet_number=1, max_batch_size=2)
    trainer.update(unet_number=1)
trainer.save("imagen.pt")
