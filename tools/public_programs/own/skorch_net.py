"""A classifier of skorch with AccelerateMixin, in bf16: trained, pickled, trained on, and asked."""

import pickle

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from torch import nn


class Net(AccelerateMixin, NeuralNetClassifier):
    """A classifier whose parts are prepared by Accelerate."""


class Layers(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2), nn.Softmax(dim=-1))


set_seed(0)
inputs = np.random.default_rng(0).normal(size=(301, 20)).astype(np.float32)
labels = (inputs.sum(1) > 0).astype(np.int64)
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
net = Net(Layers, accelerator=accelerator, lr=0.1, max_epochs=2, batch_size=16, iterator_train__shuffle=True)
net.fit(inputs, labels)
again = pickle.loads(pickle.dumps(net))
net.partial_fit(inputs, labels)
answers = {name: each.predict_proba(inputs) for name, each in (("net", net), ("again", again))}
save_file({name: torch.from_numpy(each) for name, each in answers.items()}, "final.safetensors")
