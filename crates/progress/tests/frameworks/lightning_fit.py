"""Trains a small model with Lightning: its tqdm bar on the output, its CSV logger and its TensorBoard logger.

The CSV file is rewritten when val_loss appears.
"""

import logging
import warnings

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
torch.manual_seed(7)
torch.set_num_threads(1)


class Model(LightningModule):
    # Debian's PyTorch 1.13 cannot import its sharded tensors under Python 3.11; they are not needed here.
    def _register_sharded_tensor_state_dict_hooks_if_available(self):
        pass

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, batch):
        x, y = batch
        return ((self.layer(x) - y) ** 2).mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


x = torch.rand(320, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
trainer = Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=[CSVLogger(".", flush_logs_every_n_steps=5), TensorBoardLogger(".")],
    log_every_n_steps=5,
    num_sanity_val_steps=0,
    enable_checkpointing=False,
    enable_model_summary=False,
)
trainer.fit(Model(), data, data)
