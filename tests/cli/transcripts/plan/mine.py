import torch
from torch import nn


def train(config, on_metrics, **more): ...


def short(config): ...


def build(*, vocab_size, seq_len):
    model = nn.Sequential(
        nn.Embedding(vocab_size, 64), nn.Linear(64, 64), nn.Linear(64, vocab_size)
    )
    model.mixing = nn.Parameter(torch.empty(64, 64))
    return model
